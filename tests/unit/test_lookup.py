"""How a client finds a model, with a Redis that stops replying."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from carpool.client import lookup
from carpool.client.lookup import ModelLookup
from carpool.errors import CarpoolError, DeadlineExceededError

TIMEOUT_S = 0.05

Look = Callable[[ModelLookup], Awaitable[Any]]
BOTH = pytest.mark.parametrize(
    ("look", "message"),
    [
        (
            lambda one: one.batch_size("m", TIMEOUT_S),
            "model 'm': a worker is loading it, for 0.05 s or longer",
        ),
        (
            lambda one: one.wait_ready("m", TIMEOUT_S),
            "model 'm' is not ready after 0.05 s: a worker is loading it",
        ),
    ],
    ids=["batch_size", "wait_ready"],
)


def loading(looks: int) -> ModelLookup:
    """Redis tells as many times that a worker loads the model, and then is silent."""
    left = looks

    async def call(command: str, *_: Any) -> Any:
        nonlocal left
        if not left:
            await asyncio.Event().wait()
        left -= command == "EXISTS"  # the last command of a look
        return 1 if command == "EXISTS" else None

    return ModelLookup(call, "carpool")


@BOTH
@pytest.mark.parametrize("looks", [1, 3])
async def test_what_was_missing_is_told_where_redis_is_silent_later(
    look: Look, message: str, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "POLL_S", 0.001)
    with pytest.raises(DeadlineExceededError) as error:
        await look(loading(looks))
    assert message in str(error.value)


@BOTH
async def test_silence_from_the_beginning_is_no_state_of_the_model(
    look: Look, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "POLL_S", 0.001)
    with pytest.raises(TimeoutError) as error:
        await look(loading(0))
    assert not isinstance(error.value, CarpoolError), message
