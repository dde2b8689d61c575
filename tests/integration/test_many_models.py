"""One batcher loop over many models: idle ones cost little, and one model's failure or load stays its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from carpool.keys import DEFAULT_PREFIX, Keys
from carpool.model_settings import ModelSettings
from carpool.store.connection import Link
from carpool.store.directory import Directory
from carpool.store.worker import WorkerStore
from carpool_batcher import service as service_module
from carpool_batcher import session as session_module
from carpool_cli.local.embedded import EmbeddedRedis
from support.batcher_loop import BatcherLoop
from support.operators import TESTER
from support.redis_client import redis_at
from support.stack import Service, Stack
from support.waiting import wait_until

LEASE_MS: Final = 600_000


@pytest.fixture(scope="module")
def embedded() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(append_only=False) as server:
        yield server


class Bench(BatcherLoop):
    """A batcher service whose loop the test runs, and a Redis with models and no workers."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.redis = redis_at(url, protocol=2)
        self.redis.flushall()

    def register(self, *models: str) -> None:
        """Register models, as a worker does, each with a live model process."""
        for model in models:
            store = WorkerStore(self.link, Keys(model))
            store.register(ModelSettings(max_batch_size=16).as_text())
            store.join("worker", LEASE_MS)

    def run_until_idle(self) -> None:
        self.run_until(lambda: not self.service._busy, "all models are idle")

    def active(self, model: str) -> bool:
        served = self.service._models.get(model)
        return served is not None and served.active

    def send(self, model: str, number: int = 1) -> None:
        pipeline = self.redis.pipeline(transaction=False)
        for _ in range(number):
            pipeline.xadd(Keys(model).requests, {"body": "1"})
        pipeline.execute()

    def batches(self, model: str) -> int:
        number: int = self.redis.xlen(Keys(model).batches)
        return number

    def settings(self, model: str) -> ModelSettings:
        settings: ModelSettings = self.session(model).scheduler.settings
        return settings

    def close(self) -> None:
        super().close()
        self.redis.close()


