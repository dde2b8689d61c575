"""Sequences of the Python clients, through real services; and what operators see of them."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from carpool import AsyncClient, Client
from carpool.errors import (
    AbortedError,
    CancelledRequestError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    UnimplementedError,
)
from carpool.keys import Keys
from support.command import carpool
from support.models.stateful import folded
from support.stack import Service, Stack
from support.waiting import EVENTUALLY_S, wait_until

MODEL = "Folding"
KEYS = Keys(MODEL)
TIMEOUT_S = EVENTUALLY_S


class Served(Stack):
    """A stack with a batcher, two workers of the model, and one of a model without states."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.of_batcher = self.batcher("--http-port", "0")
        specs = ("stateful.py:Folding", "stateful.py:Folding", "square")
        workers = [self.worker(spec, ready=False) for spec in specs]
        for worker in workers:
            worker.wait_for("worker ready")
        self.wait_for_model(MODEL, workers=2)
        self.wait_for_model("square")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest.fixture(autouse=True)
def nothing_is_left(served: Served) -> Iterator[None]:
    yield
    served.wait_until_idle(MODEL)
    wait_until(lambda: top(served)["sequences"]["kept"] == 0, description="nothing is kept")


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.url, timeout=TIMEOUT_S) as client:
        yield client


def run(stack: Stack, *arguments: str) -> str:
    """What a command prints, which must succeed."""
    return carpool(stack.url, *arguments, check=True).stdout


def top(stack: Stack) -> dict[str, Any]:
    (found,) = json.loads(run(stack, "top", "--once", "--json", "--model", MODEL))["models"]
    assert isinstance(found, dict)
    return found


def metrics(service: Service) -> dict[str, float]:
    """The samples about sequences, by name and the label `change`."""
    connection = http.client.HTTPConnection(service.status_url.removeprefix("http://"), timeout=10)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    return {
        f"{sample.name} {sample.labels.get('change', '')}".strip(): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "sequences" in sample.name and sample.labels["model"] == MODEL
    }


# --- answers -----------------------------------------------------------------------------------------------


async def test_interleaved_sequences_have_the_answers_of_each_alone(served: Served) -> None:
    async with AsyncClient(served.url, timeout=TIMEOUT_S) as client:
        names = []

        async def use(name: int) -> None:
            numbers = list(range(name, name + 25))
            async with client.sequence(MODEL) as sequence:
                names.append(sequence.sequence_id)
                futures = [sequence.submit(number, end=number == numbers[-1]) for number in numbers]
                assert await asyncio.gather(*futures) == folded(numbers)

        await asyncio.gather(*(use(name) for name in range(40)))
        assert served.redis.exists(*map(KEYS.sequence, names)) == 0, "nothing of them is kept"


async def test_lost_connections_change_no_answer(served: Served) -> None:
    """Requests are sent again that Redis may have accepted."""

    async with AsyncClient(served.url, timeout=TIMEOUT_S) as client:
        answered = asyncio.Event()
        losses = client._packer.transport

        async def use(name: int) -> None:
            numbers = list(range(name, name + 60))
            async with client.sequence(MODEL) as sequence:
                answers = []
                for start in range(0, 60, 4):  # a few in flight
                    futures = [sequence.submit(number) for number in numbers[start : start + 4]]
                    answers += await asyncio.gather(*futures)
                    answered.set()
                assert answers == folded(numbers)

        async def disturb() -> None:
            for _ in range(12):
                answered.clear()
                await answered.wait()
                for connection in await asyncio.to_thread(served.redis.client_list):
                    if connection["name"].startswith(client._packer.name):
                        await asyncio.to_thread(served.redis.client_kill_filter, _id=connection["id"])

        disturbing = asyncio.create_task(disturb())
        await asyncio.gather(*(use(name) for name in range(20)))
        disturbing.cancel()
        assert losses.losses > 0


def test_error_breaks_the_sequence_and_it_can_be_begun_again(client: Client) -> None:
    with client.sequence(MODEL) as sequence:
        futures = [sequence.submit(body) for body in (5, 6, "raise", 7)]
        assert [future.result() for future in futures[:2]] == folded([5, 6])
        with pytest.raises(InternalError, match="this one is spoilt"):
            futures[2].result()
        with pytest.raises(AbortedError, match="begin it again"):
            futures[3].result()
        with pytest.raises(AbortedError, match="its request 2 failed"):
            sequence.infer(8)
        sequence.restart()
        assert [sequence.infer(number) for number in (8, 9)] == folded([8, 9])


