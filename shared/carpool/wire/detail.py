"""The detail of a model: what its active batcher sees, by lane, tenant and priority.

It is published beside the report, about once a second, and only while somebody looks (`store.detail`). It has
names that producers chose, and no bodies. Whoever shows these names escapes them.

Why: docs/decisions/0115.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

from pydantic import TypeAdapter, ValidationError

from carpool.wire.report import SequencesReport

DETAIL_BYTES_MAX: Final = 64 * 1024
NAME_CHARS_MAX: Final = 128  # of a lane, tenant or ID that is longer, the beginning is shown
TEXT_CHARS_MAX: Final = 200  # of a sentence


class LaneDetail(NamedTuple):
    """A lane: what waits in it, and its batches that settled in the window.

    `version`: which is to execute its requests, '' if any may. `oldest_s`: since when the oldest request
    waits. Latency: from a request's arrival until its batch settled, p50 and p99 in microseconds; the same of
    the executions of its batches. None: no batch of it settled.
    """

    lane: str
    version: str
    waiting: int
    oldest_s: float | None
    batches: int
    requests: int
    latency_us: tuple[int, int] | None
    execution_us: tuple[int, int] | None


class TenantDetail(NamedTuple):
    """A tenant: what waits in lanes, and what arrived in the time `ModelDetail.arrivals_over_us`, refused
    requests included. `share`: of all that arrived then, 0 to 1."""

    tenant: str
    waiting: int
    oldest_s: float | None
    arrived: int
    share: float


class PriorityDetail(NamedTuple):
    """A priority at which requests wait. `oldest_s` is None if they are all delayed, or wait for an earlier
    request of their sequence."""

    priority: int
    waiting: int
    oldest_s: float | None


class BatchDetail(NamedTuple):
    """A batch that settled. Times are Redis's, in microseconds.

    `wait_us`: from the arrival of its first request to its dispatch. `waited_us`: until a model process could
    take it. `execution_us`: calls of the model. `worker`: the model process that executed it. `statuses`: how
    many of its requests failed, by status; empty if none did; `error`: what the model raised.
    """

    batch: str
    reason: str
    size: int
    fill: float  # 0 to 1, by size or by cost, whichever is more
    lane: str
    version: str
    worker: str
    dispatched_us: int
    settled_us: int
    wait_us: int
    waited_us: int
    execution_us: int
    statuses: dict[str, int]
    error: str


class ErrorDetail(NamedTuple):
    """Errors of one kind since the batcher became active: the same sentence, apart from numbers and IDs
    (`carpool.error_groups`).

    `source`: "model" if workers answered so, "batcher" if requests were refused. `status`: of their results,
    `reason`: the batcher's word for it, else empty. `last`: the latest of these sentences. `last_id`: a
    correlation ID, or, of a model's error, the ID of a batch.
    """

    source: str
    status: str
    reason: str
    text: str
    number: int  # of requests
    last: str
    last_us: int
    last_id: str


class LearnedPoint(NamedTuple):
    """l(n) for a batch size: half of the batches take `time_us`, nine of ten at most `at_most_us`."""

    size: int
    time_us: int
    at_most_us: int


class ProcessDetail(NamedTuple):
    """A model process of a bound model: the sequences that it has, its slots, and whether it has a batch."""

    process: str
    sequences: int
    slots: int
    is_busy: bool


@dataclass(frozen=True, slots=True)
class ModelDetail:
    """What a batcher tells of a model beside its report. All lists are bounded, what is most comes first.

    `over_us`: the time that the figures of lanes cover, `arrivals_over_us` those of arrivals, which are
    counted while somebody looks; both are a minute at most. `lanes_number`, `tenants_number`: how many there
    are, the tenants of those lanes that were looked at. `is_partial`: not all were looked at, or numbers of
    waiting requests by tenant are estimates.
    """

    batcher: str
    at_us: int
    over_us: int
    arrivals_over_us: int
    arrived: int
    lanes: tuple[LaneDetail, ...] = ()
    lanes_number: int = 0
    tenants: tuple[TenantDetail, ...] = ()
    tenants_number: int = 0
    priorities: tuple[PriorityDetail, ...] = ()
    delayed: int = 0  # requests
    followers: int = 0  # requests that wait for earlier ones of their sequences
    batches: tuple[BatchDetail, ...] = ()  # the latest first
    errors: tuple[ErrorDetail, ...] = ()  # the latest first
    learned: tuple[LearnedPoint, ...] = ()
    sequences: SequencesReport | None = None
    processes: tuple[ProcessDetail, ...] = ()
    processes_number: int = 0
    is_partial: bool = False

    def encode(self, bytes_max: int = DETAIL_BYTES_MAX) -> str:
        """The detail as JSON in ASCII, of at most `bytes_max`: lists that are too long lose their ends."""
        parts = {name: _json(getattr(self, name)) for name in _FIELDS}
        while (text := _joined(parts)) and len(text) > bytes_max:
            largest = max(_LISTS, key=lambda name: len(parts[name]))
            values = json.loads(parts[largest])
            parts[largest] = _json(values[: len(values) // 2])
            parts["is_partial"] = "true"
        return text

    @staticmethod
    def decode(detail: bytes) -> ModelDetail | None:
        """What `encode` wrote; None if it is not understood, such as that of another version."""
        try:
            return _DECODER.validate_json(detail)
        except ValidationError:
            return None


def clipped(name: str, chars_max: int = NAME_CHARS_MAX) -> str:
    """The name, or the beginning of a longer one; without lone surrogates, which no JSON can have."""
    shown = name if len(name) <= chars_max else f"{name[: chars_max - 1]}…"
    return shown if shown.isascii() else shown.encode("utf-8", "replace").decode()


def _joined(parts: Mapping[str, str]) -> str:
    """A map of values that are JSON."""
    return "{" + ",".join([f'"{name}":{value}' for name, value in parts.items()]) + "}"


def _json(value: Any) -> str:
    return json.dumps(_plain(value), separators=(",", ":"))


def _plain(value: Any) -> Any:
    """A value of a field as JSON has it: named tuples as maps."""
    if hasattr(value, "_asdict"):
        return value._asdict()
    if type(value) is tuple:
        return [_plain(item) for item in value]
    return value


_FIELDS: Final = tuple(field.name for field in fields(ModelDetail))
_LISTS: Final = ("lanes", "tenants", "batches", "errors", "processes")
_DECODER: Final = TypeAdapter(ModelDetail)
