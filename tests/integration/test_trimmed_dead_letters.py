"""Dead letters are bounded by number, bytes and age; those that are dropped are counted and shown."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from carpool.keys import Keys
from carpool.store.connection import Link
from carpool.store.dead_letters import DeadLetters
from support.command import carpool
from support.stack import Service, Stack
from support.waiting import wait_until

MODEL: Final = "Curable"
KEYS: Final = Keys(MODEL)
MIB: Final = 1 << 20
AGE, NUMBER, BYTES = "max_dead_letter_age_ms", "max_dead_letters", "max_dead_letter_bytes"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A Redis server, and nothing else."""
    with Stack(tmp_path_factory.mktemp("bare"), append_only=False) as stack:
        yield stack


@pytest.fixture
def letters(bare: Stack) -> Iterator[DeadLetters]:
    bare.redis.flushall()
    link = Link(bare.url, name="letters")
    yield DeadLetters(link, KEYS)
    link.close()


def write(stack: Stack, *sizes: int, at_ms: int | None = None) -> None:
    for number, size in enumerate(sizes, start=1):
        fields = {"correlation_id": "r", "body": b"x" * size, "reason": "x", "attempts": 2, "entry_id": "1-1"}
        stack.redis.xadd(KEYS.dead, fields, id="*" if at_ms is None else f"{at_ms}-{number}")


def sizes(stack: Stack) -> list[int]:
    return [len(fields[b"body"]) for _, fields in stack.redis.xrange(KEYS.dead)]


def test_bytes_are_bounded(bare: Stack, letters: DeadLetters) -> None:
    write(bare, *[8 * MIB] * 20)
    dropped = letters.trim()
    assert bare.redis.memory_usage(KEYS.dead, samples=0) <= 64 * MIB
    assert dropped == {BYTES: 20 - len(sizes(bare))} and len(sizes(bare)) >= 6
    assert letters.dropped() == dropped


def test_many_small_ones_give_way_to_a_large_one(bare: Stack, letters: DeadLetters) -> None:
    bare.redis.hset(KEYS.overrides, BYTES, 2 * MIB + 100_000)
    write(bare, *[100] * 3000, 2 * MIB - 20_000)
    assert letters.trim()[BYTES] > 2000
    assert len(sizes(bare)) > 1 and sizes(bare)[-1] == 2 * MIB - 20_000
    write(bare, 3 * MIB)  # more than all may have
    letters.trim()
    assert sizes(bare) == []


def test_number_and_age_are_bounded(bare: Stack, letters: DeadLetters) -> None:
    now_ms = bare.redis.time()[0] * 1000
    bare.redis.hset(KEYS.registration, mapping={AGE: 60_000, NUMBER: 4})
    write(bare, 1, 2, at_ms=now_ms - 120_000)
    write(bare, 3, 4, 5, 6, 7)
    assert letters.trim() == {AGE: 2, NUMBER: 1}
    assert sizes(bare) == [4, 5, 6, 7]
    bare.redis.hset(KEYS.overrides, NUMBER, 3)  # an operator's override
    assert letters.trim() == {NUMBER: 1}
    assert letters.dropped() == {AGE: 2, NUMBER: 2}
    assert letters.trim() == {}


def test_user_may_have_written_the_settings(bare: Stack, letters: DeadLetters) -> None:
    bare.redis.set(KEYS.overrides, "what")
    bare.redis.hset(KEYS.registration, mapping={AGE: "soon", NUMBER: 0, BYTES: "none"})
    write(bare, 1)
    assert letters.trim() == {} and sizes(bare) == [1]


def test_full_redis_is_relieved(bare: Stack, letters: DeadLetters) -> None:
    write(bare, *[8 * MIB] * 12)
    bare.redis.config_set("maxmemory", 32 * MIB)
    try:
        assert letters.trim()
        assert sum(sizes(bare)) <= 64 * MIB
    finally:
        bare.redis.config_set("maxmemory", 0)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path / "stack") as stack:
        yield stack


def metric(worker: Service, setting: str) -> float:
    connection = http.client.HTTPConnection(worker.status_url.removeprefix("http://"), timeout=10)
    try:
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
    finally:
        connection.close()
    (value,) = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "carpool_dead_letters_dropped_total" and sample.labels["setting"] == setting
    ]
    return float(value)


def test_worker_drops_the_oldest_and_shows_it(stack: Stack, tmp_path: Path) -> None:
    cause = tmp_path / "cause"
    cause.touch()
    stack.batcher()
    worker = stack.worker("faulty.py:Curable", "--http-port", "0")
    stack.wait_for_model(MODEL)
    carpool(stack.url, "config", MODEL, f"{NUMBER}=1", check=True)
    for name in ("first", "second"):
        stack.send(MODEL, body=json.dumps({"cause": str(cause)}), correlation_id=name)
        assert stack.result(MODEL, name)["status"] == "ABORTED"
    wait_until(lambda: worker.events("dead letters dropped"), description="the first one is dropped")
    ((_, fields),) = stack.redis.xrange(KEYS.dead)
    assert fields[b"correlation_id"] == b"second"
    assert metric(worker, NUMBER) == 1 and metric(worker, BYTES) == 0
    assert "1, 1 dropped" in carpool(stack.url, "models", check=True).stdout
    (state,) = json.loads(carpool(stack.url, "models", "--json", check=True).stdout)
    assert (state["dead"], state["dead_dropped"]) == (1, 1)
    listed = carpool(stack.url, "dead", "list", "--json", check=True)
    assert len(json.loads(listed.stdout)) == 1
    assert f"older ones of {MODEL} were dropped: 1 over {NUMBER}" in listed.stderr
