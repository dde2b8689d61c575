"""Was anything lost, duplicated or given to another? A test's history, kept outside Redis, and its verdict.

A producer says what it does, in this order: `attempt` before XADD; then `accept` if XADD returned, `refuse`
if Redis said no, and nothing if it cannot know (the connection broke): such a request may have a result or
none. Whoever reads results says `envelope` for each one found, and where it was found. `report` then says
what became of every request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from support.models.hashing import digest

Expected = Callable[[str, str], object]


@dataclass(slots=True)
class _Request:
    payload: str
    attempts: int = 0
    accepted: int = 0
    refused: int = 0
    envelopes: list[Mapping[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Report:
    """What became of the requests: counts, then those that went wrong by correlation ID, then a summary."""

    attempted: int
    accepted: int
    ok: int
    error: int
    lost: list[str]
    duplicated: list[str]
    misrouted: list[str]
    unexpected: list[str]
    statuses: Mapping[str, int]

    @property
    def faultless(self) -> bool:
        """Whether every accepted request has its own result or an explicit error, once, and no other has."""
        return not (self.lost or self.duplicated or self.misrouted or self.unexpected)

    def __str__(self) -> str:
        wrong = {name: getattr(self, name) for name in ("lost", "duplicated", "misrouted", "unexpected")}
        return (
            f"attempted {self.attempted}, accepted {self.accepted}, ok {self.ok}, error {self.error}, "
            + ", ".join(f"{name} {len(ids)} {ids[:3] or ''}".rstrip() for name, ids in wrong.items())
            + f"; statuses {dict(self.statuses)}"
        )


class Checker:
    """The history. `expected` says what the model must answer to a correlation ID and a payload."""

    def __init__(self, expected: Expected = digest) -> None:
        self._expected = expected
        self._requests: dict[str, _Request] = {}
        self._strays: list[str] = []

    def attempt(self, correlation_id: str, payload: str) -> None:
        """A producer is about to send this request; the same again if it never heard of the first attempt."""
        request = self._requests.setdefault(correlation_id, _Request(payload))
        if request.payload != payload:
            raise ValueError(f"{correlation_id}: a retry carries the payload of the first attempt")
        request.attempts += 1

    def accept(self, correlation_id: str) -> None:
        """XADD returned."""
        self._requests[correlation_id].accepted += 1

    def refuse(self, correlation_id: str) -> None:
        """Redis answered XADD with an error: there must not be a result."""
        self._requests[correlation_id].refused += 1

    def envelope(self, found_at: str, envelope: Mapping[str, Any]) -> None:
        """An envelope was found at this correlation ID: by its key, or by the stream that carried it."""
        request = self._requests.get(found_at)
        if request is None:
            self._strays.append(found_at)
        else:
            request.envelopes.append(envelope)

    def unsettled(self) -> list[str]:
        """Accepted requests that have no terminal result so far."""
        return [
            name for name, request in self._requests.items() if request.accepted and not _terminal(request)
        ]

    def report(self) -> Report:
        """The verdict, over everything said until now."""
        statuses: defaultdict[str, int] = defaultdict(int)
        lost, duplicated, misrouted, unexpected = [], [], [], list(self._strays)
        for name, request in self._requests.items():
            terminal = _terminal(request)
            possible = request.attempts - request.refused  # entries that may be in Redis
            if request.accepted and not terminal:
                lost.append(name)
            if terminal and not possible:
                unexpected.append(name)
            elif len(terminal) > possible:
                duplicated.append(name)
            if any(self._is_anothers(name, request, one) for one in request.envelopes):
                misrouted.append(name)
            if terminal:
                statuses[terminal[0]["status"]] += 1
        ok = statuses["OK"]
        return Report(
            attempted=len(self._requests),
            accepted=sum(1 for request in self._requests.values() if request.accepted),
            ok=ok,
            error=sum(statuses.values()) - ok,
            lost=lost,
            duplicated=duplicated,
            misrouted=misrouted,
            unexpected=unexpected,
            statuses={status: count for status, count in statuses.items() if count},
        )

    def _is_anothers(self, name: str, request: _Request, envelope: Mapping[str, Any]) -> bool:
        if envelope["correlation_id"] != name:
            return True
        right = envelope["status"] != "OK" or envelope["body"] == self._expected(name, request.payload)
        return not right


def _terminal(request: _Request) -> list[Mapping[str, Any]]:
    return [one for one in request.envelopes if one["final"]]