@pytest.fixture
def bench(embedded: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(session_module, "IDLE_AFTER_US", 100_000)
    started = Bench(embedded.url)
    yield started
    started.close()


def test_idle_models_are_read_together_and_a_busy_one_alone(bench: Bench) -> None:
    names = [f"m{number}" for number in range(30)]
    bench.register(*names)
    bench.run_until(lambda: all(bench.active(name) for name in names), "all are active")
    bench.run_until_idle()
    bench.send("m7")
    bench.run_until(lambda: bench.batches("m7"), "the request is dispatched")
    assert [model.keys.model for model in bench.service._busy] == ["m7"]
    connections = [client["name"] for client in bench.redis.client_list()]
    assert sum(name.startswith("batcher-under-test") for name in connections) == 3


def test_idle_model_learns_of_a_changed_setting_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given an idle model that is hardly ever compared with Redis, expect an override to be applied."""
    bench.register("m")
    bench.run_until(lambda: bench.active("m"), "it is active")
    bench.run_until_idle()
    monkeypatch.setattr(bench.service, "_next_idle_models", list)
    Directory(bench.link, DEFAULT_PREFIX).configure("m", {"max_batch_size": "3"}, (), actor=TESTER)
    bench.run_until(lambda: bench.settings("m").max_batch_size == 3, "the override is applied")


def test_idle_models_are_compared_with_redis_regularly(bench: Bench) -> None:
    """Given a setting that is changed without an announcement, expect it to be noticed."""
    bench.register("m", "n")
    bench.run_until(lambda: bench.active("m"), "it is active")
    bench.run_until_idle()
    bench.redis.hset(Keys("m").overrides, "max_batch_size", 3)
    bench.run_until(lambda: bench.settings("m").max_batch_size == 3, "the override is applied")


def test_much_to_do_for_one_model_does_not_delay_another(bench: Bench) -> None:
    """Given thousands of waiting entries of a model, expect another's request to be dispatched meanwhile."""
    bench.register("much", "little")
    bench.run_until(lambda: bench.active("much") and bench.active("little"), "both are active")
    bench.run_until_idle()
    bench.send("much", 5000)
    bench.send("little")
    bench.run_until(lambda: bench.batches("little"), "the lone request is dispatched")
    assert bench.session("much") is not None
    assert bench.waiting("much") < 2000


def test_failure_of_one_model_stays_its_own(bench: Bench) -> None:
    """Given a request stream of another type, expect that model to fail and the others to be served."""
    bench.register("good", "bad")
    bench.run_until(lambda: bench.active("good") and bench.active("bad"), "both are active")
    session = bench.session("good")
    bench.redis.delete(Keys("bad").requests)
    bench.redis.set(Keys("bad").requests, "x")
    bench.run_until(lambda: bench.service._models["bad"].failing, "the failure is found")
    bench.send("good")
    bench.run_until(lambda: bench.batches("good"), "the good one is served")
    assert bench.session("good") is session, "its session goes on"
    assert "WRONGTYPE" in str(bench.service._models["bad"].failing)
    assert bench.service.unready() == []
    bench.redis.delete(Keys("bad").requests)
    bench.send("bad")
    bench.run_until(lambda: bench.batches("bad"), "the other one is served again")
    bench.run_until(lambda: not bench.service._models["bad"].failing, "its failure is over")


def test_service_is_unready_when_every_model_fails(bench: Bench) -> None:
    bench.register("bad")
    bench.redis.set(Keys("bad").requests, "x")
    bench.run_until(bench.service.unready, "it is unready")
    (why,) = bench.service.unready()
    assert why.startswith("batcher bad: ")


def test_model_that_is_not_registered_any_more_costs_nothing(bench: Bench) -> None:
    bench.register("gone", "stays")
    bench.run_until(lambda: bench.active("gone"), "it is active")
    bench.redis.srem("carpool:models", "gone")
    bench.run_until(lambda: "gone" not in bench.service._models, "its session ends")
    assert not bench.redis.exists(Keys("gone").batcher), "its lease is given back"
    bench.register("gone")
    bench.run_until(lambda: bench.active("gone"), "it is served again")
    assert bench.active("stays")


def test_model_that_is_asked_is_served_although_it_is_not_registered(bench: Bench) -> None:
    """Redis may have been emptied: workers register again, and requests that wait must not be forgotten."""
    bench.register("m")
    bench.run_until(lambda: bench.active("m"), "it is active")
    bench.send("m", 100)
    bench.run_until(lambda: bench.batches("m"), "requests are in flight")
    bench.redis.srem("carpool:models", "m")
    discovered_s = bench.service._discovered_s
    bench.run_until(lambda: bench.service._discovered_s > discovered_s, "the models are known anew")
    assert bench.active("m")


def test_lost_connection_ends_all_sessions_and_nothing_is_lost(bench: Bench) -> None:
    bench.register("m", "n")
    bench.run_until(lambda: bench.active("m") and bench.active("n"), "both are active")
    bench.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    bench.send("m")
    with pytest.raises(Exception, match="Redis at"):
        bench.run_until(lambda: False, "the loss is noticed")
    assert not bench.active("m")
    assert not bench.active("n")
    bench.run_until(lambda: bench.batches("m"), "it is served again")


def test_hanging_loop_names_the_model(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "LOOP_SILENCE_MAX_S", -1.0)
    bench.register("m")
    found: list[str] = []
    bench.service.start()
    try:
        wait_until(lambda: bench.active("m"), description="it is active")
        model = bench.service._models["m"]

        def turn() -> Iterator[None]:
            found.extend(bench.service.unhealthy())
            yield

        monkeypatch.setattr(model.session, "turn", turn)
        bench.send("m")
        wait_until(lambda: found, description="a turn is taken")
    finally:
        bench.service.stop()
    assert found[0].startswith("batcher: has been hanging for ")
    assert found[0].endswith(", with the model m")
    assert not bench.redis.exists(Keys("m").batcher), "the lease is given back"


def test_batcher_that_stops_gives_all_leases_back(stack: Stack) -> None:
    """Given two batchers and many models, when the active one stops, the other takes over at once."""
    link = Link(stack.url, name="test")
    names = [f"m{number}" for number in range(20)]
    first = stack.batcher()
    for name in names:
        WorkerStore(link, Keys(name)).register(ModelSettings().as_text())

    def is_active(batcher: Service) -> bool:
        return {event["model"] for event in batcher.events("batcher active")} == {*names}

    wait_until(lambda: is_active(first), description="it is active for all")
    second = stack.batcher()
    assert first.terminate() == 0
    holders = [(stack.redis.get(Keys(name).batcher) or b"").decode() for name in names]
    assert not [holder for holder in holders if f"-{first.pid}-" in holder], "no lease remains"
    wait_until(lambda: is_active(second), description="the other one is")
    link.close()
