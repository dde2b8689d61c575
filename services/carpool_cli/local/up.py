"""`carpool up MODEL...`: a whole stack on this machine, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import sys
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
from carpool.settings import Listed, LogLevel, Policies, Prefix, RedisSettings, RedisUrl, read_settings
from carpool.store.connection import CommandError
from carpool_cli.local import paste
from carpool_cli.local.embedded import EmbeddedRedisError
from carpool_cli.local.supervisor import POLL_S, Plan, StartError, Supervisor, WorkerService, preferred_port
from carpool_cli.screen import Screen, count

STILL_LOADING_EVERY_S: Final = 10.0


class UpSettings(RedisSettings):
    """Redis (where no URL is given), a batcher and workers on this machine, under one supervisor.

    What dies is started again. Ctrl-C or SIGTERM stops all of it once the workers have finished what they
    have in hand.
    """

    model: CliPositionalArg[Listed] = Field(
        min_length=1,
        description="one or more of module:Name, path/file.py:Name, onnx:FILE, square, docsearch; "
        "NAME=... to name it",
    )
    redis_url: RedisUrl | None = Field(
        None, description="a Redis that runs already (default: one of our own, which stops with us)"
    )
    redis_port: int | None = Field(
        None, ge=1, le=65535, description="port of our own Redis (default: 6379 if it is free, else another)"
    )
    data_dir: Path | None = Field(
        None, description="where our own Redis keeps its data (default: a temporary one, which goes with it)"
    )
    replicas: int = Field(1, ge=1, le=256, description="model processes, of each model")
    device: str = Field("auto", description="auto, cpu, or cuda:0,cuda:1,...; given to the processes in turn")
    drain_s: float = Field(30.0, ge=0, description="how long a stop waits for what is in hand")
    http_port: int | None = Field(
        None,
        ge=1,
        le=65000,
        description="where the batcher serves /metrics, /healthz, /readyz; workers do on the ports after it",
    )
    policies: Policies = Field([])
    prefix: Prefix = Field(DEFAULT_PREFIX, description="what every key begins with")
    log_level: LogLevel = Field("info", description="the least to log")

    @model_validator(mode="after")
    def _one_redis(self) -> Self:
        ours = [name for name in ("redis_port", "data_dir") if getattr(self, name) is not None]
        if self.redis_url and ours:
            flags = " and ".join("--" + name.replace("_", "-") for name in ours)
            raise ValueError(
                f"--redis-url (or CARPOOL_REDIS_URL) names a Redis that runs already, and {flags} would "
                "be for one of our own; leave one out"
            )
        return self

    def plan(self) -> Plan:
        """What the supervisor is to run."""
        return Plan(
            models=self.model,
            redis_url=self.redis_url,
            redis_port=self.redis_port or preferred_port(),
            data_dir=self.data_dir,
            prefix=self.prefix,
            replicas=self.replicas,
            device=self.device,
            drain_s=self.drain_s,
            log_level=self.log_level,
            http_port=self.http_port,
            policies=self.policies,
        )


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM or SIGINT, then stop in order. 1 if the stack does not come up."""
    settings = read_settings(UpSettings, argv, "carpool up")
    try:
        supervisor = Supervisor(settings.plan())
    except ValueError as error:
        print(f"carpool up: {error}", file=sys.stderr)
        return 2
    configure_logs(settings.log_level, "supervisor")
    stop = stop_on_signals()
    screen = Screen()
    failure = None
    try:
        supervisor.start()
        screen.say(_which_redis(supervisor, settings, argv))
        _supervise(supervisor, settings, screen, stop)
        screen.say("\nStopping: workers finish what they have in hand. Ctrl-C again stops at once.")
    except (StartError, EmbeddedRedisError, UnavailableError, CommandError) as error:
        failure = error
    finally:
        clean = supervisor.stop()
    if failure is not None:  # said last, below what the services had to say
        print(f"carpool up: {_advice(failure, settings)}", file=sys.stderr)
        return 1
    screen.say("Stopped." if clean else "Stopped. What was still in hand is redelivered.")
    return 0


def _supervise(supervisor: Supervisor, settings: UpSettings, screen: Screen, stop: threading.Event) -> None:
    """Keep everything alive until `stop`; say so when a model, and when all of them, are served."""
    began_s = time.monotonic()
    say_at_s = began_s + STILL_LOADING_EVERY_S
    told = False
    while not stop.wait(POLL_S):
        for worker in supervisor.run_once():
            if not told:
                screen.say(served(worker, settings.replicas))
        if told:
            continue
        if supervisor.serving:
            told = True
            _tell_how_to_call(supervisor, settings, screen)
        elif time.monotonic() >= say_at_s:
            say_at_s += STILL_LOADING_EVERY_S
            names = ", ".join(worker.model for worker in supervisor.workers if not worker.serving)
            screen.say(f"  still loading after {time.monotonic() - began_s:.0f} s: {names}")


def served(worker: WorkerService, replicas: int) -> str:
    """A line for a model that has begun to be served."""
    took_s = worker.serves_since_s - worker.started_s
    size = worker.registration.get("max_batch_size", "?")
    processes = count(replicas, "process", "processes")
    return f"  {worker.model} is served after {took_s:.1f} s: {processes}, batches of up to {size}"


def _which_redis(supervisor: Supervisor, settings: UpSettings, argv: Sequence[str]) -> str:
    if supervisor.redis is None:
        by = "--redis-url" if any(word.startswith("--redis-url") for word in argv) else "CARPOOL_REDIS_URL"
        return f"Redis at {without_password(supervisor.url)}, as {by} says."
    server = supervisor.redis.server
    data = f"its data are in {settings.data_dir}" if settings.data_dir else "its data go when it stops"
    return f"{server.binary.name} {server.version} of our own at {server.url}; {data}."


def _tell_how_to_call(supervisor: Supervisor, settings: UpSettings, screen: Screen) -> None:
    screen.say(f"\n{screen.bold('Serving')} at {without_password(supervisor.url)}. To paste elsewhere:\n")
    if paste.needs_environment(supervisor.url):
        screen.say("  (where CARPOOL_REDIS_URL is set to that, with the password)\n")
    for worker in supervisor.workers:
        for line in paste.lines(supervisor.url, worker.model, settings.prefix, worker.inputs):
            screen.say(f"  {line}")
        screen.say()
    screen.say("Ctrl-C stops.")


def _advice(error: Exception, settings: UpSettings) -> str:
    if isinstance(error, StartError):
        return f"{error}; the reason is above"
    if isinstance(error, UnavailableError | CommandError) and settings.redis_url:
        said = error.detail if isinstance(error, UnavailableError) else str(error)
        return f"{said}\n    start it, or leave --redis-url (CARPOOL_REDIS_URL) out for a Redis of our own"
    return str(error)
