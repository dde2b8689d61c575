"""What a request for a text may ask for, and which random numbers it gets."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from carpool.errors import InvalidArgumentError
from carpool_worker.models.hf.order import Order, Sampling, random_number

USER = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("body", "order"),
    [
        ("Once", Order("Once")),
        ({"prompt": [3, 0, 5]}, Order((3, 0, 5))),
        ({"prompt": "", "max_tokens": 1, "stop": None}, Order("", max_tokens=1)),
        ({"prompt": "a", "stop": "end"}, Order("a", stop=("end",))),
        (
            {"prompt": "a", "temperature": 2, "top_p": 1, "top_k": 0, "seed": -1},
            Order("a", (), None, 2.0, 1.0, 0, -1),
        ),
        ({"messages": [USER]}, Order(None, (USER,))),
        (
            {
                "messages": [
                    USER | {"content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}
                ]
            },
            Order(None, (USER | {"content": "Hel\nlo"},)),
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}]},
            Order(None, (USER, {"role": "assistant", "content": "", "tool_calls": []})),
        ),
    ],
)
def test_order_is_read(body: Any, order: Order) -> None:
    assert Order.read(body) == order


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (7, "body: must be a text or a map, not int"),
        ({}, "body: must have either prompt or messages"),
        ({"prompt": None, "messages": None}, "body: must have either prompt or messages"),
        ({"prompt": "a", "messages": [USER]}, "body: must have either prompt or messages"),
        ({"prompt": "a", "max_token": 5}, "max_token: unknown; known are prompt, messages, max_tokens,"),
        ({"prompt": ["a"]}, "prompt: must be a text, or a list of tokens"),
        ({"prompt": []}, "prompt: must be a text, or a list of tokens"),
        ({"prompt": [True]}, "prompt: must be a text, or a list of tokens"),
        ({"prompt": [-1]}, "prompt: must be a text, or a list of tokens"),
        ({"messages": []}, "messages: must be a list of at least one message"),
        ({"messages": [USER, "a"]}, r"messages\[1\]: must be a map"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\].role: must be a text"),
        ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\].content: must be a text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            r"messages\[0\].content\[0\]: must be a text",
        ),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens: must be a whole number from 1, not 0"),
        ({"prompt": "a", "max_tokens": 1.0}, "max_tokens: must be a whole number"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens: must be a whole number"),
        ({"prompt": "a", "temperature": 2.1}, "temperature: must be a number from 0 to 2, not 2.1"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature: must be a number from 0 to 2, not nan"),
        ({"prompt": "a", "top_p": 0}, "top_p: must be a number above 0, and at most 1, not 0"),
        ({"prompt": "a", "top_k": -1}, "top_k: must be a whole number from 0"),
        ({"prompt": "a", "seed": "1"}, "seed: must be a whole number, not '1'"),
        ({"prompt": "a", "stop": ["a", "b", "c", "d", "e"]}, "stop: must be a list of at most 4 texts"),
        ({"prompt": "a", "stop": [""]}, "stop: must have texts that are not empty"),
    ],
)
def test_error_names_the_field(body: Any, error: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^INVALID_ARGUMENT: {error}"):
        Order.read(body)


def test_what_a_request_does_not_say_is_as_the_model_usually_samples() -> None:
    usual = Sampling(0.7, 0.8, 20)
    assert Order.read({"prompt": "a", "temperature": 0, "top_k": 0}).sampling(usual) == Sampling(0, 0.8, 0)
    assert Order.read("a").sampling(usual) == usual


def test_random_numbers_depend_on_the_seed_and_the_number_of_the_token_alone() -> None:
    """Given a seed, expect the same numbers for any request; without one, other numbers for each request."""
    seeded = Order.read({"prompt": "a", "seed": 5})
    assert seeded.key("one") == Order.read({"prompt": "b", "seed": 5}).key("other")
    keys = [seeded.key(""), Order("a", seed=6).key(""), Order("a").key("one"), Order("a").key("other")]
    assert len({random_number(key, token) for key in keys for token in range(500)}) == 2000
    drawn = [random_number(keys[0], token) for token in range(2000)]
    assert all(0 <= number < 1 for number in drawn)
    assert abs(statistics.fmean(drawn) - 0.5) < 0.03 and abs(statistics.pstdev(drawn) - 12**-0.5) < 0.02
