"""The worker service: model processes, each with an intake and a committer beside it, and one heartbeat.

    Redis --fetch--> Intake --frame--> [model process] --outcome--> Committer --commit--> Redis
                        '---------------- Slot ----------------------'
                                     Heartbeat renews what is in hand

Order of starting: processes load, the model is registered, the heartbeat beats, then the slots take batches.
Order of stopping (drain): the slots leave, the intakes end, what is in hand is committed, the processes
unload, the heartbeat stops last.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from carpool.clock import RedisClock
from carpool.errors import UnavailableError
from carpool.keys import Keys
from carpool.lifecycle import Loop
from carpool.process_names import new_process_name, replica_name
from carpool.store.connection import CommandError, Link
from carpool.store.worker import WorkerStore
from carpool.wire.registration import encode_registration
from carpool_worker.codec import Codec
from carpool_worker.committer import Committer
from carpool_worker.fetcher import Intake
from carpool_worker.heartbeat import Heartbeat
from carpool_worker.meter import WorkerMetrics
from carpool_worker.process_handle import ModelLoadError, ModelProcess
from carpool_worker.replica import Slot

STUCK_S: Final = 30.0  # no beat takes so long: Redis's timeout is 5 s


class Worker:
    """Serves one model with a process on each of `devices`."""

    def __init__(
        self,
        url: str,
        keys: Keys,
        where: str,
        devices: Sequence[str],
        lease_ms: int,
        metrics: WorkerMetrics,
    ) -> None:
        self._url = url
        self._metrics = metrics
        self._keys = keys
        self._lease_ms = lease_ms
        self._clock = RedisClock()
        self._name = new_process_name()
        self._slots = [
            Slot(replica_name(self._name, replica), ModelProcess(where, device), self._clock, metrics)
            for replica, device in enumerate(devices)
        ]
        self._registration: dict[str, str] = {}
        self._intakes: list[Loop] = []
        self._committers: list[Loop] = []
        self._hearts: list[Loop] = []
        self._store = self._new_store("control")
        self._waiting_for = "the model is loading"  # until all has started
        self._draining = False
        self.failed = threading.Event()
        self._log = structlog.get_logger().bind(model=keys.model)

    def start(self, stop: threading.Event) -> None:
        """Load the model in every process, register it once Redis is there, and begin.

        Raises ModelLoadError. Returns early when `stop` is set.
        """
        started_s = time.monotonic()
        for slot in self._slots:
            slot.process.spawn()
        ready = [slot.process.wait_ready() for slot in self._slots]
        codecs = [Codec(ready[0]) for _ in self._slots]
        for slot, codec in zip(self._slots, codecs, strict=True):
            slot.codec = codec
        for name, setting in ready[0]["misspelt"].items():
            self._log.warning("attribute ignored", reason=f"{name} is no setting; did you mean {setting}?")
        self._registration = encode_registration(ready[0]["settings"], codecs[0].inputs, codecs[0].outputs)
        self._heartbeat = Heartbeat(
            self._slots, self._new_store("heartbeat"), self._lease_ms, self._register, self._metrics
        )
        if not self._registered(stop):
            return
        heart = Loop("heartbeat", self._heartbeat.run_once, self._reporter("heartbeat"))
        self._hearts.append(heart)
        heart.start()
        for slot in self._slots:
            self._start_slot(slot)
        self._waiting_for = ""
        self._log.info(
            "worker ready",
            worker=self._name,
            processes=len(self._slots),
            devices=",".join(slot.process.device for slot in self._slots),
            load_s=round(time.monotonic() - started_s, 2),
            **self._registration,
        )

    def _registered(self, stop: threading.Event) -> bool:
        """Register, and beat once, as soon as Redis answers; False when told to stop before."""
        while not stop.is_set():
            try:
                self._store.register(self._registration)
                self._heartbeat.beat()
            except (UnavailableError, CommandError) as error:  # away, or full, or not for us yet
                self._metrics.error(error)
                self._waiting_for = str(error)
                self._log.warning("waiting for Redis", reason=str(error))
                stop.wait(1.0)
            else:
                return True
        return False

    def _start_slot(self, slot: Slot) -> None:
        committer = Committer(slot, self._new_store("commit"), self._metrics)
        intake = Intake(slot, self._new_store("intake"), self._lease_ms, self._register, self._metrics)
        for loops, agent in ((self._committers, committer), (self._intakes, intake)):
            name = f"{type(agent).__name__.lower()} {slot.consumer}"
            loop = Loop(name, agent.run_once, self._reporter(name))
            loops.append(loop)
            loop.start()
        self._store.join(slot.consumer, self._lease_ms)

    def _new_store(self, role: str) -> WorkerStore:
        return WorkerStore(Link(self._url, name=f"{self._name}:{role}"), self._keys, self._clock)

    def _register(self, store: WorkerStore) -> None:
        store.register(self._registration)
        for slot in self._slots:
            store.join(slot.consumer, self._lease_ms)

    def _reporter(self, loop: str) -> Callable[[Exception], None]:
        def report(error: Exception) -> None:
            self._metrics.error(error)
            if isinstance(error, ModelLoadError):
                self._log.error("model cannot be loaded again", reason=str(error), trace=error.trace)
                self.failed.set()
            else:
                self._log.warning("trying again", loop=loop, reason=str(error), kind=type(error).__name__)

        return report

    # --- how it is -----------------------------------------------------------------------------------------

    def unhealthy(self) -> list[str]:
        """What only a restart would mend: a loop that ended, or a heart that does not beat. A committer may
        wait for its model for as long as that takes."""
        ended = [f"{loop.name}: ended" for loop in self._loops() if not loop.alive]
        stopped = [
            f"{heart.name}: hangs for {heart.silent_s:.0f} s"
            for heart in self._hearts
            if heart.silent_s > self._lease_ms / 3000 + STUCK_S
        ]
        return [] if self._draining else ended + stopped

    def unready(self) -> list[str]:
        """Why no batches are executed now."""
        if self._draining:
            return ["draining"]
        if self._waiting_for:
            return [self._waiting_for]
        failing = [f"{loop.name}: {loop.failing}" for loop in self._loops() if loop.failing]
        for slot in self._slots:
            if not slot.process.alive:
                failing.append(f"{slot.consumer}: its process ended")
            elif not slot.process.ready:
                failing.append(f"{slot.consumer}: its process was replaced, and is loading the model")
        return failing

    def _loops(self) -> list[Loop]:
        return [*self._hearts, *self._intakes, *self._committers]

    # --- the end -------------------------------------------------------------------------------------------

    def drain(self, within_s: float) -> bool:
        """Take nothing new, finish what is in hand, leave. Whether everything was committed in time."""
        self._draining = True
        until_s = time.monotonic() + within_s
        for loop in self._intakes:
            loop.stop()
        for _ in self._hearts:  # it beats if it ever began to
            self._heartbeat.drain()
        self._leave([slot for slot in self._slots if not slot.held()])
        for loop in self._intakes:
            loop.join(max(0.1, until_s - time.monotonic()))
        emptied = [slot.wait_until_empty(max(0.1, until_s - time.monotonic())) for slot in self._slots]
        clean = all(emptied)
        for loop in self._committers:
            loop.stop()
        for slot in self._slots:
            slot.close(wait_s=max(0.5, until_s - time.monotonic()) if clean else 0.0)
        for loop in self._committers:
            loop.join(1.0)
        for loop in self._hearts:
            loop.stop()
            self._heartbeat.stop()
            loop.join(1.0)
        self._leave(self._slots)
        self._log.info("worker left", worker=self._name, clean=clean)
        return clean

    def _leave(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            with contextlib.suppress(UnavailableError):  # then the lease runs out by itself
                self._store.leave(slot.consumer)
