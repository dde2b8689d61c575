"""LocalClient and LocalAsyncClient: models in this process, called as through a stack."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carpool import (
    AbortedError,
    CarpoolError,
    Client,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    StateSpec,
    TensorSpec,
    UnavailableError,
    Unhealthy,
    UnimplementedError,
)
from carpool.client import AsyncClient, on_behalf
from carpool.testing import LocalAsyncClient, LocalClient
from carpool_worker.model_process.model import BoundSequence, RequestInfo
from support.models.calling import Ask, AskPlain, Picky, Seen
from support.waiting import wait_until

SIZE_MAX = 4


class Model:
    """Counts its batches, and is told by a body what to do."""

    max_batch_size = SIZE_MAX
    max_body_bytes = 100_000
    max_queue_size = 20

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.devices: list[str] = []
        self.unloads = 0

    def load(self, device: str) -> None:
        self.devices.append(device)

    def unload(self) -> None:
        self.unloads += 1

    def validate(self, body: Any) -> None:
        if body == "refused":
            raise ValueError("this one is refused")

    def predict(self, batch: list[Any], requests: Sequence[RequestInfo]) -> list[Any]:
        self.batches.append(list(batch))
        for body in batch:
            if body == "raise":
                raise RuntimeError("as it was told")
            if body == "ill":
                raise Unhealthy("the card is gone")
            if isinstance(body, float):
                time.sleep(body)
        return [(body, request.lane, len(batch)) for body, request in zip(batch, requests, strict=True)]


class Doubled:
    """Tensors of any length: requests of one shape are executed together."""

    max_batch_size = 8
    inputs = (TensorSpec("x", "FP32", (-1,)),)

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def predict(self, batch: Any) -> Any:
        self.shapes.append(batch.shape)
        return 2 * batch


class Total:
    states = (StateSpec("sum", "FP64", (-1,)),)

    def predict(self, batch: list[float], states: Any) -> Any:
        sums = states["sum"] + np.array(batch)
        return sums.tolist(), {"sum": sums}


class Bound:
    """Keeps a sum for each sequence that it has."""

    binds_sequences = True
    max_batch_size = 2

    def __init__(self) -> None:
        self.sums = [0, 0]
        self.ended: list[str] = []

    def start(self, sequence: BoundSequence) -> None:
        self.sums[sequence.slot] = 0

    def predict(self, batch: list[Any]) -> list[int]:
        self.sums = [total + (body or 0) for total, body in zip(self.sums, batch, strict=True)]
        return list(self.sums)

    def end(self, sequence: BoundSequence) -> None:
        self.ended.append(sequence.sequence_id)


class Echo:
    """Steps: emits its body's letters, one with each step, with all that have a slot."""

    max_batch_size = 2

    def __init__(self) -> None:
        self.steps: list[int] = []

    def begin(self, requests: list[Any]) -> None:
        for request in requests:
            request.state = iter(request.body)

    def step(self, requests: list[Any]) -> None:
        self.steps.append(len(requests))
        for request in requests:
            letter = next(request.state, None)
            if letter is None:
                request.finish()
            else:
                request.emit(letter)


def countdown(body: int) -> Iterator[int]:
    yield from range(body, 0, -1)


def test_interfaces_are_those_of_the_clients() -> None:
    for local, remote in ((LocalClient, Client), (LocalAsyncClient, AsyncClient)):
        assert issubclass(local, remote)


def test_batches_are_those_of_the_settings_and_lanes() -> None:
    model = Model()
    with LocalClient({"model": model}, device="cuda:1") as client:
        futures = [client.submit("model", number, lane="ab"[number % 2]) for number in range(12)]
        results = [future.result() for future in futures]
        sizes = [len(batch) for batch in model.batches]
        assert results[:2] == [[0, "a", 4], [1, "b", 4]]
        assert sum(sizes) == 12 and max(sizes) == SIZE_MAX
        assert all(len({body % 2 for body in batch}) == 1 for batch in model.batches)
    assert (model.devices, model.unloads) == (["cuda:1"], 1)


def test_a_version_that_the_model_has_may_be_asked_for() -> None:
    class Named(Model):
        version = "2"

    with LocalClient({"m": Named}) as client:
        assert client.infer("m", 7, version="2") == client.infer("m", 7)
        with pytest.raises(NotFoundError, match=r"no worker has version '3' .*have workers: 2"):
            client.infer("m", 7, version="3")


def test_a_failing_request_fails_alone() -> None:
    with LocalClient({"model": Model}) as client:
        futures = [client.submit("model", body) for body in ("a", "raise", "refused", "b")]
        outcomes = [future.exception() or future.result()[0] for future in futures]
    assert outcomes[0] == "a" and outcomes[3] == "b"
    assert isinstance(outcomes[1], InternalError) and "as it was told" in str(outcomes[1])
    assert isinstance(outcomes[2], InvalidArgumentError) and "this one is refused" in str(outcomes[2])


