"""preserve_ordering on a running stack: results are delivered in the order in which requests arrived."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, Final

import pytest

from carpool.keys import Keys
from support.stack import Stack
from support.waiting import wait_until

MODEL: Final = "InOrder"


def replied(stack: Stack, model: str) -> list[str]:
    """The correlation IDs on the reply stream, in order."""
    return [result["correlation_id"] for result in stack.replies(model, "all")]


def wait_for_results(
    stack: Stack, names: Sequence[str], timeout_s: float = 30.0, model: str = MODEL
) -> list[str]:
    """The correlation IDs on the reply stream, once there are as many as `names`."""
    wait_until(
        lambda: len(stack.replies(model, "all")) >= len(names),
        description=f"{len(names)} results",
        timeout_s=timeout_s,
    )
    return replied(stack, model)


def test_order_holds_through_expiry_withdrawal_and_deaths(stack: Stack) -> None:
    """Also through lanes, priorities, packed entries, and batches of any execution time."""
    batchers = [stack.batcher(), stack.batcher()]
    workers = [stack.worker("timed.py:InOrder", "--lease-ms", "900") for _ in range(3)]
    stack.wait_for_model(MODEL, workers=3)
    chance = random.Random(7)
    names: list[str] = []
    withdrawn: set[str] = set()
    for round_ in range(60):
        requests = []
        for number in range(chance.choice((1, 1, 3, 9))):
            request: dict[str, Any] = {
                "correlation_id": f"n{round_}.{number}",
                "body": str(chance.choice((0, 0.001, 0.005, 0.03))).encode(),
                "reply_to": "all",
                "priority": chance.randrange(10),
                "lane": chance.choice(("", "a", "b")),
            }
            if chance.random() < 0.1:
                request["expiration"] = chance.choice((1, 40))
            requests.append(request)
        entry_id = (
            stack.send_packed(MODEL, requests) if len(requests) > 1 else stack.send(MODEL, **requests[0])
        )
        sent = [str(request["correlation_id"]) for request in requests]
        names += sent
        if round_ % 20 == 7:
            stack.send(MODEL, withdraw=sent[0])
        if round_ % 20 == 11 and stack.redis.xdel(Keys(MODEL).requests, entry_id):
            withdrawn |= set(sent)
        if round_ == 20:
            workers[0].kill()
        if round_ == 40:
            stack.active_batcher(MODEL).kill()
    expected = [name for name in names if name not in withdrawn]
    answered = wait_for_results(stack, expected)
    if len(answered) > len(expected):  # some of a deleted entry's requests had been dispatched before
        answered = [name for name in answered if name not in withdrawn]
    assert answered == expected
    assert sum(batcher.alive for batcher in batchers) == 1
    stack.wait_until_idle(MODEL)
    assert not stack.redis.exists(Keys(MODEL).order, Keys(MODEL).tickets)


def test_withdrawal_read_together_with_its_request_keeps_the_order(stack: Stack) -> None:
    """Only a request that is refused on arrival is answered ahead of earlier ones."""
    model = stack.serve("plain.py:Single")
    keys, gate = Keys(model), stack.home / "gate"
    stack.configure(model, preserve_ordering="true")
    stack.active_batcher(model).kill()
    stack.send(model, body=json.dumps({"gate": str(gate)}), reply_to="all", correlation_id="slow")
    stack.send(model, body="7", reply_to="all", correlation_id="withdrawn")
    stack.send(model, withdraw="withdrawn")
    stack.batcher().wait_for("batcher active")
    wait_until(lambda: stack.redis.xlen(keys.requests) == 0, description="no request waits")
    assert withheld(stack, keys) == 1
    assert replied(stack, model) == []
    gate.touch()
    assert wait_for_results(stack, ["slow", "withdrawn"], model=model) == ["slow", "withdrawn"]


def test_ordering_can_be_turned_on_and_off_while_requests_wait(stack: Stack) -> None:
    model = stack.serve("plain.py:Single")
    stack.worker("plain.py:Single")
    keys, gate = Keys(model), stack.home / "gate"

    def send(name: str, body: Any) -> None:
        stack.send(model, correlation_id=name, body=json.dumps(body), reply_to="all")

    def names() -> list[str]:
        return replied(stack, model)

    stack.configure(model, preserve_ordering="true")
    send("slow", {"gate": str(gate)})
    send("fast", 7)
    wait_until(
        lambda: withheld(stack, keys) == 1,
        description="the second result is withheld",
    )
    assert names() == []
    stack.configure(model, preserve_ordering="false")
    send("later", 7)
    wait_until(lambda: names() == ["later"], description="a new result is delivered at once")
    gate.touch()
    wait_until(
        lambda: names() == ["later", "slow", "fast"], description="requests with tickets keep their order"
    )
    assert not stack.redis.exists(keys.order, keys.tickets), "no ticket is left"


def test_withheld_results_count_as_waiting(stack: Stack) -> None:
    """Otherwise they would fill Redis's memory behind one slow request."""
    model = stack.serve("plain.py:Single")
    stack.worker("plain.py:Single")
    keys, gate = Keys(model), stack.home / "gate"
    stack.configure(model, preserve_ordering="true", max_queue_size="5")
    stack.send(model, body=json.dumps({"gate": str(gate)}))
    sent: list[str] = []
    while not (sent and stack.redis.exists(keys.result(sent[-1]))):
        sent.append(stack.send(model, body="7"))
        wait_until(
            lambda: stack.redis.xlen(keys.requests) == 0 and stack.redis.xlen(keys.batches) == 1,
            description="only the slow request is not done",
        )
    refused = stack.result(model, sent[-1])
    assert refused["status"] == "RESOURCE_EXHAUSTED"
    assert "results are withheld until earlier ones are done" in refused["detail"]
    wait_until(
        lambda: json.loads(stack.redis.get(keys.report))["gauges"]["withheld"] == len(sent) - 1,
        description="the batcher reports how many are withheld",
    )
    gate.touch()
    assert [stack.result(model, entry_id)["status"] for entry_id in sent[:-1]] == ["OK"] * (len(sent) - 1)


