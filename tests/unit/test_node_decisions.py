"""What a node does next: who takes which seat, what makes room, and what is given up."""

from __future__ import annotations

from typing import Final

from carpool.wire.nodes import NodeReport, Seat, SeatName, SeatState, Snapshot, Wanted, shortage_of
from carpool_worker.node.decisions import Plan, make_plan

ENTRIES: Final = {"echo": ["1", "2"], "other": ["1"]}
LOADING, SERVING, DRAINING = SeatState.LOADING, SeatState.SERVING, SeatState.DRAINING
YIELDED: Final = SeatState.YIELDED


def wanted(
    generation: int,
    replicas: int = 1,
    *,
    model: str = "echo",
    version: str = "1",
    settled: bool = False,
    leaving: bool = False,
    share: int | None = None,
) -> Wanted:
    return Wanted(model, generation, version, {}, replicas, share, model, settled, leaving)


def snapshot_with(
    wanted: list[Wanted],
    seats: dict[tuple[int, int], tuple[SeatState, str]],
    rooms: dict[str, int],
    *,
    reasons: dict[str, dict[str, str]] | None = None,
    entries: dict[str, dict[str, list[str]]] | None = None,
) -> Snapshot:
    found = {SeatName(*name): Seat(SeatName(*name), state, node) for name, (state, node) in seats.items()}
    nodes = [
        NodeReport(
            name,
            room,
            (entries or {}).get(name, ENTRIES),
            (reasons or {}).get(name, {}),
            sorted(seat for seat in found.values() if seat.node == name),
        )
        for name, room in sorted(rooms.items())
    ]
    return Snapshot(wanted, found, nodes)


def claims(snapshot: Snapshot) -> dict[str, list[tuple[int, int]]]:
    """What each node claims."""
    return {
        node.name: [(name.generation, name.number) for name in make_plan(snapshot, node.name).claim]
        for node in snapshot.nodes
    }


def is_idle(plan: Plan) -> bool:
    return not any(plan)


def test_free_seats_are_distributed_over_all_room_and_each_has_one_claimant() -> None:
    snapshot = snapshot_with([wanted(1, 3)], {}, {"a": 2, "b": 4})
    assert claims(snapshot) == {"a": [(1, 2)], "b": [(1, 0), (1, 1)]}


def test_each_model_gets_one_seat_before_another_gets_its_second() -> None:
    snapshot = snapshot_with([wanted(1, 3), wanted(2, 1, model="other")], {}, {"a": 2})
    assert claims(snapshot) == {"a": [(1, 0), (2, 0)]}


def test_seats_of_a_dead_node_are_taken_and_what_it_left_of_others_is_swept() -> None:
    seats = {(1, 0): (SERVING, "dead"), (9, 0): (SERVING, "dead"), (9, 1): (YIELDED, "")}
    plan = make_plan(snapshot_with([wanted(1)], seats, {"a": 1}), "a")
    assert plan.claim == [(1, 0)] and plan.sweep == [(9, 0), (9, 1)]


def test_node_whose_lease_has_run_out_does_nothing() -> None:
    assert is_idle(make_plan(snapshot_with([wanted(1)], {(1, 0): (SERVING, "b")}, {"a": 1}), "b"))


def test_node_without_the_version_takes_nothing_and_one_that_failed_comes_last() -> None:
    new = wanted(1, 2, version="2")
    only_old = {"a": {"echo": ["1"]}}
    assert claims(snapshot_with([new], {}, {"a": 4, "b": 2}, entries=only_old)) == {
        "a": [],
        "b": [(1, 0), (1, 1)],
    }
    failed = {"a": {new.title: "no memory"}}
    assert claims(snapshot_with([new], {}, {"a": 4, "b": 1}, reasons=failed)) == {
        "a": [(1, 1)],
        "b": [(1, 0)],
    }


def test_paused_generation_is_left_to_its_next_try() -> None:
    snapshot = snapshot_with([wanted(1), wanted(2, model="other")], {}, {"a": 4})
    assert make_plan(snapshot, "a", paused={1}).claim == [(2, 0)]


def test_processes_that_drain_take_room_until_they_have_ended() -> None:
    snapshot = snapshot_with([wanted(2)], {(1, 0): (DRAINING, "a")}, {"a": 1})
    assert is_idle(make_plan(snapshot, "a"))
    assert is_idle(make_plan(snapshot_with([wanted(2)], {}, {"a": 1}), "a", occupied=1))


def test_what_is_not_wanted_is_stopped_once() -> None:
    seats = {
        (1, 0): (SERVING, "a"),
        (1, 1): (SERVING, "a"),  # of more replicas, before
        (2, 0): (LOADING, "a"),  # unloaded
        (3, 0): (DRAINING, "a"),
        (1, 2): (YIELDED, "b"),
    }
    snapshot = snapshot_with([wanted(1, settled=True)], seats, {"a": 4, "b": 4})
    assert make_plan(snapshot, "a").stop == [(1, 1), (2, 0)]
    assert make_plan(snapshot, "b").stop == [(1, 2)]


