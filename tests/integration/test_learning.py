"""What a batcher learns of l(n) on a running stack: only from what a model executed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest

from carpool.keys import Keys
from carpool.messages.settled import BatchSettled, ExecutedOf
from carpool.wire.batches import decode_settled
from support.stack import Stack
from support.waiting import wait_until

MODEL = "Paced"
SIZES = (1, 2, 4, 8, 16)
_sent: list[str] = []  # the correlation ID of each request


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.batcher()
        stack.worker("faulty.py:Paced")
        stack.wait_for_model(MODEL)
        for size in SIZES * 3:
            assert statuses(stack, ["x"] * size) == {"OK": size}
        yield stack


def statuses(stack: Stack, bodies: Sequence[str]) -> Counter[str]:
    """Send requests in one entry, and return how many ended in each way."""
    ids = [f"r{len(_sent) + position}" for position in range(len(bodies))]
    _sent.extend(ids)
    requests = [
        {"correlation_id": correlation_id, "body": json.dumps(body).encode()}
        for correlation_id, body in zip(ids, bodies, strict=True)
    ]
    stack.send_packed(MODEL, requests)
    return Counter(stack.result(MODEL, correlation_id)["status"] for correlation_id in ids)


def executed(stack: Stack, batches: int) -> list[int]:
    """How many requests were executed together, of each of the last batches."""
    entries = stack.redis.xrevrange(Keys(MODEL).settled, count=batches)
    return [int(fields[b"executed"]) for _, fields in entries]


def reported(stack: Stack) -> dict[int, int]:
    """What the batcher reports of l(n), in us, once its report covers all batches that were dispatched."""
    report: dict[str, object] = {}

    def is_current() -> bool:
        report.update(json.loads(stack.redis.get(Keys(MODEL).report) or b"{}"))
        gauges = report.get("gauges", {})
        assert isinstance(gauges, dict)
        return report.get("requests") == len(_sent) and not gauges["batches_in_flight"]

    wait_until(is_current, description="a report after the last batch")
    learned = report["learned"]
    assert isinstance(learned, list)
    return dict(learned)


def are_times_of_one_execution(stack: Stack, learned: dict[int, int]) -> bool:
    """Whether l(n) is, of each size, the time of a batch that was executed normally, as workers measured it.

    A batcher evens out times that fall with the size, which they do on a busy machine, so what it learned of
    a size lies among those of all sizes. What was not executed at all takes less, what was executed in halves
    or killed its process takes longer.
    """
    settled = [
        decode_settled([item for field in fields.items() for item in field])
        for _, fields in stack.redis.xrange(Keys(MODEL).settled)
    ]
    times = [
        (batch.executed, batch.compute_us + batch.overhead_us)
        for batch in settled
        if isinstance(batch, BatchSettled) and batch.executed
    ]
    if all(time_us < longest_us(size) for size, time_us in times):
        return all(4000 + 2000 * size <= time_us < longest_us(size) for size, time_us in learned.items())
    measured_us = [time_us for _, time_us in times]
    return all(min(measured_us) <= time_us <= max(measured_us) for time_us in learned.values())


def longest_us(size: int) -> float:
    """What a batch takes at most, on a machine that is not busy; one of 16 that is halved takes longer."""
    return 1.6 * (4000 + 2000 * size) + 10_000


@pytest.mark.parametrize(
    ("flood", "ends"),
    [
        (["refuse"] * 16, {"INVALID_ARGUMENT": 16}),
        (["raise"], {"INTERNAL": 1}),
        (["raise", *["x"] * 15], {"INTERNAL": 1, "OK": 15}),
        (["kill", "x"], {"ABORTED": 1, "OK": 1}),
    ],
)
def test_what_was_not_executed_normally_teaches_nothing(
    stack: Stack, flood: list[str], ends: dict[str, int]
) -> None:
    for size in SIZES:  # as many batches of each size as before teach the same
        statuses(stack, ["x"] * size)
    before = stack.redis.xlen(Keys(MODEL).settled)
    for _ in range(2 if "kill" in flood else 12):
        assert statuses(stack, flood) == ends
    floods = stack.redis.xlen(Keys(MODEL).settled) - before
    assert set(executed(stack, floods)) == {0}
    learned = reported(stack)
    # Where l(n) has a step, as on a busy machine, it is told on both sides: in the middle of two known sizes
    middles = {(small + large) // 2 for small, large in pairwise(SIZES)}
    assert set(SIZES) <= set(learned) <= {*SIZES, *middles, *[middle + 1 for middle in middles]}
    assert are_times_of_one_execution(stack, {size: learned[size] for size in SIZES}), learned


def test_only_the_valid_requests_of_a_batch_were_executed(stack: Stack) -> None:
    assert statuses(stack, ["refuse", "x", "refuse", "x"]) == {"INVALID_ARGUMENT": 2, "OK": 2}
    assert executed(stack, 1) == [2]
    assert are_times_of_one_execution(stack, {2: reported(stack)[2]})


def test_a_batch_tells_of_whose_requests_not_all_were_executed(stack: Stack) -> None:
    bodies_of = {"flood": ["refuse", "refuse"], "mixed": ["x", "refuse"], "other": ["x"]}
    requests = [
        {"correlation_id": f"{tenant}{at}", "body": json.dumps(body).encode(), "tenant": tenant}
        for tenant, bodies in bodies_of.items()
        for at, body in enumerate(bodies)
    ]
    stack.send_packed(MODEL, requests)
    _sent.extend(str(request["correlation_id"]) for request in requests)
    for request in requests:
        stack.result(MODEL, str(request["correlation_id"]))

    ((_, fields),) = stack.redis.xrevrange(Keys(MODEL).settled, count=1)
    settled = decode_settled([part for pair in fields.items() for part in pair])
    assert isinstance(settled, BatchSettled)
    assert sorted(settled.of_producers) == [
        ExecutedOf(("flood", ""), 2, 0),
        ExecutedOf(("mixed", ""), 2, 1),
    ]
