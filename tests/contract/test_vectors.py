"""Carpool's code against the golden vectors: every case of every file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from carpool.errors import INVALID_ARGUMENT, InvalidArgumentError
from carpool.messages import JSON, MSGPACK, Batch, BatchedRequest, Refusal, Request, Result, Withdrawal
from carpool.model_settings import ModelSettings
from carpool.wire.batches import decode_batch
from carpool.wire.bodies import decode_body, encode_body
from carpool.wire.requests import Decoded, decode_entry
from carpool.wire.results import decode_results, encode_result, encode_results
from carpool.wire.tensors import from_bytes, to_bytes
from contract import make_vectors

VECTORS = Path(__file__).parent / "vectors"
FILES = sorted(path.name for path in VECTORS.glob("*.json"))

Case = dict[str, Any]


def lists_of(file: str) -> dict[str, list[Case]]:
    lists: dict[str, list[Case]] = json.loads((VECTORS / file).read_text(encoding="utf-8"))
    return lists


def cases(of: str, *files: str) -> Callable[[Any], Any]:
    """Run a test for each case of a list of these files."""
    named = {
        f"{file}, {of}: {case.get('name', number)}": case
        for file in files
        for number, case in enumerate(lists_of(file)[of])
    }
    return pytest.mark.parametrize("case", named.values(), ids=named)


def as_bytes(written: Any) -> bytes:
    """Bytes, as the vectors' README says that they are written."""
    if isinstance(written, str):
        return written.encode()
    if isinstance(written, list):
        return b"".join(as_bytes(part) for part in written)
    return bytes.fromhex(written["hex"]) * int(written.get("times", 1))


def flat(case: Case) -> list[bytes]:
    return [as_bytes(part) for pair in case["fields"] for part in pair]


# --- requests ----------------------------------------------------------------------------------------------


def described(one: Decoded) -> Case:
    """What an entry became, as the vectors write it; of a refusal's detail, what comes before the colon."""
    if isinstance(one, Withdrawal):
        return {"withdrawal": sorted(one.correlation_ids)}
    if isinstance(one, Refusal):
        return {
            "refusal": {
                "status": one.status,
                "field": one.detail.partition(": ")[0].strip("'"),
                "correlation_id": one.correlation_id,
                "reply_to": one.reply_to,
                "content_type": one.content_type,
            }
        }
    return {
        "request": {
            "correlation_id": one.correlation_id,
            "body": one.body,
            "content_type": one.content_type,
            "reply_to": one.reply_to,
            "arrival_ms": one.arrival_us / 1000,
            "deadline_ms": None if one.deadline_us is None else one.deadline_us / 1000,
            "priority": one.priority,
            "lane": one.lane,
            "cost": one.cost,
            "fields": dict(one.extra or {}),
        }
    }


def expected(one: Case) -> Case:
    if "request" not in one:
        return one
    request = one["request"]
    fields = {name: as_bytes(value) for name, value in request["fields"].items()}
    return {"request": request | {"body": as_bytes(request["body"]), "fields": fields}}


@cases("cases", "requests.json", "packed.json")
def test_an_entry_becomes_what_the_vector_says(case: Case) -> None:
    settings = ModelSettings(**case.get("settings", {}))
    entry, several = decode_entry(case["id"].encode(), flat(case), settings)
    assert [described(one) for one in several] == [expected(one) for one in case["becomes"]]
    assert entry.requests == [one for one in several if isinstance(one, Request)]


# --- results -----------------------------------------------------------------------------------------------


def result_of(written: Case) -> Result:
    body = {"body": as_bytes(written["body"])} if "body" in written else {}
    return Result(**(written | body))


@cases("envelopes", "results.json")
def test_a_result_is_written_as_the_vector_says(case: Case) -> None:
    assert encode_result(result_of(case["result"])) == as_bytes(case["envelope"])


@cases("replies", "results.json")
def test_results_on_a_reply_stream_are_written_as_the_vector_says(case: Case) -> None:
    packed = as_bytes(case["entry"])
    assert encode_results(map(result_of, case["results"])) == packed
    assert decode_results(packed) == msgpack.unpackb(packed)


# --- batches -----------------------------------------------------------------------------------------------


