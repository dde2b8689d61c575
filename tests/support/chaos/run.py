"""One run: a stack under load, a fault, and what became of each request."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple

from redis import RedisError

from carpool import Client
from carpool.errors import CarpoolError, NoResultError, NotFoundError
from carpool.keys import Keys
from support.chaos.producers import ENQUEUER, ProducerProcess
from support.chaos.servers import Servers, ServersOf, alone
from support.checker import Checker, Report
from support.hostile import HOSTILE, HostileProducer
from support.load import collect
from support.models.hashing import digest
from support.stack import Service, Stack, fixed_keys
from support.waiting import Stopwatch, wait_until

MODEL: Final = "Busy"  # batches of up to 32, which take 20 ms
SPEC: Final = "hashing.py:Busy"
KEYS: Final = Keys(MODEL)
LEASE_S: Final = 0.6  # of workers
PRODUCERS: Final = 2
HOSTILE_REQUESTS: Final = 10  # in each entry of a third one, which means harm
HOSTILE_PAUSE_S: Final = 0.5  # after each: those of its requests that are valid are executed
RESULTS_KEPT_MS: Final = 3_600_000  # they are read when the run is over
SETTLE_S_MAX: Final = 60.0
PROBE_S: Final = 1.0  # a probe without a result for so long is sent again
MIB: Final = 1 << 20


class Outcome(NamedTuple):
    """What became of a run. `recoveries_s`: one for each time that the fault was inflicted; `memory_mib`: the
    most that each kind of process had; `left_over`: what was in Redis at the end and should not be."""

    report: Report
    recoveries_s: list[float]
    memory_mib: Mapping[str, float]
    left_over: list[str]

    @property
    def is_faultless(self) -> bool:
        """Whether each accepted request has exactly one result of its own, and nothing is left over."""
        return self.report.faultless and not self.left_over


class Run:
    """The stack during a run. `servers`: what its services and producers connect to."""

    replies: ClassVar[str] = f"[^{HOSTILE[0]}]*"  # the reply streams of producers, as a pattern

    def __init__(
        self,
        servers: Servers,
        home: Path,
        seed: int,
        spec: str = SPEC,
        other_specs: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`spec`: the argument of the workers. `other_specs`: of workers of further models, by model."""
        self._specs = {MODEL: spec, **other_specs}
        self._models: dict[Service, str] = {}  # of workers
        self.servers = servers
        self.stack = stack = servers.stack
        self.home = home
        self.random = random.Random(seed)
        self.recoveries_s: list[float] = []
        self._probes, self._versions = 0, 1
        self.workers = [self._new_worker(model) for model in self._specs for _ in range(2)]
        self.batchers = [stack.batcher() for _ in range(2)]
        for model in self._specs:
            stack.wait_for_model(model, workers=2)
        stack.configure(MODEL, result_ttl_ms=str(RESULTS_KEPT_MS))
        self.hostile = HostileProducer(
            servers.producers_url, KEYS, requests=HOSTILE_REQUESTS, pause_s=HOSTILE_PAUSE_S
        )
        self.hostile.start()
        self._enqueuer = ProducerProcess(servers.clients_url, MODEL, f"p{PRODUCERS}", home, program=ENQUEUER)
        self.producers = [self.new_producer(f"p{number}") for number in range(PRODUCERS)] + [self._enqueuer]
        for producer in self.producers:
            producer.wait_for_more(1)
        self.wait_for_load()

    # --- what faults use -----------------------------------------------------------------------------------

    def wait_for_load(self) -> None:
        """Wait until more requests are accepted: a random number, so that a fault comes at any moment."""
        self.producers[0].wait_for_more(self.random.randint(10, 60))

    def new_producer(self, name: str, speed: float = 1) -> ProducerProcess:
        """Start one. `speed` multiplies its pace."""
        return ProducerProcess(self.servers.producers_url, MODEL, name, self.home, speed)

    def active_batcher(self) -> Service:
        """The batcher that has the lease."""
        return self.stack.active_batcher(MODEL)

    def replace(self, service: Service) -> None:
        """Start another service in place of one that was killed."""
        if service in self.batchers:
            self.batchers[self.batchers.index(service)] = self.stack.batcher()
        else:
            at = self.workers.index(service)
            self.workers[at] = self._new_worker(self._models[service])

    def begin_version(self) -> None:
        """Workers that are started from now on have another version of the model."""
        self._versions += 1
        self.servers.environment["worker"]["VERSION"] = str(self._versions)

    def any_worker(self) -> Service:
        """One of the workers, with a batch."""
        worker: Service = self.random.choice(self.workers)
        model = self._models[worker]
        wait_until(lambda: self.stack.has_batch(model, worker), description="the worker has a batch")
        return worker

    def recovers(self, watch: Stopwatch | None = None) -> None:
        """Measure how long it takes until a new request is answered, from now or the start of `watch`."""
        watch = watch or Stopwatch()
        self._probe()
        self.recoveries_s.append(watch.passed_s)

    def settles(self) -> None:
        """Measure how long it takes from now until all batches that are in flight now are settled."""
        watch = Stopwatch()
        of_models = [Keys(model).batches for model in self._specs]
        last = [(batches, entry_id) for batches in of_models if (entry_id := self._last_of(batches))]
        for batches, entry_id in last:
            wait_until(
                partial(self._is_settled, batches, entry_id),
                description="what was in flight is settled",
                timeout_s=SETTLE_S_MAX,
            )
        self.recoveries_s.append(watch.passed_s)

    def _last_of(self, batches: str) -> bytes | None:
        """The ID of the last batch in flight."""
        found = self._call(lambda redis: redis.xrevrange(batches, count=1))
        return found[0][0] if found else None

    def _is_settled(self, batches: str, entry_id: bytes) -> bool:
        """Whether no batch is left up to this one."""
        return not self._call(lambda redis: redis.xrange(batches, "-", entry_id, count=1))

    def _probe(self) -> None:
        """Send requests until one is answered, be it late."""
        end_s = time.monotonic() + SETTLE_S_MAX
        results: list[str] = []
        while time.monotonic() < end_s:
            self._probes += 1
            name = f"probe-{self._probes}"
            results.append(KEYS.result(name))
            try:
                self.stack.redis.xadd(KEYS.requests, {"correlation_id": name, "body": '"probe"'})
                if self.stack.redis.blpop(results, PROBE_S):
                    return
            except RedisError:
                time.sleep(0.02)
        raise AssertionError("no request is answered any more")

    def _call(self, ask: Callable[[Any], Any]) -> Any:
        """Ask Redis, again if it cannot be reached."""
        end_s = time.monotonic() + SETTLE_S_MAX
        while True:
            try:
                return ask(self.stack.redis)
            except RedisError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.02)

    def _new_worker(self, model: str) -> Service:
        worker = self.stack.worker(self._specs[model], "--lease-ms", str(int(LEASE_S * 1000)))
        self._models[worker] = model
        return worker

    # --- the end -------------------------------------------------------------------------------------------

    def finish(self) -> Outcome:
        """Stop the load, wait until everything is answered, and look at what became of each request."""
        self.hostile.stop()
        for producer in self.producers:
            producer.kill()
        checker = Checker()
        for producer in self.producers:
            producer.tell(checker)
        is_idle = all(_is_idle(self.stack, model) for model in self._specs)
        collect(self.stack, MODEL, _WithoutProbes(checker), reply_to=self.replies)
        left_over = [] if is_idle else ["requests that wait or are in flight"]
        left_over += self._not_read_by_id()
        fixed = {KEYS.overrides}.union(*map(fixed_keys, self._specs))
        left_over += sorted(self.stack.keys_without_ttl() - fixed)
        if any(self.stack.pending(model) for model in self._specs):
            left_over.append("pending batches")
        return Outcome(checker.report(), self.recoveries_s, self._memory(), left_over)

    def _not_read_by_id(self) -> list[str]:
        """Read the results of what was enqueued, from this process. Returns which are not there, or wrong."""
        confirmed, wrong = self._enqueuer.confirmed(), []
        with Client(self.servers.clients_url, timeout=SETTLE_S_MAX) as client:
            for name, payload in confirmed.items():
                try:
                    is_right = client.result(f"{MODEL}/{name}", timeout=0) == digest(name, payload)
                except CarpoolError as error:  # one that a full queue refused has a result, too
                    is_right = not isinstance(error, NotFoundError | NoResultError)
                if not is_right:
                    wrong.append(name)
        return [f"{len(wrong)} results by ID, as {wrong[0]}"] if wrong else []

    def _memory(self) -> dict[str, float]:
        redis = self.stack.redis.info("memory")["used_memory_peak"] / MIB
        services = {"Redis": redis, "batcher": 0.0, "worker": 0.0}
        for service in [*self.batchers, *self.workers]:
            kind = "batcher" if service in self.batchers else "worker"
            services[kind] = max(services[kind], peak_mib(service.pid))
        return services


class _WithoutProbes(Checker):
    """Passes on what is not the answer of a probe."""

    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self._checker = checker

    def envelope(self, found_at: str, envelope: Mapping[str, Any]) -> None:
        if not found_at.startswith("probe-"):
            self._checker.envelope(found_at, envelope)


def _is_idle(stack: Stack, model: str) -> bool:
    try:
        stack.wait_until_idle(model, SETTLE_S_MAX)
    except (AssertionError, RedisError):
        return False
    return True


def peak_mib(pid: int) -> float:
    """The most memory that a process had; 0 of one that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")] or ["VmHWM: 0 kB"]
    return int(line.split()[1]) / 1024


@contextmanager
def started(
    home: Path, seed: int, *, servers: ServersOf = alone, always_on_disk: bool = False, spec: str = SPEC
) -> Iterator[Run]:
    """A stack under load. `always_on_disk`: Redis writes to its disk before it answers."""
    home.mkdir(parents=True, exist_ok=True)
    with servers(home) as connected:
        connected.stack.redis.config_set("appendfsync", "always" if always_on_disk else "everysec")
        run = Run(connected, home, seed, spec)
        try:
            yield run
        finally:
            run.hostile.stop()
            for producer in run.producers:
                producer.kill()
