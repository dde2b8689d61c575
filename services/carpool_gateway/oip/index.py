"""The index of the repository: which versions of which models there are, and their states. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from carpool.wire.nodes import OutcomeState, Snapshot, Wanted, outcome_of
from carpool_gateway.oip.documents import (
    LOADING,
    READY,
    UNAVAILABLE,
    UNKNOWN,
    UNLOADING,
    IndexEntry,
)


def index_of(registered: Sequence[IndexEntry], snapshot: Snapshot) -> list[IndexEntry]:
    """A row for each version that was loaded, or could not be, and one for each other model, in order.

    `registered`: the models that workers registered. `snapshot`: what nodes were told to serve, and have.
    """
    rows = {(entry.name, entry.version): entry for entry in registered}
    loaded = {(wanted.model, wanted.version) for wanted in snapshot.wanted}
    for wanted in snapshot.wanted:
        before = rows.get((wanted.model, wanted.version))
        if before is None or before.state != READY:
            rows[wanted.model, wanted.version] = _row_of_wanted(snapshot, wanted)
    unwanted = _of_nodes(snapshot) - loaded
    for name, version in unwanted:
        row, reason = rows.get((name, version)), _reason(snapshot, name, version)
        if (row is None or row.state == UNAVAILABLE) and (reason or row):
            rows[name, version] = IndexEntry(name, UNAVAILABLE, reason or "unloaded", version)
    for name, version in unloading(snapshot) - loaded:
        reason = "its processes answer the requests that they have"
        rows[name, version] = IndexEntry(name, UNLOADING, reason, version)
    known = {name for name, _ in rows}
    newest: dict[str, str] = {}
    for name, version in unwanted:
        newest[name] = max(newest.get(name, ""), version, key=_number)
    unknown = [
        IndexEntry(name, UNKNOWN, "it was not loaded", version)
        for name, version in newest.items()
        if name not in known
    ]
    return sorted([*rows.values(), *unknown], key=lambda row: (row.name, _number(row.version), row.version))


def unloading(snapshot: Snapshot) -> set[tuple[str, str]]:
    """The models, with their versions, of processes that are not wanted any more, and have not ended."""
    return {
        node.serves[str(seat.name)]
        for node in snapshot.nodes
        for seat in node.seats
        if str(seat.name) in node.serves and snapshot.generation(seat.name.generation) is None
    }


def _of_nodes(snapshot: Snapshot) -> set[tuple[str, str]]:
    """The versions in the repositories of nodes."""
    return {
        (name, version)
        for node in snapshot.nodes
        for name, versions in node.entries.items()
        for version in versions
    }


def _reason(snapshot: Snapshot, name: str, version: str) -> str:
    """Why nodes could not load a version; empty if they did not try."""
    title = f"{name} version {version}"
    return next((node.reasons[title] for node in snapshot.nodes if title in node.reasons), "")


def _row_of_wanted(snapshot: Snapshot, wanted: Wanted) -> IndexEntry:
    served_once = wanted.is_settled or wanted.is_leaving
    if snapshot.serving(wanted) and served_once:
        return IndexEntry(wanted.model, READY, version=wanted.version)
    outcome = outcome_of(snapshot, None, wanted.model, wanted.generation)
    state = READY if outcome.state is OutcomeState.SERVING else LOADING
    return IndexEntry(wanted.model, state, "" if state == READY else outcome.reason, wanted.version)


def _number(version: str) -> int:
    return int(version) if version.isascii() and version.isdigit() else 0
