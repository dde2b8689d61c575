"""What a node does next, as a function of what is wanted, of the seats, and of the nodes that live. No I/O.

1. Every node distributes the free seats over all nodes in the same way, and claims those that fall to itself.
   If two saw different snapshots and claim the same seat, the script lets one have it.
2. A seat falls to the node with most room that has its version. Nodes that could not load it come last.
3. A generation that replaces another one takes free room first. If there is none, the other one yields a
   seat, and the next one when the seat that took its place serves. Where only one process serves, its node
   runs one more than its room instead, so that there is never none.
4. What a node has and is not wanted, it gives up.
5. Once all of a generation serves, the node that has its first seat says so, and what it replaced goes.

Why: docs/decisions/0111.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from carpool.wire.nodes import NodeReport, Seat, SeatName, SeatState, Snapshot, Wanted, shortage_of


class Plan(NamedTuple):
    """What a node is to do.

    `claim`: seats to take. `stop`: own seats whose processes are to be drained. `sweep`: seats that remained
    of nodes that are gone. `settle`: generations all of which serves. `give_up`: an own seat that makes room
    for what replaces it, with its generation.
    """

    claim: list[SeatName]
    stop: list[SeatName]
    sweep: list[SeatName]
    settle: list[Wanted]
    give_up: tuple[Wanted, SeatName] | None


def make_plan(snapshot: Snapshot, own: str, *, occupied: int = 0, paused: Collection[int] = ()) -> Plan:
    """What the node named `own` is to do.

    `occupied`: how many processes it has beside its seats. `paused`: the generations that it does not try
    to load at the moment.
    """
    me = next((node for node in snapshot.nodes if node.name == own), None)
    if me is None:  # its lease has run out
        return Plan([], [], [], [], None)
    wanted = {name: of for of in snapshot.wanted for name in wanted_seats(snapshot, of)}
    given, left = _distribute(snapshot, me, occupied, paused)
    spare = [name for name in left if _takes_spare(snapshot, wanted[name], me, paused)]
    return Plan(
        claim=[*given, *spare],
        stop=[
            seat.name for seat in me.seats if seat.name not in wanted and seat.state is not SeatState.DRAINING
        ],
        sweep=[seat.name for seat in snapshot.seats.values() if _is_left_over(snapshot, seat)],
        settle=[of for of in snapshot.wanted if _is_to_settle(snapshot, of, own)],
        give_up=next(iter(_yields(snapshot, own, left)), None),
    )


def wanted_seats(snapshot: Snapshot, wanted: Wanted) -> Iterable[SeatName]:
    """The seats of a generation that are wanted: not those that it gave up. One that leaves without having
    settled keeps what serves of it, and nothing else."""
    for name in wanted.seats:
        seat = snapshot.seats.get(name)
        if seat is not None and seat.state is SeatState.YIELDED:
            continue
        if wanted.is_leaving and not wanted.is_settled and snapshot.held(name) is None:
            continue
        yield name


# --- who takes which seat ----------------------------------------------------------------------------------


def _distribute(
    snapshot: Snapshot, me: NodeReport, occupied: int, paused: Collection[int]
) -> tuple[list[SeatName], list[SeatName]]:
    """The seats that fall to this node, and those that fall to none because there is no room."""
    room = {node.name: node.free for node in snapshot.nodes}
    room[me.name] -= occupied
    given, left = list[SeatName](), list[SeatName]()
    for wanted, name in _free_seats(snapshot):
        able = [node for node in snapshot.nodes if room[node.name] > 0 and node.has(wanted)]
        if not able:
            left.append(name)
            continue
        node = min(able, key=lambda one: (wanted.title in one.reasons, -room[one.name], one.name))
        if node is me and wanted.generation in paused:
            continue  # it tries again later, and another one meanwhile if it may
        room[node.name] -= 1
        if node is me:
            given.append(name)
    return given, left


def _free_seats(snapshot: Snapshot) -> list[tuple[Wanted, SeatName]]:
    """Seats that nobody has. First those of generations that have fewest, so that each model gets one before
    another gets its second; what is known to work before what is new."""
    found = []
    for wanted in snapshot.wanted:
        names = [name for name in wanted_seats(snapshot, wanted) if snapshot.held(name) is None]
        have = wanted.replicas - len(names)
        found += [
            ((have + at, not wanted.is_settled, wanted.generation), wanted, name)
            for at, name in enumerate(names)
        ]
    return [(wanted, name) for _, wanted, name in sorted(found, key=lambda one: one[0])]


# --- replacing without room for both -----------------------------------------------------------------------


def _takes_spare(snapshot: Snapshot, wanted: Wanted, me: NodeReport, paused: Collection[int]) -> bool:
    """Whether this node takes the seat beyond its room: it has the only process that serves the model."""
    if wanted.replicas > 1 or wanted.share is not None or wanted.generation in paused or not me.has(wanted):
        return False
    served = [seat for of in _replaced_by(snapshot, wanted) for seat in _held(snapshot, of)]
    if len(served) != 1 or served[0].node != me.name or served[0].state is not SeatState.SERVING:
        return False
    return me.used <= me.room


def _yields(snapshot: Snapshot, own: str, left: list[SeatName]) -> Iterable[tuple[Wanted, SeatName]]:
    """The seats of this node that it may give up for seats that fall to no node."""
    for wanted in snapshot.wanted:
        if wanted.is_leaving or not any(name.generation == wanted.generation for name in left):
            continue
        if any(seat.state is not SeatState.SERVING for seat in _held(snapshot, wanted)):
            continue  # it loads: then the next one
        having = [node for node in snapshot.nodes if node.has(wanted)]
        if shortage_of(snapshot, wanted) or any(_makes_room(snapshot, node) for node in having):
            continue
        names = {node.name for node in having}
        seats = [
            (of, seat)
            for of in _replaced_by(snapshot, wanted)
            for seat in _held(snapshot, of)
            if seat.node in names and seat.state in (SeatState.LOADING, SeatState.SERVING)
        ]
        if seats:
            of, seat = max(seats, key=lambda one: (one[1].state is SeatState.LOADING, one[1].name))
            if seat.node == own:
                yield of, seat.name


def _replaced_by(snapshot: Snapshot, wanted: Wanted) -> list[Wanted]:
    return [of for of in snapshot.wanted if of.model == wanted.model and of.is_leaving]


def _held(snapshot: Snapshot, wanted: Wanted) -> list[Seat]:
    """The seats of a generation that living nodes have."""
    return [seat for name in wanted.seats if (seat := snapshot.held(name)) is not None]


def _makes_room(snapshot: Snapshot, node: NodeReport) -> bool:
    """Whether a process of the node ends anyway, so that nothing has to be given up for its place."""
    wanted = {name for of in snapshot.wanted for name in wanted_seats(snapshot, of)}
    return any(seat.state is SeatState.DRAINING or seat.name not in wanted for seat in node.seats)


# --- what is done ------------------------------------------------------------------------------------------


def _is_to_settle(snapshot: Snapshot, wanted: Wanted, own: str) -> bool:
    first = snapshot.held(SeatName(wanted.generation, 0))
    if wanted.is_leaving or first is None or first.node != own:
        return False
    is_new = not wanted.is_settled or (wanted.share is None and bool(_replaced_by(snapshot, wanted)))
    return is_new and snapshot.serving(wanted) == wanted.replicas


def _is_left_over(snapshot: Snapshot, seat: Seat) -> bool:
    """Whether a seat is of a generation that is not wanted, and no living node gives it back."""
    of = snapshot.generation(seat.name.generation)
    is_wanted = of is not None and seat.name.number < of.replicas
    return not is_wanted and not snapshot.lives(seat.node)