def test_requests_of_one_shape_share_a_call_and_rows_stay_an_array() -> None:
    model = Doubled()
    with LocalClient({"doubled": model}) as client:
        lengths = (3, 5, 3, 5)
        futures = [client.submit("doubled", np.ones(length, np.float32)) for length in lengths]
        assert [future.result().tolist() for future in futures] == [[2.0] * length for length in lengths]
        assert sorted(model.shapes) == [(2, 3), (2, 5)]
        rows = client.infer_many("doubled", np.ones((20, 2), np.float32))
        assert rows.shape == (20, 2) and rows.dtype == np.float32


class Beside:
    """Decodes numbers to ones, of so many, which are padded; encodes their sum."""

    max_batch_size = SIZE_MAX
    decode_in = "processes"
    decode_workers = 2
    decoded = (TensorSpec("ones", "INT64", (-1,), buckets=[4], lengths="lengths"),)

    def load_decoder(self) -> None:
        self.is_loaded = True

    def decode(self, body: Any) -> Any:
        assert self.is_loaded
        if body == "object":
            return {"ones": object()}  # which a process cannot send
        return np.ones(body, np.int64)

    def predict(self, batch: dict[str, Any]) -> list[Any]:
        return [(batch["ones"].shape, int(row.sum()), int(n)) for row, n in zip(*batch.values(), strict=True)]

    def encode(self, result: Any) -> Any:
        return {"shape": list(result[0]), "sum": result[1], "length": result[2]}


def test_bodies_are_decoded_and_results_encoded_by_the_model() -> None:
    with LocalClient({"beside": Beside}) as client:
        futures = [client.submit("beside", body) for body in (1, "none", 3)]
        assert isinstance(futures[1].exception(), InvalidArgumentError)
        with pytest.raises(InvalidArgumentError, match="what decode returned cannot be sent"):
            client.infer("beside", "object")
        assert [futures[at].result() for at in (0, 2)] == [
            {"shape": [2, 4], "sum": size, "length": size} for size in (1, 3)
        ]
        with pytest.raises(InvalidArgumentError, match="at most 4, its largest bucket"):
            client.infer("beside", 5)


@pytest.mark.parametrize("body", ["x" * 30_000, b"bytes", {"a": [1, None]}, np.arange(6.0).reshape(2, 3)])
def test_bodies_are_encoded_and_decoded(body: Any) -> None:
    with LocalClient({"echo": lambda batch: batch}) as client:
        assert np.array_equal(client.infer("echo", body), body)


def test_refusals_are_those_of_a_batcher() -> None:
    with LocalClient({"model": Model}) as client:
        with pytest.raises(CarpoolError, match="body: "):
            client.infer("model", "x" * 200_000)
        futures: list[Future[Any]] = [client.submit("model", number) for number in range(40)]
        refused = [isinstance(future.exception(), ResourceExhaustedError) for future in futures]
        assert 0 < sum(refused) <= 20
        with pytest.raises(NotFoundError, match="registered: model"):
            client.infer("nobody", 1)
        with pytest.raises(InvalidArgumentError, match="priority"):
            client.infer("model", 1, priority=11)


def test_deadlines_pass_while_a_request_waits_and_while_it_is_executed() -> None:
    model = Model()
    with LocalClient({"model": model}) as client:
        slow = client.submit("model", 0.2, lane="slow", priority=9)
        waits = client.submit("model", "waits", timeout=0.05, lane="later")
        assert slow.result()[0] == 0.2
        with pytest.raises(DeadlineExceededError):
            waits.result()
        with pytest.raises(DeadlineExceededError):
            client.infer("model", 0.1, timeout=0.02)
        assert ["waits"] not in model.batches


def test_streams() -> None:
    echo = Echo()
    with LocalClient({"countdown": countdown, "echo": echo}) as client:
        assert list(client.stream("countdown", 3)) == [3, 2, 1]
        assert client.infer("countdown", 2) == [2, 1]
        assert client.infer_many("echo", ["abc", "de", "f"]) == ["abc", "de", "f"]
        assert max(echo.steps) == 2
        stream = client.stream("echo", "long" * 1000)
        assert next(stream) == "l"
        stream.close()
        assert list(client.stream("echo", "ok")) == [
            "o",
            "k",
        ]  # the slot of the other one is free, or soon is


def test_sequences() -> None:
    bound = Bound()
    with LocalClient({"total": Total, "bound": bound}) as client:
        for model in ("total", "bound"):
            with client.sequence(model) as one, client.sequence(model) as other:
                assert [one.infer(5), other.infer(1), one.infer(3), other.infer(1)] == [5, 1, 8, 2]
                last = one.submit(2)
            assert last.result() == 10
        with pytest.raises(InvalidArgumentError, match="never begun"):
            client.infer("total", 1, sequence_id="unknown")
        assert len(bound.ended) == 2


