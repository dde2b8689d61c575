"""Starts and supervises a stack on one machine: Redis if no URL is given, a batcher, a worker for each model,
and a gateway and the operators' page if they are wanted.

Start order: Redis first, then the others, which connect to it. Stop order: the gateway answers its requests,
the workers finish their executions, then the batcher releases its leases, and Redis stops last, because all
need it to do so; the operators' page ends together with the workers. Everything is started from the main
thread and ends with this process, however it ends (`carpool.lifecycle`).

Why: docs/decisions/0049.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

import structlog

from carpool.child_processes import wait_or_kill
from carpool.clock import RedisClock
from carpool.errors import UnavailableError
from carpool.keys import Keys, NodesKeys
from carpool.lifecycle import command_that_dies_with_parent
from carpool.model_settings import POLICIES, ModelKind
from carpool.process_names import is_local_process
from carpool.settings import NO_OPTIONS, ModelOptions, RedisSettings
from carpool.spoken import Spoken
from carpool.store.connection import CommandError, Link
from carpool.store.directory import ModelSnapshot, take_snapshot
from carpool.store.nodes import NodeStore
from carpool.wire.nodes import OutcomeState
from carpool.wire.registration import decode_inputs
from carpool.wire.tensors import TensorSpec
from carpool_cli.local.embedded import HOST, EmbeddedRedis, EmbeddedRedisError, free_port, is_free
from carpool_cli.operator_name import this_operator
from carpool_console.users import FIRST_USER, Users, default_users_file
from carpool_worker.devices import devices, usable_cpus
from carpool_worker.repository.repository import Repository
from carpool_worker.served_models import ServedModel, served_models

POLL_S: Final = 0.1  # the interval at which `run_once` is to be called
READY_CHECK_INTERVAL_S: Final = 0.2
RESTART_DELAY_S: Final = 0.1  # doubled with each restart ...
RESTART_DELAY_S_MAX: Final = 5.0  # ... up to this ...
RESTART_DELAY_RESET_S: Final = 10.0  # ... and reset for a child that ran for this long
BATCHER_STOP_TIMEOUT_S: Final = 10.0
CONSOLE_STOP_TIMEOUT_S: Final = 15.0
LOADING_STOP_TIMEOUT_S: Final = 1.0  # for a worker that does not serve yet, and so has nothing to finish
REDIS_PORT: Final = 6379
GATEWAY_PORT: Final = 8000
CONSOLE_PORT: Final = 8800
STARTS_MAX: Final = 5  # of a service that may have any port; another program may take it first
# Our own settings put these into the URL. A child that also found them in its environment would reject both.
_IN_THE_URL: Final = tuple(
    f"CARPOOL_{name.upper()}" for name in RedisSettings.model_fields if name != "redis_url"
)


class StartError(Exception):
    """The stack cannot start, and a restart would not help."""


class ServiceEndedError(StartError):
    """A service ended by itself. Its log says why."""


@dataclass(frozen=True, slots=True)
class StackPlan:
    """What to run. `models` and `options` are written as for a worker. `repository`: in place of models, a
    folder of which a node serves these `entries`, or all if there are none. `replicas` and `device`: None for
    what a file of models declares, or else the defaults. The batcher has `http_port`, and the workers have
    the ports after it. `gateway_port`: 0 for any, None for no gateway; `grpc_port`: likewise, of the gateway
    for gRPC; `console_port`: likewise, of the operators' page. `logs` is a directory, or None for standard
    error."""

    models: Sequence[str]
    redis_url: str | None = None
    options: ModelOptions = NO_OPTIONS
    redis_port: int | None = None
    data_dir: Path | None = None
    prefix: str = "carpool"
    replicas: int | Literal["auto"] | None = None
    device: str | None = None
    drain_s: float = 30.0
    log_level: str = "info"
    http_port: int | None = None
    gateway_port: int | None = None
    grpc_port: int | None = None
    console_port: int | None = None
    policies: Sequence[str] = ()
    logs: Path | None = None
    repository: Path | None = None
    entries: Sequence[str] = ()


class Child(Protocol):
    """A child process."""

    name: str

    def start(self) -> None:
        """Start it, or start it again."""

    def exit_reason(self) -> str | None:
        """How it ended; None while it runs."""


class Redis:
    """The stack's own Redis server."""

    name = "redis"

    def __init__(self, port: int | None, data_dir: Path | None) -> None:
        self._port = port
        self._data_dir = data_dir
        self._server: EmbeddedRedis | None = None

    @property
    def server(self) -> EmbeddedRedis:
        assert self._server is not None, "not started"
        return self._server

    def start(self) -> None:
        """Start it, and wait until it answers. Raises EmbeddedRedisError."""
        if self._server is None:
            self._server = EmbeddedRedis(port=self._port, data_dir=self._data_dir)
        else:
            self._server.restart()

    def exit_reason(self) -> str | None:
        return None if self.server.alive else "it died"

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()


