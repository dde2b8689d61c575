"""The worker service: a worker process, and a model process for each of its replicas.

    worker process, one thread for each loop          | model process: the package model_process
                                                      |
    Redis -> batch_sources.py -v                      |
           serial_replica.py -> process_handle.py <---|---> frame_loop.py -> executor.py
    Redis <- committer.py -----^                      |     main.py loads the user's model
    Redis <- heartbeat.py                             |
                                                  frames.py: what crosses the boundary
    execution.py  a batch in hand, fetch to commit
    codec.py      bodies -> frames, outcomes -> results

A replica is a loop, with a source and a committer of its own; the heartbeat is one loop for all. Models that
step, those that bind sequences and async ones have other replicas: `stepping`, `bound`, `concurrent_replica`.

Start: the processes load the model, the model is registered, the heartbeat starts, the replicas take batches.
Stop (drain): idle replicas leave, what is in hand is committed, the processes unload their model, the
heartbeat ends last.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import structlog

from carpool.clock import RedisClock
from carpool.errors import UnavailableError
from carpool.keys import Keys
from carpool.lifecycle import Loop
from carpool.model_settings import ModelKind, ModelSettings
from carpool.process_names import new_process_name, replica_name
from carpool.store.bound import BoundStore
from carpool.store.connection import CommandError, Link
from carpool.store.directory import ProcessMemory
from carpool.store.eviction import eviction_warning
from carpool.store.link_errors import reason_of
from carpool.store.steps import StepStore
from carpool.store.worker import WorkerStore
from carpool.wire.orders import About, encode_about
from carpool.wire.registration import encode_registration, encode_settings_from
from carpool_worker.batch_log import BatchLog
from carpool_worker.batch_sources import Fetcher
from carpool_worker.bound.inbox import Inbox
from carpool_worker.bound.replica import BoundReplica
from carpool_worker.codec import Codec
from carpool_worker.committer import Committer
from carpool_worker.concurrent_replica import ConcurrentReplica
from carpool_worker.devices import threads_of
from carpool_worker.heartbeat import Heartbeat
from carpool_worker.loading import LoadingNotice
from carpool_worker.member import BEATS_PER_LEASE, Member
from carpool_worker.memory import FamilyMemory, gpu_use
from carpool_worker.meter import MemoryGauges, WorkerMetrics
from carpool_worker.model_process.configuration import Configuration
from carpool_worker.model_process.frames import Ready
from carpool_worker.operator_drain import LAST_BATCH_MS, OperatorDrain
from carpool_worker.process_handle import ModelLoadError, ProcessHandle
from carpool_worker.registrar import Registrar
from carpool_worker.replica_loop import AnyReplica
from carpool_worker.retirement import LastSuccess
from carpool_worker.serial_replica import SerialReplica
from carpool_worker.stepping.log import StepLog
from carpool_worker.stepping.replica import FETCH_BLOCK_MS, StepReplica

_DEFAULTS: Final = ModelSettings().as_text()
MEMORY_TTL_MS: Final = 60_000
BEAT_S_MAX: Final = 30.0  # no beat takes that long: the timeout of Redis calls is 5 s


class Worker:
    """Serves one model, with a replica on each of `devices`."""

    def __init__(
        self,
        url: str,
        keys: Keys,
        location: str,
        devices: Sequence[str],
        lease_ms: int,
        metrics: WorkerMetrics,
        *,
        configuration: Configuration | None = None,
        finish_streams: bool = False,
        load_s_max: float | None = None,
    ) -> None:
        """`configuration`: what the model is loaded with. `finish_streams`: when it drains, requests of a
        stepping model are finished, not handed over. `load_s_max`: how long the model may take to load."""
        self._url = url
        self._settings_from = encode_settings_from(configuration.settings_from if configuration else {})
        self._finish_streams = finish_streams
        self._metrics = metrics
        self._keys = keys
        self._lease_ms = lease_ms
        self._clock = RedisClock()
        self._name = new_process_name()
        self._version = ""  # of whose batches it takes those that others may not; known once it is loaded
        self._processes = [
            ProcessHandle(
                location,
                device,
                load_s_max,
                configuration=configuration,
                processes=len(devices),
                replica=replica_name(self._name, index),
            )
            for index, device in enumerate(devices)
        ]
        self._replicas: list[AnyReplica] = []  # once the model is loaded: one for each process
        self._registrar: Registrar | None = None  # once the model is loaded
        self._replica_loops: list[Loop] = []
        self._heartbeats: list[Loop] = []  # one, once it is started
        self._control = self._new_link("control")
        self._store = WorkerStore(self._control, keys, self._clock)
        self._eviction_warning = ""
        self._waiting_for = "the model is loading"  # empty once everything is started
        self._draining = False
        self._operator_drain = OperatorDrain(self._name)
        self._since_ms: int | None = None  # when it began to serve
        self.failed = threading.Event()
        self._log = structlog.get_logger().bind(model=keys.model)
        self._batch_log = BatchLog(keys.model, self._name)
        self._step_log = StepLog(keys.model, self._name, metrics, self._slots_in_use)
        metrics.watch_slots(self._slots_in_use, self._slots)
        for index, process in enumerate(self._processes):
            process.on_measured = partial(metrics.own.take, index)
            if metrics.spans is not None:
                process.on_spans = partial(metrics.spans.model_recorded, clock=self._clock)
        self._memory = [self._memory_of(process) for process in self._processes]
        metrics.watch_memory(self._memory)

    def start(self, stop: threading.Event) -> None:
        """Load the model in every process, register it as soon as Redis answers, and take batches.

        Raises ModelLoadError. Returns early when `stop` is set.
        """
        with LoadingNotice(self._new_link("loading"), self._keys, self._name, self._lease_ms):
            self._start(stop)

    def _start(self, stop: threading.Event) -> None:
        started_s = time.monotonic()
        devices = ",".join(process.device for process in self._processes)
        self._log.info("loading the model", worker=self._name, devices=devices)
        for process in self._processes:
            process.spawn()
        descriptions = [process.wait_ready() for process in self._processes]
        ready = descriptions[0]  # all are of the same model
        if ready.kind is not ModelKind.BOUND:  # whose batches are for single processes
            self._version = self._store.version = ready.version
        self._make_replicas(ready)
        self._tell_doubts(ready)
        self._metrics.set_version(ready.version)
        if ready.version:
            self._batch_log.bind(version=ready.version)
            self._step_log.bind(version=ready.version)
        declared = encode_registration(
            ready.settings,
            ready.inputs,
            ready.outputs,
            ready.kind,
            ready.parameters,
            ready.version,
            ready.spoken,
        )
        self._registrar = Registrar(self._name, {**declared, **self._settings_from})
        self._limit_batches(self._registrar)
        self._heartbeat = Heartbeat(
            self._replicas,
            self._new_store("heartbeat"),
            self._lease_ms,
            self._register,
            self._metrics,
            self._follow_others,
            self._tell_memory,
        )
        if not self._wait_for_redis(stop):
            return
        self._start_loops()
        self._log.info(
            "worker ready",
            worker=self._name,
            processes=len(self._replicas),
            devices=devices,
            threads=threads_of(os.environ, len(self._processes)),
            load_s=round(time.monotonic() - started_s, 2),
            **{name: text for name, text in declared.items() if text != _DEFAULTS.get(name)},
        )

    def _make_replicas(self, ready: Ready) -> None:
        self._replicas = [
            self._new_replica(replica_name(self._name, index), process, ready)
            for index, process in enumerate(self._processes)
        ]
        last_success, turn = LastSuccess(), threading.Lock()
        for replica in self._replicas:
            replica.retirement.last_success = last_success
            replica.succession.turn = turn

    def _tell_doubts(self, ready: Ready) -> None:
        """Warn of what the model declares that may be a mistake."""
        for name, setting in ready.misspelt.items():
            self._log.warning(
                "attribute of the model ignored", reason=f"{name} is not a setting; did you mean {setting}?"
            )
        for doubt in ModelSettings.from_mapping(ready.settings).doubts():
            self._log.warning("setting of the model may be a mistake", reason=doubt)

    def _start_loops(self) -> None:
        """The heartbeat first. The batcher counts the replicas once they have joined."""
        self._start_loop(self._heartbeats, "heartbeat", self._heartbeat.run_once)
        for replica in self._replicas:
            self._start_loop(self._replica_loops, f"replica {replica.name}", replica.run_once)
        self._join(self._store)
        self._waiting_for = ""

    def _wait_for_redis(self, stop: threading.Event) -> bool:
        """Register and beat once, as soon as Redis permits it. False if `stop` was set before."""
        while not stop.is_set():
            try:
                self._registered_by.register(self._store)
                self._heartbeat.beat()
                self._eviction_warning = eviction_warning(self._control)
            except (UnavailableError, CommandError) as error:  # unreachable, out of memory, or no permission
                self._metrics.error(error)
                self._waiting_for = reason_of(error, "worker")
                self._log.warning("cannot register with Redis, retrying", reason=self._waiting_for)
                stop.wait(1.0)
            else:
                if self._eviction_warning:
                    self._log.warning("Redis may lose requests", reason=self._eviction_warning)
                return True
        return False

    def _new_replica(self, name: str, process: ProcessHandle, ready: Ready) -> AnyReplica:
        codec, settings = Codec(ready), ModelSettings.from_mapping(ready.settings)
        metrics, clock, link = self._metrics, self._clock, self._new_link("commit")
        if ready.kind is ModelKind.BOUND:
            return self._new_bound_replica(name, process, codec, link, settings.max_batch_size)
        member, is_stepping = Member(name), ready.kind is ModelKind.STEPPING
        committer = Committer(member, self._as_store(link), metrics, self._batch_log)
        block_ms = FETCH_BLOCK_MS if is_stepping else None
        source = Fetcher(
            member, self._new_store("fetch"), self._lease_ms, self._register, metrics, block_ms=block_ms
        )
        if ready.is_async:
            return ConcurrentReplica(
                member,
                process,
                codec,
                source,
                committer,
                clock,
                metrics,
                batches_max=settings.max_concurrent_batches,
                calls_others=ready.wants_callers,
            )
        if not is_stepping:
            return SerialReplica(member, process, codec, source, committer, clock, metrics)
        return StepReplica(
            member,
            process,
            codec,
            source,
            metrics,
            store=StepStore(link, self._keys, clock, self._version),
            committer=committer,
            settings=settings,
            log=self._step_log,
            finishes=self._finish_streams,
        )

    def _new_bound_replica(
        self, name: str, process: ProcessHandle, codec: Codec, link: Link, slots: int
    ) -> BoundReplica:
        member = Member(name, is_joined=False, can_be_revived=False)
        store = BoundStore(link, self._keys, self._clock)
        inbox_store = BoundStore(self._new_link("inbox"), self._keys, self._clock)

        def join(name: str) -> None:
            self._register(store)  # Redis may have been emptied
            store.join(name, self._lease_ms)

        return BoundReplica(
            member,
            process,
            codec,
            Inbox(member, inbox_store, self._lease_ms, self._register, self._metrics),
            Committer(member, store, self._metrics, self._batch_log),
            self._metrics,
            store=store,
            slots=slots,
            join=join,
        )

    def _start_loop(self, loops: list[Loop], name: str, run_once: Callable[[], None]) -> None:
        loop = Loop(name, run_once, self._on_error(name))
        loops.append(loop)
        loop.start()

    def _new_store(self, role: str) -> WorkerStore:
        return self._as_store(self._new_link(role))

    def _as_store(self, link: Link) -> WorkerStore:
        store = WorkerStore(link, self._keys, self._clock)
        store.version = self._version
        return store

    def _new_link(self, role: str) -> Link:
        return Link(self._url, name=f"{self._name}:{role}", key=self._keys.requests)

    @property
    def _registered_by(self) -> Registrar:
        assert self._registrar is not None  # nothing registers before the model is loaded
        return self._registrar

    def _register(self, store: WorkerStore) -> None:
        self._registered_by.register(store)
        self._join(store)

    def _follow_others(self, store: WorkerStore) -> None:
        self._registered_by.follow(store)
        self._limit_batches(self._registered_by)
        is_ordered = self._registered_by.is_drained
        try:
            self._operator_drain.follow(self._replicas, store, is_ordered=is_ordered)
        except CommandError as error:  # its leases must not depend on it
            self._log.warning("order to drain not followed, retrying", reason=str(error))

    def _limit_batches(self, registrar: Registrar) -> None:
        for replica in self._replicas:
            replica.batch_size_max = registrar.batch_size_max

    def _join(self, store: WorkerStore) -> None:
        """Join again under the same names, if Redis was emptied, but for those that have lost more with their
        leases: the next heartbeat notices."""
        for replica in self._replicas:
            if replica.member.is_joined and replica.member.can_be_revived:
                store.join(replica.name, self._lease_ms)

    def _on_error(self, loop: str) -> Callable[[Exception], None]:
        def report(error: Exception) -> None:
            self._metrics.error(error)
            if isinstance(error, ModelLoadError):
                self._log.error(
                    "model cannot be loaded again, stopping the worker",
                    reason=str(error),
                    **error.logged_trace(),
                )
                self.failed.set()
            else:
                self._log.warning(
                    "loop failed, retrying",
                    loop=loop,
                    reason=reason_of(error, "worker"),
                    kind=type(error).__name__,
                )

        return report

    def _tell_memory(self, store: WorkerStore) -> None:
        """For `carpool top` and `carpool workers`. The leases of this worker must not depend on it."""
        told = [ProcessMemory(resident(), on_gpus()) for resident, on_gpus in self._memory]
        with contextlib.suppress(CommandError):  # Redis is full, or has older rules for this role
            store.tell_memory(self._name, told, MEMORY_TTL_MS, self._about_itself())

    def _about_itself(self) -> str:
        if self._since_ms is None:  # it serves from now on
            self._since_ms = self._clock.now_us() // 1000
        devices = [process.device for process in self._processes]
        return encode_about(About(self._since_ms, self._lease_ms, devices, self._metrics.recent_deaths))

    @staticmethod
    def _memory_of(process: ProcessHandle) -> MemoryGauges:
        def on_gpus() -> int:
            use = gpu_use(process.pid)
            return 0 if use is None else use.used_bytes

        # A new one each time: a scrape of the metrics asks in another thread than the heartbeat.
        return MemoryGauges(lambda: FamilyMemory().resident_bytes(process.pid) or 0, on_gpus)

    def _slots(self) -> int:
        return sum(replica.slots for replica in self._replicas)

    def _slots_in_use(self) -> int:
        return sum(replica.slots_in_use for replica in self._replicas)

    @property
    def is_drained(self) -> bool:
        """Whether an operator drains it."""
        return self._operator_drain.is_ordered

    def summarize_if_due(self) -> None:
        """Log what was done since the last time, if that was a second ago."""
        self._batch_log.summarize_if_due()
        self._step_log.summarize_if_due()

    # --- health --------------------------------------------------------------------------------------------

    def unhealthy(self) -> list[str]:
        """What only a restart can repair: a loop that ended, or a heartbeat that hangs."""
        if self._draining:
            return []
        ended = [f"{loop.name}: its thread ended" for loop in self._loops() if not loop.alive]
        silent_s_max = self._lease_ms / 1000 / BEATS_PER_LEASE + BEAT_S_MAX
        hanging = [
            f"{loop.name}: has been hanging for {loop.silent_s:.0f} s"
            for loop in self._heartbeats
            if loop.silent_s > silent_s_max
        ]
        return ended + hanging

    def unready(self) -> list[str]:
        """Why no batches are executed now; empty if they are."""
        if self._draining:
            return ["draining"]
        if self._waiting_for:
            return [self._waiting_for]
        if self._operator_drain.is_ordered:
            return [f"an operator drains it; `carpool drain {self._name} --undo` ends that"]
        reasons = [
            f"{loop.name}: {reason_of(error, 'worker')}" for loop in self._loops() if (error := loop.failing)
        ]
        for replica in self._replicas:
            if not replica.process.alive:
                reasons.append(f"{replica.name}: its model process ended")
            elif replica.process.descriptor is None:
                reasons.append(f"{replica.name}: its model process is ending, and is replaced then")
            elif not replica.process.ready:
                reasons.append(f"{replica.name}: its model process was replaced and is loading the model")
        return reasons

    def warnings(self) -> list[str]:
        """What a person should mend, although batches are executed; as it was when the worker started."""
        return [self._eviction_warning] if self._eviction_warning else []

    def _loops(self) -> list[Loop]:
        return [*self._heartbeats, *self._replica_loops]

    # --- stopping ------------------------------------------------------------------------------------------

    def drain(self, within_s: float) -> bool:
        """Take no new batches, finish what is in hand, stop. Returns whether all was committed in time."""
        self._draining = True
        until_s = time.monotonic() + within_s
        self._begin_drain()
        for replica in self._replicas:
            replica.drain()
        if self._heartbeats:
            self._heartbeat.drain()
        self._leave([replica for replica in self._replicas if replica.may_leave])
        started = self._replicas[: len(self._replica_loops)]
        drained = [replica.wait_until_drained(max(0.1, until_s - time.monotonic())) for replica in started]
        clean = all(drained)
        for loop in self._replica_loops:
            loop.stop()
        wait_s = max(0.5, until_s - time.monotonic()) if clean else 0.0
        for replica in self._replicas:
            replica.close(wait_s)
        if not self._replicas:  # it was stopped while it loaded the model
            for process in self._processes:
                process.close(wait_s)
        for loop in self._replica_loops:
            loop.join(1.0)
        for loop in self._heartbeats:
            loop.stop()
            self._heartbeat.stop()
            loop.join(1.0)
        self._leave(self._replicas)
        self._withdraw_declaration()
        self._batch_log.summarize()
        self._step_log.summarize()
        self._log.info("worker stopped", worker=self._name, clean=clean)
        return clean

    def _begin_drain(self) -> None:
        """No replica fetches anything more, and the batcher is told so. If they are the last of their model,
        they take what was dispatched before it knew, because that would wait for the next worker. Until that
        is known no replica may end, although it has nothing in hand."""
        replicas = [replica for replica in self._replicas if not replica.marks_its_drain]
        for replica in replicas:
            replica.begin_drain()
        others = 1
        for replica in replicas:  # all of this worker drain when the last one was told
            with contextlib.suppress(UnavailableError, CommandError):
                others = self._store.drain(replica.name)
        if others == 0:
            until_ms = self._clock.now_us() // 1000 + LAST_BATCH_MS
            for replica in replicas:
                replica.fetch_last(until_ms)

    def _leave(self, replicas: Sequence[AnyReplica]) -> None:
        for replica in replicas:
            with contextlib.suppress(UnavailableError, CommandError):  # then its lease runs out
                self._store.leave(replica.name)

    def _withdraw_declaration(self) -> None:
        if self._registrar is not None:
            with contextlib.suppress(UnavailableError, CommandError):  # then others forget it
                self._store.declarations.remove(self._name)
                self._store.forget_order(self._name)