def test_new_version_takes_free_room_and_settles_when_all_of_it_serves() -> None:
    old, new = wanted(1, 2, settled=True, leaving=True), wanted(2, 2, version="2")
    seats = {(1, 0): (SERVING, "a"), (1, 1): (SERVING, "a")}
    assert claims(snapshot_with([old, new], seats, {"a": 4})) == {"a": [(2, 0), (2, 1)]}
    seats |= {(2, 0): (SERVING, "a"), (2, 1): (LOADING, "a")}
    assert is_idle(make_plan(snapshot_with([old, new], seats, {"a": 4}), "a"))
    seats |= {(2, 1): (SERVING, "a")}
    assert make_plan(snapshot_with([old, new], seats, {"a": 4}), "a").settle == [new]


def test_without_room_for_both_seats_are_exchanged_one_after_the_other() -> None:
    old, new = wanted(1, 2, settled=True, leaving=True), wanted(2, 2, version="2")
    seats = {(1, 0): (SERVING, "a"), (1, 1): (SERVING, "b")}
    rooms = {"a": 1, "b": 1}
    snapshot = snapshot_with([old, new], seats, rooms)
    assert make_plan(snapshot, "b").give_up == (old, (1, 1)) and is_idle(make_plan(snapshot, "a"))
    seats |= {(1, 1): (YIELDED, "b")}
    snapshot = snapshot_with([old, new], seats, rooms)
    assert make_plan(snapshot, "b").stop == [(1, 1)] and is_idle(make_plan(snapshot, "a"))
    seats |= {(1, 1): (YIELDED, "")}
    assert claims(snapshot_with([old, new], seats, rooms)) == {"a": [], "b": [(2, 0)]}
    seats |= {(2, 0): (LOADING, "b")}
    assert is_idle(make_plan(snapshot_with([old, new], seats, rooms), "a"))
    seats |= {(2, 0): (SERVING, "b")}
    assert make_plan(snapshot_with([old, new], seats, rooms), "a").give_up == (old, (1, 0))


def test_seat_that_does_not_serve_is_given_up_first() -> None:
    old, new = wanted(1, 2, settled=True, leaving=True), wanted(2, 2, version="2")
    seats = {(1, 0): (LOADING, "a"), (1, 1): (SERVING, "a")}
    assert make_plan(snapshot_with([old, new], seats, {"a": 2}), "a").give_up == (old, (1, 0))


def test_only_process_of_a_model_is_replaced_beyond_the_room() -> None:
    old, new = wanted(1, settled=True, leaving=True), wanted(2, version="2")
    seats = {(1, 0): (SERVING, "a"), (3, 0): (SERVING, "b")}
    everything = [old, new, wanted(3, model="other", settled=True)]
    assert claims(snapshot_with(everything, seats, {"a": 1, "b": 1})) == {"a": [(2, 0)], "b": []}
    assert claims(snapshot_with(everything, seats, {"a": 1, "b": 2})) == {"a": [], "b": [(2, 0)]}
    assert not shortage_of(snapshot_with(everything, seats, {"a": 1, "b": 1}), new)


def test_nothing_is_given_up_for_what_will_not_have_room() -> None:
    old, new = wanted(1, 2, settled=True, leaving=True), wanted(2, 3, version="2")
    seats = {(1, 0): (SERVING, "a"), (1, 1): (SERVING, "a")}
    snapshot = snapshot_with([old, new], seats, {"a": 2})
    assert is_idle(make_plan(snapshot, "a"))
    assert shortage_of(snapshot, new) == "echo needs 3 processes; node a has 2 of 2 free"


def test_share_takes_free_room_only_and_nothing_leaves_for_it() -> None:
    main, share = wanted(1, settled=True), wanted(2, version="2", share=10)
    seats = {(1, 0): (SERVING, "a")}
    full = snapshot_with([main, share], seats, {"a": 1})
    assert is_idle(make_plan(full, "a"))
    assert shortage_of(full, share) == "echo needs 1 process; node a has 0 of 1 free"
    seats |= {(2, 0): (SERVING, "a")}
    assert make_plan(snapshot_with([main, share], seats, {"a": 2}), "a").settle == [share]


def test_of_a_load_that_failed_what_serves_stays_until_the_other_one_is_complete() -> None:
    old, failed = wanted(1, 2, settled=True), wanted(2, 2, version="2", leaving=True)
    seats = {(1, 0): (SERVING, "a"), (2, 0): (SERVING, "a"), (2, 1): (YIELDED, "")}
    plan = make_plan(snapshot_with([old, failed], seats, {"a": 2}), "a")
    assert plan == Plan([], [], [], [], (failed, SeatName(2, 0)))
    seats |= {(1, 1): (SERVING, "a")}
    assert make_plan(snapshot_with([old, failed], seats, {"a": 3}), "a").settle == [old]
