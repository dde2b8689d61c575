"""One model process and the batches it has in hand: the one it executes, and the next, waiting in its pipe.

Two loops meet here: the intake puts jobs in, the committer takes them out finished, in order. A process that
dies is replaced at once, and what it had in hand is executed again: the frame it died on one request at a
time, since one of them may have been the cause.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import structlog

from carpool.clock import RedisClock
from carpool_worker.codec import Codec, Frame, Job, fail, split
from carpool_worker.meter import WorkerMetrics
from carpool_worker.model_process.frames import ProcessGoneError
from carpool_worker.process_handle import ModelProcess

JOBS_IN_HAND: Final = 2
# A busy process asks for its next batch this long before it expects to be free: early enough to hide the
# trip, too late to take a batch that an idle process would have started sooner.
LEAD_S: Final = 0.002

Note = Callable[[Job, int], None]


class Slot:
    """See the module. `consumer` is the slot's name in the group of workers."""

    def __init__(
        self, consumer: str, process: ModelProcess, clock: RedisClock, metrics: WorkerMetrics
    ) -> None:
        self.consumer = consumer
        self._metrics = metrics
        self.process = process
        self.codec: Codec | None = None  # known once the model is loaded
        self._clock = clock
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()  # a job left
        self._handed: queue.SimpleQueue[Job] = queue.SimpleQueue()  # to the committer, who keeps the oldest
        self._oldest: Job | None = None
        self._pipe = threading.Lock()  # who sends, and what was sent; held while a full pipe makes us wait
        self._busy_since_s = 0.0
        self._typical_s: float | None = None  # how long a batch takes; not known before the first
        self._closing = False
        self._log = structlog.get_logger()

    # --- the intake's side ---------------------------------------------------------------------------------

    def wait_for_room(self, timeout_s: float) -> bool:
        """Whether a next batch is wanted, waiting up to `timeout_s` until it is."""
        until_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                now_s = time.monotonic()
                wanted_at_s = self._wanted_at_s()
                if wanted_at_s <= now_s:
                    return True
                if now_s >= until_s:
                    return False
                self._changed.wait(min(wanted_at_s, until_s) - now_s)

    def _wanted_at_s(self) -> float:
        if not self._jobs:
            return 0.0
        if len(self._jobs) >= JOBS_IN_HAND or self._typical_s is None:
            return float("inf")
        return self._busy_since_s + 0.8 * self._typical_s - LEAD_S

    def take(self, job: Job) -> None:
        """Take a job in hand, and send it ahead if everything before it was sent.

        In hand first: sending waits where the pipe is full, and meanwhile the job is to be renewed, and its
        outcomes to be taken, or the process would wait to be heard while we wait for it to listen.
        """
        with self._pipe:
            job.sent = not job.singly and all(one.sent for one in self.jobs())
            with self._changed:
                if not self._jobs:
                    self._busy_since_s = time.monotonic()
                self._jobs.append(job)
            self._handed.put(job)
            if job.sent:
                self._send(job)

    def _send(self, job: Job) -> None:
        """Send all frames of a job. The pipe must be held."""
        with contextlib.suppress(ProcessGoneError):  # the committer, waiting for the outcome, sees to it
            for frame in tuple(job.frames):  # the committer takes out those that are done
                self.process.send(frame.header, frame.payload)

    # --- the committer's side ------------------------------------------------------------------------------

    def finish_next(self, note: Note, timeout_s: float) -> Job | None:
        """The oldest job once each of its requests has a result; None if there is none within `timeout_s`.

        `note(job, position)` is called before a request is executed alone. Whatever it raises goes through,
        and the job stays in hand: call `drop`.
        """
        job = self._oldest
        if job is None:
            try:
                job = self._oldest = self._handed.get(timeout=timeout_s)
            except queue.Empty:
                if not self.process.alive and not self._closing:
                    self._replace("while idle")
                return None
        while job.frames:
            frame = job.frames[0]
            if job.singly:
                note(job, frame.positions[0])
            self._execute(job, frame)
        return job

    def _execute(self, job: Job, frame: Frame) -> None:
        assert self.codec is not None
        try:
            if not job.sent:  # nothing of it is in the pipe, and the process waits: one frame at a time
                with self._pipe:
                    self.process.send(frame.header, frame.payload)
                    job.sent = not job.singly and frame is job.frames[-1]
            header, payload = self.process.receive()
        except ProcessGoneError:
            if self._closing:
                raise  # we hung up, not the process: nobody died of this batch
            self._replace(f"on a batch of {len(job.batch.requests)}", batch=job.batch.id)
            split(frame, job, self.codec, self._clock.now_us())
            return
        try:
            self.codec.take_outcome(job, frame, header, payload)
        except Exception as error:  # a case nobody thought of: the outcome will not come twice
            self._log.exception("outcome not understood", worker=self.consumer, batch=job.batch.id)
            fail(job, frame, f"the model's results cannot be read: {error}")
        del job.frames[0]

    def _replace(self, when: str, **about: str) -> None:
        """The process died: start another. What was sent to the old one is to be sent again."""
        how = self.process.why_gone()
        self._metrics.process_died()
        self._log.error("model process died", worker=self.consumer, how=how, when=when, **about)
        with self._pipe:
            for job in self.jobs():
                job.sent = False
            self.process.spawn()
        self.process.wait_ready()
        self._log.info("model process replaced", worker=self.consumer, pid=self.process.pid)

    def drop(self, job: Job) -> None:
        """The job is committed, or lost to another worker."""
        self._oldest = None
        with self._changed:
            self._jobs.remove(job)
            now_s = time.monotonic()
            took_s = job.compute_us / 1e6
            self._typical_s = took_s if self._typical_s is None else 0.8 * self._typical_s + 0.2 * took_s
            self._busy_since_s = now_s
            self._changed.notify_all()

    # --- others --------------------------------------------------------------------------------------------

    def jobs(self) -> list[Job]:
        """The jobs in hand, oldest first."""
        with self._changed:
            return list(self._jobs)

    def held(self) -> list[tuple[str, int]]:
        """ID and epoch of each batch in hand, for whoever renews the leases."""
        return [(job.batch.id, job.batch.epoch) for job in self.jobs()]

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Whether everything in hand was committed within `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout_s)

    def close(self, wait_s: float) -> None:
        """The process is not replaced any more; it has `wait_s` to unload its model and leave."""
        self._closing = True
        self.process.close(wait_s)
