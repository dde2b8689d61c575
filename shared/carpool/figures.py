"""The figures of models: their load, rates and latencies, computed from two samples of each.

Rates and shares cover the time between the two samples. Where the earlier one is from another batcher, or
there is none, they cover the time since the batcher became active. All of it comes from the reports of
batchers in Redis, so every program finds the same figures.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from carpool.errors import UnavailableError
from carpool.store.directory import Directory, ModelSample, ProcessMemory
from carpool.wire.orders import Paused
from carpool.wire.report import BatcherReport, SequencesReport, VersionReport, WantedReport

INTERVAL_S: Final = 1.0
SAMPLES_MAX: Final = 6  # rates cover the time from the oldest of them to the newest: 5 s


Sample = Mapping[str, ModelSample]
"""Every model at one time, by name."""


class Requests(NamedTuple):
    """Requests, or sequences, that ended in one way: since the batcher became active, and lately."""

    total: int
    per_s: float


class Stepping(NamedTuple):
    """What only a stepping model has. The times are those of streams that ended, because a batcher learns of
    them when a stream ends."""

    slots: int
    slots_in_use: int  # requests in flight for which there is a slot
    prefetched: int  # the others, which get one as soon as one is free
    chunks: int  # since the batcher became active
    chunks_per_s: float | None = None
    first_chunk_p50_ms: float | None = None  # time from a request's arrival to its first chunk
    first_chunk_p99_ms: float | None = None
    chunk_gap_p50_ms: float | None = None  # mean time between two chunks of a stream
    chunk_gap_p99_ms: float | None = None


class SequenceFigures(NamedTuple):
    """What only a model with sequences has."""

    kept: int
    waiting_to_start: int  # that wait, because max_candidate_sequences are kept, or no slot is free
    started: Requests  # since the batcher became active, and lately
    ended: Requests
    broken: Requests
    slots: int | None = None  # of all model processes of a bound model

    def as_json(self) -> dict[str, Any]:
        """As plain dicts."""
        counted = {"started": self.started, "ended": self.ended, "broken": self.broken}
        return {**self._asdict(), **{name: number._asdict() for name, number in counted.items()}}


class Memory(NamedTuple):
    """What the processes of a model take, in bytes: the largest, all together, and all together on GPUs."""

    largest: int
    total: int
    on_gpus: int


class Figures(NamedTuple):
    """A model in numbers; None where a number is unknown. The names are the keys of `carpool top --json`."""

    model: str
    batcher: bool
    model_processes: int
    waiting: int  # requests; entries of the stream if no batcher reports how many requests they hold
    oldest_s: float | None
    batches_in_flight: int
    requests_in_flight: int | None = None
    withheld: int = 0  # results
    over_s: float | None = None  # the time that rates, fill and shares cover
    requests_per_s: float | None = None
    batches_per_s: float | None = None
    fill: float | None = None  # 0 to 1
    reasons: Mapping[str, float] = {}  # the share of each dispatch reason
    p50_ms: float | None = None
    p99_ms: float | None = None
    learned: Mapping[int, float] = {}  # l(n) in ms of some batch sizes, from the smallest seen to the largest
    refused: Mapping[str, Requests] = {}  # or expired in flight, by STATUS/reason
    batches: Mapping[str, int] = {}  # by dispatch reason, since the batcher became active
    requests: int | None = None  # dispatched since then
    active_s: float | None = None  # how long ago that was
    rejected_settings: str = ""  # why the batcher rejects the model's settings, where it does
    policy: str | None = None  # the one in force
    missed: Mapping[str, Requests] = {}  # deadlines, by cause (`carpool_batcher.core.missed_deadlines`)
    stepping: Stepping | None = None  # None: it is not a stepping model, or no batcher reports that it is
    sequences: SequenceFigures | None = None  # None: it has no sequences, or no batcher reports any
    failed: Mapping[str, Requests] = {}  # answered with an error by workers, by status
    last_error: str = ""  # what the model raised last, such as `KeyError at model.py:14`
    last_error_s: float | None = None  # how long ago that was
    dead: int = 0  # dead letters
    loading: bool = False  # a worker loads it
    memory: Memory | None = None  # None: no worker tells
    versions: Mapping[str, VersionReport] = {}  # what workers of each did since the batcher became active
    paused: Paused | None = None  # by an operator
    wanted: WantedReport | None = None  # workers; None: no batcher reports it
    process_deaths: int = 0  # model processes that died in the last minute, as far as workers tell

    def as_json(self) -> dict[str, Any]:
        """As plain dicts, for `json.dumps`."""
        refused = {reason: requests._asdict() for reason, requests in self.refused.items()}
        missed = {cause: requests._asdict() for cause, requests in self.missed.items()}
        failed = {status: requests._asdict() for status, requests in self.failed.items()}
        versions = {version: of._asdict() for version, of in self.versions.items()}
        stepping = None if self.stepping is None else self.stepping._asdict()
        sequences = None if self.sequences is None else self.sequences.as_json()
        changed = {
            "refused": refused,
            "missed": missed,
            "failed": failed,
            "stepping": stepping,
            "sequences": sequences,
            "versions": versions,
            "memory": None if self.memory is None else self.memory._asdict(),
            "paused": None if self.paused is None else self.paused._asdict(),
            "wanted": None if self.wanted is None else self.wanted._asdict(),
        }
        return {**self._asdict(), **changed}


def figures(model: str, before: ModelSample | None, now: ModelSample) -> Figures:
    """The figures of a model. `before` is an earlier sample, the same one, or None."""
    known_without_report = Figures(
        model, now.batcher, now.model_processes, now.waiting_entries, now.oldest_s, now.batches_in_flight,
        dead=now.dead, loading=now.loading, memory=_memory(now.memory), paused=now.paused,
        process_deaths=now.process_deaths,
    )  # fmt: skip
    report = now.active_report
    if report is None:
        return known_without_report
    base = _base_report(before.report if before is not None else None, report)
    over_s = (report.at_us - base.at_us) / 1e6
    dispatched = _largest_first(_increases(base.batches, report.batches))
    batches = sum(dispatched.values())
    gauges = report.gauges
    p50_ms, p99_ms = _quantiles_ms(report.quantiles_us)
    has_fill = batches and report.stepping is None
    return known_without_report._replace(
        model_processes=gauges.model_processes,
        waiting=gauges.waiting,
        oldest_s=gauges.oldest_s if gauges.waiting else None,
        batches_in_flight=gauges.batches_in_flight,
        requests_in_flight=gauges.requests_in_flight,
        withheld=gauges.withheld,
        over_s=over_s,
        requests_per_s=_per_s(report.requests - base.requests, over_s),
        batches_per_s=_per_s(batches, over_s),
        fill=(report.fill_percent - base.fill_percent) / batches / 100 if has_fill else None,
        reasons={reason: number / batches for reason, number in dispatched.items()},
        p50_ms=p50_ms,
        p99_ms=p99_ms,
        learned={size: time_us / 1000 for size, time_us in report.learned},
        refused=_totals_and_rates(base.refused, report.refused, over_s),
        batches=report.batches,
        requests=report.requests,
        active_s=(report.at_us - report.began_us) / 1e6,
        rejected_settings=report.rejected_settings,
        policy=report.policy or None,
        missed=_totals_and_rates(base.missed, report.missed, over_s),
        failed=_totals_and_rates(base.failed, report.failed, over_s),
        last_error=report.last_error[0] if report.last_error else "",
        last_error_s=(report.at_us - report.last_error[1]) / 1e6 if report.last_error else None,
        stepping=_stepping(base, report, over_s),
        sequences=_sequences(base, report, over_s),
        versions=report.versions,
        wanted=report.wanted,
    )


def _memory(processes: Sequence[ProcessMemory]) -> Memory | None:
    resident = [process.resident for process in processes]
    if not any(resident):
        return None
    return Memory(max(resident), sum(resident), sum(process.on_gpus for process in processes))


def _stepping(base: BatcherReport, report: BatcherReport, over_s: float) -> Stepping | None:
    now, in_flight = report.stepping, report.gauges.requests_in_flight
    if now is None:
        return None
    slots_in_use = min(in_flight, now.slots)
    chunks_before = 0 if base.stepping is None else base.stepping.chunks
    return Stepping(
        now.slots,
        slots_in_use,
        in_flight - slots_in_use,
        now.chunks,
        _per_s(now.chunks - chunks_before, over_s),
        *_quantiles_ms(now.first_us),
        *_quantiles_ms(now.gap_us),
    )


def _sequences(base: BatcherReport, report: BatcherReport, over_s: float) -> SequenceFigures | None:
    now, before = report.sequences, base.sequences or SequencesReport(0, 0, 0, 0, 0)
    if now is None:
        return None

    def counted(total: int, earlier: int) -> Requests:
        return Requests(total, _per_s(total - earlier, over_s) or 0.0)

    return SequenceFigures(
        now.kept,
        now.waiting_to_start,
        counted(now.started, before.started),
        counted(now.ended, before.ended),
        counted(now.broken, before.broken),
        now.slots,
    )


def _base_report(before: BatcherReport | None, now: BatcherReport) -> BatcherReport:
    """The report to count from: an earlier one of this batcher, or zeros at the time it became active."""
    same = before is not None and (before.batcher, before.began_us) == (now.batcher, now.began_us)
    if before is not None and same and before.at_us < now.at_us:
        return before
    return BatcherReport(now.batcher, now.began_us, now.began_us, now.gauges, {}, 0, 0, {}, (), None)


def _increases(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {name: more for name, total in now.items() if (more := total - before.get(name, 0))}


def _totals_and_rates(
    before: Mapping[str, int], now: Mapping[str, int], over_s: float
) -> dict[str, Requests]:
    return {
        name: Requests(total, _per_s(total - before.get(name, 0), over_s) or 0.0)
        for name, total in _largest_first(now).items()
    }


def _largest_first(numbers: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(numbers.items(), key=lambda item: (-item[1], item[0])))


def _per_s(number: int, over_s: float) -> float | None:
    return number / over_s if over_s > 0 else None


def _quantiles_ms(quantiles_us: tuple[int, int] | None) -> tuple[float, float] | tuple[None, None]:
    """p50 and p99."""
    return (None, None) if quantiles_us is None else (quantiles_us[0] / 1000, quantiles_us[1] / 1000)


def compare(before: Sample, now: Sample) -> list[Figures]:
    """The figures of each model of the later sample, compared with the earlier one."""
    return [figures(model, before.get(model), sample) for model, sample in now.items()]


# --- from Redis --------------------------------------------------------------------------------------------


def take_sample(directory: Directory, only_model: str = "") -> Sample:
    """Every model that is registered or loaded for the first time, or only one, as it is now. Empty if that
    one is neither. Raises UnavailableError."""
    models = directory.models()
    if not only_model:
        sampled = sorted([*models, *directory.loading(models)])
    else:
        sampled = [only_model] if only_model in models or directory.is_loading(only_model) else []
    return {model: directory.sample(model) for model in sampled}


class RecentFigures:
    """The figures of all models, of the last SAMPLES_MAX samples.

    `update` blocks. A program with an event loop runs `follow` as a task.
    """

    def __init__(self, sample_now: Callable[[], Sample], *samples: Sample) -> None:
        self._sample_now = sample_now
        self._samples = deque(samples, SAMPLES_MAX)
        self.error = ""  # why there is no newer sample, if Redis did not answer

    @property
    def figures(self) -> list[Figures]:
        """Those of each model; none before there is a sample."""
        samples = self._samples
        return compare(samples[0], samples[-1]) if samples else []

    def update(self) -> None:
        """Take a sample. While Redis does not answer, the last figures remain."""
        try:
            self._samples.append(self._sample_now())
            self.error = ""
        except UnavailableError as unavailable:
            self.error = str(unavailable)

    async def follow(self) -> None:
        """Take a sample each INTERVAL_S, for ever, on a thread: the event loop is not blocked. Raises
        CommandError if the user may not read reports."""
        while True:
            await asyncio.to_thread(self.update)
            await asyncio.sleep(INTERVAL_S)
