"""Writing for one replica of a stepping model: the chunks and results of all its requests, in one script.

While the memory of Redis is full, it takes no chunks: they wait in their requests, and the writer tries again
from time to time. Results are written all the same, because a request that ends frees memory.

Why: docs/decisions/0055.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from math import inf
from typing import Final, NamedTuple

import structlog

from carpool.model_settings import ModelSettings
from carpool.store.connection import CommandError
from carpool.store.steps import StepStore, StepWrite
from carpool_worker.member import Member
from carpool_worker.meter import WorkerMetrics
from carpool_worker.stepping.execution import StepExecution
from carpool_worker.stepping.in_hand import InHand

CHECK_INTERVAL_S: Final = 0.05  # how often Redis is asked which requests were withdrawn or expired, or read
FULL_RETRY_S: Final = 0.1  # after Redis rejected chunks because its memory is full
WRITE_BYTES_MAX: Final = 16 * 1024 * 1024  # in one script


class Written(NamedTuple):
    """The requests that do not simply go on after a script was run.

    `ended`: the result is written. `answered`: by a batcher, because they expired or were withdrawn.
    `fenced`: another worker has them. `mismatched`: Redis lost its last writes, so they must begin again.
    """

    ended: Sequence[tuple[StepExecution, StepWrite]] = ()
    answered: Sequence[StepExecution] = ()
    fenced: Sequence[StepExecution] = ()
    mismatched: Sequence[StepExecution] = ()


class StepWriter:
    """The replica acts on what a script has returned before the next one is run."""

    def __init__(
        self,
        member: Member,
        store: StepStore,
        in_hand: InHand,
        metrics: WorkerMetrics,
    ) -> None:
        self._member = member
        self._store = store
        self._in_hand = in_hand
        self._metrics = metrics
        self._check_at_s = 0.0
        self._full_until_s = 0.0
        self._log = structlog.get_logger()

    @property
    def is_full(self) -> bool:
        """Whether Redis rejects chunks."""
        return time.monotonic() < self._full_until_s

    @property
    def due_at_s(self) -> float:
        """When it has something to do by time alone, while requests are in hand."""
        return max(self._check_at_s, self._full_until_s)

    def write_due(self, settings: ModelSettings) -> Iterator[Written]:
        """Write what was emitted; from time to time, ask which of all requests were answered meanwhile."""
        now_s, is_full, buffer = time.monotonic(), self.is_full, settings.stream_buffer
        checked_since_s = -inf  # those that are in hand since then, or longer, are asked about
        if now_s >= self._check_at_s:
            self._check_at_s = now_s + CHECK_INTERVAL_S
            checked_since_s = now_s - CHECK_INTERVAL_S
        due = [
            request
            for request in self._in_hand
            if request.held_since_s <= checked_since_s
            or request.has_ended
            or (not is_full and request.has_news(buffer))
        ]
        if not due:
            return
        try:
            yield from self._write(due, settings, only_final=is_full)
        except CommandError as error:
            if error.code == "NOGROUP":  # Redis was emptied
                yield Written(fenced=[*self._in_hand])
                return
            if error.code != "OOM":
                raise
            in_hand = [*self._in_hand]
            self._log.warning("Redis is full, chunks wait", replica=self._member.name, requests=len(in_hand))
            self._full_until_s = time.monotonic() + FULL_RETRY_S
            yield from self._write(in_hand, settings, only_final=True)

    def _write(
        self, requests: Sequence[StepExecution], settings: ModelSettings, *, only_final: bool
    ) -> Iterator[Written]:
        now_us = self._store.clock.now_us()
        together: list[tuple[StepExecution, StepWrite]] = []
        together_bytes = 0
        for request in requests:
            write = request.next_write(settings.stream_buffer, now_us, only_final=only_final)
            together.append((request, write))
            together_bytes += sum([len(chunk.kept) for chunk in write.chunks])
            together_bytes += len(write.result.body or b"") if write.result is not None else 0
            if together_bytes > WRITE_BYTES_MAX:
                yield self._write_together(together, settings)
                together, together_bytes = [], 0
        if together:
            yield self._write_together(together, settings)

    def _write_together(
        self, together: Sequence[tuple[StepExecution, StepWrite]], settings: ModelSettings
    ) -> Written:
        replies = self._store.write(self._member.name, [write for _, write in together])
        now_s, now_us = time.monotonic(), self._store.clock.now_us()
        states = [reply.state for reply in replies]
        written = [sent for sent, state in zip(together, states, strict=True) if state == "WRITTEN"]
        self._metrics.chunks_written([(write, request.chunk_us) for request, write in written], now_us)
        others: dict[str, list[StepExecution]] = {"ANSWERED": [], "FENCED": [], "MISMATCH": []}
        for (request, write), reply in zip(together, replies, strict=True):
            if reply.state != "WRITTEN":
                others[reply.state].append(request)
                continue
            request.wrote(write, reply, settings.stream_buffer, now_s, now_us)
            if request.execution.trace is not None and self._metrics.spans is not None:
                told = [(chunk.index, chunk.merged) for chunk, _ in write.chunks]
                self._metrics.spans.chunks_written(request.execution.trace, now_us, told)
            if write.result is None:
                request.give_up_idle_reader(settings.reader_idle_ms)
        ended = [(request, write) for request, write in written if write.result is not None]
        return Written(ended, others["ANSWERED"], others["FENCED"], others["MISMATCH"])
