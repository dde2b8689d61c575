"""Clients on behalf of requests: what requests to other models inherit, without Redis."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from carpool.client.on_behalf import DEPTH_MAX, AsyncRequestClient, Origin, Origins, RequestClient
from carpool.errors import (
    CancelledRequestError,
    CarpoolError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    UnimplementedError,
)
from carpool.keys import CORRELATION_ID
from carpool_worker.model_process.calls import Calls, FrameCalls
from carpool_worker.model_process.frames import FrameHeader

URL = "redis://127.0.0.1:1/0"
HOUR_S = 3600


def client_for(origin: Origin, model: str = "outer") -> RequestClient:
    client = Origins(model, is_async=False, url=URL).client_for(origin)
    assert isinstance(client, RequestClient)
    return client


def prepared(origin: Origin, body: Any = 1, model: str = "inner", **options: Any) -> dict[str, Any]:
    """The options of a request to another model."""
    return dict(client_for(origin)._prepare(model, body, options).options)  # type: ignore[arg-type]


def test_request_inherits_from_its_origin() -> None:
    fields = {"tenant": b"gold", "traceparent": b"00-1-2-3", "called_by": b"first", "x": b"1"}
    options = prepared(Origin("id", priority=7, fields=fields))
    assert options.pop("correlation_id").startswith("id.")
    assert options == {
        "tenant": "gold",
        "priority": 7,
        "fields": {"traceparent": b"00-1-2-3", "called_by": "first outer"},
    }


def test_what_a_model_says_comes_first() -> None:
    fields = {"tenant": b"gold", "traceparent": b"00-1-2-3"}
    own = {"traceparent": "00-4-5-6", "y": "2"}
    options = prepared(
        Origin("id", fields=fields), tenant="free", priority=0, fields=own, correlation_id="mine"
    )
    assert options == {
        "tenant": "free",
        "priority": 0,
        "fields": {**own, "called_by": "outer"},
        "correlation_id": "mine",
    }


@pytest.mark.parametrize(
    ("asked", "expected"), [({}, HOUR_S), ({"timeout": 2 * HOUR_S}, HOUR_S), ({"timeout": 2}, 2)]
)
def test_timeout_is_at_most_what_is_left(asked: dict[str, Any], expected: float) -> None:
    options = prepared(Origin("id", deadline_s=time.monotonic() + HOUR_S), **asked)
    assert expected - 60 < options["timeout"] <= expected


@pytest.mark.parametrize(("left_s", "return_s_max"), [(HOUR_S, 0.1), (1.0, 0.05)])
def test_an_error_has_time_to_come_back(left_s: float, return_s_max: float) -> None:
    """Expect that what is asked is late before the request is, whose batcher cannot say which model was."""
    client = client_for(Origin("id", deadline_s=time.monotonic() + left_s))
    timeout_s = client._prepare("inner", 1, {}).options["timeout"]
    assert timeout_s is not None and client.seconds_left is not None
    assert 0.9 * return_s_max < left_s - timeout_s
    assert client.seconds_left - timeout_s <= return_s_max
    assert prepared(Origin("id", deadline_s=time.monotonic() + left_s), timeout=0.5)["timeout"] == 0.5


def test_nothing_is_asked_after_the_deadline() -> None:
    client = client_for(Origin("id", place=3, deadline_s=time.monotonic() - 1))
    assert client.seconds_left == 0
    with pytest.raises(DeadlineExceededError, match="outer -> inner: the deadline had passed") as raised:
        client.infer("inner", 1)
    assert raised.value.request_index == 3


def test_same_question_has_the_same_id_wherever_it_is_asked() -> None:
    """Given a request that is executed again, expect that what it asks is asked under the same IDs."""

    def ids(origin: Origin) -> list[str]:
        client = client_for(origin)
        asked = [
            ("inner", 1, {}),
            ("inner", 1, {}),
            ("inner", 2, {}),
            ("other", 1, {}),
            ("inner", 1, {"lane": "b"}),
        ]
        return [client._prepare(model, body, options).correlation_id for model, body, options in asked]  # type: ignore[arg-type]

    first = ids(Origin("id"))
    assert first == ids(Origin("id", deadline_s=time.monotonic() + HOUR_S))
    assert len(set(first)) == 5 and set(first).isdisjoint(ids(Origin("another")))
    assert all(CORRELATION_ID.fullmatch(name) for name in ids(Origin("x" * 128)))


def test_ids_of_two_requests_with_one_name_differ_while_both_are_executed() -> None:
    origins = Origins("outer", is_async=False, url=URL)
    asked = [origins.client_for(Origin("1"))._prepare("inner", 1, {}).correlation_id for _ in range(2)]
    assert len(set(asked)) == 2


class Recorder:
    """Sends nothing. `sent`: the correlation IDs, each with the future of its result."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, asyncio.Future[Any]]] = []

    def submit(self, model: str, body: Any, **options: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.sent.append((options["correlation_id"], future))
        return future


async def test_what_was_withdrawn_is_asked_again_under_another_id() -> None:
    """Given a request that is executed three times, and a question that it withdraws the first time, expect
    that it gets other IDs later: the answer "withdrawn" may come late. What was answered keeps its ID."""
    recorder = Recorder()
    origins = Origins("outer", is_async=True, sender=recorder)
    for number, result in enumerate((None, 7, 8)):
        client = origins.client_for(Origin("id"))
        assert isinstance(client, AsyncRequestClient)
        asked = asyncio.ensure_future(client.infer("inner", "withdrawn first"))
        other = asyncio.ensure_future(client.infer("inner", "answered"))
        while len(recorder.sent) < 2 * (number + 1):
            await asyncio.sleep(0)
        recorder.sent[-1][1].set_result(1)
        assert await other == 1
        if result is not None:
            recorder.sent[-2][1].set_result(result)
            assert await asked == result
        await client.end()
        await asyncio.wait([asked])
    withdrawn, second, third = (name for name, _ in recorder.sent[::2])
    assert len({withdrawn, second, third}) == 3
    assert len({name for name, _ in recorder.sent[1::2]}) == 1
    with pytest.raises(CancelledRequestError):
        await asyncio.ensure_future(client.infer("inner", 1))


@pytest.mark.parametrize(
    ("called_by", "model", "error"),
    [
        (b"", "outer", "outer -> outer: a model cannot call one that waits for it"),
        (b"first second", "first", "outer -> first: a model cannot call one that waits for it"),
        (b" ".join([b"m%d" % number for number in range(DEPTH_MAX)]), "inner", f"at most {DEPTH_MAX} models"),
    ],
)
def test_model_that_would_wait_for_itself_is_found_out(called_by: bytes, model: str, error: str) -> None:
    with pytest.raises(UnimplementedError, match=error):
        client_for(Origin("id", fields={"called_by": called_by})).infer(model, 1)


@pytest.mark.parametrize(
    ("error", "detail", "status"),
    [
        (InvalidArgumentError("bad"), "outer -> inner: bad", "INVALID_ARGUMENT"),
        (InvalidArgumentError("inner -> last: bad"), "outer -> inner -> last: bad", "INVALID_ARGUMENT"),
        (NotFoundError("no such model"), "outer -> inner: no such model", "UNAVAILABLE"),
    ],
)
def test_error_names_the_models_that_it_came_through(error: CarpoolError, detail: str, status: str) -> None:
    """Given a model that is missing, expect a status that does not blame the producer."""
    found = client_for(Origin("id", place=2))._of_stage("inner", error)
    assert type(found) is type(error)
    assert (found.detail, found.status, found.request_index) == (detail, status, 2)


def test_client_is_for_one_call_of_the_model() -> None:
    client = client_for(Origin("id"))
    client.cancel()
    with pytest.raises(
        CancelledRequestError, match="outer -> inner: the request that asked it was withdrawn"
    ):
        client.infer("inner", 1)


def test_deadlines_of_a_frame_are_those_of_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given deadlines by Redis's clock, expect them by this host's; and places in the call of the model."""
    monkeypatch.setenv("CARPOOL_REDIS_URL", URL)
    now_us = time.monotonic_ns() // 1000
    frame = FrameHeader(
        0,
        3,
        deadlines=[(1, None), (2, now_us + 1_000_000 + HOUR_S * 1_000_000)],
        callers=[("a", 4, {}), ("b", 4, {}), ("c", 9, {})],
        redis_ahead_us=1_000_000,
    )
    calls = FrameCalls(Calls("outer", is_async=False), frame)
    first, last = calls.open([0, 2])
    assert first.seconds_left is None and HOUR_S - 60 < (last.seconds_left or 0) <= HOUR_S
    assert (last.correlation_id, last._origin.place, last._origin.priority) == ("c", 1, 9)


def test_model_process_without_an_address_cannot_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARPOOL_MODEL_PROCESS", "1")
    monkeypatch.delenv("CARPOOL_REDIS_URL", raising=False)
    with pytest.raises(PermissionDeniedError, match="CARPOOL_MODEL_REDIS_URL"):
        Calls("outer", is_async=True)
