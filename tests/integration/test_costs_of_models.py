"""Models that tell what a body costs, on a whole stack."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.stack import Stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("costs")) as stack:
        stack.serve("costly.py:Texts", "costly.py:Prompts", "costly.py:Learned")
        # The batcher learns how many usually cost the limit, of the cheapest lane: then it divides none.
        ask(stack, "Texts", *texts(1, 1, 1, 1), lane="cheap")
        yield stack


def ask(stack: Stack, model: str, *bodies: str, lane: str = "", **costs: int) -> list[Any]:
    """What was executed together with each of these bodies, sent in one entry, or its result if it failed.
    `costs`: of producers."""
    requests: list[dict[str, Any]] = [
        {"correlation_id": f"{model}-{at}", "body": json.dumps(body).encode()}
        for at, body in enumerate(bodies)
    ]
    for name, cost in costs.items():
        requests[int(name.removeprefix("r"))]["cost"] = cost
    stack.send_packed(model, requests, lane=lane)
    results = [stack.result(model, request["correlation_id"]) for request in requests]
    return [_together(result["body"]) if result["status"] == "OK" else result for result in results]


def _together(body: Any) -> Any:
    return body["together"] if isinstance(body, dict) else body


def texts(*sizes: int) -> list[str]:
    return ["x" * size for size in sizes]


def test_batch_is_executed_in_parts_of_the_cost_limit(stack: Stack) -> None:
    """The producers say nothing. Given 60, 30, 20, 80, 150 and 1 in one batch, expect no call over 100, but
    for the one that costs more alone."""
    found = ask(stack, "Texts", *texts(60, 30, 20, 80, 150, 1))
    assert found == [[60, 30], [60, 30], [20, 80], [20, 80], [150], [1]]


def test_the_larger_cost_counts(stack: Stack) -> None:
    found = ask(stack, "Texts", *texts(60, 30, 20, 1), r1=40, r2=1, r3=50)
    assert found == [[60, 30], [60, 30], [20, 1], [20, 1]]
    assert ask(stack, "Texts", *texts(60, 30, 20, 1), r1=41) == [[60], [30, 20, 1], [30, 20, 1], [30, 20, 1]]


def test_request_whose_cost_cannot_be_told_fails_alone(stack: Stack) -> None:
    one, raised, refused, wrong, two, three = ask(
        stack, "Texts", "x" * 10, "raise", "refuse", "wrong", "x" * 20, "x" * 30
    )
    assert one == two == three == [10, 20, 30]
    assert (raised["status"], raised["detail"]) == (
        "INTERNAL",
        "the model failed on this request: KeyError: 'no such word'",
    )
    assert (refused["status"], refused["detail"]) == ("NOT_FOUND", "there is none")
    assert (wrong["status"], wrong["detail"]) == (
        "INTERNAL",
        "the model's cost(body) returned 'much': it must be a number from 0 to 1099511627776",
    )


def test_override_of_the_limit_holds_for_what_the_model_tells(stack: Stack) -> None:
    try:
        stack.configure("Texts", max_batch_cost="30")
        assert ask(stack, "Texts", *texts(10, 20, 30, 1)) == [[10, 20], [10, 20], [30], [1]]
        stack.configure("Texts", max_batch_cost="none")
        assert ask(stack, "Texts", *texts(90, 80, 70, 60)) == [[90, 80, 70, 60]] * 4
    finally:
        stack.configure("Texts", max_batch_cost="100")


def test_batcher_learns_how_many_usually_cost_the_limit(stack: Stack) -> None:
    """Given requests that cost half of the limit, expect the second batch to have two, and no parts."""
    assert ask(stack, "Learned", *texts(50, 50, 50, 50)) == [[50, 50]] * 4
    stack.wait_until_idle("Learned")
    send = [stack.send("Learned", body=json.dumps("x" * 50)) for _ in range(4)]
    assert [stack.result("Learned", name)["batch_size"] for name in send] == [2] * 4


def test_prefill_of_a_stepping_model_is_limited_by_what_it_tells(stack: Stack) -> None:
    """Each begun together is within 100, and none of the prompts waits for ever."""
    found = ask(stack, "Prompts", *texts(60, 30, 20, 150, 1), r4=7)
    assert all(sum(together) <= 100 or together == [150] for together in found)
    assert [max(60, *found[0]), *map(max, found[3:4])] == [60, 150]
    assert 7 in found[4]


def test_prompt_whose_cost_cannot_be_told_fails_alone(stack: Stack) -> None:
    raised, good = ask(stack, "Prompts", "raise", "x" * 5)
    assert raised["detail"] == "the model failed on this request: KeyError: 'no such word'"
    assert 5 in good