def withheld(stack: Stack, keys: Keys) -> int:
    """How many requests have a withheld result. Several may share one: `r COUNT ...`."""
    return sum(
        int(value.split(b" ", 2)[1]) for value in stack.redis.hvals(keys.tickets) if value.startswith(b"r ")
    )


def test_delivered_results_no_longer_count_as_waiting(stack: Stack) -> None:
    model = stack.serve("plain.py:Single")
    stack.worker("plain.py:Single")
    keys, gate = Keys(model), stack.home / "gate"
    stack.configure(model, preserve_ordering="true", max_queue_size="5")
    sent = [stack.send(model, body=json.dumps({"gate": str(gate)}), reply_to="all")]
    wait_until(lambda: stack.redis.xlen(keys.batches) == 1, description="the slow request is in flight")
    while withheld(stack, keys) < 3:
        sent.append(stack.send(model, body="7", reply_to="all"))
        wait_until(lambda: stack.redis.xlen(keys.requests) == 0, description="no request waits")
        wait_until(lambda: withheld(stack, keys) >= len(sent) - 2, description="all but the last are done")
    wait_until(
        lambda: json.loads(stack.redis.get(keys.report))["gauges"]["withheld"] >= 3,
        description="the batcher has counted them",
    )
    gate.touch()
    wait_until(lambda: len(stack.replies(model, "all")) == len(sent), description="all are delivered")
    stack.send_packed(model, [{"correlation_id": f"r{number}", "body": b"7"} for number in range(5)])
    assert [stack.result(model, f"r{number}")["status"] for number in range(5)] == ["OK"] * 5


def test_batcher_that_takes_over_a_full_queue_refuses_none_of_it(stack: Stack) -> None:
    model = stack.serve("plain.py:Single")
    keys, gate = Keys(model), stack.home / "gate"
    stack.configure(model, preserve_ordering="true", max_queue_size="20")
    sent = [stack.send(model, body=json.dumps({"gate": str(gate)}), reply_to="all")]
    while not stack.replies(model, "all"):
        sent.append(stack.send(model, body="7", reply_to="all"))
        wait_until(
            lambda: stack.redis.llen(keys.order) == len(sent) or stack.replies(model, "all"),
            description="the request has a ticket, or was refused",
        )
    stack.active_batcher(model).kill()
    second = stack.batcher()
    second.wait_for("batcher active")
    gate.touch()
    assert wait_for_results(stack, sent, model=model) == [sent[-1], *sent[:-1]]
    statuses = [result["status"] for result in stack.replies(model, "all")]
    assert statuses == ["RESOURCE_EXHAUSTED", *["OK"] * (len(sent) - 1)]


