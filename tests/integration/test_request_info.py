"""What models of each kind are told of a request, on a whole stack."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from support.stack import Stack

MODELS: Final = ("plain", "Stepping", "generating")
TOLD: Final = {
    "content_type": "text/plain",
    "accept": "application/json",
    "priority": 7,
    "cost": 3,
    "tenant": "gold",
    "lane": "short",
    "user": "u1",
    "deliveries": 1,
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("told")) as stack:
        stack.batcher()
        for model in (*MODELS, "Killed"):
            stack.worker(f"told.py:{model}")
        for model in (*MODELS, "Killed"):
            stack.wait_for_model(model)
        yield stack


def ask(stack: Stack, model: str, **fields: Any) -> Any:
    """The value with which a model answers; a generator's is a list of the one that it yields."""
    result = stack.result(model, stack.send(model, **fields))
    assert result["status"] == "OK", result
    body = result["body"]
    value = json.loads(body) if isinstance(body, bytes | str) else body
    return value[0] if isinstance(value, list) else value


@pytest.mark.parametrize("model", MODELS)
def test_model_is_told_all_of_a_request(stack: Stack, model: str) -> None:
    sent = {name: value for name, value in TOLD.items() if name != "deliveries"}
    told = ask(stack, model, body="x", expiration=60_000, **sent)
    assert {name: told[name] for name in TOLD} == TOLD
    assert 0 <= told["age_s"] < 60 and 0 < told["left_s"] <= 60 and told["agrees"]


@pytest.mark.parametrize("model", MODELS)
def test_request_that_says_nothing_has_the_defaults(stack: Stack, model: str) -> None:
    told = ask(stack, model, body="1", user="u")
    named = ("content_type", "accept", "priority", "cost", "tenant", "lane", "left_s")
    assert [told[name] for name in named] == ["application/json", "", 4, 1, "", "", None]


def test_request_that_may_have_been_executed_is_delivered_again(stack: Stack) -> None:
    assert ask(stack, "Killed", body='"live"') == 1
    assert ask(stack, "Killed", body='"die"') == 2
