"""`carpool config` on a running stack: what it shows, what it changes within a second, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from carpool.keys import Keys
from carpool.model_settings import ModelSettings
from support.stack import Stack
from support.waiting import wait_until

MODEL: Final = "Echo"
KEYS: Final = Keys(MODEL)
IN_FORCE_S: Final = 1.0  # for a change; on top of it, what a busy machine takes
SLACK_S: Final = 4.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("served")) as stack:
        stack.serve("plain.py:Echo")
        yield stack


@pytest.fixture
def stack(served: Stack) -> Iterator[Stack]:
    """With no operator's word in force, before and after."""
    yield served
    served.wait_until_idle(MODEL)
    before = len(changes(served))
    if served.redis.delete(KEYS.config):
        wait_until(lambda: len(changes(served)) > before, description="the model's own settings hold again")


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "gate"
    yield path
    path.touch()


class Said(dict[str, Any]):
    """What `carpool config --json` said, by setting."""


def run(stack: Stack, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "carpool_cli", "config", *words, "--redis-url", stack.url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def config(stack: Stack, *words: str) -> Said:
    done = run(stack, *words, "--json")
    assert done.returncode == 0, done.stderr
    return Said(json.loads(done.stdout))


def changes(stack: Stack) -> list[dict[str, Any]]:
    return [event for event in stack.events("settings changed") if event["model"] == MODEL]


def in_force(stack: Stack, name: str, value: str) -> None:
    """Wait until the batcher says that it goes by the setting; that is soon."""
    wait_until(
        lambda: (said := changes(stack)) and said[-1].get(name) == value,
        description=f"{name}={value} is in force",
        timeout_s=IN_FORCE_S + SLACK_S,
    )


def change(stack: Stack, *words: str) -> None:
    """Make changes, and wait until they are in force."""
    config(stack, MODEL, *words)
    for word in words:
        name, _, value = word.partition("=")
        in_force(stack, name, value)


def hold_up(stack: Stack, gate: Path) -> None:
    """Give the one worker something that lasts until the gate is opened; what is sent from now on waits."""
    stack.send(MODEL, body=json.dumps({"gate": str(gate)}), correlation_id=f"gate-{gate.parent.name}")
    wait_until(lambda: stack.redis.xlen(KEYS.batches) == 1, description="the worker is held up")


def send(stack: Stack, names: str, **fields: str | int) -> None:
    for name in names.split():
        stack.send(MODEL, body="7", correlation_id=name, **fields)


def send_together(stack: Stack, names: str) -> None:
    """In one entry, so that no first one leaves ahead of a busy process on its own."""
    stack.send_packed(MODEL, [{"correlation_id": name, "body": b"7"} for name in names.split()])


def results(stack: Stack, names: str) -> dict[str, dict[str, Any]]:
    return {name: stack.result(MODEL, name) for name in names.split()}


# --- the command -------------------------------------------------------------------------------------------


def test_each_value_is_shown_and_where_it_came_from(stack: Stack) -> None:
    said = config(stack, MODEL)
    assert list(said) == ModelSettings.names()
    assert said["max_batch_size"]["value"] == "16"
    assert said["max_batch_size"]["source"] == "model"
    assert said["max_queue_size"] == {
        "value": "10000",
        "source": "default",
        "meaning": ModelSettings.meanings()["max_queue_size"],
    }
    page = run(stack, MODEL).stdout.splitlines()
    assert page[0].split() == ["setting", "value", "from", "meaning"]
    assert page[1].split()[:3] == ["max_batch_size", "16", "model"]
    assert len(page) == 1 + len(said)


def test_a_change_holds_until_it_is_taken_back(stack: Stack, gate: Path) -> None:
    assert config(stack, MODEL, "max_batch_size=2")["max_batch_size"]["source"] == "operator"
    in_force(stack, "max_batch_size", "2")
    hold_up(stack, gate)
    send_together(stack, "a b c")
    gate.touch()
    assert [one["batch_size"] for one in results(stack, "a b c").values()] == [2, 2, 1]
    # When it is taken back
    told = config(stack, MODEL, "max_batch_size=")["max_batch_size"]
    assert (told["value"], told["source"]) == ("16", "model")
    assert stack.redis.exists(KEYS.config) == 0
    in_force(stack, "max_batch_size", "16")


def test_a_person_is_shown_what_changed_and_how_to_see_the_rest(stack: Stack) -> None:
    head, change, blank, more = run(stack, MODEL, "max_batch_size=2").stdout.splitlines()
    assert head.split() == ["setting", "value", "from", "before"]
    assert change.split() == ["max_batch_size", "2", "operator", "16", "(model)"]
    assert (blank, more) == ("", "`carpool config Echo` shows all settings.")
    in_force(stack, "max_batch_size", "2")


def test_several_changes_at_once_all_in_force(stack: Stack, gate: Path) -> None:
    change(stack, "max_queue_size=2", "result_ttl_ms=7000")
    hold_up(stack, gate)
    send(stack, "a b c d")  # one may leave ahead
    assert stack.result(MODEL, "d")["status"] == "RESOURCE_EXHAUSTED"
    gate.touch()
    wait_until(lambda: stack.redis.exists(KEYS.result("a")), description="the result of a is there")
    assert 0 < stack.redis.pttl(KEYS.result("a")) <= 7000
    assert {one["status"] for one in results(stack, "a b").values()} == {"OK"}
    stack.result(MODEL, "c")


def test_a_delay_holds_a_lone_request_back_from_now_on(stack: Stack) -> None:
    change(stack, "max_queue_delay_ms=300")
    send(stack, "a")
    assert stack.result(MODEL, "a")["queue_us"] >= 300_000


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["Echo", "max_batch_size=0"],
            "max_batch_size: '0' must be a whole number, 1 or more; nothing was changed",
        ),
        (["Echo", "max_queue_size=5", "policy=lazy"], "policy: 'lazy' must be eager or deferred"),
        (["Echo", "tenant_weights=gold"], "tenant_weights: 'gold' must be weights of tenants"),
        (["Echo", "max_batchsize=8"], "no setting 'max_batchsize'; did you mean max_batch_size?"),
        (["Echo", "max_batch_size"], "max_batch_size: say what it is to be"),
        (["Ecko", "max_batch_size=8"], "no model 'Ecko' is registered; there are Echo"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(
    stack: Stack, words: list[str], says: str
) -> None:
    done = run(stack, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"carpool config: {says}")
    assert stack.redis.exists(KEYS.config) == 0


def test_no_redis_is_another_matter() -> None:
    command = [sys.executable, "-m", "carpool_cli", "config", "Echo", "--redis-url", "redis://127.0.0.1:1/0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("carpool config: ")


def test_an_operators_word_outlives_batchers_and_workers(tmp_path: Path, gate: Path) -> None:
    with Stack(tmp_path / "stack") as stack:
        stack.serve("plain.py:Echo")
        change(stack, "max_batch_size=2")
        # When everybody is replaced, and the model registered anew
        for service in stack.services:
            service.terminate()
        stack.redis.hset(KEYS.registration, "max_batch_size", 99)
        stack.serve("plain.py:Echo")
        # Then the model says its own again, and the operator's word holds
        assert stack.redis.hget(KEYS.registration, "max_batch_size") == b"16"
        hold_up(stack, gate)
        send_together(stack, "a b c")
        gate.touch()
        assert [one["batch_size"] for one in results(stack, "a b c").values()] == [2, 2, 1]


# --- what settings do, once each on the whole way ----------------------------------------------------------


def order(stack: Stack, reply_to: str, number: int) -> list[str]:
    """The correlation IDs on a reply stream, once there are so many."""
    wait_until(
        lambda: len(stack.replies(MODEL, reply_to)) >= number, description="all are answered", timeout_s=20
    )
    return [one["correlation_id"] for one in stack.replies(MODEL, reply_to)]


@pytest.mark.parametrize(("weights", "share"), [("", 10), ("trickle:4", 16)])
def test_a_tenants_flood_does_not_starve_another(stack: Stack, gate: Path, weights: str, share: int) -> None:
    change(stack, "max_batch_size=4", *([f"tenant_weights={weights}"] if weights else []))
    hold_up(stack, gate)
    shared: Any = {"reply_to": f"flood-{share}"}
    flood = [{"correlation_id": f"f{at}", "body": b"1"} for at in range(400)]
    trickle = [{"correlation_id": f"t{at}", "body": b"1"} for at in range(20)]
    stack.send_packed(MODEL, flood, tenant="flood", **shared)
    stack.send_packed(MODEL, trickle, tenant="trickle", **shared)
    wait_until(lambda: stack.redis.xlen(KEYS.requests) == 2, description="both wait")
    gate.touch()
    # Two batches of the flood may have been ahead before the others arrived
    among_first = [name for name in order(stack, f"flood-{share}", 420) if name != "gate"][: 20 + 8]
    assert sum(name.startswith("t") for name in among_first) >= share


def test_a_preferred_size_leaves_as_soon_as_it_is_reached(stack: Stack) -> None:
    change(stack, "max_queue_delay_ms=20000", "preferred_batch_sizes=3")
    send(stack, "a b")
    send_together(stack, "c d")
    told = results(stack, "a b c")
    assert {one["batch_size"] for one in told.values()} == {3}
    config(stack, MODEL, "max_queue_delay_ms=")  # d need not wait for its delay
    assert stack.result(MODEL, "d")["batch_size"] == 1


def test_who_has_expired_is_delayed_and_served(stack: Stack, gate: Path) -> None:
    change(stack, "expiration_action=delay", "max_batch_size=1")
    hold_up(stack, gate)
    send(stack, "ahead")  # a full one goes ahead of a busy process
    wait_until(lambda: stack.redis.xlen(KEYS.batches) == 2, description="one is ahead")
    send(stack, "late", expiration=20, priority=9, reply_to="delayed")
    late_ms = int(stack.redis.time()[0]) * 1000
    send(stack, "low", priority=0, reply_to="delayed")
    wait_until(
        lambda: int(stack.redis.time()[0]) * 1000 > late_ms + 1000, description="it has expired", timeout_s=5
    )
    gate.touch()
    assert order(stack, "delayed", 2) == ["low", "late"]
    assert {one["status"] for one in stack.replies(MODEL, "delayed")} == {"OK"}


def test_an_expiration_of_ones_own_can_be_ruled_out(stack: Stack, gate: Path) -> None:
    change(stack, "allow_expiration_override=false", "default_expiration_ms=200")
    hold_up(stack, gate)
    send(stack, "a", expiration=600_000)
    assert stack.result(MODEL, "a", timeout_s=5)["status"] == "DEADLINE_EXCEEDED"


def test_a_priority_has_limits_of_its_own(stack: Stack, gate: Path) -> None:
    policies = '{"0": {"max_queue_size": 1, "default_expiration_ms": 300}}'
    config(stack, MODEL, f"priority_policies={policies}")
    in_force(stack, "priority_policies", policies)
    hold_up(stack, gate)
    send(stack, "high1 high2", priority=9)
    send(stack, "low1 low2", priority=0)
    assert stack.result(MODEL, "low2")["status"] == "RESOURCE_EXHAUSTED"
    assert stack.result(MODEL, "low1")["status"] == "DEADLINE_EXCEEDED"
    gate.touch()
    assert {one["status"] for one in results(stack, "high1 high2").values()} == {"OK"}
