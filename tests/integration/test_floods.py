"""A flood of bodies that fail: other producers' requests in the same batches are executed together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count

import pytest

from support.stack import Stack

MODEL = "Counting"
_numbers = count()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.batcher()
        stack.worker("counting.py:Counting")
        stack.wait_for_model(MODEL)
        yield stack


def answers(stack: Stack, bodies: Sequence[str], of_tenants: Sequence[str]) -> list[object]:
    """Send requests that fill a batch, and return each result, or its status."""
    ids = [f"r{next(_numbers)}" for _ in bodies]
    requests = [
        {"correlation_id": correlation_id, "body": json.dumps(body).encode(), "tenant": tenant.encode()}
        for correlation_id, body, tenant in zip(ids, bodies, of_tenants, strict=True)
    ]
    stack.send_packed(MODEL, requests)
    envelopes = [stack.result(MODEL, correlation_id) for correlation_id in ids]
    assert {envelope["batch_size"] for envelope in envelopes} == {len(bodies)}
    return [envelope.get("body", envelope["status"]) for envelope in envelopes]


def test_others_are_not_halved_with_a_producer_on_whose_requests_the_model_raises(stack: Stack) -> None:
    bodies, tenants = ["raise", "x", "x", "x"] * 4, ["flood", "a", "b", "c"] * 4
    for _ in range(3):  # until it is known
        assert answers(stack, bodies, tenants).count("INTERNAL") == 4
    assert answers(stack, bodies, tenants) == ["INTERNAL", 12, 12, 12] * 4
    # Without a failing body nobody is apart in the end, and one call executes all.
    calls = [answers(stack, ["x"] * 16, tenants)[:2] for _ in range(4)]
    assert calls == [[4, 12], [4, 12], [16, 16], [16, 16]]


def test_others_are_executed_together_beside_refused_bodies(stack: Stack) -> None:
    for _ in range(3):
        found = answers(stack, ["refuse", "x", "x", "x"] * 4, ["refused", "a", "b", "c"] * 4)
        assert found == ["INVALID_ARGUMENT", 12, 12, 12] * 4
