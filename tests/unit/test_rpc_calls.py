"""What is read of a call of gRPC beside its message."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import HTTP_STATUS
from carpool_gateway.answers import HttpError, failure
from carpool_gateway.credentials import ANYBODY, Key
from carpool_gateway.limits import BodyMemory, Limits
from carpool_gateway.rpc.calls import Call, Calls, rounded_up_s, status_of


def a_call(*metadata: tuple[str, str | bytes], left_s: float | None = None, key: Key = ANYBODY) -> Call:
    context = SimpleNamespace(invocation_metadata=lambda: metadata, time_remaining=lambda: left_s)
    calls = Calls(
        keys=cast(Any, None),
        access_log=cast(Any, None),
        memory=BodyMemory(1000),
        limits=Limits(),
        new_request_id=lambda: "new",
        of_mistake=cast(Any, None),
    )
    call = Call(calls, "/path", "grpc_infer", context)
    call.key = key
    return call


@given(st.floats(0.001, 1e6))
def test_a_deadline_is_rounded_up_by_a_sixteenth_at_most(left_s: float) -> None:
    assert left_s <= rounded_up_s(left_s) <= left_s * (1 + 1 / 16)


def test_calls_with_one_deadline_have_few_timeouts() -> None:
    assert {rounded_up_s(5 - at / 10_000) for at in range(100)} == {5.0}
    assert len({rounded_up_s(10 * at / 10_000) for at in range(5_000, 10_000)}) <= 17
    assert rounded_up_s(-1) > 0


def test_options_of_the_metadata_and_the_deadline() -> None:
    metadata = (("user-agent", "grpc-python"), ("carpool-timeout-ms", "2000"), ("carpool-field-a", "b"))
    assert a_call(*metadata).options() == {"timeout": 2.0, "fields": {"a": b"b"}}
    assert a_call(*metadata, left_s=0.9).options()["timeout"] == rounded_up_s(0.9)
    assert a_call(*metadata, left_s=9).options()["timeout"] == 2.0
    assert a_call(left_s=3600).options() == {"timeout": Limits().timeout_s}
    assert a_call(key=Key("k", b"", tenant="acme")).options() == {"tenant": "acme"}


def test_request_ids_and_names_that_come_twice() -> None:
    assert a_call(("x-request-id", "mine")).request_id == "mine"
    assert a_call(("x-request-id", "two words")).request_id == "new"
    assert a_call(("a", "1"), ("a", b"2")).headers == {b"a": b"1, 2"}


@pytest.mark.parametrize("status", HTTP_STATUS)
def test_statuses_have_the_codes_of_the_same_name(status: str) -> None:
    if status != "OK":
        assert status_of(failure(status, "why", "")).name == status
    assert status_of(HttpError(401, "who")) is grpc.StatusCode.UNAUTHENTICATED
