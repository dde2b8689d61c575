"""Nodes with processes of the test's own, operators and failures, in any order.

The nodes, their decisions and the scripts are the real ones. Processes are told when they serve, fail or end;
time is the test's, but for leases, which are Redis's: a node that is frozen long enough loses its lease.
"""

from __future__ import annotations

import os
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from carpool.keys import NodesKeys
from carpool.store.connection import Link
from carpool.store.nodes import NodeStore
from carpool.store.seats import SeatStore
from carpool.wire.nodes import OutcomeState, Wanted
from carpool_worker.node.node import Node
from support.operators import TESTER
from support.stack import Stack

MODELS: Final = ("a", "b")
BROKEN: Final = "3"  # the version that cannot be loaded
VERSIONS: Final = st.sampled_from(["1", "2", "1", "2", BROKEN])
ENTRIES: Final = {model: ["1", "2", BROKEN] for model in MODELS}
LEASE_MS: Final = 600_000
EXAMPLES: Final = int(os.environ.get("CARPOOL_TEST_NODES_EXAMPLES", "25"))
DRAIN_S: Final = 30.0
TURNS_MAX: Final = 100
QUIET_TURNS: Final = 3  # in which nothing changes: then nothing will


class Process:
    """A process of a seat. `is_draining` processes end when they are told to."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.serves = False
        self.is_drained = False
        self.ended = ""
        self.cannot_load = False
        self.is_draining = False

    def load(self) -> None:
        if not self.ended and not self.is_draining:
            self.cannot_load = self.wanted.version == BROKEN
            self.serves = not self.cannot_load
            self.ended = "it cannot be loaded" if self.cannot_load else ""

    def poll(self) -> None:
        pass

    def drain(self) -> None:
        self.is_draining = True

    def kill(self) -> None:
        self.ended = "it was killed"

    def wait(self, within_s: float) -> bool:
        self.ended = "it was drained"
        return True

    @property
    def takes_batches(self) -> bool:
        return self.serves and not self.is_draining and not self.ended


class Machine(RuleBasedStateMachine):
    """Two nodes at first, with room for one and two processes."""

    stack: Stack

    def __init__(self) -> None:
        super().__init__()
        self.redis: Any = self.stack.redis
        self.redis.flushdb()
        self.links: list[Link] = []
        self.operator = NodeStore(self._link())
        self.now_s = 1000.0
        self.nodes: dict[str, Node] = {}
        self.processes: dict[str, list[Process]] = {}
        self.rooms: dict[str, int] = {}
        self.number = 0
        self.frozen: set[str] = set()
        self.served: dict[str, int] = {}  # how many serve each model, without failures since it settled
        for room in (1, 2):
            self.add_node(room)

    def _link(self) -> Link:
        link = Link(self.stack.url, name="test")
        self.links.append(link)
        return link

    def teardown(self) -> None:
        for link in self.links:
            link.close()

    # --- nodes -------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.nodes) < 3)
    @rule(room=st.integers(1, 3))
    def add_node(self, room: int) -> None:
        self.number += 1
        name = f"n{self.number}"
        processes: list[Process] = []

        def start(wanted: Wanted, _slot: int) -> Process:
            processes.append(process := Process(wanted))
            return process

        store = SeatStore(self._link(), name, LEASE_MS)
        self.processes[name], self.rooms[name] = processes, room
        self.nodes[name] = Node(
            store, name, room, lambda: (ENTRIES, {}), start, drain_s=DRAIN_S, now_s=lambda: self.now_s
        )
        self.nodes[name].turn()

    def _live(self) -> list[str]:
        return sorted(set(self.nodes) - self.frozen)

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def turn(self, data: st.DataObject) -> None:
        self.now_s += 0.5
        self.nodes[data.draw(st.sampled_from(self._live()))].turn()

    @precondition(lambda self: len(self._live()) > 1)
    @rule(data=st.data(), dies=st.booleans())
    def lose_a_node(self, data: st.DataObject, dies: bool) -> None:
        """It dies, or is frozen for longer than its lease."""
        self.served.clear()
        name = data.draw(st.sampled_from(self._live()))
        self.redis.zadd(NodesKeys().leases, {name: 1})
        if dies:
            del self.nodes[name]
            self.processes[name].clear()
        else:
            self.frozen.add(name)

    @precondition(lambda self: self.frozen)
    @rule()
    def thaw(self) -> None:
        self.nodes[self.frozen.pop()].turn()

    # --- processes -----------------------------------------------------------------------------------------

    def _running(self) -> list[Process]:
        return [one for name in self._live() for one in self.processes[name] if not one.ended]

    @precondition(lambda self: self._running())
    @rule(data=st.data())
    def load_one(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self._running())).load()

    @precondition(lambda self: any(one.is_draining for one in self._running()))
    @rule()
    def finish_draining(self) -> None:
        for process in self._running():
            if process.is_draining:
                process.ended = "it has drained"

    @precondition(lambda self: self._running())
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        self.served.clear()
        data.draw(st.sampled_from(self._running())).ended = "it crashed"

    # --- operators -----------------------------------------------------------------------------------------

    @rule(
        model=st.sampled_from(MODELS),
        version=VERSIONS,
        replicas=st.sampled_from([None, 1, 2]),
    )
    def ask_to_load(self, model: str, version: str, replicas: int | None) -> None:
        if self._live():
            if replicas is not None:
                self.served.pop(model, None)
            self.operator.load(model, version, {}, replicas, None, actor=TESTER)

    @rule(model=st.sampled_from(MODELS))
    def ask_to_unload(self, model: str) -> None:
        self.served.pop(model, None)
        self.operator.unload(model, actor=TESTER)

    @precondition(lambda self: self.served)
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        """What serves is replaced, perhaps by what cannot be loaded."""
        model = data.draw(st.sampled_from(sorted(self.served)))
        self.operator.load(model, data.draw(VERSIONS), {}, None, None, actor=TESTER)
        self.settle_down()

    @rule()
    def settle_down(self) -> None:
        """All goes well for a while: expect that what is wanted is reached as far as there is room."""
        while self.frozen:
            self.thaw()
        quiet, before = 0, None
        for _ in range(TURNS_MAX):
            self.now_s += 61.0  # longer than any pause
            for name in self._live():
                self.nodes[name].turn()
                self.check_replacing()
            for process in self._running():
                process.load()
                process.ended = process.ended or ("it has drained" if process.is_draining else "")
            for name in self.processes:
                self.processes[name][:] = [one for one in self.processes[name] if not one.ended]
            snapshot = self.operator.snapshot()
            quiet, before = (quiet + 1 if snapshot == before else 0), snapshot
            if quiet == QUIET_TURNS:
                break
        else:
            raise AssertionError(f"it does not come to rest: {snapshot}")
        seats_max = sum(self.rooms[name] for name in self._live())
        asked = sum(wanted.replicas for wanted in snapshot.wanted if not wanted.is_leaving)
        for model in MODELS:
            of_model = [wanted for wanted in snapshot.wanted if wanted.model == model]
            takes = [one for one in self._running() if one.takes_batches and one.wanted.model == model]
            if asked <= seats_max:
                assert not any(wanted.is_leaving for wanted in of_model)
                (serving,) = of_model or (None,)
                assert len(takes) == (0 if serving is None else serving.replicas)
                assert {one.wanted.generation for one in takes} == (
                    set() if serving is None else {serving.generation}
                )
                if serving is not None:
                    assert self.operator.outcome(model, serving.generation).state is OutcomeState.SERVING
                    self.served[model] = serving.replicas
        if asked <= seats_max:
            assert len(snapshot.seats) == asked, "nothing is left over"

    # --- what always holds ---------------------------------------------------------------------------------

    @invariant()
    def no_two_nodes_have_a_seat(self) -> None:
        """As Redis has it, a seat has one node; and a node runs at most one process for each of its seats."""
        for name in self._live():
            running = [one for one in self.processes[name] if not one.ended]
            assert len(running) <= self.rooms[name] + 1, "one beyond the room, for the only one of a model"

    @invariant()
    def check_replacing(self) -> None:
        """Unless something crashed, or other replicas are wanted, at most one less serves than before."""
        for model, replicas in self.served.items():
            takes = [one for one in self._running() if one.takes_batches and one.wanted.model == model]
            assert len(takes) >= max(1, replicas - 1), f"{len(takes)} of {replicas} serve {model}"


def test_nodes_reach_what_is_wanted_whatever_happens(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "stack", stack, raising=False)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