def test_an_unhealthy_model_aborts_its_requests() -> None:
    with LocalClient({"model": Model}) as client:
        with pytest.raises(AbortedError, match="the card is gone"):
            client.infer("model", "ill")
        assert client.infer("model", "next")[0] == "next"


def test_models_that_a_worker_would_refuse_are_refused() -> None:
    class Wrong:
        max_batch_size = 0

        def predict(self, batch: Any) -> Any:
            return batch

    with pytest.raises(ValueError, match="max_batch_size"):
        LocalClient({"wrong": Wrong})
    with pytest.raises(TypeError, match="give the class"):
        LocalClient({"wrong": "models.py:Wrong"})


async def test_async_client() -> None:
    model = Model()
    async with LocalAsyncClient({"model": model, "countdown": countdown, "total": Total}) as client:
        results = await asyncio.gather(*[client.infer("model", number) for number in range(10)])
        assert [result[0] for result in results] == [*range(10)]
        assert max(map(len, model.batches)) == SIZE_MAX
        assert [chunk async for chunk in client.stream("countdown", 3)] == [3, 2, 1]
        async with client.sequence("total") as sequence:
            assert [await sequence.infer(5), await sequence.infer(3)] == [5.0, 8.0]
        assert (await client.request("model", "a")).batch_size == 1
        assert await client.models() == ["countdown", "model", "total"]
        with pytest.raises(RuntimeError, match="LocalAsyncClient"), LocalClient({"model": Model}):
            pass
    assert model.unloads == 1


def test_a_waiting_program_uses_no_thread() -> None:
    threads: list[int] = []

    def which(batch: list[Any]) -> list[Any]:
        threads.append(threading.get_ident())
        return batch

    with LocalClient({"which": which}) as client:
        before = threading.active_count()
        client.infer("which", 1)
        assert client.submit("which", 2).result(timeout=5) == 2
        assert (threads, threading.active_count()) == ([threading.get_ident()] * 2, before)


def test_results_by_id_need_a_stack() -> None:
    with LocalClient({"model": Model}) as client:
        for call in (
            lambda: client.enqueue("model", 1),
            lambda: client.result("model/1", timeout=0),
            lambda: client.status("model/1"),
            lambda: client.cancel("model/1"),
        ):
            with pytest.raises(UnimplementedError, match="carpool_stack"):
                call()


# --- what models declare -----------------------------------------------------------------------------------


class Weighing:
    """Tells what a body costs, and names its version."""

    version = "2"
    max_batch_size = 8
    max_batch_cost = 10

    def load(self, device: str, *, weights: Path, unit: int = 1) -> None:
        self.weights, self.unit = weights, unit
        self.batches: list[list[int]] = []

    def cost(self, body: int) -> int:
        return body * self.unit

    def predict(self, batch: list[int], requests: list[RequestInfo]) -> list[Any]:
        self.batches.append(batch)
        return [[str(self.weights), one.priority, one.cost, one.delivery_count] for one in requests]