def test_withheld_results_are_delivered_although_redis_is_full(stack: Stack) -> None:
    """Several scripts deliver them, and each must begin with a write that Redis allows then."""
    model = stack.serve("plain.py:Echo")
    stack.worker("plain.py:Echo")
    keys, gate = Keys(model), stack.home / "gate"
    stack.configure(model, preserve_ordering="true", max_batch_size="1")
    stack.send(model, body=json.dumps({"gate": str(gate)}), reply_to="all", correlation_id="slow")
    wait_until(lambda: stack.redis.xlen(keys.batches) == 1, description="the slow request is in flight")
    stack.configure(model, max_batch_size="500")
    names = [f"n{number}" for number in range(2500)]
    body = json.dumps("x" * 2000).encode()
    stack.send_packed(
        model, [{"correlation_id": name, "body": body} for name in names], reply_to="all"
    )  # in batches behind it, or on the other worker
    wait_until(lambda: withheld(stack, keys) >= 2000, description="most are withheld")
    stack.redis.config_set("maxmemory", stack.redis.info("memory")["used_memory"] // 2)
    gate.touch()
    wait_until(lambda: len(stack.replies(model, "all")) == 2501, description="all are delivered")
    assert replied(stack, model) == ["slow", *names]
    assert not stack.events("batcher failed, starting over")
    assert not stack.redis.exists(keys.order, keys.tickets)


@pytest.mark.parametrize("name", ["order", "tickets"])
@pytest.mark.parametrize("in_order", ["true", "false"])
def test_key_of_another_type_costs_the_order_but_no_result(stack: Stack, name: str, in_order: str) -> None:
    model = stack.serve("plain.py:Single")
    keys = Keys(model)
    stack.configure(model, preserve_ordering=in_order, max_queue_size="3")
    stack.redis.set(getattr(keys, name), "x")
    stack.redis.delete(keys.report)
    wait_until(lambda: stack.redis.exists(keys.report), description="the batcher has taken a snapshot since")
    for _ in range(5):
        assert stack.result(model, stack.send(model, body="7"))["status"] == "OK"
    assert not stack.events("batcher failed, starting over")


def test_forged_ticket_costs_no_result(stack: Stack) -> None:
    """A producer may send an entry as if it was put back, with the ticket of another's withheld result."""
    model = stack.serve("plain.py:Single")
    stack.worker("plain.py:Single")
    keys, gate = Keys(model), stack.home / "gate"
    stack.configure(model, preserve_ordering="true")
    stack.send(model, body=json.dumps({"gate": str(gate)}), reply_to="all", correlation_id="slow")
    wait_until(lambda: stack.redis.xlen(keys.batches) == 1, description="the slow request is in flight")
    behind = stack.send(model, body="7", reply_to="all", correlation_id="behind")
    wait_until(lambda: withheld(stack, keys) == 1, description="the result of the one behind it is withheld")
    forged = [{"correlation_id": "forged", "body": b"7", "reply_to": "all"}]
    stack.send_packed(model, forged, arrival=1, tickets=f"{behind}:0")
    wait_until(lambda: stack.redis.xlen(keys.requests) == 0, description="the forged one is dispatched")
    gate.touch()
    wait_until(lambda: len(stack.replies(model, "all")) == 3, description="all results are delivered")
    names = replied(stack, model)
    assert sorted(names) == ["behind", "forged", "slow"]
    assert names.index("slow") < names.index("behind")
    assert not stack.redis.exists(keys.order, keys.tickets)


def test_entries_and_batches_known_to_be_in_redis_are_not_looked_up(stack: Stack) -> None:
    """A lookup costs Redis the bytes of a batch, a few times a second."""
    model = stack.serve("plain.py:Single")
    keys, gate = Keys(model), stack.home / "gate"
    stack.configure(model, preserve_ordering="true")
    stack.send(model, body=json.dumps({"gate": str(gate)}), reply_to="all")
    waiting = [stack.send(model, body="7", reply_to="all") for _ in range(3)]
    wait_until(lambda: stack.redis.llen(keys.order) == 4, description="all have tickets")
    stack.redis.config_resetstat()
    stack.redis.delete(keys.report)
    wait_until(lambda: stack.redis.exists(keys.report), description="the batcher has taken a snapshot since")
    assert "cmdstat_xrange" not in stack.redis.info("commandstats")
    stack.redis.xdel(keys.requests, waiting[-1])
    gate.touch()
    wait_until(lambda: not stack.redis.exists(keys.order), description="the lost ticket is freed, too")
    assert len(stack.replies(model, "all")) == 3
