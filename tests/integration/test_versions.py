"""Versions of a model behind one queue: asked for, given by a share, promoted, gone. docs/new_version.md."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest

from carpool import Client
from carpool.errors import InvalidArgumentError
from carpool.keys import DEFAULT_PREFIX, Keys
from carpool.store.connection import Link
from carpool.store.traffic import Traffic
from carpool.wire.traffic import Division
from support.command import carpool
from support.http import call
from support.models.stepping import text_of
from support.operators import TESTER
from support.stack import Service, Stack, frozen
from support.waiting import wait_until

MODEL = "clf"
KEYS = Keys(MODEL, DEFAULT_PREFIX)
LEASE = ("--lease-ms", "600")
LONG_LEASE = ("--lease-ms", "30000")  # of a worker that must have its batches until it is killed
RESULT_S = 60.0


@pytest.fixture
def traffic(stack: Stack) -> Iterator[Traffic]:
    link = Link(stack.url, name="shares")
    yield Traffic(link, KEYS)
    link.close()


def start(stack: Stack, version: str, **options: Any) -> Service:
    return stack.worker(f"{MODEL}=versions.py:V{version}", *LEASE, **options)


def versions_of(stack: Stack, names: list[str]) -> dict[str, str]:
    """Which version answered each of these requests."""
    return {name: stack.result(MODEL, name, RESULT_S)["version"] for name in names}


class Load:
    """Sends requests from a thread, which ask for these versions in turn, until the block ends."""

    def __init__(self, stack: Stack, asks: tuple[str, ...] = ("", "1", "2")) -> None:
        self._stack = stack
        self._asks = asks
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.sent: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def wait_for(self, count: int = 200) -> None:
        """Wait until that many more requests are sent."""
        target = len(self.sent) + count
        wait_until(lambda: len(self.sent) >= target, description=f"{count} more requests", timeout_s=60)

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            for _ in range(6):
                number = len(self.sent)
                asks = self._asks[number % len(self._asks)]
                name = f"n{number}"
                fields = {"version": asks} if asks else {}
                self._stack.send(MODEL, body=str(number), correlation_id=name, **fields)
                self.sent[name] = asks


def test_asked_versions_under_load_while_a_batcher_is_killed(stack: Stack) -> None:
    """Expect each answer from the version that was asked for, and every request answered."""
    batchers = [stack.batcher(), stack.batcher()]
    for version in "12":
        start(stack, version)
    stack.wait_for_model(MODEL, workers=2)
    with Load(stack) as load:
        load.wait_for()
        active = stack.active_batcher(MODEL)
        active.kill()
        (other,) = [batcher for batcher in batchers if batcher is not active]
        other.wait_for("batcher active")
        load.wait_for()
    answered = versions_of(stack, list(load.sent))
    assert all(answered[name] == asks for name, asks in load.sent.items() if asks)
    assert Counter(answered[name] for name, asks in load.sent.items() if not asks).keys() == {"1", "2"}
    stack.wait_until_idle(MODEL)
    assert not any(stack.redis.xlen(KEYS.batches_of(version)) for version in "12")


def test_a_paused_batcher_does_not_dispatch_to_a_version_that_was_forgotten(stack: Stack) -> None:
    """Given a batcher that stands still while the last worker of a version leaves, expect that what it knows
    is not dispatched to a stream that nobody reads any more."""
    stack.batcher(), start(stack, "1")
    leaving = start(stack, "2")
    stack.wait_for_model(MODEL, workers=2)
    assert stack.result(MODEL, stack.send(MODEL, body="1", version="2"))["version"] == "2"
    paused, other = stack.active_batcher(MODEL), stack.batcher()
    with frozen(paused):
        names = [stack.send(MODEL, body="1", version="2", expiration=20_000) for _ in range(3)]
        assert leaving.terminate() == 0
        other.wait_for("batcher active")
        wait_until(
            lambda: not stack.redis.sismember(KEYS.versions, "2"), description="the version is forgotten"
        )
    assert {stack.result(MODEL, name, RESULT_S)["status"] for name in names} == {"NOT_FOUND"}
    stack.wait_until_idle(MODEL)
    assert not stack.redis.exists(KEYS.batches_of("2"))


def test_shares_promotion_and_rollback_under_requests(stack: Stack, traffic: Traffic) -> None:
    """Expect the same version for the same ID, whichever batcher decides, and that no request fails when all
    traffic goes to the one version or the other."""
    batcher = stack.batcher()
    for version in "12":
        start(stack, version)
    stack.wait_for_model(MODEL, workers=2)
    traffic.set({"2": 20}, actor=TESTER)
    division = Division({"2": 20}, "12")
    names = [f"id-{number}" for number in range(150)]
    expected = {name: division.version_of(name) for name in names}
    wait_until(
        lambda: stack.redis.xlen(KEYS.settled) and is_given(stack, division), description="the share is read"
    )
    for attempt in range(2):
        for name in names:
            stack.send(MODEL, body="1", correlation_id=name)
        assert versions_of(stack, names) == expected
        if not attempt:
            batcher.kill()
            stack.batcher().wait_for("batcher active")
    assert {"1", "2"} == set(expected.values())

    with Load(stack, asks=("",)) as load:
        load.wait_for()
        traffic.promote(actor=TESTER)
        assert traffic.shares() == {"2": 100}
        wait_until(lambda: is_given(stack, Division({"2": 100}, "12")), description="version 2 has all of it")
        load.wait_for()
        traffic.roll_back("2", actor=TESTER)
        wait_until(lambda: is_given(stack, Division({"2": 0}, "12")), description="version 1 has all of it")
        load.wait_for()
    assert set(versions_of(stack, list(load.sent)).values()) == {"1", "2"}


def is_given(stack: Stack, division: Division) -> bool:
    """Whether new requests are divided in this way."""
    names = [stack.send(MODEL, body="1", correlation_id=f"probe-{number}") for number in range(8)]
    probes = [f"probe-{number}" for number in range(len(names))]
    return versions_of(stack, probes) == {name: division.version_of(name) for name in probes}


def test_the_last_worker_of_a_version_is_killed_with_batches_in_its_stream(
    stack: Stack, traffic: Traffic
) -> None:
    """Of those, expect that the others answer what only its share gave to it, and an error for what asks."""
    stack.batcher()
    start(stack, "1")
    other = stack.worker(f"{MODEL}=versions.py:V3", *LONG_LEASE)
    stack.wait_for_model(MODEL, workers=2)
    traffic.set({"3": 100}, actor=TESTER)
    wait_until(lambda: is_given(stack, Division({"3": 100}, "13")), description="version 3 has all traffic")
    held = stack.send(MODEL, body='"hold 3"', correlation_id="held")
    wait_until(lambda: stack.redis.xlen(KEYS.batches_of("3")) == 1, description="its process is busy")
    # A full batch, which is dispatched to a busy process however long that has been so.
    asks = [stack.send(MODEL, body=str(number), version="3") for number in range(4)]
    given = [stack.send(MODEL, body=str(number)) for number in range(3)]
    wait_until(lambda: stack.redis.xlen(KEYS.batches_of("3")) >= 2, description="batches are in its stream")
    other.kill()
    stack.expire_lease(MODEL, other)
    assert set(versions_of(stack, given).values()) == {"1"}
    assert stack.result(MODEL, "held", RESULT_S)["version"] == "1", held
    answers = [stack.result(MODEL, name, RESULT_S) for name in asks]
    assert {answer["status"] for answer in answers} == {"NOT_FOUND"}
    assert "no worker has version '3'" in answers[0]["detail"] and "workers: 1" in answers[0]["detail"]
    wait_until(
        lambda: not stack.redis.xlen(KEYS.batches_of("3")), description="nothing is left in its stream"
    )
    late = stack.send(MODEL, body="1", version="3")
    assert stack.result(MODEL, late)["status"] == "NOT_FOUND"
    start(stack, "3")
    stack.wait_for_model(MODEL, workers=2)
    assert versions_of(stack, [stack.send(MODEL, body="1", version="3")]).popitem()[1] == "3"


def test_the_only_worker_drains_under_load_and_the_next_one_serves_the_rest(stack: Stack) -> None:
    """Scale to zero, and back: requests wait, and the first worker that comes serves them."""
    stack.batcher()
    worker = start(stack, "1")
    stack.wait_for_model(MODEL)
    with Load(stack, asks=("", "1")) as load:
        load.wait_for()
        assert worker.terminate(30) == 0
        wait_until(lambda: not stack.live_workers(MODEL), description="no worker is left")
        assert not stack.redis.xlen(KEYS.batches) and not stack.redis.xlen(KEYS.batches_of("1"))
        load.wait_for(60)
        start(stack, "1")
    assert set(versions_of(stack, list(load.sent)).values()) == {"1"}


def test_clients_ask_for_versions_and_commands_share_the_traffic(stack: Stack) -> None:
    """The Python client, `carpool infer`, HTTP, the Open Inference Protocol; share, promote, rollback."""
    stack.batcher()
    for version in "12":
        start(stack, version)
    gateway = stack.gateway()
    stack.wait_for_model(MODEL, workers=2)
    with Client(stack.url) as client:
        assert [client.infer(MODEL, 7, version=version) for version in "2121"] == ["2:7", "1:7"] * 2
        with pytest.raises(InvalidArgumentError, match="version: 'a b' must have"):
            client.infer(MODEL, 7, version="a b")
    assert carpool(stack.url, "infer", MODEL, "7", "--version", "2").stdout == '"2:7"\n'
    native, v2 = f"/carpool/v1/models/{MODEL}", f"/v2/models/{MODEL}"
    tensor = {"inputs": [{"name": "body", "shape": [1, 1], "datatype": "BYTES", "data": ["7"]}]}
    for version in "21":
        answer = call(gateway.url, "POST", f"{native}/versions/{version}/infer", b"7")
        assert (answer.json, answer.headers["carpool-model-version"]) == (f"{version}:7", version)
        answer = call(gateway.url, "POST", f"{native}/infer", b"7", carpool_version=version)
        assert answer.json == f"{version}:7"
        answer = call(gateway.url, "POST", f"{v2}/versions/{version}/infer", json.dumps(tensor).encode())
        assert answer.json["model_version"] == version, answer.json
        assert answer.json["outputs"][0]["data"][0].startswith(f"{version}:")
    assert call(gateway.url, "GET", v2).json["versions"] == ["1", "2"]

    def answers_as(version: str) -> bool:
        """Whether this version answers a request that asks for none. The answer must name who made it."""
        found = call(gateway.url, "POST", f"{v2}/infer", json.dumps(tensor).encode()).json
        assert found["outputs"][0]["data"][0].startswith(f"{found['model_version']}:")
        return bool(found["model_version"] == version)

    for version in "12":
        carpool(stack.url, "promote", MODEL, "--version", version, check=True)
        wait_until(partial(answers_as, version), description=f"all traffic goes to version {version}")
    carpool(stack.url, "share", MODEL, "--none", check=True)
    assert call(gateway.url, "POST", f"{v2}/versions/3/infer", json.dumps(tensor).encode()).code == 404

    assert "any worker takes" in carpool(stack.url, "share", MODEL).stdout
    assert " 10%  version 2\n   90%  version 1" in carpool(stack.url, "share", MODEL, "2=10%").stdout
    assert "100%  version 2" in carpool(stack.url, "promote", MODEL).stdout
    wait_until(lambda: is_given(stack, Division({"2": 100}, "12")), description="version 2 has all traffic")
    assert "  0%  version 2\n  100%  version 1" in carpool(stack.url, "rollback", MODEL).stdout
    (state,) = json.loads(carpool(stack.url, "models", "--json").stdout)
    assert state["shares"] == {"2": 0}
    wait_until(
        lambda: {version for version, of in by_version(stack).items() if of["requests"] >= 5} == {"1", "2"},
        description="the report has the requests of both versions",
    )
    assert not by_version(stack)["2"]["failed"]
    assert "Versions of clf" in carpool(stack.url, "models").stdout
    assert "any worker takes" in carpool(stack.url, "share", MODEL, "--none").stdout
    for mistake in (("promote", MODEL), ("share", MODEL, "2"), ("share", "nobody", "2=1%")):
        failed = carpool(stack.url, *mistake)
        assert failed.returncode == 1 and failed.stderr.startswith(f"carpool {mistake[0]}: ")


def by_version(stack: Stack) -> Any:
    (state,) = json.loads(carpool(stack.url, "models", "--json").stdout)
    return state["by_version"]


def test_streams_of_a_version_are_handed_over_within_it(stack: Stack, tmp_path: Path) -> None:
    """A stepping model: what asks for version 1 goes on at another worker of version 1."""
    stack.batcher()
    keys, gate = Keys("Chain"), tmp_path / "gate"
    first = stack.worker("Chain=stepping.py:Named", *LEASE)
    stack.worker("Chain=stepping.py:Other", *LEASE)
    stack.wait_for_model("Chain", workers=2)
    body = json.dumps({"length": 20, "gate": str(gate)})
    names = [stack.send("Chain", body=body, version="1", correlation_id=f"s{number}") for number in range(4)]
    wait_until(lambda: stack.redis.xlen(keys.batches_of("1")) == len(names), description="all are in flight")
    wait_until(lambda: stack.pending("Chain") == len(names), description="its worker has them")
    assert carpool(stack.url, "drain", first.events("worker ready")[0]["worker"]).returncode == 0
    first.wait_for("worker drained by an operator")
    listed = json.loads(carpool(stack.url, "workers", "Chain", "--json").stdout)
    (drained,) = [worker for worker in listed if worker["version"] == "1"]
    assert drained["state"] == "draining" and drained["processes"][0]["in_hand"] == len(names)
    assert all(batch.endswith("@1") for batch in drained["processes"][0]["batches"])
    assert not first.events("requests handed over"), "no other worker of version 1 could go on with them"
    stack.worker("Chain=stepping.py:Named", *LEASE)
    assert first.terminate(30) == 0
    gate.touch()
    for number in range(4):
        answer = stack.result("Chain", f"s{number}", RESULT_S)
        assert (answer["body"], answer["version"]) == (text_of(f"s{number}", 20), "1")
    assert stack.events("requests handed over")
    stack.wait_until_idle("Chain")


def test_results_come_in_order_over_versions(stack: Stack) -> None:
    stack.batcher()
    for version in "12":
        start(stack, version)
    stack.wait_for_model(MODEL, workers=2)
    stack.configure(MODEL, preserve_ordering="true")
    names = [f"o{number}" for number in range(80)]
    for number, name in enumerate(names):
        asks = {"version": "12"[number % 2]} if number % 3 else {}
        stack.send(MODEL, body=str(number), correlation_id=name, reply_to="ordered", **asks)
    wait_until(lambda: len(stack.replies(MODEL, "ordered")) == len(names), description="all are answered")
    assert [reply["correlation_id"] for reply in stack.replies(MODEL, "ordered")] == names
    assert {reply["version"] for reply in stack.replies(MODEL, "ordered")} == {"1", "2"}


def test_a_version_loses_its_only_worker_that_drains(stack: Stack, traffic: Traffic) -> None:
    """It finishes what it has; what its share would have given to it goes to the other version."""
    stack.batcher()
    start(stack, "1")
    old = start(stack, "2")
    stack.wait_for_model(MODEL, workers=2)
    traffic.set({"2": 100}, actor=TESTER)
    wait_until(lambda: is_given(stack, Division({"2": 100}, "12")), description="version 2 has all traffic")
    with Load(stack, asks=("",)) as load:
        load.wait_for(60)
        assert old.terminate(30) == 0
        load.wait_for(60)
    assert set(versions_of(stack, list(load.sent)).values()) == {"1", "2"}
    stack.wait_until_idle(MODEL)
