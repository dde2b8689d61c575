"""`carpool up MODEL...`: a whole stack on this machine, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg

from carpool.address import without_password
from carpool.errors import UnavailableError
from carpool.keys import DEFAULT_PREFIX
from carpool.lifecycle import stop_on_signals
from carpool.logs import configure_logs
from carpool.model_settings import ModelKind
from carpool.settings import (
    Devices,
    Listed,
    LogLevel,
    ModelSource,
    OptionalPort,
    Policies,
    Prefix,
    RedisSettings,
    RedisUrl,
    Replicas,
    Seconds,
    read_settings,
)
from carpool.shown import complain
from carpool.store.connection import CommandError, UnsupportedServerError
from carpool_batcher.custom_policies import load_policies
from carpool_cli.local import paste
from carpool_cli.local.embedded import EmbeddedRedisError, free_port
from carpool_cli.local.example import TEXT, is_known
from carpool_cli.local.reload import Reloader
from carpool_cli.local.supervisor import (
    POLL_S,
    ServedHere,
    ServiceEndedError,
    StackPlan,
    StartError,
    Supervisor,
    can_serve_http,
    can_show_pages,
    preferred_port,
)
from carpool_cli.screen import Screen, count

LOADING_NOTICE_INTERVAL_S: Final = 10.0


class UpSettings(ModelSource, RedisSettings):
    """Start Redis (unless a URL is given), one batcher, a worker for each model, an HTTP gateway and the
    operators' page, all on this machine.

    A process that dies is restarted; but one that exits with an error before all models are served ends the
    command. Ctrl-C or SIGTERM stops everything after the workers have finished their batches.
    """

    model: CliPositionalArg[Listed] = Field(
        min_length=1,
        description="one or more of module:Name, path/file.py:Name, hf:FOLDER, st:FOLDER, onnx:FILE, square, "
        "docsearch, writer, voice-activity; NAME=MODEL serves it under another name; FILE.toml has models, "
        "with parameters and settings, and FILE.toml:NAME is one of them; repository:DIR/NAME is one of a "
        "folder; or the folder of a repository, alone: all its models",
    )
    load: Listed = Field([], description="of a repository: the names of its models to serve (default: all)")
    redis_url: RedisUrl | None = Field(
        None, description="a running Redis to use (default: start one, which stops with this command)"
    )
    redis_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of the Redis to start; 0: any free one (default: 6379 if free, else another)",
    )
    data_dir: Path | None = Field(
        None,
        description="data directory of the Redis to start (default: a temporary one, removed at the end)",
    )
    replicas: Replicas = Field(
        1, description="number of model processes for each model; auto: one per device"
    )
    device: Devices = "auto"
    drain_s: Seconds = Field(
        30.0, ge=0, description="seconds that workers may take to finish their requests when stopped"
    )
    http_port: int | None = Field(
        None,
        ge=1,
        le=65000,
        description="port of the batcher's /metrics, /healthz and /readyz; workers use the ports after it",
    )
    gateway: bool = Field(True, description="start no HTTP gateway")
    gateway_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of the gateway; 0: any free one (default: 8000 if free, else another)",
    )
    grpc_port: OptionalPort = Field(
        None, description="port of the gateway for gRPC; 0: any free one (default: none)"
    )
    console: bool = Field(True, description="start no operators' page")
    console_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of the operators' page; 0: any free one (default: 8800 if free, else another)",
    )
    reload: bool = Field(
        False,
        description="for development: when a file of a model changes, load it again: its own, a module "
        "beside it, or its TOML file",
    )
    policies: Policies = Field([])
    prefix: Prefix = Field(DEFAULT_PREFIX, description="prefix of every Redis key")
    log_level: LogLevel = Field("info", description="minimum log level")

    @model_validator(mode="after")
    def _check_one_redis(self) -> Self:
        own = [name for name in ("redis_port", "data_dir") if getattr(self, name) is not None]
        if self.redis_url and own:
            flags = " and ".join("--" + name.replace("_", "-") for name in own)
            raise ValueError(
                f"--redis-url (or CARPOOL_REDIS_URL) uses a running Redis, but {flags} is for one that "
                "this command starts; omit one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_reload(self) -> Self:
        if self.reload and self.http_port is not None:
            raise ValueError(
                "--reload starts a new worker before the old one ends, and two cannot have one port: omit "
                "--http-port (or CARPOOL_HTTP_PORT)"
            )
        return self

    @property
    def repository(self) -> Path | None:
        """The folder of models that is to be served, if the arguments name one."""
        folders = [Path(model) for model in self.model if Path(model).is_dir()]
        return folders[0] if folders else None

    @model_validator(mode="after")
    def _check_repository(self) -> Self:
        if self.repository is None:
            if self.load:
                raise ValueError("--load (or CARPOOL_LOAD) names models of a repository; give its folder")
            return self
        if len(self.model) > 1:
            raise ValueError(f"{self.repository} is a folder of models: give it alone, or start it by itself")
        given = [name for name in ("param", "param_file", "set", "reload") if getattr(self, name)]
        if given:
            flags = " and ".join("--" + name.replace("_", "-") for name in given)
            raise ValueError(
                f"{flags}: not with a repository; write it into its files, or use `carpool load`"
            )
        return self

    def _gateway_port(self) -> int | None:
        """None for no gateway; 0 for any port, the usual one first."""
        if not (self.gateway and can_serve_http()):
            return None
        if self.gateway_port is None:
            return 0
        return self.gateway_port or free_port()

    def _console_port(self) -> int | None:
        """None for no operators' page; 0 for any port, the usual one first."""
        if not (self.console and can_show_pages()):
            return None
        if self.console_port is None:
            return 0
        return self.console_port or free_port()

    def plan(self) -> StackPlan:
        """The plan for the supervisor."""
        return StackPlan(
            models=[] if self.repository else self.model,
            repository=self.repository,
            entries=self.load,
            options=self.options,
            redis_url=self.redis_url,
            redis_port=preferred_port() if self.redis_port is None else self.redis_port or None,
            data_dir=self.data_dir,
            prefix=self.prefix,
            replicas=self.given("replicas"),
            device=self.given("device"),
            drain_s=self.drain_s,
            log_level=self.log_level,
            http_port=self.http_port,
            gateway_port=self._gateway_port(),
            grpc_port=self.grpc_port,
            console_port=self._console_port(),
            policies=self.policies,
        )


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM or SIGINT, then stop in order. Returns 1 if the stack cannot start."""
    settings = read_settings(UpSettings, argv, "carpool up")
    try:
        load_policies(settings.policies)  # only to refuse those that the batcher could not use
        supervisor = Supervisor(settings.plan())
    except ValueError as error:
        complain(f"carpool up: {error}")
        return 2
    configure_logs(settings.log_level, "supervisor")
    stop = stop_on_signals()
    screen = Screen()
    failure = None
    try:
        supervisor.start()
        screen.print(_describe_redis(supervisor, settings, argv))
        _supervise(supervisor, settings, screen, stop)
        screen.print("\nStopping: workers finish their batches. Press Ctrl-C again to stop at once.")
    except (StartError, EmbeddedRedisError, UnavailableError, CommandError) as error:
        failure = error
    finally:
        ended_by_themselves = supervisor.stop()
    if failure is not None:  # printed last, below the services' own errors
        complain(f"carpool up: {_explain(failure, settings)}")
        return 1
    screen.print(
        "Stopped."
        if ended_by_themselves
        else "Stopped before all batches were finished. If Redis keeps its data, the next worker executes "
        "them."
    )
    return 0


def _supervise(supervisor: Supervisor, settings: UpSettings, screen: Screen, stop: threading.Event) -> None:
    """Supervise the stack until `stop`. Print when each model is served, and commands to call them."""
    started_s = time.monotonic()
    notice_at_s = started_s + LOADING_NOTICE_INTERVAL_S
    reloader = Reloader(supervisor, screen.print) if settings.reload else None
    while not stop.wait(POLL_S):
        for worker in supervisor.run_once():
            screen.print(served_line(worker))
            _warn_of_policy(supervisor, worker, screen)
        if supervisor.serving:
            _print_commands(supervisor, settings, screen)
            break
        if time.monotonic() >= notice_at_s:
            notice_at_s += LOADING_NOTICE_INTERVAL_S
            names = ", ".join(one.model for one in supervisor.models if not one.serving)
            screen.print(f"  still loading after {time.monotonic() - started_s:.0f} s: {names}")
    if reloader is not None:
        _reload(supervisor, reloader, stop)
    while not stop.wait(POLL_S):
        supervisor.run_once()


def _reload(supervisor: Supervisor, reloader: Reloader, stop: threading.Event) -> None:
    """Supervise until `stop`, and load models again whose files change."""
    try:
        while not stop.wait(POLL_S):
            reloader.run_once()
            supervisor.run_once()
    finally:
        reloader.stop()


def served_line(worker: ServedHere) -> str:
    """The line that announces that a model is served."""
    took_s = worker.serving_since_s - worker.started_s
    size = worker.registration.get("max_batch_size", "?")
    processes = count(worker.processes, "process", "processes")
    has_slots = worker.kind in (ModelKind.STEPPING, ModelKind.BOUND)
    limit = f"{size} slots each" if has_slots else f"batches of up to {size}"
    return f"  {worker.model} is served after {took_s:.1f} s: {processes}, {limit}"


def _warn_of_policy(supervisor: Supervisor, worker: ServedHere, screen: Screen) -> None:
    """An override that the batcher rejects does not end the command: it could then not be removed."""
    policy = worker.overrides.get("policy", "")
    if policy and not supervisor.has_policy(policy):
        screen.print(
            f"  WARNING: the overrides of {worker.model} are not in force, because the batcher does not have "
            f"their policy {policy}.\n"
            f"  Start again with --policies {policy}, or remove it: carpool config {worker.model} policy="
        )


def _describe_redis(supervisor: Supervisor, settings: UpSettings, argv: Sequence[str]) -> str:
    if supervisor.redis is None:
        by_flag = any(argument.startswith("--redis-url") for argument in argv)
        source = "--redis-url" if by_flag else "CARPOOL_REDIS_URL"
        return f"Using Redis at {without_password(supervisor.url)}, from {source}."
    server = supervisor.redis.server
    data = (
        f"its data is kept in {settings.data_dir}" if settings.data_dir else "its data is removed at the end"
    )
    return f"Started {server.binary.name} {server.version} at {server.url}; {data}."


def _print_commands(supervisor: Supervisor, settings: UpSettings, screen: Screen) -> None:
    screen.title(f"Serving at {without_password(supervisor.url)}. Commands to try in another terminal:\n")
    if paste.needs_environment(supervisor.url):
        screen.print("  (with CARPOOL_REDIS_URL set to this URL, including the password)\n")
    for worker in supervisor.models:
        for line in paste.lines(
            supervisor.url,
            worker.model,
            settings.prefix,
            worker.inputs,
            worker.kind,
            supervisor.gateway.url if supervisor.gateway else "",
            worker.spoken,
        ):
            screen.print(f"  {line}")
        if not is_known(worker.model, worker.inputs, worker.spoken):
            screen.print(f'  (In place of "{TEXT}", send what {worker.model} takes.)')
        screen.print()
    if supervisor.gateway and supervisor.gateway.grpc_address:
        screen.print(f"gRPC, for clients of Triton and KServe: {supervisor.gateway.grpc_address}\n")
    if settings.gateway and not supervisor.gateway:
        screen.print(
            "Without HTTP: for curl, install Carpool with its gateway: pip install 'PATH[gateway]'\n"
        )
    if supervisor.console:
        screen.print(f"{supervisor.console.told}\n")
    screen.print("Press Ctrl-C to stop everything.")


def _explain(error: Exception, settings: UpSettings) -> str:
    if isinstance(error, ServiceEndedError):
        return f"{error}; see the log above for the reason"
    if isinstance(error, UnavailableError | CommandError) and settings.redis_url:
        detail = error.detail if isinstance(error, UnavailableError) else str(error)
        remedy = "use another" if isinstance(error, UnsupportedServerError) else "start that Redis"
        return f"{detail}\n    {remedy}, or omit --redis-url (CARPOOL_REDIS_URL) to have one started"
    return str(error)
