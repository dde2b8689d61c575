"""A stack for a test: a Redis server, batchers and workers as processes, and their logs.

    with Stack(tmp_path) as stack:
        stack.batcher()
        stack.worker("hashing.py:Hashing", "--lease-ms", "600")     # a file of tests/support/models
        stack.wait_for_model("Hashing")
        entry_id = stack.send("Hashing", body="1")
        assert stack.result("Hashing", entry_id)["status"] == "OK"

Nothing here sleeps for a fixed time, and each wait has a timeout. A stack stops only processes that it
started.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Self

import msgpack
from redis import Redis

import carpool
import carpool_batcher
import carpool_cli
import carpool_console
import carpool_gateway
import carpool_worker
from carpool.keys import DEFAULT_PREFIX, Keys
from carpool.lifecycle import command_that_dies_with_parent
from carpool.store.connection import Link
from carpool.store.directory import Directory
from carpool_cli.local.embedded import EmbeddedRedis
from support.child_forking import STARTER
from support.forking import ForkedProcess, ForkServer
from support.operators import TESTER
from support.waiting import EVENTUALLY_S, wait_until
from support.wire import envelopes

MODELS: Final = Path(__file__).parent / "models"
START_S: Final = EVENTUALLY_S
RESULT_S: Final = EVENTUALLY_S
_LOG_LINES_SHOWN: Final = 40

Event = dict[str, Any]

# A test that expects an event not to be logged would pass for ever once the event was renamed.
_LOG_CALL: Final = re.compile(r'log(?:ger\(\))?\.(?:debug|info|warning|error|exception)\(\s*"([^"]+)"')
LOG_EVENTS: Final = frozenset(
    event
    for package in (carpool, carpool_batcher, carpool_cli, carpool_console, carpool_gateway, carpool_worker)
    for file in Path(package.__path__[0]).rglob("*.py")
    for event in _LOG_CALL.findall(file.read_text())
)


class Service:
    """A batcher, worker or gateway process and its log. It is forked, or with `fresh` a new interpreter.
    `packages`: see `ForkServer.start`."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        fresh: bool,
        packages: Path | None = None,
    ) -> None:
        self.name = name
        self.arguments = list(arguments)
        self.log = log
        self._events: list[Event] = []
        self._bytes_read = 0
        self.process: ForkedProcess | subprocess.Popen[bytes]
        with log.open("wb") as output:
            if not fresh:
                server = ForkServer.of_this_process()
                self.process = server.start(
                    module, arguments, MODELS, environment, output, output, packages=packages
                )
                return
            self.process = subprocess.Popen(
                command_that_dies_with_parent([sys.executable, "-P", "-m", module, *arguments]),
                cwd=MODELS,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process but not to its children."""
        self.process.send_signal(number)

    def freeze(self) -> None:
        """Stop the process and its children with SIGSTOP, as a paused machine would; return once they are."""
        frozen = [self.pid, *self.children()]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: all(_state(pid) == "T" for pid in frozen), description=f"{self.name} is stopped")

    def thaw(self) -> None:
        """Let the process and its children continue (SIGCONT)."""
        for pid in [self.pid, *self.children()]:
            with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
                os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; return once the process has ended."""
        self.process.kill()
        self.process.wait(EVENTUALLY_S)

    def terminate(self, within_s: float = EVENTUALLY_S) -> int:
        """SIGTERM; return the exit status."""
        self.process.terminate()
        return self.process.wait(within_s)

    def children(self) -> list[int]:
        """The pids of this process's children: a worker's model processes."""
        tasks = Path(f"/proc/{self.pid}/task")
        with contextlib.suppress(OSError):
            found = [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
            return [pid for pid in found if process_name(pid) != STARTER]
        return []

    def events(self, name: str | None = None) -> list[Event]:
        """All events in the log, or those with this name, which must be one that some code logs."""
        assert name is None or name in LOG_EVENTS, f"no code logs an event {name!r}"
        self._read_log()
        return [{**event} for event in self._events if name in (None, event.get("event"))]

    def _read_log(self) -> None:
        """Parse the lines that were written since it was read last. Tests look every few milliseconds."""
        with self.log.open("rb") as file:
            file.seek(self._bytes_read)
            written = file.read()
        lines, newline, _ = written.rpartition(b"\n")  # what follows is still being written
        self._bytes_read += len(lines) + len(newline)
        for line in lines.decode(errors="replace").split("\n"):
            event = _event(line)
            if event is not None:
                self._events.append(event)

    def wait_for(self, name: str, timeout_s: float = START_S) -> Event:
        """Wait for the first event of this name. Fails if the process ends without logging it."""
        wait_until(
            lambda: self.events(name) or not self.alive,
            description=f"{self.name} logs {name!r}",
            timeout_s=timeout_s,
        )
        found = self.events(name)
        assert found, f"{self.name} exited with {self.process.returncode} without logging {name!r}"
        return found[0]

    @cached_property
    def status_url(self) -> str:
        """The URL of the status server of a service started with "--http-port", "0"."""
        url: str = self.wait_for("serving metrics and health")["url"]
        return url.removesuffix("/metrics")

    @cached_property
    def url(self) -> str:
        """The URL of a gateway, or of a console."""
        role = self.name.partition("-")[0]
        url: str = self.wait_for("console started" if role == "console" else "gateway started")["url"]
        return url

    def end_of_log(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
        state = "running" if self.alive else f"exited with {self.process.returncode}"
        return "\n".join([f"--- {self.name}, {state}", *lines])


class Stack:
    """A Redis server with batchers and workers. See the module for an example.

    Logs are written to `home`. `binary` is the Redis server to start, the preferred one if None. `server` is
    a running one instead, which is stopped with the stack; tests connect to `server.url`. `environment` has
    variables for batchers and workers, by role; they override that URL. With `fresh`, services are not forked
    from a process that has imported them (see `support.forking`), but run in new interpreters.
    """

    running: ClassVar[list[Stack]] = []

    def __init__(
        self,
        home: Path,
        *,
        binary: Path | None = None,
        append_only: bool = True,
        server: EmbeddedRedis | None = None,
        environment: Mapping[str, Mapping[str, str]] | None = None,
        fresh: bool = False,
    ) -> None:
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        self.server = server or EmbeddedRedis(binary=binary, append_only=append_only)
        self.environment = {} if environment is None else environment
        self.fresh = fresh
        self.packages: Path | None = None  # for services that are started from now on: see `ForkServer.start`
        # Any: redis-py's types are too vague for results and for most arguments.
        self.redis: Any = Redis.from_url(self.server.url, protocol=2, socket_timeout=2 * RESULT_S)
        self.services: list[Service] = []
        self.is_spoiled = False  # a test failed that used it
        self._served: dict[str, Service] = {}
        Stack.running.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return self.server.url

    # --- services ------------------------------------------------------------------------------------------

    def batcher(self, *flags: str, faulty_package: Path | None = None, ready: bool = True) -> Service:
        """Start a batcher; wait until it looks for models unless `ready` is False."""
        service = self._start("batcher", flags, faulty_package)
        if ready:
            service.wait_for("batcher started")
        return service

    def worker(
        self, spec: str, *flags: str, faulty_package: Path | None = None, ready: bool = True
    ) -> Service:
        """Start a worker; wait until it is ready unless `ready` is False.

        `spec` is the worker's argument, relative to `tests/support/models`. `faulty_package` is a directory
        with a package of Carpool that replaces the real one, in a process that is forked.
        """
        service = self._start("worker", [spec, *flags], faulty_package)
        if ready:
            service.wait_for("worker ready")
        return service

    def gateway(self, *flags: str, ready: bool = True) -> Service:
        """Start a gateway, on a free port unless `flags` name one; wait until it serves unless `ready` is
        False."""
        service = self._start("gateway", ["--port", "0", *flags], None)
        if ready:
            service.wait_for("gateway started")
        return service

    def console(self, *flags: str, ready: bool = True) -> Service:
        """Start a console, on a free port, with a file of users in `home`, unless `flags` name them; wait
        until it serves unless `ready` is False."""
        users = str(self.home / "users.toml")
        service = self._start("console", ["--port", "0", "--users", users, *flags], None)
        if ready:
            service.wait_for("console started")
        return service

    def serve(self, *specs: str) -> str:
        """Start a batcher and a worker for each model where none runs; return the name of the last model."""
        if not any(service.alive and service.name.startswith("batcher") for service in self.services):
            self.batcher()
        models = {spec.rpartition(":")[2]: spec for spec in specs}
        missing = [model for model in models if model not in self._served or not self._served[model].alive]
        for model in missing:
            self._served[model] = self.worker(models[model], ready=False)
        for model in missing:
            self._served[model].wait_for("worker ready")
        for model in models:
            self.wait_for_model(model)
        return model

    def served_by(self, model: str) -> Service:
        """The worker that `serve` started for the model."""
        return self._served[model]

    def _start(self, role: str, arguments: Sequence[str], faulty_package: Path | None) -> Service:
        name = f"{role}-{len(self.services)}"
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("CARPOOL_")},
            "CARPOOL_REDIS_URL": self.url,
            "CARPOOL_LOG_LEVEL": "debug",  # for a line about each batch
            **self.environment.get(role, {}),
        }
        log = self.home / f"{name}.log"
        service = Service(
            name,
            f"carpool_{role}",
            arguments,
            log,
            environment,
            fresh=self.fresh,
            packages=faulty_package or self.packages,
        )
        self.services.append(service)
        return service

    def wait_for_model(self, model: str, workers: int = 1, timeout_s: float = START_S) -> None:
        """Wait until a batcher is active for the model and has at least `workers` live model processes."""
        keys = Keys(model)
        wait_until(
            lambda: self.redis.exists(keys.batcher) and len(self.live_workers(model)) >= workers,
            description=f"{model} has a batcher and {workers} model processes",
            timeout_s=timeout_s,
        )

    def configure(self, model: str, **values: str) -> None:
        """Override settings as `carpool config` does; return once a batcher has read them."""
        wait_until(
            lambda: any(event["model"] == model for event in self.events("batcher active")),
            description=f"a batcher has read the settings of {model}",  # else it may start with the new ones
            timeout_s=START_S,
        )
        before = len(self.events("settings changed"))
        link = Link(self.url, name="configure")
        Directory(link, DEFAULT_PREFIX).configure(model, values, (), actor=TESTER)
        link.close()
        wait_until(lambda: len(self.events("settings changed")) > before, description=f"{values} take effect")

    def live_workers(self, model: str) -> list[str]:
        """The names of the workers whose lease has not run out."""
        seconds, microseconds = self.redis.time()
        now_ms = seconds * 1000 + microseconds // 1000
        return [name.decode() for name in self.redis.zrangebyscore(Keys(model).workers, now_ms, "+inf")]

    def expire_lease(self, model: str, worker: Service) -> None:
        """Let the lease of a worker that is frozen or dead run out now, as if that time had passed: of its
        model processes and of the batches that they have.

        So a test need not give workers a lease so short that they also lose it because a machine is busy.
        """
        keys, name = Keys(model), worker.wait_for("worker ready")["worker"]
        arguments = worker.arguments
        lease_ms = int(arguments[arguments.index("--lease-ms") + 1])
        for process in self.live_workers(model):
            if process.startswith(f"{name}/"):
                self.redis.zadd(keys.workers, {process: int(self.redis.time()[0]) * 1000 - 1})
        versions = [version.decode() for version in self.redis.smembers(keys.versions)]
        for stream in (keys.batches, *map(keys.batches_of, versions)):
            for batch in self.redis.xpending_range(stream, "workers", "-", "+", 1000):
                consumer = batch["consumer"].decode()
                if consumer.startswith(f"{name}/"):
                    self.redis.xclaim(
                        stream, "workers", consumer, 0, [batch["message_id"]], idle=lease_ms, justid=True
                    )

    def active_batcher(self, model: str) -> Service:
        """Wait until a batcher holds the model's lease, and return it."""

        def holder() -> Service | None:
            name = (self.redis.get(Keys(model).batcher) or b"").decode()
            return next((service for service in self.services if f"-{service.pid}-" in name), None)

        found: Service = wait_for(
            holder, description=f"a batcher of this stack holds the lease of {model}", timeout_s=START_S
        )
        return found

    def models(self) -> list[str]:
        """The names of the registered models."""
        return sorted(name.decode() for name in self.redis.smembers("carpool:models"))

    def events(self, name: str) -> list[Event]:
        """The events of this name in all logs."""
        return [event for service in self.services for event in service.events(name)]

    # --- a producer that uses only Redis -------------------------------------------------------------------

    def send(self, model: str, **fields: str | bytes | int) -> str:
        """XADD one request; return the entry ID."""
        entry_id: bytes = self.redis.xadd(Keys(model).requests, dict(fields))
        return entry_id.decode()

    def send_packed(self, model: str, requests: list[dict[str, Any]], **shared: str | bytes | int) -> str:
        """XADD one packed entry; return its ID."""
        return self.send(model, requests=msgpack.packb(requests), **shared)

    def result(self, model: str, correlation_id: str, timeout_s: float = RESULT_S) -> dict[str, Any]:
        """Wait for an envelope, and remove it."""
        found = self.redis.blpop([Keys(model).result(correlation_id)], timeout_s)
        assert found is not None, f"no result of {model} for {correlation_id} within {timeout_s:g} s"
        return envelope(found[1])

    def replies(self, model: str, name: str) -> list[dict[str, Any]]:
        """All envelopes in a reply stream, in order."""
        entries = self.redis.xrange(Keys(model).replies(name))
        return [reply for _, fields in entries for reply in envelopes(fields)]

    # --- the state of Redis --------------------------------------------------------------------------------

    def wait_until_idle(self, model: str, timeout_s: float = RESULT_S) -> None:
        """Wait until no request of the model waits or is in flight."""
        requests = Keys(model).requests
        wait_until(
            lambda: not any(self.redis.xlen(key) for key in (requests, *self.batch_streams(model))),
            description=f"no request of {model} waits or is in flight",
            timeout_s=timeout_s,
        )

    def batch_streams(self, model: str) -> list[str]:
        """The streams of batches of a model: the common one, and those of versions."""
        keys = Keys(model)
        versions = sorted(version.decode() for version in self.redis.smembers(keys.versions))
        return [keys.batches, *map(keys.batches_of, versions)]

    def last_batch_id(self, model: str) -> bytes:
        """The ID of the batch that was dispatched last, also if it is done."""
        last_id: bytes = self.redis.xinfo_stream(Keys(model).batches)["last-generated-id"]
        return last_id

    def pending(self, model: str) -> int:
        """The number of batches in Redis's pending entries lists."""
        groups = [group for key in self.batch_streams(model) for group in self.redis.xinfo_groups(key)]
        return sum(group["pending"] for group in groups)

    def has_batch(self, model: str, worker: Service) -> bool:
        """Whether the worker has a batch."""
        return bool(self.batches_of(model, worker))

    def batches_of(self, model: str, worker: Service) -> set[bytes]:
        """The IDs of the batches that the worker has, according to Redis's pending entries list."""
        name = worker.wait_for("worker ready")["worker"]
        pending = self.redis.xpending_range(Keys(model).batches, "workers", "-", "+", 1000)
        return {one["message_id"] for one in pending if one["consumer"].decode().startswith(f"{name}/")}

    def keys_without_ttl(self) -> set[str]:
        """The names of the keys that never expire. Streams of batches for a version are named as that of the
        others."""
        names = list(self.redis.scan_iter(count=1000))
        pipeline = self.redis.pipeline(transaction=False)
        for name in names:
            pipeline.pttl(name)
        lasting = [
            name.decode() for name, ttl_ms in zip(names, pipeline.execute(), strict=True) if ttl_ms == -1
        ]
        return {re.sub(r"(?<=:batches):[^:]+$", "", name) for name in lasting}

    # --- stopping ------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop all services and the Redis server. May be called more than once."""
        for service in self.services:
            if service.alive:
                service.signal(signal.SIGKILL)
        for service in self.services:
            service.process.wait(EVENTUALLY_S)
        self.redis.close()
        self.server.stop()
        if self in Stack.running:
            Stack.running.remove(self)

    def end_of_logs(self) -> str:
        return "\n".join(service.end_of_log() for service in self.services)


def fixed_keys(model: str) -> set[str]:
    """A model's keys that have no TTL, as listed in PROTOCOL.md; each is bounded."""
    keys = Keys(model)
    return {
        keys.requests,
        keys.batches,
        keys.settled,
        keys.dead,
        keys.registration,
        keys.workers,
        keys.versions,
        keys.shares,
        keys.statistics,
        keys.audit,
        "carpool:models",
    }


def envelope(data: bytes) -> dict[str, Any]:
    """Decode the envelope from a result key: a JSON object or a msgpack map."""
    decoded: dict[str, Any] = json.loads(data) if data.startswith(b"{") else msgpack.unpackb(data)
    return decoded


@contextlib.contextmanager
def frozen(service: Service) -> Iterator[None]:
    """Inside the block the service is stopped (SIGSTOP)."""
    service.freeze()
    try:
        yield
    finally:
        service.thaw()


@contextlib.contextmanager
def frozen_with_batch(stack: Stack, model: str, worker: Service) -> Iterator[None]:
    """Inside the block the worker is stopped (SIGSTOP) and has a batch.

    Between a commit and the next fetch a worker has none. Its last command may still be on its way to Redis
    when it stops: Redis reads it before it answers a second question.
    """

    def is_frozen_with_batch() -> bool:
        worker.freeze()
        if all(stack.has_batch(model, worker) for _ in range(2)):
            return True
        worker.thaw()
        return False

    wait_until(is_frozen_with_batch, description=f"{worker.name} is stopped while it has a batch")
    try:
        yield
    finally:
        worker.thaw()


def wait_for(probe: Callable[[], Any], *, description: str, timeout_s: float = EVENTUALLY_S) -> Any:
    """Wait until `probe` returns a true value, and return it."""
    found: list[Any] = []

    def is_found() -> bool:
        found[:] = [probe()]
        return bool(found[0])

    wait_until(is_found, description=description, timeout_s=timeout_s)
    return found[0]


def _event(line: str) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:  # a traceback
        return None
    return event if isinstance(event, dict) else None


def process_name(pid: int) -> str:
    """What /proc calls the process: of a forked one 15 characters of its module; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "ended"
