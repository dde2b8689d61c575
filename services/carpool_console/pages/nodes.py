"""Nodes: how much room they have, what each serves, what is wanted, and what could not be loaded."""

from __future__ import annotations

from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from carpool.wire.nodes import NodeReport, OutcomeState, Seat, Snapshot, Wanted, outcome_of
from carpool_console.access import console_of, render, viewer
from carpool_console.console import Console


class SeatView(NamedTuple):
    """A model process of a node."""

    model: str
    version: str
    state: str


class NodeView(NamedTuple):
    """A node, and what it could not load, by what that is."""

    node: NodeReport
    seats: list[SeatView]
    reasons: list[tuple[str, str]]


class WantedView(NamedTuple):
    """A version of a model that is wanted, and what became of it."""

    wanted: Wanted
    serving: int
    state: str
    reason: str
    level: str


def routes(console: Console) -> list[Route]:
    """The page."""
    return [Route("/nodes", _nodes, methods=["GET"])]


@viewer
def _nodes(request: Request) -> Response:
    view = console_of(request).reader.look(nodes=True)
    snapshot = view.nodes
    return render(
        request,
        "nodes.html",
        title="Nodes",
        overview=view.overview,
        problem=view.nodes_problem,
        is_read=snapshot is not None,
        nodes=nodes_of(snapshot) if snapshot is not None else [],
        wanted=wanted_of(snapshot) if snapshot is not None else [],
    )


def nodes_of(snapshot: Snapshot) -> list[NodeView]:
    """All living nodes, by name."""
    return [
        NodeView(node, [_seat(snapshot, node, seat) for seat in node.seats], sorted(node.reasons.items()))
        for node in snapshot.nodes
    ]


def _seat(snapshot: Snapshot, node: NodeReport, seat: Seat) -> SeatView:
    of = snapshot.generation(seat.name.generation)
    served = node.serves.get(str(seat.name), ("?", "?")) if of is None else (of.model, of.version)
    return SeatView(*served, snapshot.shown_state(node, seat).lower())


def wanted_of(snapshot: Snapshot) -> list[WantedView]:
    """What is wanted of models, and what became of it."""
    found = []
    for wanted in snapshot.wanted:
        state, reason = outcome_of(snapshot, None, wanted.model, wanted.generation)
        if wanted.is_leaving:
            found.append(WantedView(wanted, snapshot.serving(wanted), "leaving", reason, "notice"))
            continue
        level = {OutcomeState.SERVING: "fine", OutcomeState.LOADING: "notice"}.get(state, "hurts")
        found.append(WantedView(wanted, snapshot.serving(wanted), state.lower(), reason, level))
    return found
