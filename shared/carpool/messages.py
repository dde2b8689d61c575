"""What travels: requests, the entries that carry them, batches, and results. Data only, no I/O.

Times are integers in microseconds (`_us`) or milliseconds (`_ms`) on Redis's clock: an entry's ID begins with
the millisecond at which Redis accepted it, and no other host's clock decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple, Self

from carpool.errors import OK

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
RAW: Final = "application/octet-stream"
CONTENT_TYPES: Final = (JSON, MSGPACK, RAW)

PRIORITY_DEFAULT: Final = 4
PRIORITY_LEVELS: Final = 10


@dataclass(slots=True, eq=False)
class Entry:
    """One entry of the request stream, and the requests in it that still wait.

    Mutable on purpose: when a dispatch takes only some of a packed entry's requests, the rest go back under a
    new ID. Each request points at its entry, so they need not be told.
    """

    id: str
    arrival_us: int
    requests: list[Request] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Request:
    """One producer's unit of work, as it waits. Compared by identity; nobody changes it after it was decoded.

    (Not `frozen=True`: that alone costs 1 µs a request, and a million are made in a minute.)
    """

    entry: Entry
    correlation_id: str
    body: bytes
    content_type: str = JSON
    reply_to: str | None = None
    arrival_us: int = 0
    deadline_us: int | None = None
    priority: int = PRIORITY_DEFAULT
    lane: str = ""
    cost: int = 1
    extra: Mapping[str, bytes] | None = None


class Withdrawal(NamedTuple):
    """A producer takes back requests that wait, named by correlation ID."""

    entry: Entry
    correlation_ids: frozenset[str]


class BatchedRequest(NamedTuple):
    """A request on its ride. The order of the fields is the order on the wire."""

    entry_id: str
    correlation_id: str
    content_type: str
    reply_to: str | None
    arrival_us: int
    deadline_us: int | None
    body: bytes
    extra: Mapping[str, bytes] | None


class Batch(NamedTuple):
    """Requests dispatched together, as a worker takes them. `epoch` is the delivery count, from 1."""

    id: str
    epoch: int
    requests: list[BatchedRequest]
    reason: str
    dispatched_us: int
    lane: str


class Result(NamedTuple):
    """One request's outcome. `body` is bytes of `content_type`; None unless `status` is OK."""

    correlation_id: str
    status: str = OK
    content_type: str = JSON
    body: bytes | None = None
    detail: str | None = None
    batch_size: int = 0
    queue_us: int = 0
    compute_us: int = 0


class Refusal(NamedTuple):
    """A request that is answered without being dispatched, and where to. `reason` is one word of few, to
    count by; `detail` is a sentence for its producer."""

    entry: Entry
    correlation_id: str
    reply_to: str | None
    content_type: str
    status: str
    reason: str
    detail: str
    request: Request | None = None  # None where it could not be understood


class DeadLetter(NamedTuple):
    """A request given up, as it came, with the reason and how often it was started."""

    request: BatchedRequest
    reason: str
    attempts: int


class Settled(NamedTuple):
    """What the batcher learns of a committed batch. `size` 0: a worker announces itself instead."""

    batch_id: str
    worker: str
    size: int
    compute_us: int


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How a model wants its requests batched. Declared by the model, registered by its workers.

    Numbers, or None where that means no limit; one that makes no sense raises ValueError naming the field.
    """

    max_batch_size: int = 32
    max_batch_cost: int | None = None
    max_queue_delay_ms: float = 0
    max_queue_size: int = 10_000
    max_queue_bytes: int = 256 * 1024 * 1024
    max_body_bytes: int = 8 * 1024 * 1024
    default_expiration_ms: int | None = None
    max_expiration_ms: int = 24 * 3600 * 1000
    result_ttl_ms: int = 60_000

    def __post_init__(self) -> None:
        for spec in fields(self):
            value, lowest = getattr(self, spec.name), 0 if spec.name == "max_queue_delay_ms" else 1
            kinds = (int, float) if spec.name == "max_queue_delay_ms" else (int,)
            if value is None and "None" in str(spec.type):
                continue
            if type(value) not in kinds or not lowest <= value < 1 << 53:
                raise ValueError(f"{spec.name}: {value!r} must be a number, {lowest} or more")

    @classmethod
    def names(cls) -> list[str]:
        """The settings' names, in the order in which they are documented."""
        return [spec.name for spec in fields(cls)]

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Settings from registered or declared values: numbers, or their text. Unknown names are left out."""
        known: dict[str, Any] = {
            name: _number(name, values[name]) for name in cls.names() if values.get(name) is not None
        }
        return cls(**known)


def _number(name: str, value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{name}: {value!r} must be a number")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError(f"{name}: {value!r} must be a number") from None
    return int(number) if number.is_integer() else number
