"""What is wanted of models, and who serves it, in Redis: each move, and what it must not do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from carpool.keys import NodesKeys
from carpool.store.audit import recent_actions
from carpool.store.connection import Link
from carpool.store.nodes import NodeStore
from carpool.store.seats import SeatStore, SeatUpdate
from carpool.wire.audit import Action
from carpool.wire.nodes import NodeReport, OutcomeState, SeatName, SeatState, Snapshot, Wanted
from conftest import SERVERS
from support.operators import TESTER
from support.stack import Stack

LEASE_MS: Final = 60_000
LOADING, SERVING, DRAINING = SeatState.LOADING, SeatState.SERVING, SeatState.DRAINING


class House:
    """Nodes that hold what a test tells them, and an operator."""

    def __init__(self, stack: Stack) -> None:
        self.redis = stack.redis
        self.redis.flushdb()
        self._opened = ExitStack()
        self._url = stack.url
        self.operator = NodeStore(self._link())
        self.nodes: dict[str, SeatStore] = {}
        self._serves: dict[str, dict[str, tuple[str, str]]] = {}

    def _link(self) -> Link:
        link = Link(self._url, name="test")
        self._opened.callback(link.close)
        return link

    def close(self) -> None:
        self._opened.close()

    def hold(self, node: str, *seats: str, state: SeatUpdate = SERVING, room: int = 4) -> set[str]:
        """The node says that it has these seats; returns those that are refused."""
        store = self.nodes.setdefault(node, SeatStore(self._link(), node, LEASE_MS))
        self._serves.setdefault(node, {}).update(dict.fromkeys(seats, ("echo", "")))
        entries, serves = {"echo": ["1", "2", "10"]}, self._serves[node]
        report = NodeReport(node, room, entries, {}, serves=serves).encode()
        refused, _ = store.hold(report, {name(seat): state for seat in seats})
        return set(map(str, refused))

    def settle(self, generation: int) -> bool:
        return next(iter(self.nodes.values())).settle(self.wanted(generation))

    def wanted(self, generation: int) -> Wanted:
        found = self.operator.snapshot().generation(generation)
        assert found is not None
        return found

    def end_lease(self, node: str) -> None:
        """As if the node had been dead for some time."""
        self.redis.zadd(NodesKeys().leases, {node: 1})

    def audit(self) -> list[Action]:
        return recent_actions(self._link(), NodesKeys(), 100)

    @property
    def seats(self) -> dict[str, str]:
        return {str(seat.name): f"{seat.state} {seat.node}" for seat in self.snapshot.seats.values()}

    @property
    def snapshot(self) -> Snapshot:
        return self.operator.snapshot()

    @property
    def staying(self) -> list[int]:
        """The generations that are to go on."""
        return [wanted.generation for wanted in self.snapshot.wanted if not wanted.is_leaving]

    def load(self, version: str | None, replicas: int | None = None, share: int | None = None) -> int:
        return self.operator.load("echo", version, {}, replicas, share, actor=TESTER)

    def state(self, generation: int) -> OutcomeState:
        return self.operator.outcome("echo", generation).state

    def reason(self, generation: int) -> str:
        return self.operator.outcome("echo", generation).reason


def name(text: str) -> SeatName:
    found = SeatName.parse(text)
    assert found is not None
    return found


@pytest.fixture
def house(stacks: Callable[[Path], Stack]) -> Iterator[House]:
    house = House(stacks(SERVERS[0]))
    yield house
    house.close()


def test_seat_has_one_node_until_its_lease_has_run_out(house: House) -> None:
    house.hold("a")
    first = house.load("1", 2)
    assert house.hold("a", f"{first}/0", state=LOADING) == set()
    assert house.hold("b", f"{first}/0", f"{first}/1", state=LOADING) == {f"{first}/0"}
    house.end_lease("a")
    assert [node.name for node in house.snapshot.nodes] == ["b"]
    assert house.hold("b", f"{first}/0", state=LOADING) == set()
    assert house.hold("a", f"{first}/0") == {f"{first}/0"}  # it was paused, and goes on
    house.nodes["b"].leave()
    assert house.seats == {}


def test_version_replaces_another_one_once_all_of_it_serves(house: House) -> None:
    house.hold("a")
    first = house.load("1", 2)
    assert house.state(first) is OutcomeState.LOADING
    house.hold("a", f"{first}/0", f"{first}/1")
    assert not house.nodes["a"].fail(house.wanted(first)._replace(generation=99), "it is another one")
    assert house.state(first) is OutcomeState.LOADING  # it serves, and nobody has seen it
    assert house.settle(first) and house.state(first) is OutcomeState.SERVING
    assert house.load("1") == house.load("1", 2) == first  # the same again

    second = house.load(None)  # the newest, 10, with as many replicas
    assert house.wanted(second).version == "10" and house.wanted(second).replicas == 2
    house.hold("a", f"{second}/0")
    assert not house.settle(second) and house.staying == [second]
    house.hold("a", f"{second}/1")
    assert house.settle(second)
    assert [wanted.generation for wanted in house.snapshot.wanted] == [second]
    assert house.state(first) is OutcomeState.GONE and "replaced it" in house.reason(first)
    house.hold("a", f"{first}/0", f"{first}/1", state=DRAINING)
    assert house.state(second) is OutcomeState.LOADING  # until the old processes have ended
    house.hold("a", f"{first}/0", f"{first}/1", state="FREE")
    assert house.state(second) is OutcomeState.SERVING
    assert set(house.seats) == {f"{second}/0", f"{second}/1"}


def test_load_that_fails_leaves_what_served(house: House) -> None:
    house.hold("a")
    first = house.load("1", 2)
    house.hold("a", f"{first}/0", f"{first}/1")
    house.settle(first)
    second = house.load("2")
    house.hold("a", f"{second}/0")
    house.hold("a", f"{second}/1", state=LOADING)
    assert house.nodes["a"].yield_seat(house.wanted(first), 1)
    assert house.nodes["a"].fail(house.wanted(second), "no module named torch")
    assert house.operator.outcome("echo", second) == (OutcomeState.FAILED, "no module named torch")
    assert house.staying == [first]
    # What serves of it does so until the other one has its seat again.
    assert house.seats[f"{second}/0"] == "SERVING a" and house.seats[f"{second}/1"] == "YIELDED a"
    assert house.hold("a", f"{first}/1", state=DRAINING) == set()  # it began to end meanwhile
    house.hold("a", f"{first}/1", f"{second}/1", state="FREE")
    house.hold("a", f"{first}/1")
    assert house.settle(first)
    assert [wanted.generation for wanted in house.snapshot.wanted] == [first]
    assert not house.nodes["a"].fail(house.wanted(first), "later")  # it has settled, and is tried again


@pytest.mark.parametrize("crashes", [False, True])
def test_load_that_fails_leaves_what_served_in_part(house: House, crashes: bool) -> None:
    """Given a version of which one of two processes serves, expect that it is wanted again when what replaced
    it cannot be loaded, and is complete at last, although its process has ended meanwhile; and that what
    could not be loaded is not wanted again."""
    house.hold("a")
    first = house.load("1", 2)
    house.hold("a", f"{first}/0")
    second = house.load("2")
    assert house.operator.outcome("echo", first).state is OutcomeState.GONE
    if crashes:
        house.hold("a", f"{first}/0", state="FREE")
    house.hold("a", f"{second}/0")
    assert house.nodes["a"].fail(house.wanted(second), "no module named torch")
    assert house.staying == [first]
    assert house.operator.outcome("echo", first).state is OutcomeState.LOADING
    house.hold("a", f"{first}/0", f"{first}/1", f"{second}/0")
    assert house.settle(first)
    assert house.operator.outcome("echo", second) == (OutcomeState.FAILED, "no module named torch")
    assert [wanted.generation for wanted in house.snapshot.wanted] == [first]


def test_never_fewer_serve_than_before_less_one(house: House) -> None:
    house.hold("a")
    first = house.load("1", 3)
    house.hold("a", *(f"{first}/{index}" for index in range(3)))
    house.settle(first)
    second = house.load("2")
    old = house.wanted(first)
    assert not house.nodes["a"].yield_seat(house.wanted(second), 0)  # which does not leave
    assert house.nodes["a"].yield_seat(old, 2)
    assert not house.nodes["a"].yield_seat(old, 1)
    assert house.hold("b", f"{first}/2", state=LOADING) == {f"{first}/2"}
    house.hold("a", f"{first}/2", state="FREE")
    assert house.hold("b", f"{first}/2", state=LOADING) == {f"{first}/2"}  # nobody is to claim it
    house.hold("b", f"{second}/0", state=LOADING)
    assert not house.nodes["a"].yield_seat(old, 1)
    house.hold("b", f"{second}/0")
    assert house.nodes["a"].yield_seat(old, 1)


def test_of_two_loads_the_later_one_counts(house: House) -> None:
    house.hold("a")
    first = house.load("1", 1)
    house.hold("a", f"{first}/0")
    house.settle(first)
    second, third = house.load("2"), house.load("10")
    assert house.state(second) is OutcomeState.GONE
    assert house.reason(second) == f"generation {third} (version 10) was loaded instead"
    assert house.staying == [third]
    assert house.load("1") == first and house.staying == [first]  # back to what still serves
    assert house.settle(first) and len(house.snapshot.wanted) == 1


def test_share_is_served_beside_and_promoted_or_unloaded(house: House) -> None:
    house.hold("a")
    with pytest.raises(ValueError, match="nothing serves the rest"):
        house.load("2", share=10)
    first = house.load("1", 2)
    house.hold("a", f"{first}/0", f"{first}/1")
    house.settle(first)
    with pytest.raises(ValueError, match="only another one"):
        house.load("1", share=10)
    second = house.load("2", share=10)
    house.hold("a", f"{second}/0")
    assert house.settle(second) and house.staying == [first, second]
    assert house.operator.unload("echo", "2", actor=TESTER) == 1 and house.staying == [first]
    again = house.load("2", share=10)
    assert house.load("2") == again and house.wanted(again).replicas == 2
    assert house.staying == [again]  # all of the traffic is for it, once two serve
    assert house.operator.unload("echo", actor=TESTER) == 2 and house.snapshot.wanted == []
    assert [(one.action, one.details) for one in reversed(house.audit())] == [
        ("load", loaded(first, "1", "2", "all")),
        ("load", loaded(second, "2", "1", "10%")),
        ("unload", {"model": "echo", "versions": "2", "generations": "1"}),
        ("load", loaded(again, "2", "1", "10%")),
        ("load", loaded(again, "2", "1 -> 2", "10% -> all")),
        ("unload", {"model": "echo", "versions": "2 1", "generations": "2"}),
    ]


def loaded(generation: int, version: str, replicas: str, share: str) -> dict[str, str]:
    """What the audit says of a load."""
    of = {"model": "echo", "entry": "echo", "generation": str(generation), "version": version}
    return {**of, "replicas": replicas, "share": share}


def test_what_lacks_is_said(house: House) -> None:
    with pytest.raises(ValueError, match="no node runs"):
        house.load(None)
    house.hold("a", room=2)
    house.hold("b", room=1)
    with pytest.raises(ValueError, match="there are: 1, 2, 10"):
        house.load("3")
    with pytest.raises(ValueError, match="replicas is 0"):
        house.load("1", 0)
    first = house.load("1", 4)
    assert house.state(first) is OutcomeState.WAITING
    assert house.reason(first) == "echo needs 4 processes; node a has 2 of 2 free, node b has 1 of 1 free"
    house.hold("a", f"{first}/0", f"{first}/1", room=2)
    assert house.reason(first) == "echo needs 2 processes; node a has 0 of 2 free, node b has 1 of 1 free"
    house.load("1", 3)
    assert house.reason(first) == "2 of 3 processes of echo version 1 serve"
