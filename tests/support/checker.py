"""Checks whether results were lost, duplicated, or delivered to another request. Its history is not in Redis.

A producer records, in this order: `attempt` before XADD; then `accept` if XADD returned, or `refuse` if Redis
answered with an error. It records nothing if the connection broke: such a request may or may not have a
result. A reader of results records `envelope` for each one, and where it was found. `report` then lists the
faults.
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
    """How the requests ended: counts, the correlation IDs of each kind of fault, and counts by status."""

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
        """Whether each accepted request has exactly one result of its own, and no other request has one."""
        return not (self.lost or self.duplicated or self.misrouted or self.unexpected)

    def __str__(self) -> str:
        faults = {name: getattr(self, name) for name in ("lost", "duplicated", "misrouted", "unexpected")}
        return (
            f"attempted {self.attempted}, accepted {self.accepted}, ok {self.ok}, error {self.error}, "
            + ", ".join(f"{name} {len(ids)} {ids[:3] or ''}".rstrip() for name, ids in faults.items())
            + f"; statuses {dict(self.statuses)}"
        )


class Checker:
    """The history. `expected` returns the right result for a correlation ID and a payload."""

    def __init__(self, expected: Expected = digest) -> None:
        self._expected = expected
        self._requests: dict[str, _Request] = {}
        self._unknown: list[str] = []

    def attempt(self, correlation_id: str, payload: str) -> None:
        """A producer is about to send this request, perhaps again after an attempt with unknown outcome."""
        request = self._requests.setdefault(correlation_id, _Request(payload))
        if request.payload != payload:
            raise ValueError(f"{correlation_id}: a retry must have the payload of the first attempt")
        request.attempts += 1

    def accept(self, correlation_id: str) -> None:
        """XADD returned."""
        self._requests[correlation_id].accepted += 1

    def refuse(self, correlation_id: str) -> None:
        """Redis answered XADD with an error: there must be no result."""
        self._requests[correlation_id].refused += 1

    def envelope(self, found_at: str, envelope: Mapping[str, Any]) -> None:
        """An envelope was found for this correlation ID: at its result key, or in a reply stream."""
        request = self._requests.get(found_at)
        if request is None:
            self._unknown.append(found_at)
        else:
            request.envelopes.append(envelope)

    def unsettled(self) -> list[str]:
        """The correlation IDs of accepted requests that have no terminal result yet."""
        return [
            name for name, request in self._requests.items() if request.accepted and not _terminal(request)
        ]

    def report(self) -> Report:
        """The report on everything recorded so far."""
        statuses: defaultdict[str, int] = defaultdict(int)
        lost, duplicated, misrouted, unexpected = [], [], [], list(self._unknown)
        for name, request in self._requests.items():
            terminal = _terminal(request)
            possible = request.attempts - request.refused  # entries that may be in Redis
            if request.accepted and not terminal:
                lost.append(name)
            if terminal and not possible:
                unexpected.append(name)
            elif len(terminal) > possible:
                duplicated.append(name)
            if any(self._is_misrouted(name, request, envelope) for envelope in request.envelopes):
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

    def _is_misrouted(self, name: str, request: _Request, envelope: Mapping[str, Any]) -> bool:
        if envelope["correlation_id"] != name:
            return True
        is_right = envelope["status"] != "OK" or envelope["body"] == self._expected(name, request.payload)
        return not is_right


def _terminal(request: _Request) -> list[Mapping[str, Any]]:
    return [envelope for envelope in request.envelopes if envelope["final"]]
