"""Requests that are alike but for their numbers: each has the bodies and the response that it has alone."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.errors import InternalError, InvalidArgumentError
from carpool.rows import Rows
from carpool.wire.tensors import WIDTHS, TensorSpec
from carpool_gateway.oip import prepared as module
from carpool_gateway.oip.errors import ProtocolError
from carpool_gateway.oip.models import OfferedModel
from carpool_gateway.oip.prepared import JSON_BYTES_MAX, Prepared, Preparer
from carpool_gateway.oip.responses import RowResult
from support.oip import echo, identity, offered, packed, with_binary, written

MSGPACK = "application/msgpack"
AS_BINARY: dict[str, Any] = {"parameters": {"binary_data_output": True}}


def bodies_of(bodies: Rows | Sequence[bytes]) -> list[bytes]:
    return [bodies[at] for at in range(len(bodies))]


def echoed(model: OfferedModel, preparer: Preparer, body: bytes, length: bytes | None) -> list[bytes]:
    """The parts of the response of a model that returns its body."""
    prepared, bodies = preparer.prepare(model, body, length)
    results = [RowResult("OK", prepared.plan.content_type, body) for body in bodies_of(bodies)]
    return [bytes(part) for part in prepared.respond(results).parts]


def floats(*rows: Sequence[float]) -> tuple[str, str, list[int], bytes]:
    return "x", "FP32", [len(rows), len(rows[0])], np.array(rows, np.float32).tobytes()


def prepare(preparer: Preparer, model: OfferedModel, *rows: Sequence[float], **more: Any) -> Prepared:
    return preparer.prepare(model, *with_binary(floats(*rows), **{**AS_BINARY, **more}))[0]


@settings(deadline=None)
@given(st.data())
def test_one_after_the_other_as_each_by_itself(data: st.DataObject) -> None:
    datatype = data.draw(st.sampled_from(sorted(WIDTHS)))
    model, preparer = identity(datatype), Preparer()
    some_rows, columns = st.integers(0, 3), st.integers(0, 2)
    for _ in range(data.draw(st.integers(2, 6))):
        rows, width = data.draw(some_rows), data.draw(columns)
        size = rows * width * WIDTHS[datatype]
        numbers = data.draw(st.binary(min_size=size, max_size=size))
        request = with_binary(("x", datatype, [rows, width], numbers), **AS_BINARY)
        try:
            expected = b"".join(echo(model, *request).parts)
        except ProtocolError as error:  # what is no BOOL, and FP16 in JSON
            with pytest.raises(ProtocolError, match="BOOL") as caught:
                preparer.prepare(model, *request)
            assert caught.value.detail == error.detail
        else:
            assert b"".join(echoed(model, preparer, *request)) == expected


def test_the_same_json_is_prepared_once() -> None:
    preparer, model = Preparer(), identity("FP32")
    first = prepare(preparer, model, [1.0, 2.0])
    assert prepare(preparer, model, [3.0, 4.0]) is first
    assert prepare(preparer, model, [3.0, 4.0], id="7") is not first
    assert prepare(preparer, model, [3.0], [4.0]) is not first


def test_a_model_that_changed_is_planned_again() -> None:
    preparer = Preparer()
    request = with_binary(floats([1.0, 2.0]))
    preparer.prepare(identity("FP32"), *request)
    with pytest.raises(ProtocolError, match="datatype is FP32, but the model takes INT32"):
        preparer.prepare(identity("INT32"), *request)


def test_results_of_another_shape_have_a_response_of_their_own() -> None:
    model = offered([TensorSpec("x", "FP32", (-1,))], [TensorSpec("y", "FP32", (-1,))])
    prepared = prepare(Preparer(), model, [1.0])

    def respond(*values: float) -> bytes:
        return b"".join(prepared.respond([packed(np.array(values, np.float32))]).parts)

    for values in ([1.0], [2.0], [3.0, 4.0], [5.0], []):
        response = respond(*values)
        assert b'"shape":[1,%d]' % len(values) in response
        assert response.endswith(np.array(values, np.float32).tobytes())


def test_results_of_one_size_may_have_other_shapes() -> None:
    spec = TensorSpec("x", "FP32", (-1, -1))
    body, length = with_binary(("x", "FP32", [1, 2, 3], bytes(24)), **AS_BINARY)
    prepared, _ = Preparer().prepare(offered([spec], [spec]), body, length)
    for shape in ((2, 3), (3, 2), (2, 3)):
        response = prepared.respond([packed(np.zeros(shape, np.float32))])
        assert b'"shape":[1,%d,%d]' % shape in response.parts[0]


def test_each_bool_is_checked() -> None:
    preparer, model = Preparer(), identity("BOOL")
    preparer.prepare(model, *with_binary(("x", "BOOL", [1, 2], b"\0\1")))
    with pytest.raises(ProtocolError, match="element 1 is 2"):
        preparer.prepare(model, *with_binary(("x", "BOOL", [1, 2], b"\0\2")))


def test_a_result_that_is_none_of_the_model_is_refused_also_later() -> None:
    prepared = prepare(Preparer(), identity("FP32"), [1.0])
    prepared.respond([packed(np.array([1.0], np.float32))])
    with pytest.raises(InternalError, match="is not what the model declares"):
        prepared.respond([packed(np.array([1], np.int32))])
    with pytest.raises(InternalError, match="the result is application/json"):
        prepared.respond([RowResult("OK", "application/json", b"1")])
    with pytest.raises(InvalidArgumentError, match="too small"):
        prepared.respond([RowResult("INVALID_ARGUMENT", detail="too small")])


def test_nothing_keeps_the_body_of_a_request() -> None:
    preparer, size = Preparer(), 1 << 20
    body, length = with_binary(("x", "FP32", [1, size // 4], bytes(size)))
    before = sys.getrefcount(body)
    preparer.prepare(identity("FP32"), body, length)
    gc.collect()
    assert sys.getrefcount(body) == before


def test_long_json_and_many_requests_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    preparer, model = Preparer(), identity("FP32")
    long = {"id": "i" * JSON_BYTES_MAX}
    assert prepare(preparer, model, [1.0], **long) is not prepare(preparer, model, [1.0], **long)
    monkeypatch.setattr(module, "KEPT_MAX", 2)
    first = prepare(preparer, model, [1.0], id="0")
    for number in range(1, 5):
        prepare(preparer, model, [1.0], id=str(number))
        assert len(preparer._kept) <= 2
    assert prepare(preparer, model, [1.0], id="0") is not first


@pytest.mark.parametrize("length", [b"9" * 5000, b"-1", b"1e2", b"\xb2", b"99999", b"9999", b""])
def test_a_length_that_is_none(length: bytes) -> None:
    with pytest.raises(ProtocolError, match="must be a number of bytes"):
        Preparer().prepare(identity("FP32"), with_binary(floats([1.0]))[0], length)


def test_json_is_prepared_each_time() -> None:
    body = written({"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1.0]})
    preparer, model = Preparer(), identity("FP32")
    assert echoed(model, preparer, body, None) == [bytes(part) for part in echo(model, body).parts]
    assert not preparer._kept