def test_sequence_may_begin_anew_before_it_has_ended(client: Client) -> None:
    with client.sequence(MODEL, "again") as sequence:
        assert sequence.infer(5) == folded([5])[0]
    with client.sequence(MODEL, "again") as sequence:
        assert [sequence.infer(6), sequence.infer(7, end=True)] == folded([6, 7])


def test_exception_cancels_what_waits(client: Client, gate: Path) -> None:
    futures = []
    with pytest.raises(ZeroDivisionError), client.sequence(MODEL) as sequence:
        futures = [sequence.submit(body) for body in (str(gate), 1, 2)]
        raise ZeroDivisionError
    for future in futures[1:]:
        with pytest.raises(CancelledRequestError):
            future.result()
    gate.touch()
    assert futures[0].done() or futures[0].result() == 0


def test_expired_request_breaks_the_sequence(client: Client, gate: Path) -> None:
    with client.sequence(MODEL) as sequence:
        first, expiring = sequence.submit(str(gate)), sequence.submit(1, timeout=0.2)
        with pytest.raises(DeadlineExceededError):
            expiring.result()
        gate.touch()
        assert first.result() == 0
        with pytest.raises(AbortedError, match="its request 1 failed"):
            sequence.infer(2)


def test_fields_of_sequences_are_checked(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="sequence_id: missing"):
        client.infer(MODEL, 1)
    with pytest.raises(InvalidArgumentError, match=r"sequence_id: .*never begun"):
        client.infer(MODEL, 1, sequence_id="never")
    with pytest.raises(UnimplementedError, match="sequence_id"):
        client.infer("square", 1, sequence_id="never", sequence_start=True)


def test_command_line_sends_a_sequence(served: Served) -> None:
    numbers = [3, 4, 5]
    printed = [
        run(served, "infer", MODEL, str(number), "--sequence-id", "by-hand", *flags)
        for number, flags in zip(numbers, (["--sequence-start"], [], ["--sequence-end"]), strict=True)
    ]
    assert [int(line) for line in printed] == folded(numbers)


def test_command_says_what_an_index_waits_for(served: Served) -> None:
    arguments = ("--sequence-id", "gap", "--sequence-index", "7", "--timeout", "0.3")
    done = carpool(served.url, "infer", MODEL, "1", *arguments)
    assert done.returncode == 1
    assert "waits for those of its sequence with the indexes below 7" in done.stderr


# --- what operators see ------------------------------------------------------------------------------------


def test_top_models_and_metrics_show_sequences(served: Served, client: Client) -> None:
    """Given two sequences that are kept, a third that must wait to start, and one that breaks."""
    before, counted = metrics(served.of_batcher), top(served)["sequences"]
    served.configure(MODEL, max_candidate_sequences="2")
    with client.sequence(MODEL) as one, client.sequence(MODEL) as other:
        assert (one.infer(1), other.infer(2)) == (1, 2)
        with client.sequence(MODEL) as third:
            waiting = third.submit(3)
            wait_until(
                lambda: top(served)["sequences"]["waiting_to_start"] == 1,
                description="it waits to start",
            )
            assert "2, 1 wait to start" in run(served, "models")
            gauges = metrics(served.of_batcher)
            assert gauges["carpool_kept_sequences"] == 2
            assert gauges["carpool_sequences_waiting_to_start"] == 1
            with pytest.raises(InternalError):
                other.infer("raise")
            assert waiting.result() == 3
    served.configure(MODEL, max_candidate_sequences="10000")
    wait_until(lambda: top(served)["sequences"]["kept"] == 0, description="all have ended")
    now, after = top(served)["sequences"], metrics(served.of_batcher)
    changes = {name: now[name]["total"] - counted[name]["total"] for name in ("started", "ended", "broken")}
    assert (changes["started"], changes["broken"]) == (3, 1)
    assert changes["ended"] >= 2
    for name, change in changes.items():
        sample = f"carpool_sequences_total {name}"
        assert after[sample] - before.get(sample, 0) == change
    assert "sequences" in run(served, "top", "--once")


def test_tune_sends_no_body_outside_a_sequence(served: Served) -> None:
    done = carpool(served.url, "tune", MODEL, "7", "--latency-ms", "30")
    assert done.returncode == 2
    assert done.stderr.startswith(f"carpool tune: {MODEL} keeps a state for each sequence, and BODY")
