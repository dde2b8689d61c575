"""A stack on one machine: Redis where no URL is given, a batcher, a worker for each model; all kept alive.

Order of starting: Redis, then the others, who find each other there. Order of stopping: the workers finish
what they have in hand, the batcher gives its leases back, Redis leaves last, because both need it to.
All is started from the main thread and ends with this process, however that ends (`carpool.lifecycle`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import structlog

from carpool.clock import RedisClock
from carpool.errors import UnavailableError
from carpool.keys import Keys
from carpool.lifecycle import command_that_dies_with_parent
from carpool.process_names import is_local_process
from carpool.settings import RedisSettings
from carpool.store.connection import CommandError, Link
from carpool.store.directory import take_snapshot
from carpool.wire.registration import decode_inputs
from carpool.wire.tensors import TensorSpec
from carpool_cli.local.embedded import EmbeddedRedis, EmbeddedRedisError, is_free
from carpool_worker.model_process.loader import model_name

POLL_S: Final = 0.1  # how often `run_once` is meant to be called
LOOK_EVERY_S: Final = 0.2
PAUSE_S: Final = 0.1  # before what died is started again; doubled each time ...
PAUSE_S_MAX: Final = 5.0  # ... up to here ...
SETTLED_S: Final = 10.0  # ... and forgotten once it lived so long
BATCHER_STOP_S: Final = 10.0
LOADING_STOP_S: Final = 1.0  # who serves nobody yet has nothing to finish
REDIS_PORT: Final = 6379
# What our own settings put into the URL: said again beside it, here or in `.env`, it would be said twice.
_IN_THE_URL: Final = tuple(
    f"CARPOOL_{name.upper()}" for name in RedisSettings.model_fields if name != "redis_url"
)


class StartError(Exception):
    """The stack cannot come up; starting again would not help."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to run. `models` are named as for a worker. `http_port` is the batcher's, the workers have the
    ports after it. `logs` is a directory; None: standard error."""

    models: Sequence[str]
    redis_url: str | None = None
    redis_port: int | None = None
    data_dir: Path | None = None
    prefix: str = "carpool"
    replicas: int = 1
    device: str = "auto"
    drain_s: float = 30.0
    log_level: str = "info"
    http_port: int | None = None
    policies: Sequence[str] = ()
    logs: Path | None = None


class Child(Protocol):
    """Something that runs beside us."""

    name: str

    def start(self) -> None:
        """Start it, for the first time or again."""

    def how_it_ended(self) -> str | None:
        """None while it runs."""


class Redis:
    """The Redis server of our own."""

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

    def how_it_ended(self) -> str | None:
        return None if self.server.alive else "it died"

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()


class Service:
    """A batcher or a worker: a process in a session of its own, for Ctrl-C is ours to act on."""

    def __init__(self, name: str, argv: Sequence[str], environment: Mapping[str, str], logs: Path | None):
        self.name = name
        self._argv = argv
        self._environment = environment
        self.log = logs / f"{name.replace(' ', '-')}.log" if logs else None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") if self.log else contextlib.nullcontext(sys.stderr) as output:
            self._process = subprocess.Popen(
                command_that_dies_with_parent([sys.executable, "-m", *self._argv]),
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

    def how_it_ended(self) -> str | None:
        status = self.exit_status
        if status is None:
            return None
        return f"exit status {status}" if status >= 0 else signal.Signals(-status).name

    def ask_to_stop(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def see_out(self, within_s: float) -> bool:
        """Wait for the end, and bring it about after `within_s`. Whether it came by itself."""
        if self._process is None:
            return True
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True


class WorkerService(Service):
    """The worker of one model."""

    def __init__(self, spec: str, plan: Plan, environment: Mapping[str, str]) -> None:
        self.model = model_name(spec)[0]
        flags = {"--replicas": plan.replicas, "--device": plan.device, "--drain-s": plan.drain_s}
        argv = ["carpool_worker", spec, *(str(part) for flag in flags.items() for part in flag)]
        super().__init__(f"worker of {self.model}", argv, environment, plan.logs)
        self.serving = False
        self.serves_since_s = 0.0
        self.registration: Mapping[str, str] = {}
        self.started_s = 0.0

    @property
    def inputs(self) -> list[TensorSpec]:
        """The tensors that the model declares."""
        return decode_inputs(self.registration)

    def start(self) -> None:
        self.serving = False
        self.started_s = time.monotonic()
        super().start()


class Keeper:
    """Starts a child again whenever it has ended: soon at first, later if it keeps on ending."""

    def __init__(self, child: Child, now_s: float) -> None:
        self.child = child
        self._pause_s = PAUSE_S
        self._started_s = now_s
        self._due_s: float | None = None
        self._log = structlog.get_logger()

    def run_once(self, now_s: float) -> None:
        """Look after the child: it runs, or it died and a start is due now or later."""
        if self._due_s is None:
            how = self.child.how_it_ended()
            if how is not None:
                self._plan_start(now_s, how)
        elif now_s >= self._due_s:
            try:
                self.child.start()
            except (EmbeddedRedisError, OSError) as error:
                self._plan_start(now_s, str(error))
            else:
                self._started_s, self._due_s = now_s, None
                self._log.info("started again", child=self.child.name)

    def _plan_start(self, now_s: float, how: str) -> None:
        if self._due_s is None and now_s - self._started_s >= SETTLED_S:
            self._pause_s = PAUSE_S
        self._due_s = now_s + self._pause_s
        self._log.warning("died, starts again", child=self.child.name, how=how, in_s=self._pause_s)
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)


class Supervisor:
    """Runs a plan. `start` once, `run_once` every POLL_S, `stop` at any time; all from the main thread.

    Raises ValueError for a model without a usable name, or two of one name.
    """

    def __init__(self, plan: Plan) -> None:
        names = [model_name(spec)[0] for spec in plan.models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two models are named {name}; write NAME=... to name one otherwise")
        self._plan = plan
        self.redis = None if plan.redis_url else Redis(plan.redis_port, plan.data_dir)
        self.url = plan.redis_url or ""
        self.workers: list[WorkerService] = []
        self._batcher: Service | None = None
        self._keepers: list[Keeper] = []
        self._link: Link | None = None
        self._look_at_s = 0.0
        self._came_up = False
        self._log = structlog.get_logger()

    @property
    def serving(self) -> bool:
        """Whether every model is served."""
        return bool(self.workers) and all(worker.serving for worker in self.workers)

    def start(self) -> None:
        """Start everything, without waiting for the models. Raises EmbeddedRedisError or UnavailableError."""
        plan = self._plan
        if self.redis is not None:
            self.redis.start()
            self.url = self.redis.server.url
            self._keepers.append(Keeper(self.redis, time.monotonic()))
        self._link = Link(self.url, name=f"supervisor-{os.getpid()}", timeout_s=1.0)
        self._link.call("PING")
        policies = ["--policies", ",".join(plan.policies)] if plan.policies else []
        argv = ["carpool_batcher", *policies]
        self._batcher = Service("batcher", argv, self._environment(0), plan.logs)
        self.workers = [
            WorkerService(spec, plan, self._environment(at)) for at, spec in enumerate(plan.models, 1)
        ]
        for service in (self._batcher, *self.workers):
            service.start()
            self._keepers.append(Keeper(service, time.monotonic()))

    def _environment(self, at: int) -> dict[str, str]:
        """What the service in place `at` is told: the batcher is in place 0, the workers follow."""
        plan = self._plan
        environment = {
            **os.environ,
            **dict.fromkeys(_IN_THE_URL, ""),
            "CARPOOL_REDIS_URL": self.url,
            "CARPOOL_PREFIX": plan.prefix,
            "CARPOOL_LOG_LEVEL": plan.log_level,
        }
        environment.pop("CARPOOL_HTTP_PORT", None)  # two cannot have one
        if plan.http_port is not None:
            environment["CARPOOL_HTTP_PORT"] = str(plan.http_port + at)
        return environment

    def run_once(self) -> list[WorkerService]:
        """Start again what died. Returns the workers that began to serve since the last call.

        Raises StartError if, before everything served for the first time, a service gave up by itself.
        """
        if not self._came_up:
            self._give_up_if_one_did()
        for keeper in self._keepers:
            keeper.run_once(time.monotonic())
        begun = self._who_began_to_serve()
        if self.serving:
            self._came_up = True
        return begun

    def _give_up_if_one_did(self) -> None:
        """Who ends with a status has said why, and would say it again; who was killed has not."""
        for service in (self._batcher, *self.workers):
            if service is not None and (service.exit_status or 0) > 0:
                raise StartError(f"the {service.name} ended with {service.how_it_ended()} before it served")

    def _who_began_to_serve(self) -> list[WorkerService]:
        now_s = time.monotonic()
        waiting = [worker for worker in self.workers if not worker.serving]
        if not waiting or now_s < self._look_at_s:
            return []
        self._look_at_s = now_s + LOOK_EVERY_S
        with contextlib.suppress(UnavailableError, CommandError):  # Redis is restarting, or loads its data
            return [worker for worker in waiting if self._begins_to_serve(worker)]
        return []

    def _begins_to_serve(self, worker: WorkerService) -> bool:
        """Whether all of this worker's model processes take batches, and somebody dispatches them."""
        assert self._link is not None
        keys = Keys(worker.model, self._plan.prefix)
        snapshot = take_snapshot(self._link, keys, RedisClock())
        processes = sum(is_local_process(name, worker.pid) for name in snapshot.workers)
        if processes < self._plan.replicas or not self._link.call("EXISTS", keys.batcher):
            return False
        worker.serving = True
        worker.serves_since_s = time.monotonic()
        worker.registration = snapshot.registration
        if self._came_up:
            self._log.info("serves again", model=worker.model)
        return True

    def stop(self) -> bool:
        """Stop everything, in order. Whether all of it left by itself. Any number of times."""
        self._keepers.clear()
        for worker in self.workers:
            worker.ask_to_stop()
        patience_s = self._plan.drain_s + BATCHER_STOP_S
        clean = [worker.see_out(patience_s if worker.serving else LOADING_STOP_S) for worker in self.workers]
        if self._batcher is not None:
            self._batcher.ask_to_stop()
            clean.append(self._batcher.see_out(BATCHER_STOP_S))
        if self._link is not None:
            self._link.close()
        if self.redis is not None:
            self.redis.stop()
        return all(clean)


def preferred_port() -> int | None:
    """Redis's own port if nobody has it: then no one needs to be told. None for any other that is free."""
    return REDIS_PORT if is_free(REDIS_PORT) else None