def riding(written: Case) -> BatchedRequest:
    extra = {name: as_bytes(value) for name, value in written["fields"].items()} or None
    own = {name: value for name, value in written.items() if name != "fields"}
    return BatchedRequest(**(own | {"body": as_bytes(written["body"]), "extra": extra}))


@cases("batches", "batches.json")
def test_a_batch_is_read_as_the_vector_says(case: Case) -> None:
    becomes = case["becomes"]
    requests = [riding(one) for one in becomes["requests"]]
    told = (becomes["reason"], becomes["dispatched_us"], becomes["lane"])
    assert decode_batch(b"9-0", flat(case), epoch=2) == Batch("9-0", 2, requests, *told)


# --- tensors and bodies ------------------------------------------------------------------------------------


@cases("tensors", "tensors.json")
def test_a_tensor_is_the_same_in_every_content_type(case: Case) -> None:
    datatype, shape, data = case["datatype"], case["shape"], as_bytes(case["data"])
    packed = as_bytes(case["msgpack"])
    arrays = [decode_body(MSGPACK, packed), from_bytes(datatype, shape, data)]
    if case["json"] is not None:
        arrays.append(decode_body(JSON, case["json"].encode()))
    for array in arrays:
        assert list(array.shape) == shape
        if "beyond numbers" not in case["name"]:  # which of its bits say that a NaN is one is nobody's matter
            assert to_bytes(array, datatype) == data
        np.testing.assert_array_equal(array, arrays[0])


@cases("tensors", "tensors.json")
def test_an_array_is_written_as_the_vector_says(case: Case) -> None:
    packed = as_bytes(case["msgpack"])
    array = decode_body(MSGPACK, packed)
    if case["datatype"] == "BF16":  # which is FP32 once decoded, and so goes back
        assert msgpack.unpackb(encode_body(MSGPACK, array))["datatype"] == "FP32"
    else:
        assert encode_body(MSGPACK, array) == packed
        if case["json"] is not None:
            assert json.loads(encode_body(JSON, array)) == json.loads(case["json"])


@cases("nested", "tensors.json")
def test_nested_lists_are_the_tensor_that_flat_ones_are(case: Case) -> None:
    tensor = json.loads(case["json"])
    array = decode_body(JSON, case["json"].encode())
    assert list(array.shape) == tensor["shape"]
    assert to_bytes(array, tensor["datatype"]) == as_bytes(case["data"])


@cases("strings", "tensors.json")
def test_strings_are_a_flat_list(case: Case) -> None:
    assert decode_body(JSON, case["json"].encode()) == case["texts"]
    assert decode_body(MSGPACK, as_bytes(case["msgpack"])) == case["texts"]


@cases("bf16_roundings", "tensors.json")
def test_bf16_is_rounded_as_the_vector_says(case: Case) -> None:
    array = np.frombuffer(bytes.fromhex(case["fp32"]), ">f4")
    assert to_bytes(array, "BF16")[::-1].hex() == case["bf16"]


@cases("values", "bodies.json")
def test_a_value_is_the_same_in_every_content_type(case: Case) -> None:
    in_json, in_msgpack = case["json"].encode(), as_bytes(case["msgpack"])
    for content_type, body in ((JSON, in_json), (MSGPACK, in_msgpack)):
        value = decode_body(content_type, body)
        assert value == case["value"] and type(value) is type(case["value"])
        assert encode_body(content_type, value) == body


@cases("refused", "bodies.json", "tensors.json")
def test_a_body_is_refused(case: Case) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        decode_body(case["content_type"], as_bytes(case["body"]))
    assert caught.value.status == INVALID_ARGUMENT
    assert caught.value.detail.partition(": ")[0] == case["field"]


# --- the files ---------------------------------------------------------------------------------------------


def test_every_file_is_made() -> None:
    assert sorted(make_vectors.files()) == FILES


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_what_make_vectors_makes(file: str) -> None:
    made = make_vectors.as_text(make_vectors.files()[file])
    assert (VECTORS / file).read_bytes() == made.encode()


@pytest.mark.parametrize("file", FILES)
def test_no_two_cases_have_one_name(file: str) -> None:
    for of_file in lists_of(file).values():
        names = [case["name"] for case in of_file if "name" in case]
        assert len(names) == len(set(names))
