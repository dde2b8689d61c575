"""The statistics of a model equal a checker's own counts, whatever is killed while they are counted."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any, Final

import pytest

from carpool.errors import OK
from carpool.keys import Keys
from support.checker import Checker
from support.http import call
from support.load import Load, collect
from support.stack import Service, Stack, frozen_with_batch
from support.waiting import wait_until

pytestmark = pytest.mark.chaos

MODEL: Final = "Busy"
KEYS: Final = Keys(MODEL)
KILLS: Final = 10
INVALID: Final = {"priority": 11}
MALFORMED_EVERY: Final = 5  # requests of a client, which sends at least as many
SOON: Final = {"expiration": 30}  # many of these expire, waiting or in flight


class Clients:
    """Clients of the gateways. Each request has an Idempotency-Key, and is sent to one gateway after another
    until it is answered."""

    def __init__(self, gateways: list[Service]) -> None:
        self.gateways = gateways
        self.codes: list[int] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(4)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def _run(self, number: int) -> None:
        sent = 0
        while not self._stop.is_set() or sent < MALFORMED_EVERY:
            sent += 1
            self.codes.append(
                self._code(f"{number}-{sent}", b'"x"' if sent % MALFORMED_EVERY else b"not JSON")
            )

    def _code(self, key: str, body: bytes) -> int:
        while True:
            for gateway in list(self.gateways):
                try:
                    answer = call(
                        gateway.url, "POST", f"/carpool/v1/models/{MODEL}/infer", body, Idempotency_Key=key
                    )
                except (OSError, AssertionError, ValueError):  # it was killed
                    continue
                if answer.code != 503:
                    return answer.code


def send_failing(stack: Stack, checker: Checker, start: int, count: int) -> None:
    """Requests that are refused, that expire, and that are withdrawn."""
    for number in range(start, start + count):
        name = f"failing-{number}"
        checker.attempt(name, "payload")
        body = json.dumps("payload")
        fields: dict[str, Any] = {"correlation_id": name, "body": body, **(INVALID, SOON, {})[number % 3]}
        stack.redis.xadd(KEYS.requests, fields)
        checker.accept(name)
        if number % 3 == 2:
            stack.redis.xadd(KEYS.requests, {"withdraw": name})


def kill_with_batch(stack: Stack, worker: Service) -> None:
    """Kill a worker that has a batch, so that another one reclaims it."""
    worker.wait_for("worker ready")
    with frozen_with_batch(stack, MODEL, worker):
        worker.kill()


def statistics_of(gateway: Service) -> dict[str, Any]:
    (found,) = call(gateway.url, "GET", f"/v2/models/{MODEL}/stats").json["model_stats"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("seed", [1, 2])
def test_statistics_equal_the_outcomes(tmp_path: Path, seed: int) -> None:
    """Given workers, batchers and gateways that are killed at random, expect each result to be counted once,
    and all gateways to tell the same."""
    chosen = random.Random(seed)
    with Stack(tmp_path / "stack") as stack:

        def new_worker() -> Service:
            return stack.worker("hashing.py:Busy", "--lease-ms", "600")

        batchers, workers = [stack.batcher(), stack.batcher()], [new_worker(), new_worker()]
        stack.wait_for_model(MODEL, 2)
        gateways = [stack.gateway(), stack.gateway()]
        checker, clients = Checker(), Clients(gateways)
        clients.start()
        try:
            with Load(stack, MODEL, checker) as load:
                for kill in range(KILLS):
                    load.wait_for_more(chosen.randint(1, 60))
                    send_failing(stack, checker, 30 * kill, 30)
                    of_kind, new = (
                        (workers, new_worker), (batchers, stack.batcher), (gateways, stack.gateway)
                    )[kill % 3]  # fmt: skip
                    at = chosen.randrange(2)
                    if kill == 0:
                        kill_with_batch(stack, of_kind[at])
                    else:
                        of_kind[at].kill()
                    of_kind[at] = new()
        finally:
            clients.stop()
        stack.wait_until_idle(MODEL, 30)
        collect(stack, MODEL, checker, reply_to="load*")
        report = checker.report()
        assert report.faultless, report
        first = statistics_of(gateways[0])
        assert statistics_of(gateways[1]) == first
        assert set(report.statuses) >= {OK, "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "CANCELLED"}, report
        assert stack.events("batch reclaimed"), "the batch of the first worker that was killed"

        succeeded = clients.codes.count(200)
        assert 0 < succeeded < len(clients.codes)
        of_requests, batches = first["inference_stats"], first["batch_stats"]
        assert of_requests["success"]["count"] == first["inference_count"] == report.ok + succeeded
        assert of_requests["fail"]["count"] == report.error + len(clients.codes) - succeeded
        for name in ("queue", "compute_input", "compute_infer", "compute_output"):
            assert of_requests[name]["count"] == first["inference_count"]
        executions = [of_size["compute_infer"]["count"] for of_size in batches]
        assert first["execution_count"] == sum(executions)
        sizes = [of_size["batch_size"] for of_size in batches]
        assert sum(map(int.__mul__, sizes, executions)) == first["inference_count"]
        wait_until(lambda: stack.redis.hlen(KEYS.statistics) <= 2 + 32, description="the fields are few")
