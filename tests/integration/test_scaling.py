"""How many workers a model wants, as an autoscaler asks the gateway: up, down, to none and up from none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from carpool.keys import Keys
from carpool.wire.report import BatcherReport
from support.command import carpool
from support.http import call
from support.stack import Service, Stack
from support.waiting import wait_until

MODEL = "Scaled"
PER_S = 80.0  # of which a process serves 20: for more than 3, which are the most, also if it falls behind


@contextmanager
def load(stack: Stack) -> Iterator[list[str]]:
    """Requests at a steady rate. Yields the IDs of those that were sent."""
    sent: list[str] = []
    ended = threading.Event()

    def send() -> None:
        while not ended.wait(1 / PER_S):
            sent.append(stack.send(MODEL, body="1"))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield sent
    finally:
        ended.set()
        thread.join()


def test_workers_are_started_and_stopped_as_the_model_wants(stack: Stack) -> None:
    batcher, gateway = stack.batcher(), stack.gateway()
    workers = [stack.worker("scaled.py:Scaled")]
    stack.wait_for_model(MODEL)

    def answer() -> Any:
        found = call(gateway.url, "GET", f"/carpool/v1/scale/{MODEL}")
        return found.json if found.code == 200 else {"wanted": None}

    def wait_until_wanted(number: int) -> None:
        wait_until(lambda: answer()["wanted"] == number, description=f"{number} workers are wanted")

    with load(stack) as sent:
        wait_until_wanted(3)
        workers += [stack.worker("scaled.py:Scaled") for _ in range(2)]
        stack.wait_for_model(MODEL, workers=3)
        wait_until(lambda: answer().get("processes") == 3, description="three processes are needed")
        top = ("top", "--once", "--model", MODEL)
        wait_until(lambda: "3 workers (" in carpool(stack.url, *top).stdout, description="they are shown")
    for correlation_id in sent:
        assert stack.result(MODEL, correlation_id)["status"] == "OK"

    wait_until_wanted(0)
    idle = {"model": MODEL, "wanted": 0, "processes": 0, "reason": "idle"}
    wait_until(lambda: answer() == idle, description="that is because nothing is asked for")
    for worker in workers:
        worker.terminate()
    wait_until(lambda: not stack.live_workers(MODEL), description="no worker is left")
    wait_until_wanted(0)

    waiting = stack.send(MODEL, body="2")
    wait_until_wanted(1)
    stack.worker("scaled.py:Scaled")
    assert stack.result(MODEL, waiting)["status"] == "OK"

    assert_errors_where_nothing_is_known(stack, gateway, batcher)


def assert_errors_where_nothing_is_known(stack: Stack, gateway: Service, batcher: Service) -> None:
    """An autoscaler leaves workers as they are after an error."""
    unknown = call(gateway.url, "GET", "/carpool/v1/scale/nobody")
    assert (unknown.code, unknown.json["status"]) == (404, "NOT_FOUND")
    report = BatcherReport.decode(stack.redis.get(Keys(MODEL).report))
    assert report is not None
    batcher.terminate()
    stack.redis.delete(Keys(MODEL).report)
    missing = call(gateway.url, "GET", f"/carpool/v1/scale/{MODEL}")
    assert missing.code == 503
    assert "no batcher tells how many workers the model 'Scaled' needs" in missing.json["error"]