class Service:
    """A batcher or a worker. It has a session of its own, so that Ctrl-C reaches only the supervisor."""

    def __init__(self, name: str, argv: Sequence[str], environment: Mapping[str, str], logs: Path | None):
        self.name = name
        self._argv = argv
        self._environment = environment
        self.log = logs / f"{name.replace(' ', '-')}.log" if logs else None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") if self.log else contextlib.nullcontext(sys.stderr) as output:
            # -P: nothing is imported from the working directory, where files of any name may be.
            self._process = subprocess.Popen(
                command_that_dies_with_parent([sys.executable, "-P", "-m", *self._argv]),
                env=dict(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def exit_status(self) -> int | None:
        """As Popen's: None while it runs (or was never started), negative for a signal."""
        return self._process.poll() if self._process else None

    def exit_reason(self) -> str | None:
        status = self.exit_status
        if status is None:
            return None
        return f"exit status {status}" if status >= 0 else signal.Signals(-status).name

    def terminate(self) -> None:
        """Send SIGTERM: it finishes its work and ends."""
        if self._process is not None:
            self._process.terminate()

    def wait_or_kill(self, timeout_s: float) -> bool:
        """Wait until it has ended, and kill it after `timeout_s`. Whether it ended by itself."""
        return self._process is None or wait_or_kill(self._process, timeout_s)


class ServedHere:
    """A model of the stack: whether it is served, and what its workers registered."""

    def __init__(self, model: str, processes: int) -> None:
        self.model = model
        self.processes = processes
        self.serving = False
        self.serving_since_s = 0.0
        self.registration: Mapping[str, str] = {}
        self.overrides: Mapping[str, str] = {}  # the operator's, when it began to serve
        self.started_s = time.monotonic()

    def begin_to_serve(self, snapshot: ModelSnapshot) -> None:
        """It serves, and this is what is known of it."""
        self.serving = True
        self.serving_since_s = time.monotonic()
        self.registration, self.overrides = snapshot.registration, snapshot.overrides

    @property
    def inputs(self) -> list[TensorSpec]:
        """The input tensors that the model declares."""
        return decode_inputs(self.registration)

    @property
    def kind(self) -> ModelKind:
        """How the model executes requests."""
        return ModelKind.of(self.registration)

    @property
    def spoken(self) -> Spoken:
        """What the model declares of OpenAI's API."""
        return Spoken.of(self.registration)


class LoadedEntry(ServedHere):
    """An entry of the repository that the stack's node serves. `generation`: 0 until it was asked for."""

    def __init__(self, model: str, processes: int) -> None:
        super().__init__(model, processes)
        self.generation = 0


class NodeService(Service):
    """The node of a stack with a repository."""

    def __init__(self, repository: Path, room: int, plan: StackPlan, environment: Mapping[str, str]) -> None:
        flags = {"--repository": repository, "--room": room, "--drain-s": plan.drain_s}
        argv = ["carpool_worker", *(str(part) for flag in flags.items() for part in flag)]
        argv += ["--finish-streams", *(["--device", plan.device] if plan.device else [])]
        super().__init__("node", argv, environment, plan.logs)


class WorkerService(ServedHere, Service):
    """The worker of one model."""

    def __init__(self, served: ServedModel, plan: StackPlan, environment: Mapping[str, str]) -> None:
        ServedHere.__init__(self, served.name, len(served.devices))
        self.served = served
        devices = ",".join(served.devices)
        flags = {"--replicas": self.processes, "--device": devices, "--drain-s": plan.drain_s}
        argv = ["carpool_worker", served.spec, *(str(part) for flag in flags.items() for part in flag)]
        argv.append("--finish-streams")  # there is no other worker, and Redis stops as well
        environment = {**environment, **served.options.environment}
        Service.__init__(self, f"worker of {self.model}", argv, environment, plan.logs)

    def start(self) -> None:
        self.serving = False
        self.started_s = time.monotonic()
        Service.start(self)


class HttpService(Service):
    """One that people and programs reach at a port of this machine, the `usual` one if that is free and none
    is wanted. `wanted`: 0 for any."""

    def __init__(
        self, name: str, flags: Sequence[str], ports: tuple[int, int], plan: StackPlan,
        environment: Mapping[str, str],
    ) -> None:  # fmt: skip
        wanted, usual = ports
        self._takes_any_port = wanted == 0
        self.port = wanted or (usual if is_free(usual) else free_port())
        self._starts = 1
        self.serving = False
        self._flags = [*flags, "--host", HOST]
        super().__init__(name, self._flags, environment, plan.logs)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        self._argv = [*self._flags, "--port", str(self.port), *self._more_flags()]
        super().start()

    def _more_flags(self) -> Sequence[str]:
        """Those of this start."""
        return ()

    def start_elsewhere(self) -> bool:
        """It could not start: perhaps another program took the port. Returns whether it is tried again."""
        if not self._takes_any_port or self._starts == STARTS_MAX:
            return False
        self._starts += 1
        self.port = free_port()
        self.start()
        return True

    def check_serving(self) -> bool:
        """Whether it is this one that answers on its port, and can work."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=1.0)
        try:
            connection.request("GET", self._probe)
            answer = connection.getresponse()
            self.serving = answer.status == http.HTTPStatus.OK and self._is_from_here(answer)
        except (OSError, http.client.HTTPException):
            self.serving = False
        finally:
            connection.close()
        return self.serving

    _probe = "/"

    def _is_from_here(self, answer: http.client.HTTPResponse) -> bool:
        """Whether this process has sent the answer, as far as that can be seen."""
        return self.exit_status is None


class GatewayService(HttpService):
    """The gateway, which serves if it has Redis."""

    _probe = "/readyz"

    def __init__(self, port: int, plan: StackPlan, environment: Mapping[str, str]) -> None:
        self._takes_any_grpc_port = plan.grpc_port == 0
        self.grpc_port = plan.grpc_port
        flags = ["carpool_gateway", "--drain-s", str(plan.drain_s)]
        super().__init__("gateway", flags, (port, GATEWAY_PORT), plan, environment)

    @property
    def grpc_address(self) -> str:
        """Where gRPC is served; empty if it is not."""
        return "" if self.grpc_port is None else f"{HOST}:{self.grpc_port}"

    def _more_flags(self) -> Sequence[str]:
        if self._takes_any_grpc_port:
            self.grpc_port = free_port()
        return [] if self.grpc_port is None else ["--grpc-port", str(self.grpc_port)]

    def _is_from_here(self, answer: http.client.HTTPResponse) -> bool:
        name = answer.headers.get("x-request-id", "").rpartition("-")[0]
        return is_local_process(name, self.pid)


class ConsoleService(HttpService):
    """The operators' page. `password`: that of its first user, if the file of users was made for it."""

    _probe = "/sign-in"

    def __init__(
        self, port: int, users: Path | None, plan: StackPlan, environment: Mapping[str, str]
    ) -> None:
        self.users = Users(users or default_users_file())
        self.password = self.users.add_first()
        flags = ["carpool_console", "--users", str(self.users.path)]
        super().__init__("console", flags, (port, CONSOLE_PORT), plan, environment)

    @property
    def told(self) -> str:
        """Where it is, and how one signs in."""
        how = (
            f"sign in as {FIRST_USER} with {self.password}" if self.password else f"users: {self.users.path}"
        )
        return f"Operators' page: {self.url} ({how})"


def can_serve_http() -> bool:
    """Whether the packages of the gateway are installed."""
    try:
        import httptools  # noqa: F401, PLC0415 (an optional dependency)
        import msgspec  # noqa: F401, PLC0415
    except ModuleNotFoundError:
        return False
    return True


def can_show_pages() -> bool:
    """Whether the packages of the operators' page are installed."""
    names = ("jinja2", "starlette", "uvicorn")
    return all(importlib.util.find_spec(name) is not None for name in names)


class Restarter:
    """Starts a child again whenever it ends: soon at first, and later if it keeps ending."""

    def __init__(self, child: Child, now_s: float) -> None:
        self.child = child
        self._delay_s = RESTART_DELAY_S
        self._started_s = now_s
        self._restart_at_s: float | None = None
        self._log = structlog.get_logger()

    def run_once(self, now_s: float) -> None:
        """Schedule a restart if the child has ended, or restart it if that is due."""
        if self._restart_at_s is None:
            reason = self.child.exit_reason()
            if reason is not None:
                self._schedule_restart(now_s, reason)
        elif now_s >= self._restart_at_s:
            try:
                self.child.start()
            except (EmbeddedRedisError, OSError) as error:
                self._schedule_restart(now_s, str(error))
            else:
                self._started_s, self._restart_at_s = now_s, None
                self._log.info("child process restarted", child=self.child.name)

    def _schedule_restart(self, now_s: float, reason: str) -> None:
        if self._restart_at_s is None and now_s - self._started_s >= RESTART_DELAY_RESET_S:
            self._delay_s = RESTART_DELAY_S
        self._restart_at_s = now_s + self._delay_s
        self._log.warning(
            "child process ended, restarting it", child=self.child.name, how=reason, in_s=self._delay_s
        )
        self._delay_s = min(2 * self._delay_s, RESTART_DELAY_S_MAX)


class Supervisor:
    """Runs a plan. Call `start` once, `run_once` every POLL_S and `stop` at any time, all from the main
    thread.

    Raises ValueError, as `served_models` does.
    """

    def __init__(self, plan: StackPlan) -> None:
        self._models = served_models(plan.models, plan.options, replicas=plan.replicas, device=plan.device)
        self._plan = plan
        self.entries = _entries(plan)
        self._node: NodeService | None = None
        self.redis = None if plan.redis_url else Redis(plan.redis_port, plan.data_dir)
        self.url = plan.redis_url or ""
        self._services_url = self.url
        self.workers: list[WorkerService] = []
        self._batcher: Service | None = None
        self.gateway: GatewayService | None = None
        self.console: ConsoleService | None = None
        self._restarters: list[Restarter] = []
        self._leaving: list[WorkerService] = []  # that were replaced, and finish what they have
        self._link: Link | None = None
        self._ready_check_at_s = 0.0
        self._has_served = False
        self._log = structlog.get_logger()

    @property
    def serving(self) -> bool:
        """Whether every model is served, by the gateway too, and the operators' page is there."""
        return all(one.serving for one in (*self._serving_services(), *self.entries))

    @property
    def models(self) -> list[WorkerService | LoadedEntry]:
        """All models of the stack."""
        return [*self.workers, *self.entries]

    def _http_services(self) -> list[HttpService]:
        return [one for one in (self.gateway, self.console) if one is not None]

    def _serving_services(self) -> list[WorkerService | HttpService]:
        return [*self.workers, *self._http_services()]

    def _services(self) -> list[Service]:
        return [one for one in (self._batcher, self._node, *self._serving_services()) if one is not None]

    def start(self) -> None:
        """Start everything without waiting for the models. Raises EmbeddedRedisError or UnavailableError."""
        plan = self._plan
        if self.redis is not None:
            self.redis.start()
            self.url = self.redis.server.url
            self._services_url = self.redis.server.services_url
            self._restarters.append(Restarter(self.redis, time.monotonic()))
        self._link = Link(self.url, name=f"supervisor-{os.getpid()}", timeout_s=1.0)
        self._link.call("PING")
        policies = ["--policies", ",".join(plan.policies)] if plan.policies else []
        argv = ["carpool_batcher", *policies]
        self._batcher = Service("batcher", argv, self._environment(0), plan.logs)
        self.workers = [
            WorkerService(served, plan, self._environment(at)) for at, served in enumerate(self._models, 1)
        ]
        if plan.repository is not None:
            # And one more, for another version beside the one that serves.
            room = max(usable_cpus(), 1 + sum(entry.processes for entry in self.entries))
            self._node = NodeService(plan.repository, room, plan, self._environment(1))
        if plan.gateway_port is not None:
            self.gateway = GatewayService(plan.gateway_port, plan, self._environment(None))
        if plan.console_port is not None:
            users = self._users_of_console()
            self.console = ConsoleService(plan.console_port, users, plan, self._environment(None))
        for service in self._services():
            service.start()
            self._restarters.append(Restarter(service, time.monotonic()))

    def _users_of_console(self) -> Path | None:
        """The file of users of the operators' page: with the data of the stack's own Redis, and gone with it;
        None for the usual file, if another Redis is used."""
        return None if self.redis is None else self.redis.server.home / "console-users.toml"

    def _environment(self, at: int | None) -> dict[str, str]:
        """The environment of the batcher, which has the number 0, of a worker, from 1 on, or of the gateway
        or the console, which have no second port."""
        plan = self._plan
        environment = {
            **os.environ,
            **dict.fromkeys(_IN_THE_URL, ""),
            "CARPOOL_REDIS_URL": self._services_url,
            "CARPOOL_PREFIX": plan.prefix,
            "CARPOOL_LOG_LEVEL": plan.log_level,
        }
        environment.pop("CARPOOL_HTTP_PORT", None)  # two processes cannot listen on one port
        if plan.http_port is not None and at is not None:
            environment["CARPOOL_HTTP_PORT"] = str(plan.http_port + at)
        return environment

    def run_once(self) -> list[WorkerService | LoadedEntry]:
        """Restart children that ended. Returns the models that are served since the last call.

        Raises StartError if a service exits with an error before all models were served for the first time.
        """
        if not self._has_served:
            self._check_start()
        for restarter in self._restarters:
            restarter.run_once(time.monotonic())
        self._leaving = [worker for worker in self._leaving if worker.exit_status is None]
        newly_serving = self._newly_serving()
        if self.serving:
            self._has_served = True
        return newly_serving

    def _check_start(self) -> None:
        """A service that exits by itself would exit again. One that was killed is restarted."""
        for service in self._services():
            if (service.exit_status or 0) > 0:
                if isinstance(service, HttpService) and service.start_elsewhere():
                    continue
                raise ServiceEndedError(
                    f"the {service.name} ended with {service.exit_reason()} before it was ready"
                )

    def _newly_serving(self) -> list[WorkerService | LoadedEntry]:
        now_s = time.monotonic()
        starting = [worker for worker in self.workers if not worker.serving]
        loading = [entry for entry in self.entries if not entry.serving]
        if self.serving or now_s < self._ready_check_at_s:
            return []
        self._ready_check_at_s = now_s + READY_CHECK_INTERVAL_S
        for service in self._http_services():
            if not service.serving:
                service.check_serving()
        with contextlib.suppress(UnavailableError, CommandError):  # Redis is restarting, or loads its data
            served = [entry for entry in loading if self._check_loaded(entry)]
            return [*(worker for worker in starting if self._check_serving(worker)), *served]
        return []

    def _check_loaded(self, entry: LoadedEntry) -> bool:
        """Whether the node serves this entry, which is asked for once the node is there."""
        assert self._link is not None
        key = NodesKeys(self._plan.prefix).wanted
        link = Link(self.url, name=f"supervisor-{os.getpid()}", timeout_s=1.0, key=key)
        try:
            store = NodeStore(link, self._plan.prefix)
            if not store.nodes():
                return False
            if not entry.generation:
                entry.generation = store.load(
                    entry.model, None, {}, entry.processes, None, actor=this_operator()
                )
            state, reason = store.outcome(entry.model, entry.generation)
        except ValueError as error:
            raise StartError(str(error)) from None
        finally:
            link.close()
        if state in (OutcomeState.FAILED, OutcomeState.GONE) and not self._has_served:
            raise StartError(f"{entry.model} is not loaded: {reason}")
        keys = Keys(entry.model, self._plan.prefix)
        if state is not OutcomeState.SERVING or not self._link.call("EXISTS", keys.batcher):
            return False
        entry.begin_to_serve(take_snapshot(self._link, keys, RedisClock()))
        self._check_policy(entry)
        return True

    def _check_serving(self, worker: WorkerService) -> bool:
        """Whether all model processes of this worker take batches, and a batcher is active for its model."""
        assert self._link is not None
        keys = Keys(worker.model, self._plan.prefix)
        snapshot = take_snapshot(self._link, keys, RedisClock())
        processes = sum(is_local_process(name, worker.pid) for name in snapshot.model_processes)
        if processes < worker.processes or not self._link.call("EXISTS", keys.batcher):
            return False
        worker.begin_to_serve(snapshot)
        if not self._has_served:
            self._check_policy(worker)
        else:
            self._log.info("model served again", model=worker.model)
        return True

    # --- replacing a worker ----------------------------------------------------------------------------

    def start_beside(self, worker: WorkerService) -> WorkerService:
        """Start another worker of the same model, which does not take its place yet."""
        new = WorkerService(worker.served, self._plan, self._environment(None))
        new.start()
        return new

    def take_over_if_serving(self, worker: WorkerService, new: WorkerService) -> bool:
        """If `new`, of `start_beside`, serves, it takes the place of this one, which finishes what it has."""
        try:
            if not self._check_serving(new):
                return False
        except (UnavailableError, CommandError):  # Redis is restarting
            return False
        self.workers[self.workers.index(worker)] = new
        for restarter in self._restarters:
            if restarter.child is worker:
                restarter.child = new
        worker.terminate()
        self._leaving.append(worker)
        return True

    def _check_policy(self, worker: ServedHere) -> None:
        """A model may only declare a policy that the batcher has, unless an operator has overridden it."""
        policy = worker.registration.get("policy", POLICIES[0])
        if "policy" not in worker.overrides and not self.has_policy(policy):
            raise StartError(
                f"the model {worker.model} declares the policy {policy!r}, which the batcher does not have; "
                f"add --policies {policy}, or remove the declaration"
            )

    def has_policy(self, name: str) -> bool:
        """Whether the batcher can use a policy of this name."""
        return name in (*POLICIES, *self._plan.policies)

    def stop(self) -> bool:
        """Stop everything, in order. Whether all of it ended by itself. May be called more than once."""
        self._restarters.clear()
        drain_timeout_s = self._plan.drain_s + BATCHER_STOP_TIMEOUT_S
        ended: list[bool] = []
        if self.gateway is not None:
            self.gateway.terminate()
            ended.append(self.gateway.wait_or_kill(drain_timeout_s))
        if self.console is not None:
            self.console.terminate()
        workers = [*self.workers, *self._leaving]
        for worker in workers:
            worker.terminate()
        ended += [
            worker.wait_or_kill(drain_timeout_s if worker.serving else LOADING_STOP_TIMEOUT_S)
            for worker in workers
        ]
        if self._node is not None:
            self._node.terminate()
            ended.append(self._node.wait_or_kill(drain_timeout_s))
        if self.console is not None:
            ended.append(self.console.wait_or_kill(CONSOLE_STOP_TIMEOUT_S))
        if self._batcher is not None:
            self._batcher.terminate()
            ended.append(self._batcher.wait_or_kill(BATCHER_STOP_TIMEOUT_S))
        if self._link is not None:
            self._link.close()
        if self.redis is not None:
            self.redis.stop()
        return all(ended)


def _entries(plan: StackPlan) -> list[LoadedEntry]:
    """The entries that the node is to serve. Raises ValueError."""
    if plan.repository is None:
        return []
    repository = Repository(plan.repository)
    names = repository.names()
    for name in plan.entries:
        if name not in names:
            listed = ", ".join(names) or "none"
            raise ValueError(f"there is no model {name!r:.80} in {plan.repository}; there are {listed}")
    if not names:
        raise ValueError(
            f"{plan.repository} has no models: each is a folder with its versions, NAME/1/model.py"
        )
    processes = len(devices(plan.device or "auto", plan.replicas or 1))
    return [LoadedEntry(name, processes) for name in plan.entries or names]


def preferred_port() -> int | None:
    """Redis's usual port if it is free, so that commands need no URL; None means any free port."""
    return REDIS_PORT if is_free(REDIS_PORT) else None
