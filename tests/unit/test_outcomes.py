"""What who waits for a load or an unload is told, and when."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from carpool.errors import UnavailableError
from carpool.wire.nodes import NodeReport, Outcome, OutcomeState, Seat, SeatName, SeatState, Snapshot, Wanted
from carpool_gateway.outcomes import POLL_S, ROOM_S, Outcomes, _Load


def wanted(generation: int, **more: Any) -> Wanted:
    fields: dict[str, Any] = {"model": "m", "version": "1", "parameters": {}, "replicas": 1, "share": None}
    return Wanted(generation=generation, entry="m", **{**fields, **more})


NOTHING = Snapshot([], {}, [])


async def test_a_load_waits_for_room_for_a_while() -> None:
    load = _Load("m", 1, end_s=100.0)
    waiting = Outcome(OutcomeState.WAITING, "no room")
    load.look(NOTHING, waiting, 10.0)
    load.look(NOTHING, Outcome(OutcomeState.LOADING, "0 of 1"), 10.0 + ROOM_S)  # there was some
    load.look(NOTHING, waiting, 11.0 + ROOM_S)
    load.look(NOTHING, waiting, 10.9 + 2 * ROOM_S)
    assert not load.ended.done()
    load.look(NOTHING, waiting, 11.0 + 2 * ROOM_S)
    assert load.ended.result() == waiting


async def test_a_load_that_takes_long_is_told_at_the_end() -> None:
    load, loading = _Load("m", 1, end_s=100.0), Outcome(OutcomeState.LOADING, "0 of 1")
    load.look(NOTHING, loading, 99.9)
    assert not load.ended.done()
    load.look(NOTHING, loading, 100.0)
    assert load.ended.result() == loading


@pytest.mark.parametrize(
    "later", [wanted(1), wanted(3, is_leaving=True), wanted(3, share=10), wanted(3, model="n")]
)
async def test_only_a_load_in_its_place_is_waited_for_instead(later: Wanted) -> None:
    gone = Outcome(OutcomeState.GONE, "it was unloaded")
    load = _Load("m", 2, end_s=100.0)
    load.look(Snapshot([later], {}, []), gone, 1.0)
    assert load.ended.result() == gone
    other = _Load("m", 2, end_s=100.0)
    other.look(Snapshot([wanted(3)], {}, []), gone, 1.0)
    assert (other.ended.done(), other.generation) == (False, 3)


class Nodes:
    """Nodes whose tellings a test decides."""

    def __init__(self) -> None:
        self.told: Outcome | Exception = Outcome(OutcomeState.LOADING, "0 of 1")
        self.snapshot = NOTHING
        self.asked: list[dict[int, str]] = []

    async def outcomes(self, models: dict[int, str]) -> tuple[Snapshot, dict[int, Outcome]]:
        self.asked.append(models)
        if isinstance(self.told, Exception):
            raise self.told
        return self.snapshot, dict.fromkeys(models, self.told)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    monkeypatch.setattr("carpool_gateway.outcomes.POLL_S", POLL_S / 100)
    return Nodes()


FAR_S = 1e9


async def test_one_question_is_for_all_who_wait(nodes: Nodes) -> None:
    outcomes = Outcomes(cast(Any, nodes))
    loads = [asyncio.ensure_future(outcomes.of_load("m", at % 3, FAR_S)) for at in range(30)]
    while len(nodes.asked) < 3:
        await asyncio.sleep(0)
    assert nodes.asked[-1] == {0: "m", 1: "m", 2: "m"}
    loads[0].cancel()  # its client went away
    nodes.told = UnavailableError("no Redis")
    before = len(nodes.asked)
    while len(nodes.asked) < before + 3:
        await asyncio.sleep(0)
    nodes.told = Outcome(OutcomeState.SERVING, "")
    assert await asyncio.gather(*loads[1:]) == [nodes.told] * 29
    before = len(nodes.asked)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(nodes.asked) <= before + 1  # nobody waits, so nothing is asked
    assert (await outcomes.of_load("m", 9, FAR_S)).state is OutcomeState.SERVING


async def test_an_unload_is_over_when_no_living_node_has_a_process(nodes: Nodes) -> None:
    outcomes = Outcomes(cast(Any, nodes))
    assert await outcomes.of_unload([], FAR_S)
    seat = Seat(SeatName(1, 0), SeatState.DRAINING, "node")
    nodes.snapshot = Snapshot([], {seat.name: seat}, [NodeReport("node", 1, {}, {}, [seat])])
    assert not await outcomes.of_unload([wanted(1)], 0.0)
    unload = asyncio.ensure_future(outcomes.of_unload([wanted(1)], FAR_S))
    while len(nodes.asked) < 3:
        await asyncio.sleep(0)
    assert not unload.done()
    nodes.snapshot = nodes.snapshot._replace(nodes=[])
    assert await unload


async def test_who_waits_is_told_that_redis_or_the_gateway_is_gone(nodes: Nodes) -> None:
    outcomes = Outcomes(cast(Any, nodes))
    nodes.told = UnavailableError("no Redis")
    with pytest.raises(UnavailableError, match="no Redis"):
        await outcomes.of_load("m", 1, 0.0)
    load = asyncio.ensure_future(outcomes.of_load("m", 1, FAR_S))
    while len(nodes.asked) < 2:
        await asyncio.sleep(0)
    outcomes.stop()
    with pytest.raises(UnavailableError, match="the gateway stops"):
        await load
    with pytest.raises(UnavailableError, match="the gateway stops"):
        await outcomes.of_load("m", 2, FAR_S)
