"""Versions of a model behind one queue: asked for, given by a share, promoted, and gone.
docs/new_version.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from carpool.keys import DEFAULT_PREFIX, Keys
from carpool.store.connection import Link
from carpool.store.traffic import Traffic
from support.stack import Service, Stack

MODEL = "clf"
LEASE = ("--lease-ms", "600")


@pytest.fixture
def traffic(stack: Stack) -> Iterator[Traffic]:
    link = Link(stack.url, name="shares")
    yield Traffic(link, Keys(MODEL, DEFAULT_PREFIX))
    link.close()


def start(stack: Stack, version: str, **options: Any) -> Service:
    return stack.worker(f"{MODEL}=versions.py:V{version}", *LEASE, **options)


def versions_of(stack: Stack, names: list[str]) -> dict[str, str]:
    """Which version answered each of these requests."""
    return {name: stack.result(MODEL, name)["version"] for name in names}


def test_a_request_is_executed_by_the_version_that_it_asks_for(stack: Stack) -> None:
    stack.batcher()
    start(stack, "1")
    start(stack, "2")
    stack.wait_for_model(MODEL, workers=2)
    asked: dict[str, str] = {}
    for number in range(60):
        version = "12"[number % 2]
        asked[stack.send(MODEL, body=str(number), version=version)] = version
        stack.send(MODEL, body=str(number), correlation_id=f"any-{number}")
    assert versions_of(stack, list(asked)) == asked
    assert set(versions_of(stack, [f"any-{number}" for number in range(60)]).values()) <= {"1", "2"}