def test_parameters_costs_and_versions() -> None:
    """Given bodies that cost more than one call may, expect that they are executed in parts."""
    model, parameters = Weighing(), {"weighing": {"weights": Path("small.pt"), "unit": "2"}}
    with LocalClient({"weighing": model}, parameters=parameters) as client:
        futures = [client.submit("weighing", body, priority=7) for body in (1, 2, 3, 2)]
        results = [future.result() for future in futures]
        assert client.request("weighing", 1).version == "2"
    assert results == [[str(Path.cwd() / "small.pt"), 7, 2 * body, 1] for body in (1, 2, 3, 2)]
    assert all(2 * sum(batch) <= 10 for batch in model.batches) and max(map(len, model.batches)) > 1


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, r"weights is missing .* given as parameters=\{'weighing'"),
        ({"weighing": {"weights": "w", "unit": "many"}}, "the parameter unit .* must be a valid integer"),
        ({"weighing": {"weights": "w", "units": 1}}, "no parameter 'units' .*, did you mean unit"),
        ({"other": {}}, "there is no model 'other'; there are weighing"),
    ],
)
def test_parameters_are_checked(parameters: dict[str, dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalClient({"weighing": Weighing}, parameters=parameters)


def test_times_of_a_request_are_those_of_this_machine() -> None:
    def times(batch: list[Any], requests: list[RequestInfo]) -> list[Any]:
        return [[one.arrival_s, one.deadline_s] for one in requests]

    class Stepping:
        def begin(self, requests: list[Any]) -> None:
            for request in requests:
                request.emit([request.arrival_s, request.deadline_s])
                request.finish()

        def step(self, requests: list[Any]) -> None:
            raise AssertionError("nothing is left to be done")

    with LocalClient({"times": times, "steps": Stepping}) as client:
        for model in ("times", "steps"):
            before_s = time.time()
            arrival_s, deadline_s = client.infer(model, 1, timeout=30.0)
            assert before_s - 0.1 <= arrival_s <= time.time()
            assert deadline_s == pytest.approx(arrival_s + 30.0, abs=0.1)


def test_elements_of_bytes_are_bytes() -> None:
    class Files:
        inputs = (TensorSpec("file", "BYTES", (1,)),)

        def predict(self, batch: Any) -> Any:
            return [row[0][::-1] for row in batch]

    with LocalClient({"files": Files}) as client:
        assert client.infer("files", b"\xff\x00\x01") == b"\x01\x00\xff"


# --- models that wait, and that call others ----------------------------------------------------------------


class Meeting:
    """Each batch waits until as many are executed as may be."""

    max_batch_size = 2
    max_concurrent_batches = 3

    def __init__(self) -> None:
        self.here = 0
        self.most = 0

    async def predict(self, batch: list[Any]) -> list[Any]:
        self.here += 1
        self.most = max(self.most, self.here)
        while self.most < self.max_concurrent_batches:
            await asyncio.sleep(0)
        self.here -= 1
        return batch


MODELS = {"Ask": Ask, "AskPlain": AskPlain, "Picky": Picky, "Seen": Seen}
BOTH = pytest.mark.parametrize("ask", ["Ask", "AskPlain"])


def test_an_async_model_executes_several_batches_at_a_time() -> None:
    model = Meeting()
    with LocalClient({"meeting": model}) as client:
        assert client.infer_many("meeting", range(20)) == [*range(20)]
    assert model.most == 3


@BOTH
def test_models_call_others(ask: str) -> None:
    with LocalClient(MODELS) as client:
        ones = [client.submit(ask, {"model": "Picky", "body": number}) for number in range(10)]
        assert [future.result() for future in ones] == [2 * number for number in range(10)]
        assert client.infer(ask, {"model": "Picky", "bodies": [1, 2]}) == [2, 4]
        body = {"model": "Seen", "body": 1}
        seen = client.infer(ask, body, tenant="gold", correlation_id="outer")
        assert seen.pop("id").startswith("outer.")
        assert seen == {"tenant": "gold", "called_by": ask}
        assert client.infer("Ask", {"model": "AskPlain", "body": body})["called_by"] == "Ask AskPlain"


@BOTH
def test_errors_name_the_models_that_they_came_through(ask: str) -> None:
    with LocalClient(MODELS) as client:
        with pytest.raises(InvalidArgumentError, match=f"{ask} -> Picky: not a number"):
            client.infer(ask, {"model": "Picky", "body": "x"})
        with pytest.raises(UnavailableError, match=f"{ask} -> nowhere: "):
            client.infer(ask, {"model": "nowhere", "body": 1})
        with pytest.raises(UnimplementedError, match=f"{ask} -> {ask}: a model cannot call one that waits"):
            client.infer(ask, {"model": ask, "body": 1})


class Never:
    """Never answers, and tells whether it was withdrawn by its end."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.ends = 0

    async def predict(self, batch: list[Any]) -> list[Any]:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ends += 1
        return batch


@BOTH
def test_closing_ends_what_is_executed(ask: str) -> None:
    """Given a model that waits for another one, which waits, expect that neither keeps a thread or a task."""
    threads, never = threading.active_count(), Never()
    with LocalClient({**MODELS, "never": never}) as client:
        client.submit(ask, {"model": "never", "body": 1})
        wait_until(  # models run only while the program waits for a result
            lambda: client.infer("Picky", 1) and never.begun.is_set(),
            description="the model that waits has begun",
        )
        with pytest.raises(DeadlineExceededError):
            client.infer("never", 2, timeout=0.05)
    assert never.ends and threading.active_count() == threads


@BOTH
def test_a_deadline_holds_through_both_models(ask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_behalf, "RETURN_SHARE", 0.8)  # and no race on a busy machine
    monkeypatch.setattr(on_behalf, "RETURN_S_MAX", 60.0)
    with LocalClient({**MODELS, "never": Never()}) as client:
        with pytest.raises(DeadlineExceededError, match=f"{ask} -> never: "):
            client.infer(ask, {"model": "never", "body": 1}, timeout=5.0)
        assert client.infer(ask, {"model": "Picky", "body": 3}) == 6


async def test_models_of_an_async_client_call_others() -> None:
    async with LocalAsyncClient(MODELS) as client:
        bodies = [{"model": "Picky", "body": number} for number in range(6)]
        both = [client.infer_many(ask, bodies) for ask in ("Ask", "AskPlain")]
        assert await asyncio.gather(*both) == [[2 * number for number in range(6)]] * 2
