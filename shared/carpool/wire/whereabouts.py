"""Where a request is: what a batcher is asked and answers, and what Redis adds to that.

A question is an entry of the stream `settled`; the answer is a key that expires (`Keys.answer`), JSON. Times
are microseconds by Redis's clock. Nothing here has a body.

Why: docs/decisions/0115.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

ANSWER_TTL_MS: Final = 10_000
FOUND_MAX: Final = 8  # requests with one correlation ID, and different addresses, that an answer names

State = Literal["waiting", "in flight", "streaming", "dead", "answered", "withdrawn", "refused", "unknown"]


class Waiting(NamedTuple):
    """A request that waits.

    `why`: one sentence, why it is not dispatched yet; `until_us`: until when, as far as that is known.
    `before`: how many requests of its lane go before it; None: it is in no lane yet, or many asked at once.
    `before_is_least`: there are more than were counted. `priority`: 0 to 9. `reply_to`: where its result
    goes; '' for a list of its own. `arrived_us`: of a delayed request the end of that time.
    """

    lane: str
    tenant: str
    priority: int
    arrived_us: int
    deadline_us: int | None
    why: str
    until_us: int | None = None
    before: int | None = None
    before_is_least: bool = False
    version: str = ""
    sequence: str = ""
    reply_to: str = ""


class InFlight(NamedTuple):
    """A request in flight, in a batch.

    `position`: in the batch, from 0. `process`: the model process that has it, '' if none has fetched it.
    `renewed_ms`: how long ago that last said so. `deliveries`: how often it was fetched; more than once means
    that its model process or worker died, or gave it up. `starts`: how often it was started alone since.
    `chunks`: of a stream, how many were written.
    """

    batch: str
    position: int
    size: int
    dispatched_us: int
    lane: str = ""
    version: str = ""
    deadline_us: int | None = None
    process: str = ""
    renewed_ms: int = 0
    deliveries: int = 0
    starts: int = 0
    chunks: int | None = None

    @property
    def is_suspect(self) -> bool:
        """Whether it may have ended a process, and is executed alone."""
        return self.deliveries > 1


class Refused(NamedTuple):
    """A request that the batcher answered without dispatching it: refused, expired or withdrawn."""

    at_us: int
    status: str
    reason: str
    detail: str


class FoundResult(NamedTuple):
    """A result that is kept. `kind`: "list" if nobody has read it, "kept" if it is read by ID, as often as
    wanted; `status`: of a kept one done, failed or dead. `until_us`: when it expires; None: never."""

    kind: Literal["list", "kept"]
    status: str
    until_us: int | None


class FoundLetter(NamedTuple):
    """A dead letter: its ID, why the request was given up, and how often a process ended with it."""

    id: str
    reason: str
    attempts: int
    at_us: int


class BatcherAnswer(NamedTuple):
    """What an active batcher knows of the requests with one correlation ID.

    `is_reading`: it has not read all requests that wait, because it took over just now, or many arrive.
    `withheld`: how many results of the model are withheld until earlier ones are delivered
    (`preserve_ordering`): the request's may be among them.
    """

    batcher: str
    at_us: int
    waiting: tuple[Waiting, ...] = ()
    in_flight: tuple[InFlight, ...] = ()
    refused: tuple[Refused, ...] = ()
    is_reading: bool = False
    withheld: int = 0

    def encode(self) -> str:
        """The answer as JSON."""
        return json.dumps(_plain(self), separators=(",", ":"))

    @staticmethod
    def decode(answer: bytes) -> BatcherAnswer | None:
        """What `encode` wrote; None if it is not understood, such as that of another version."""
        try:
            return _DECODER.validate_json(answer)
        except ValidationError:
            return None


_DECODER: Final = TypeAdapter(BatcherAnswer)


def question_fields(correlation_id: str, answer: str) -> tuple[str | int, ...]:
    """The fields of an entry of `settled` that asks where a request is. `answer`: the name of the answer."""
    return ("where", correlation_id, "answer", answer, "size", 0)


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where the requests of a model with one correlation ID are, as far as that can be known.

    `batcher`: "answered"; "silent" if one is active and did not answer in time; "none" if none is active.
    `not_seen`: what could not be looked at, and why: sentences. `is_reading` and `withheld`: as in a
    BatcherAnswer.
    """

    model: str
    correlation_id: str
    at_us: int
    batcher: Literal["answered", "silent", "none"]
    waiting: Sequence[Waiting] = ()
    in_flight: Sequence[InFlight] = ()
    refused: Sequence[Refused] = ()
    results: Sequence[FoundResult] = ()
    dead: Sequence[FoundLetter] = ()
    not_seen: Sequence[str] = ()
    withheld: int = 0
    is_reading: bool = False

    @property
    def state(self) -> State:
        """The first of these that applies; one correlation ID may name requests in several states."""
        if self.waiting:
            return "waiting"
        if self.in_flight:
            return "streaming" if any(one.chunks for one in self.in_flight) else "in flight"
        if self.dead:
            return "dead"
        if self.results:
            return "answered"
        if self.refused:
            return "withdrawn" if self.refused[-1].reason == "withdrawn" else "refused"
        return "unknown"

    def as_json(self) -> dict[str, Any]:
        """As plain values, for `json.dumps`."""
        parts = ("waiting", "in_flight", "refused", "results", "dead")
        found: Mapping[str, Any] = {name: [one._asdict() for one in getattr(self, name)] for name in parts}
        return {
            "model": self.model,
            "correlation_id": self.correlation_id,
            "state": self.state,
            "at_us": self.at_us,
            "batcher": self.batcher,
            "is_reading": self.is_reading,
            **found,
            "not_seen": list(self.not_seen),
            "readings": self.readings(),
        }

    def readings(self) -> list[str]:
        """What an unknown request may be; empty if it was found."""
        if self.state != "unknown":
            return []
        readings = ["it was never sent to this model"]
        if self.batcher != "answered":
            readings.append("it waits")
        elif self.is_reading:
            readings.append("it waits, and its batcher has not read it yet")
        if self.withheld:
            readings.append("its result is withheld until earlier ones are delivered (preserve_ordering)")
        return [
            *readings,
            "it was answered, and its result was read, or has expired",
            "it named a reply stream (reply_to), and its result is there",
            "its entry was removed with XDEL",
        ]

    def lines(self) -> list[str]:
        """All of it as sentences for a person, with texts of producers as they are: escape them."""
        is_open = self.state == "unknown" and self.is_reading
        state = "not found yet, its batcher is still reading what waits" if is_open else self.state
        lines = [f"{self.correlation_id} of {self.model}: {state}"]
        lines += [line for one in self.waiting for line in self._of_waiting(one)]
        lines += [line for one in self.in_flight for line in self._of_in_flight(one)]
        for letter in self.dead:
            ago = self._ago(letter.at_us)
            lines.append(f"given up {ago}: {letter.reason} (dead letter {letter.id})")
        for result in self.results:
            until = f"until it expires, {self._ahead(result.until_us)}" if result.until_us else "for ever"
            what = "nobody has read its result, which is kept"
            if result.kind == "kept":
                what = f"its result ({result.status}) is read by ID, and kept"
            lines.append(f"{what} {until}")
        for refused in self.refused:
            lines.append(f"answered {refused.status} {self._ago(refused.at_us)}: {refused.detail}")
        if readings := self.readings():
            lines.append(f"one of these is true: {'; '.join(readings)}")
        return [*lines, *self.not_seen]

    def _of_waiting(self, one: Waiting) -> Iterator[str]:
        where = f"lane {one.lane!r}" if one.lane else "the default lane"
        tenant = f", tenant {one.tenant!r}" if one.tenant else ""
        since = self._ago(one.arrived_us)
        yield f"waits in {where}{tenant}, priority {one.priority}; it arrived {since}"
        if one.before is not None:
            least = "at least " if one.before_is_least else ""
            yield f"requests that go before it in this lane: {least}{one.before:,}"
        yield f"why: {one.why}"
        if one.deadline_us is not None:
            yield f"deadline: {self._ahead(one.deadline_us)}"

    def _of_in_flight(self, one: InFlight) -> Iterator[str]:
        yield f"dispatched {self._ago(one.dispatched_us)} in batch {one.batch}, with {one.size:,} in it"
        if not one.process:
            yield "no model process has fetched it yet"
        else:
            renewed = _duration(one.renewed_ms / 1000)
            yield f"at model process {one.process}, which renewed its lease of it {renewed} ago"
        if one.is_suspect:
            yield (
                f"suspect: fetched {one.deliveries} times, because processes or workers that had it ended; "
                f"started alone {one.starts} times"
            )
        if one.chunks is not None:
            yield f"chunks written so far: {one.chunks:,}"
        if one.deadline_us is not None:
            yield f"deadline: {self._ahead(one.deadline_us)}"

    def _ago(self, at_us: int) -> str:
        if at_us > self.at_us:
            return self._ahead(at_us)
        return f"{_duration((self.at_us - at_us) / 1e6)} ago"

    def _ahead(self, at_us: int) -> str:
        if at_us < self.at_us:
            return self._ago(at_us)
        return f"in {_duration((at_us - self.at_us) / 1e6)}"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds // 60:,.0f} min {seconds % 60:.0f} s"


def _plain(value: Any) -> Any:
    """As JSON has it: named tuples as maps."""
    if hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if type(value) is tuple:
        return [_plain(item) for item in value]
    return value
