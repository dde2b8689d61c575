"""A whole stack for a test: a Redis server of its own, batchers and workers as processes, and their logs.

    with Stack(tmp_path) as stack:
        stack.batcher()
        stack.worker("hashing.py:Hashing", "--lease-ms", "600")     # a file of tests/support/models
        stack.wait_for_model("Hashing")
        entry_id = stack.send("Hashing", body="1")
        assert stack.result("Hashing", entry_id)["status"] == "OK"

Nothing here sleeps for a fixed time, every wait has an end, and only what was started here is ended, by pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Self

import msgpack
from redis import Redis

from carpool.keys import Keys
from carpool.lifecycle import command_that_dies_with_parent
from carpool_cli.local.embedded import EmbeddedRedis
from support.waiting import wait_until

MODELS: Final = Path(__file__).parent / "models"
START_S: Final = 20.0  # a cold interpreter on a machine that is busy with something else
RESULT_S: Final = 15.0
_LOG_LINES_SHOWN: Final = 40

Event = dict[str, Any]


class Service:
    """A batcher or a worker: a process, and what it has logged so far."""

    def __init__(self, name: str, argv: list[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command_that_dies_with_parent([sys.executable, *argv]),
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
        """Send a signal to this process alone, if it still runs."""
        self.process.send_signal(number)

    def freeze(self) -> None:
        """SIGSTOP, to the process and its children: as if the machine had paused. Returns once they stand."""
        frozen = [self.pid, *self.children()]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: all(_state(pid) == "T" for pid in frozen), description=f"{self.name} stands still")

    def thaw(self) -> None:
        """SIGCONT, to the process and its children."""
        for pid in [self.pid, *self.children()]:
            os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns once the process is gone."""
        self.process.kill()
        self.process.wait(10)

    def terminate(self, within_s: float = 15.0) -> int:
        """SIGTERM; the exit status."""
        self.process.terminate()
        return self.process.wait(within_s)

    def children(self) -> list[int]:
        """Pids of the processes that this one started: a worker's model processes."""
        tasks = Path(f"/proc/{self.pid}/task")
        with contextlib.suppress(OSError):
            return [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
        return []

    def events(self, name: str | None = None) -> list[Event]:
        """The log's lines, or those of one event."""
        with self.log.open(encoding="utf-8", errors="replace") as lines:
            parsed = [event for line in lines if (event := _event(line)) is not None]
        return [event for event in parsed if name in (None, event.get("event"))]

    def wait_for(self, name: str, timeout_s: float = START_S) -> Event:
        """The first event of this name, once it was logged. Fails if the process ends without."""
        wait_until(
            lambda: self.events(name) or not self.alive,
            description=f"{self.name} logs {name!r}",
            timeout_s=timeout_s,
        )
        found = self.events(name)
        assert found, f"{self.name} ended with {self.process.returncode} and never logged {name!r}"
        return found[0]

    @property
    def status_url(self) -> str:
        """Where a service that was started with "--http-port", "0" says how it is."""
        url: str = self.wait_for("status served")["url"]
        return url.removesuffix("/metrics")

    def end_of_log(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
        state = "running" if self.alive else f"ended with {self.process.returncode}"
        return "\n".join([f"--- {self.name}, {state}", *lines])


class Stack:
    """See the module. `home` is for logs; `binary` is the Redis server, the preferred one if None.

    `server` is one that runs already, and is stopped with the stack; at `server.url` the tests do as they
    like. `environment` are variables for batchers and workers, by role, in place of that URL.
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
    ) -> None:
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        self.server = server or EmbeddedRedis(binary=binary, append_only=append_only)
        self.environment = {} if environment is None else environment
        # Any: redis-py's types leave open what comes back, and most of what may be put in.
        self.redis: Any = Redis.from_url(self.server.url, protocol=2, socket_timeout=30)
        self.services: list[Service] = []
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

    def batcher(self, *flags: str, planted: Path | None = None, ready: bool = True) -> Service:
        """Start one more batcher, and wait until it looks for models unless `ready` is False."""
        service = self._start("batcher", ["-m", "carpool_batcher", *flags], planted)
        if ready:
            service.wait_for("batcher started")
        return service

    def worker(self, spec: str, *flags: str, planted: Path | None = None, ready: bool = True) -> Service:
        """Start one more worker, and wait until it takes batches unless `ready` is False.

        `spec` is a worker's own; files are looked for in `tests/support/models`. `planted` is a directory
        with a package `carpool` that is used instead of ours.
        """
        service = self._start("worker", ["-m", "carpool_worker", spec, *flags], planted)
        if ready:
            service.wait_for("worker ready")
        return service

    def serve(self, *specs: str) -> str:
        """Have a batcher and a worker serve each of the models, unless they do so; the last one's name."""
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
        """The worker that `serve` started."""
        return self._served[model]

    def _start(self, role: str, argv: list[str], planted: Path | None) -> Service:
        name = f"{role}-{len(self.services)}"
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("CARPOOL_")},
            "CARPOOL_REDIS_URL": self.url,
            **self.environment.get(role, {}),
        }
        if planted is not None:
            environment["PYTHONPATH"] = str(planted)
        service = Service(name, argv, self.home / f"{name}.log", environment)
        self.services.append(service)
        return service

    def wait_for_model(self, model: str, workers: int = 1, timeout_s: float = START_S) -> None:
        """Wait until a batcher is active for the model, and as many model processes are alive."""
        keys = Keys(model)
        wait_until(
            lambda: self.redis.exists(keys.batcher) and len(self.live_workers(model)) >= workers,
            description=f"{workers} processes of {model} and a batcher serve it",
            timeout_s=timeout_s,
        )

    def configure(self, model: str, **values: str) -> None:
        """As `carpool config` does; returns once a batcher of ours goes by it."""
        wait_until(
            lambda: any(event["model"] == model for event in self.events("batcher active")),
            description=f"a batcher has read the settings of {model}",  # or it would begin with these
            timeout_s=START_S,
        )
        before = len(self.events("settings changed"))
        self.redis.hset(Keys(model).config, mapping=values)
        wait_until(lambda: len(self.events("settings changed")) > before, description=f"{values} is in force")

    def live_workers(self, model: str) -> list[str]:
        """Consumers whose lease has not run out."""
        seconds, microseconds = self.redis.time()
        now_ms = seconds * 1000 + microseconds // 1000
        return [name.decode() for name in self.redis.zrangebyscore(Keys(model).workers, now_ms, "+inf")]

    def active_batcher(self, model: str) -> Service:
        """The batcher that holds the model's lease, once one does."""

        def holder() -> Service | None:
            name = (self.redis.get(Keys(model).batcher) or b"").decode()
            return next((one for one in self.services if f"-{one.pid}-" in name), None)

        wait_until(holder, description=f"a batcher of ours holds the lease of {model}", timeout_s=START_S)
        found = holder()
        assert found is not None
        return found

    def models(self) -> list[str]:
        """Names of the registered models."""
        return sorted(name.decode() for name in self.redis.smembers("carpool:models"))

    def events(self, name: str) -> list[Event]:
        """Events of this name in all logs."""
        return [event for service in self.services for event in service.events(name)]

    # --- a producer that knows only Redis ------------------------------------------------------------------

    def send(self, model: str, **fields: str | bytes | int) -> str:
        """XADD one request; the entry's ID."""
        entry_id: bytes = self.redis.xadd(Keys(model).requests, dict(fields))
        return entry_id.decode()

    def send_packed(self, model: str, requests: list[dict[str, Any]], **shared: str | bytes | int) -> str:
        """XADD one entry with several requests; the entry's ID."""
        return self.send(model, requests=msgpack.packb(requests), **shared)

    def result(self, model: str, correlation_id: str, timeout_s: float = RESULT_S) -> dict[str, Any]:
        """Wait for one envelope, and take it."""
        found = self.redis.blpop([Keys(model).result(correlation_id)], timeout_s)
        assert found is not None, f"no result of {model} for {correlation_id} within {timeout_s:g} s"
        return envelope(found[1])

    def replies(self, model: str, name: str) -> list[dict[str, Any]]:
        """All envelopes on a reply stream, in order."""
        entries = self.redis.xrange(Keys(model).replies(name))
        return [one for _, fields in entries for one in msgpack.unpackb(fields[b"results"])]

    # --- at rest -------------------------------------------------------------------------------------------

    def wait_until_idle(self, model: str, timeout_s: float = RESULT_S) -> None:
        """Wait until nothing of the model waits or is in flight."""
        keys = Keys(model)
        wait_until(
            lambda: self.redis.xlen(keys.requests) == self.redis.xlen(keys.batches) == 0,
            description=f"nothing of {model} waits or is in flight",
            timeout_s=timeout_s,
        )

    def pending(self, model: str) -> int:
        """Batches in Redis's pending entries list."""
        (group,) = self.redis.xinfo_groups(Keys(model).batches)
        count: int = group["pending"]
        return count

    def keys_without_ttl(self) -> set[str]:
        """Names of the keys that would stay for ever."""
        names = list(self.redis.scan_iter(count=1000))
        pipeline = self.redis.pipeline(transaction=False)
        for name in names:
            pipeline.pttl(name)
        return {name.decode() for name, ttl_ms in zip(names, pipeline.execute(), strict=True) if ttl_ms == -1}

    # --- the end -------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End what was started here. Any number of times."""
        for service in self.services:
            if service.alive:
                service.signal(signal.SIGKILL)
        for service in self.services:
            service.process.wait(10)
        self.redis.close()
        self.server.stop()
        if self in Stack.running:
            Stack.running.remove(self)

    def end_of_logs(self) -> str:
        return "\n".join(service.end_of_log() for service in self.services)


def fixed_keys(model: str) -> set[str]:
    """A model's keys that have no TTL, each bounded: what PROTOCOL.md lists, and nothing else."""
    keys = Keys(model)
    return {
        keys.requests,
        keys.batches,
        keys.settled,
        keys.dead,
        keys.registration,
        keys.workers,
        "carpool:models",
    }


def envelope(data: bytes) -> dict[str, Any]:
    """An envelope from a result's own list: a JSON object or a msgpack map."""
    decoded: dict[str, Any] = json.loads(data) if data.startswith(b"{") else msgpack.unpackb(data)
    return decoded


@contextlib.contextmanager
def frozen(service: Service) -> Iterator[None]:
    """The service stands still inside the block."""
    service.freeze()
    try:
        yield
    finally:
        service.thaw()


def wait_for(probe: Callable[[], Any], *, description: str, timeout_s: float = 10.0) -> Any:
    """What `probe` returns, once that is something."""
    found: list[Any] = []

    def look() -> bool:
        found[:] = [probe()]
        return bool(found[0])

    wait_until(look, description=description, timeout_s=timeout_s)
    return found[0]


def _event(line: str) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:  # a traceback, or the half of a line that is being written
        return None
    return event if isinstance(event, dict) else None


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
