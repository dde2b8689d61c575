"""`carpool nodes`: the nodes, what each serves, and what it could not load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from carpool.settings import ConnectionSettings, read_settings
from carpool.shown import complain, printable_json
from carpool.store.connection import CommandError, LinkError
from carpool.store.nodes import NodeStore
from carpool.wire.nodes import START_A_NODE, NodeReport, Seat, SeatState, Snapshot, Wanted, outcome_of
from carpool_cli.load import open_link
from carpool_cli.refused import explain
from carpool_cli.screen import Screen, build_table


class NodesSettings(ConnectionSettings):
    """List the nodes (`carpool worker --repository`) and the models that are loaded."""

    model_config = SettingsConfigDict(cli_shortcuts={"as-json": "json"})

    as_json: bool = Field(False, description="print a JSON object instead of tables")


def main(argv: Sequence[str]) -> int:
    """Print them. Returns 1 if Redis does not answer."""
    settings = read_settings(NodesSettings, argv, "carpool nodes")
    link = open_link(settings, "nodes")
    try:
        snapshot = NodeStore(link, settings.prefix).snapshot()
    except (LinkError, CommandError) as error:
        complain(f"carpool nodes: {explain(error)}")
        return 1
    finally:
        link.close()
    if settings.as_json:
        print(printable_json(as_json(snapshot)))
    else:
        show(snapshot, Screen())
    return 0


def show(snapshot: Snapshot, screen: Screen) -> None:
    """The tables, and what could not be loaded."""
    if not snapshot.nodes:
        screen.print(f"No node runs; {START_A_NODE}.")
    else:
        rows = [
            (node.name, str(node.room), str(node.used), _serves(snapshot, node)) for node in snapshot.nodes
        ]
        screen.print_table(build_table([("node", "room", "used", "serves"), *rows], has_prose=True))
    if snapshot.wanted:
        screen.print()
        heading = ("model", "version", "replicas", "serving", "share", "state")
        screen.print_table(
            build_table([heading, *(_row(snapshot, one) for one in snapshot.wanted)], has_prose=True)
        )
    reasons = [(node.name, *reason) for node in snapshot.nodes for reason in sorted(node.reasons.items())]
    for node, title, reason in reasons:
        screen.print(f"\n{title} could not be loaded on {node}: {reason}")


def _row(snapshot: Snapshot, wanted: Wanted) -> tuple[str, ...]:
    share = "" if wanted.share is None else f"{wanted.share}%"
    serving = str(snapshot.serving(wanted))
    return wanted.model, wanted.version, str(wanted.replicas), serving, share, _state(snapshot, wanted)


def _state(snapshot: Snapshot, wanted: Wanted) -> str:
    if wanted.is_leaving:
        return "leaves when what replaces it serves"
    state, reason = outcome_of(snapshot, None, wanted.model, wanted.generation)
    return state.lower() if snapshot.serving(wanted) == wanted.replicas else f"{state.lower()}: {reason}"


def _serves(snapshot: Snapshot, node: NodeReport) -> str:
    """Such as `echo 2 (2 processes), echo 1 (draining)`."""
    numbers = Counter(_of_seat(snapshot, node, seat) for seat in node.seats)
    return ", ".join(f"{text} x{number}" if number > 1 else text for text, number in sorted(numbers.items()))


def _of_seat(snapshot: Snapshot, node: NodeReport, seat: Seat) -> str:
    title = " ".join(_served(snapshot, node, seat))
    state = snapshot.shown_state(node, seat)
    return title if state is SeatState.SERVING else f"{title} ({state.lower()})"


def as_json(snapshot: Snapshot) -> dict[str, Any]:
    """All of it, for programs."""
    wanted = [
        {
            **of._asdict(),
            "serving": snapshot.serving(of),
            **outcome_of(snapshot, None, of.model, of.generation)._asdict(),
        }
        for of in snapshot.wanted
    ]
    nodes = [
        {
            "name": node.name,
            "room": node.room,
            "used": node.used,
            "entries": node.entries,
            "reasons": node.reasons,
            "seats": [_seat_json(snapshot, node, seat) for seat in node.seats],
        }
        for node in snapshot.nodes
    ]
    return {"nodes": nodes, "wanted": wanted}


def _served(snapshot: Snapshot, node: NodeReport, seat: Seat) -> tuple[str, str]:
    """The model and the version of a seat, also if that is not wanted any more."""
    of = snapshot.generation(seat.name.generation)
    return node.serves.get(str(seat.name), ("?", "?")) if of is None else (of.model, of.version)


def _seat_json(snapshot: Snapshot, node: NodeReport, seat: Seat) -> dict[str, Any]:
    model, version = _served(snapshot, node, seat)
    return {
        "model": model,
        "version": version,
        "generation": seat.name.generation,
        "number": seat.name.number,
        "state": snapshot.shown_state(node, seat),
    }
