"""`carpool forget`: a model that is no longer served is removed from Redis, and batchers drop it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from carpool.keys import Keys, NodesKeys
from carpool.model_settings import ModelKind, ModelSettings
from carpool.store.audit import recent_actions
from carpool.store.connection import Link
from carpool.store.removal import Removal, Removed, Use
from carpool.store.worker import WorkerStore
from carpool.wire.registration import encode_registration
from carpool_cli.local.embedded import EmbeddedRedis
from carpool_cli.operator_name import this_operator
from support.batcher_loop import BatcherLoop
from support.command import Done, carpool
from support.operators import TESTER
from support.redis_client import redis_at

MODEL: Final = "old-1.0"  # the dot is no wildcard
KEYS: Final = Keys(MODEL)


@pytest.fixture(scope="module")
def embedded() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(append_only=False) as server:
        yield server


@pytest.fixture
def redis(embedded: EmbeddedRedis) -> Iterator[Any]:
    client = redis_at(embedded.url, protocol=2)
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def link(embedded: EmbeddedRedis, redis: Any) -> Iterator[Link]:
    link = Link(embedded.url, name="test")
    yield link
    link.close()


def register(link: Link, model: str, kind: ModelKind = ModelKind.PLAIN) -> WorkerStore:
    """As a worker does, which has stopped by now."""
    store = WorkerStore(link, Keys(model))
    store.register(encode_registration(ModelSettings().as_text(), [], [], kind))
    return store


def forget(embedded: EmbeddedRedis, *arguments: str) -> Done:
    return carpool(embedded.url, "forget", *arguments)


def names(redis: Any) -> set[str]:
    """All keys, but for the audit of what was removed."""
    found = {name.decode() for name in redis.scan_iter(count=1000)}
    return {name for name in found if not name.endswith(":{.nodes}:audit")}


def test_everything_of_the_model_is_removed_and_nothing_else(
    embedded: EmbeddedRedis, redis: Any, link: Link
) -> None:
    register(link, "old-1x0")
    others = names(redis)
    register(link, MODEL)
    redis.hset(KEYS.overrides, "max_batch_size", 2)
    redis.xadd(KEYS.dead, {"body": "1"})
    redis.xadd(KEYS.dead, {"body": "2"})
    for number in range(1200):
        redis.hset(KEYS.sequence(str(number)), "state", "x")
    redis.rpush(KEYS.result("r"), "unread")
    redis.hset(KEYS.paused, mapping={"mode": "wait"})
    redis.hset(KEYS.drained, mapping={"gone": "{}"})
    redis.xadd(KEYS.audit, {"action": "pause"})
    done = forget(embedded, MODEL)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        f"{MODEL} is removed: 2 dead letters; 1,207 keys: audit, batches, config, dead, drained, model, "
        "paused, sequence (1,200); 1 key with unread results left to expire\n"
    )
    (action,) = recent_actions(link, NodesKeys(), 10)
    assert action.action == "forget" and action.details["model"] == MODEL and action.details["dead"] == "2"
    assert action.who == this_operator().who
    assert names(redis) - {KEYS.result("r")} == others
    assert redis.smembers("carpool:models") == {b"old-1x0"}
    again = forget(embedded, MODEL)
    assert again.returncode == 1
    assert again.stderr == f"carpool forget: model '{MODEL}' is not registered; registered models: old-1x0\n"


def test_model_in_use_is_left_as_it_is(embedded: EmbeddedRedis, redis: Any, link: Link) -> None:
    store = register(link, MODEL)
    store.join("host-1-a", 600_000)
    store.join("host-1-b", 600_000)
    redis.xadd(KEYS.requests, {"body": "1"})
    before = names(redis)
    done = forget(embedded, MODEL)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        f"carpool forget: {MODEL} is not removed: host-1-a (and 1 other) serves it, and it has "
        "1 waiting entry; --force removes it anyway\n"
    )
    assert names(redis) == before
    forced = forget(embedded, MODEL, "--force")
    assert forced.returncode == 0, forced.stderr
    assert forced.stdout.startswith(f"{MODEL} is removed: 1 waiting entry; 5 keys: ")
    assert "a worker still serves it, and will register it again: host-1-a (and 1 other)" in forced.stdout
    assert not redis.exists(KEYS.registration, KEYS.requests, KEYS.workers)


def test_request_that_arrives_between_the_look_and_the_removal_stays(
    redis: Any, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(link, MODEL)
    removal, look = Removal(link, KEYS, TESTER), Removal.use

    def look_and_let_arrive(self: Removal) -> Use:
        use = look(self)
        redis.xadd(KEYS.requests, {"body": "1"})
        return use

    monkeypatch.setattr(Removal, "use", look_and_let_arrive)
    assert removal.remove_if_unused() == Use([], 1, 0)
    assert redis.xlen(KEYS.requests) == 2 and redis.sismember("carpool:models", MODEL)


def test_prefix_is_no_pattern(redis: Any, link: Link) -> None:
    redis.hset("a*[b]:{m}:model", "a", "b")
    redis.hset("axb:{m}:sequence:1", "a", "b")
    removed = Removal(link, Keys("m", "a*[b]"), TESTER).remove_if_unused()
    assert isinstance(removed, Removed) and removed.keys == {"model": 1}
    assert names(redis) == {"axb:{m}:sequence:1"}


class Served(BatcherLoop):
    """A batcher whose loop the test runs."""

    def series(self) -> list[str]:
        """What is exported of the model."""
        return [
            sample.name
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.labels.get("model") == MODEL
        ]


@pytest.mark.parametrize("kind", [ModelKind.PLAIN, ModelKind.STATEFUL])
def test_batcher_drops_a_forgotten_model(
    embedded: EmbeddedRedis, redis: Any, link: Link, kind: ModelKind
) -> None:
    store = register(link, MODEL, kind)
    redis.hset(KEYS.sequence("kept"), mapping={"state": "x", "next": 1})
    redis.zadd(KEYS.sequences, {"kept": redis.time()[0] * 1000})
    served = Served(embedded.url)
    models = served.service._models
    served.run_until(lambda: MODEL in models and models[MODEL].active, "it is served")
    assert served.series()
    store.join("gone", 1)
    assert isinstance(Removal(link, KEYS, TESTER).remove(), Removed)
    served.run_until(lambda: not models, "it is dropped")
    assert served.series() == []
    assert not served.service._subscribed and not served.service._busy
    served.run_until(lambda: not names(redis) - {KEYS.report}, "nothing of it is written again")
    register(link, MODEL, kind)
    served.run_until(lambda: MODEL in models and models[MODEL].active, "it is served again")
    assert served.series()
