"""What the gateway knows of models: how often it is read, and how old it may be."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from carpool.errors import NotFoundError, UnavailableError
from carpool.wire.registration import encode_registration
from carpool.wire.tensors import TensorSpec
from carpool_gateway import catalog
from carpool_gateway.catalog import AGE_S_MAX, Catalog


class Calls:
    """Redis, which replies when the test lets it."""

    def __init__(self) -> None:
        self.registered = encode_registration({}, [TensorSpec("x", "FP32", (2,))], [])
        self.commands: list[str] = []
        self.error: Exception | None = None
        self.may_reply = asyncio.Event()
        self.may_reply.set()

    async def call(self, key: str, command: tuple[str, ...]) -> list[bytes]:
        self.commands.append(f"{command[0]} {key}")
        await self.may_reply.wait()
        if self.error is not None:
            raise self.error
        fields = self.registered if key.endswith(":model") else {}
        return [part.encode() for pair in fields.items() for part in pair]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of the catalogue: `now_s`."""
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(catalog, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_model_is_read_once_for_all_who_want_it(clock: SimpleNamespace) -> None:
    calls = Calls()
    models = Catalog(cast(Any, calls), "carpool")
    found = await asyncio.gather(*(models.model("m") for _ in range(1000)))
    assert len(calls.commands) == 2
    assert all(model is found[0] is models.known("m") for model in found)
    calls.registered = {}
    with pytest.raises(NotFoundError):
        await Catalog(cast(Any, calls), "carpool").model("m")


async def test_a_model_that_is_used_is_read_again_before_it_is_too_old(clock: SimpleNamespace) -> None:
    """Given a model that is asked for all the time, expect that it is always known, and never too old."""
    calls = Calls()
    models = Catalog(cast(Any, calls), "carpool")
    first = await models.model("m")
    calls.registered = encode_registration({}, [TensorSpec("x", "FP32", (3,))], [])
    for _ in range(10):
        clock.now_s += AGE_S_MAX / 5
        assert models.known("m") is not None
        await turns()
    assert models.known("m") != first
    assert len(calls.commands) == 2 * 4, "every third time of ten"

    calls.may_reply.clear()
    clock.now_s += AGE_S_MAX * 0.6
    before = len(calls.commands)
    assert all(models.known("m") is not None for _ in range(1000))
    await turns()
    assert len(calls.commands) == before + 1, "one read is under way"
    clock.now_s += AGE_S_MAX
    assert models.known("m") is None, "it is too old"
    waiting = asyncio.ensure_future(models.model("m"))
    calls.may_reply.set()
    assert (await waiting) is models.known("m")


async def test_a_model_that_cannot_be_read_is_an_error_once_it_is_too_old(clock: SimpleNamespace) -> None:
    calls = Calls()
    models = Catalog(cast(Any, calls), "carpool")
    await models.model("m")
    calls.error = UnavailableError("no Redis")
    clock.now_s += AGE_S_MAX * 0.9
    assert models.known("m") is not None
    await turns()
    clock.now_s += AGE_S_MAX
    for _ in range(2):
        with pytest.raises(UnavailableError):
            await models.model("m")
