"""`carpool config` on a running stack: settings shown, changed within a second, and rejected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from carpool.keys import Keys
from carpool.model_settings import ModelSettings
from support.command import Done, carpool
from support.stack import Stack
from support.waiting import wait_until
from support.wire import count_requests

MODEL: Final = "Echo"
KEYS: Final = Keys(MODEL)
APPLIED_WITHIN_S: Final = 1.0
SLACK_S: Final = 4.0  # for a busy machine


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("served")) as stack:
        stack.serve("plain.py:Echo")
        yield stack


@pytest.fixture
def stack(served: Stack) -> Iterator[Stack]:
    """The stack without overrides and results, before and after the test."""
    yield served
    served.wait_until_idle(MODEL)
    for key in served.redis.scan_iter(KEYS.result("*")):  # of a failed test: others use these IDs
        served.redis.delete(key)
    before = len(changes(served))
    if served.redis.delete(KEYS.overrides):
        wait_until(lambda: len(changes(served)) > before, description="the model's own settings are in force")


def run(stack: Stack, *arguments: str) -> Done:
    return carpool(stack.url, "config", *arguments)


def config(stack: Stack, *arguments: str) -> dict[str, Any]:
    """The output of `carpool config --json`, by setting."""
    done = run(stack, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    settings: dict[str, Any] = json.loads(done.stdout)
    return settings


def changes(stack: Stack) -> list[dict[str, Any]]:
    return [event for event in stack.events("settings changed") if event["model"] == MODEL]


def wait_until_applied(stack: Stack, name: str, value: str) -> None:
    """Wait until the batcher has logged the setting."""
    wait_until(
        lambda: (logged := changes(stack)) and logged[-1].get(name) == value,
        description=f"{name}={value} is applied",
        timeout_s=APPLIED_WITHIN_S + SLACK_S,
    )


def change(stack: Stack, *changes: str) -> None:
    """Make changes, and wait until they are applied."""
    config(stack, MODEL, *changes)
    for assignment in changes:
        name, _, value = assignment.partition("=")
        wait_until_applied(stack, name, value)


def block_worker(stack: Stack, gate: Path) -> None:
    """Give the only worker a batch that lasts until the gate file exists. Requests sent from now on wait."""
    stack.send(MODEL, body=json.dumps({"gate": str(gate)}), correlation_id=f"gate-{gate.parent.name}")
    wait_until(lambda: stack.redis.xlen(KEYS.batches) == 1, description="the worker is blocked")


def block_worker_and_next(stack: Stack, gate: Path) -> None:
    """As `block_worker`, and dispatch a batch ahead of it. No request sent from now on is dispatched.

    For `max_batch_size` 1: only a full batch is sure to be dispatched ahead of a busy process.
    """
    block_worker(stack, gate)
    send(stack, "ahead")
    wait_until(lambda: stack.redis.xlen(KEYS.batches) == 2, description="one batch is ahead")


def waiting(stack: Stack) -> int:
    return sum(count_requests(fields) for _, fields in stack.redis.xrange(KEYS.requests))


def send(stack: Stack, names: str, **fields: str | int) -> None:
    for name in names.split():
        stack.send(MODEL, body="7", correlation_id=name, **fields)


def send_together(stack: Stack, names: str) -> None:
    """Send requests in one entry, so that the first one is not dispatched alone, ahead of a busy process."""
    stack.send_packed(MODEL, [{"correlation_id": name, "body": b"7"} for name in names.split()])


def results(stack: Stack, names: str) -> dict[str, dict[str, Any]]:
    return {name: stack.result(MODEL, name) for name in names.split()}


# --- the command -------------------------------------------------------------------------------------------


def test_each_setting_is_shown_with_its_source(stack: Stack) -> None:
    settings = config(stack, MODEL)
    assert list(settings) == ModelSettings.names()
    assert settings["max_batch_size"]["value"] == "16"
    assert settings["max_batch_size"]["source"] == "model"
    assert settings["max_queue_size"] == {
        "value": "10000",
        "source": "default",
        "meaning": ModelSettings.meanings()["max_queue_size"],
        "has_effect": True,
    }
    assert [name for name, of in settings.items() if not of["has_effect"]] == [
        *("max_prefill_cost", "stream_buffer", "reader_idle_ms"),
        *("max_candidate_sequences", "max_sequence_idle_ms"),
    ]
    page = run(stack, MODEL).stdout.splitlines()
    assert page[0].split() == ["setting", "value", "from", "meaning"]
    assert page[1].split()[:3] == ["max_batch_size", "16", "model"]
    assert len(page) == 1 + len(settings)


def test_one_setting_is_shown_alone(stack: Stack) -> None:
    head, *rows = run(stack, MODEL, "max_batch_size", "max-queue-size").stdout.splitlines()
    assert head.split()[:3] == ["setting", "value", "from"]
    assert [row.split()[:3] for row in rows] == [
        ["max_batch_size", "16", "model"],
        ["max_queue_size", "10000", "default"],
    ]
    assert list(config(stack, MODEL, "policy")) == ["policy"]
    done = run(stack, MODEL, "polcy")
    assert (done.returncode, done.stderr.strip()) == (
        2,
        "carpool config: no setting 'polcy'; did you mean policy?",
    )


def test_override_is_in_force_until_it_is_removed(stack: Stack, gate: Path) -> None:
    assert config(stack, MODEL, "max_batch_size=2")["max_batch_size"]["source"] == "operator"
    wait_until_applied(stack, "max_batch_size", "2")
    block_worker(stack, gate)
    send_together(stack, "a b c")
    gate.touch()
    assert [one["batch_size"] for one in results(stack, "a b c").values()] == [2, 2, 1]
    # When the override is removed
    setting = config(stack, MODEL, "max_batch_size=")["max_batch_size"]
    assert (setting["value"], setting["source"]) == ("16", "model")
    assert stack.redis.exists(KEYS.overrides) == 0
    wait_until_applied(stack, "max_batch_size", "16")


def test_table_shows_what_changed_and_how_to_see_the_rest(stack: Stack) -> None:
    head, change, blank, more = run(stack, MODEL, "max_batch_size=2").stdout.splitlines()
    assert head.split() == ["setting", "value", "from", "before"]
    assert change.split() == ["max_batch_size", "2", "operator", "16", "(model)"]
    assert (blank, more) == ("", "`carpool config Echo` shows all settings.")
    wait_until_applied(stack, "max_batch_size", "2")


def test_value_that_can_hardly_be_meant_is_set_and_warned_of(stack: Stack) -> None:
    done = run(stack, MODEL, "result_ttl_ms=5ms")
    assert done.returncode == 0
    assert "result_ttl_ms: a result that nobody has read after 5 ms is lost" in done.stdout
    assert stack.redis.hgetall(KEYS.overrides) == {b"result_ttl_ms": b"5"}
    wait_until_applied(stack, "result_ttl_ms", "5")  # else there is nothing to take back


def test_several_changes_are_applied_together(stack: Stack, gate: Path) -> None:
    change(stack, "max_batch_size=1", "max_queue_size=2", "result_ttl_ms=7000")
    block_worker_and_next(stack, gate)
    send(stack, "a b c")
    assert stack.result(MODEL, "c")["status"] == "RESOURCE_EXHAUSTED"
    gate.touch()
    wait_until(lambda: stack.redis.exists(KEYS.result("a")), description="a has its result")
    assert 0 < stack.redis.pttl(KEYS.result("a")) <= 7000
    assert {one["status"] for one in results(stack, "a b").values()} == {"OK"}


def test_new_queue_delay_applies_to_the_next_request(stack: Stack) -> None:
    change(stack, "max_queue_delay_ms=300")
    send(stack, "a")
    assert stack.result(MODEL, "a")["queue_us"] >= 300_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["Echo", "max_batch_size=0"],
            "max_batch_size is '0': must be a whole number of at least 1; nothing was changed",
        ),
        (
            ["Echo", "max_queue_size=5", "policy=lazy"],
            "policy is 'lazy': must be eager, deferred, or one of the batcher's --policies",
        ),
        (
            ["Echo", "tenant_weights=gold"],
            "tenant_weights is 'gold': must map tenants to weights of at least 0.001",
        ),
        (["Echo", "max_batchsize=8"], "no setting 'max_batchsize'; did you mean max_batch_size?"),
        (["Echo", "max_batch_size", "policy=eager"], "max_batch_size: write max_batch_size=VALUE"),
        (["Ecko", "max_batch_size=8"], "model 'Ecko' is not registered; registered models: Echo"),
    ],
)
def test_invalid_change_is_rejected_and_changes_nothing(
    stack: Stack, arguments: list[str], message: str
) -> None:
    done = run(stack, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"carpool config: {message}")
    assert stack.redis.exists(KEYS.overrides) == 0


def test_unreachable_redis_exits_with_another_status() -> None:
    done = carpool("redis://127.0.0.1:1/0", "config", "Echo")
    assert done.returncode == 1
    assert done.stderr.startswith("carpool config: ")


def test_override_survives_batchers_and_workers(tmp_path: Path, gate: Path) -> None:
    with Stack(tmp_path / "stack") as stack:
        stack.serve("plain.py:Echo")
        change(stack, "max_batch_size=2")
        # When all services are replaced, and the model is registered again
        for service in stack.services:
            service.terminate()
        stack.redis.hset(KEYS.registration, "max_batch_size", 99)
        stack.serve("plain.py:Echo")
        # Then the model has registered its own value, and the override is in force
        assert stack.redis.hget(KEYS.registration, "max_batch_size") == b"16"
        block_worker(stack, gate)
        send_together(stack, "a b c")
        gate.touch()
        assert [one["batch_size"] for one in results(stack, "a b c").values()] == [2, 2, 1]


# --- the effect of settings on a whole stack ----------------------------------------------------------------


def order(stack: Stack, reply_to: str, number: int) -> list[str]:
    """The correlation IDs on a reply stream, once it has `number` of them."""
    wait_until(lambda: len(stack.replies(MODEL, reply_to)) >= number, description="all are answered")
    return [one["correlation_id"] for one in stack.replies(MODEL, reply_to)]


@pytest.mark.parametrize(("weights", "share"), [("", 10), ("trickle:4", 16)])
def test_flood_of_one_tenant_does_not_starve_another(
    stack: Stack, gate: Path, weights: str, share: int
) -> None:
    change(stack, "max_batch_size=4", *([f"tenant_weights={weights}"] if weights else []))
    block_worker(stack, gate)
    reply: Any = {"reply_to": f"flood-{share}"}
    flood = [{"correlation_id": f"f{at}", "body": b"1"} for at in range(400)]
    trickle = [{"correlation_id": f"t{at}", "body": b"1"} for at in range(20)]
    stack.send_packed(MODEL, flood, tenant="flood", **reply)
    stack.send_packed(MODEL, trickle, tenant="trickle", **reply)
    wait_until(lambda: waiting(stack) == 416, description="both wait, but the first full batch")
    gate.touch()
    # Two batches of the flood may have been dispatched before the other requests arrived.
    among_first = [name for name in order(stack, f"flood-{share}", 420) if name != "gate"][: 20 + 8]
    assert sum(name.startswith("t") for name in among_first) >= share


def test_preferred_size_is_dispatched_as_soon_as_it_is_reached(stack: Stack) -> None:
    change(stack, "max_queue_delay_ms=20000", "preferred_batch_sizes=3")
    send(stack, "a b")
    send_together(stack, "c d")
    found = results(stack, "a b c")
    assert {one["batch_size"] for one in found.values()} == {3}
    config(stack, MODEL, "max_queue_delay_ms=")  # so that d does not wait for its delay
    assert stack.result(MODEL, "d")["batch_size"] == 1


def test_expired_request_is_delayed_and_served(stack: Stack, gate: Path) -> None:
    change(stack, "expiration_action=delay", "max_batch_size=1")
    block_worker_and_next(stack, gate)
    send(stack, "late", expiration=20, priority=9, reply_to="delayed")
    late_ms = int(stack.redis.time()[0]) * 1000
    send(stack, "low", priority=0, reply_to="delayed")
    wait_until(lambda: int(stack.redis.time()[0]) * 1000 > late_ms + 1000, description="it has expired")
    gate.touch()
    assert order(stack, "delayed", 2) == ["low", "late"]
    assert {one["status"] for one in stack.replies(MODEL, "delayed")} == {"OK"}


def test_expiration_of_a_request_can_be_overridden(stack: Stack, gate: Path) -> None:
    change(stack, "allow_expiration_override=false", "default_expiration_ms=200")
    block_worker(stack, gate)
    send(stack, "a", expiration=600_000)
    assert stack.result(MODEL, "a", timeout_s=5)["status"] == "DEADLINE_EXCEEDED"


def test_priority_has_its_own_limits(stack: Stack, gate: Path) -> None:
    policies = '{"0": {"max_queue_size": 1}, "1": {"default_expiration_ms": 300}}'
    change(stack, "max_batch_size=1", f"priority_policies={policies}")
    block_worker_and_next(stack, gate)
    send(stack, "high1 high2", priority=9)
    send(stack, "low1 low2", priority=0)
    send(stack, "brief", priority=1)
    assert stack.result(MODEL, "low2")["status"] == "RESOURCE_EXHAUSTED"
    assert stack.result(MODEL, "brief")["status"] == "DEADLINE_EXCEEDED"
    gate.touch()
    assert {one["status"] for one in results(stack, "high1 high2 low1").values()} == {"OK"}
