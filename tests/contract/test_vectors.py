"""Carpool's code against every case of every file of golden vectors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from carpool.client.enqueued import RequestId
from carpool.errors import INVALID_ARGUMENT, InvalidArgumentError
from carpool.keys import Keys
from carpool.messages.batches import BatchedRequest
from carpool.messages.requests import JSON, MSGPACK, Run, SequencePart, SequencesEnd, Withdrawal
from carpool.messages.results import Chunk, Refusal, Result, ResultColumns
from carpool.messages.settled import BatchSettled, ExecutedOf, Failures, ModelProcessesChanged
from carpool.model_settings import ModelSettings
from carpool.rows import Rows, StoredBody
from carpool.store.kept import keep_arguments, owner_of_tenant, owner_prefix, status_in_record
from carpool.tickets import TicketRange
from carpool.wire.batches import decode_batch, decode_settled
from carpool.wire.bodies import decode_body, encode_body
from carpool.wire.requests import decode_entry
from carpool.wire.results import (
    decode_columns,
    decode_results,
    encode_chunk,
    encode_chunk_envelope,
    encode_columns,
    encode_result,
    encode_results,
)
from carpool.wire.tensors import from_bytes, to_bytes
from contract import make_vectors
from support.wire import ENTRY_ID, Single, one_by_one

VECTORS = Path(__file__).parent / "vectors"
FILES = sorted(path.name for path in VECTORS.glob("*.json"))

Case = dict[str, Any]


def lists_of(file: str) -> dict[str, list[Case]]:
    lists: dict[str, list[Case]] = json.loads((VECTORS / file).read_text(encoding="utf-8"))
    return lists


def cases(of: str, *files: str) -> Callable[[Any], Any]:
    """Run a test for each case in one list of each of these files."""
    named = {
        f"{file}, {of}: {case.get('name', number)}": case
        for file in files
        for number, case in enumerate(lists_of(file)[of])
    }
    return pytest.mark.parametrize("case", named.values(), ids=named)


def as_bytes(written: Any) -> bytes:
    """Bytes from the notation that the README of the vectors describes."""
    if isinstance(written, str):
        return written.encode()
    if isinstance(written, list):
        return b"".join(as_bytes(part) for part in written)
    return bytes.fromhex(written["hex"]) * int(written.get("times", 1))


def flat(case: Case) -> list[bytes]:
    return [as_bytes(part) for pair in case["fields"] for part in pair]


# --- requests ----------------------------------------------------------------------------------------------


def described(item: Single | Refusal | Withdrawal | SequencesEnd) -> Case:
    """What was decoded, in the notation of the vectors. Of a refusal's detail, only the field is compared."""
    if isinstance(item, Withdrawal):
        return {"withdrawal": sorted(item.correlation_ids)}
    if isinstance(item, SequencesEnd):
        return {"end_sequences": list(item.sequence_ids)}
    if isinstance(item, Refusal):
        return {
            "refusal": {
                "status": item.status,
                "field": item.detail.partition(": ")[0].strip("'"),
                "correlation_id": item.correlation_ids[0],
                "reply_to": item.reply_to,
                "content_type": item.content_type,
            }
        }
    stored = isinstance(item.body, StoredBody)
    return {
        "request": {
            "correlation_id": item.correlation_id,
            **({"stored_body": list(item.body)} if stored else {"body": item.body}),
            "content_type": item.content_type,
            "reply_to": item.reply_to,
            "arrival_ms": item.arrival_us / 1000,
            "deadline_ms": None if item.deadline_us is None else item.deadline_us / 1000,
            "priority": item.priority,
            "lane": item.lane,
            "cost": item.cost,
            "reply_columns": item.reply_columns,
            "stream": item.stream,
            "fields": item.extra,
            **({} if item.sequence is None else {"sequence": _part(item.sequence)}),
            **({"not_before_ms": item.not_before_ms} if item.not_before_ms else {}),
            **({"version": item.version} if item.version else {}),
        }
    }


def _part(part: SequencePart) -> Case:
    assert part.place == SequencePart.place_of(ENTRY_ID, int(part.place[-5:]))
    return {
        "sequence_id": part.sequence_id,
        "start": part.starts,
        "end": part.ends,
        "index": part.index,
    }


def expected(item: Case) -> Case:
    if "request" not in item:
        return item
    request = item["request"]
    fields = {name: as_bytes(value) for name, value in request["fields"].items()}
    body = {"body": as_bytes(request["body"])} if "body" in request else {}
    return {"request": request | body | {"fields": fields}}


@cases("cases", "requests.json", "packed.json", "columns.json", "sequences.json")
def test_entry_is_decoded_as_in_the_vector(case: Case) -> None:
    settings = ModelSettings(**case.get("settings", {}))
    entry, decoded = decode_entry(case["id"].encode(), flat(case), settings)
    assert list(map(described, one_by_one(decoded))) == list(map(expected, case["becomes"]))
    assert entry.runs == [item for item in decoded if isinstance(item, Run)]


# --- results -----------------------------------------------------------------------------------------------


def result_of(written: Case) -> Result:
    body = {"body": as_bytes(written["body"])} if "body" in written else {}
    return Result(**(written | body))


@cases("envelopes", "results.json")
def test_result_is_encoded_as_in_the_vector(case: Case) -> None:
    assert encode_result(result_of(case["result"])) == as_bytes(case["envelope"])


@cases("chunks", "results.json")
def test_chunk_is_encoded_as_in_the_vector(case: Case) -> None:
    chunk = Chunk(**(case["chunk"] | {"body": as_bytes(case["chunk"]["body"])}))
    assert encode_chunk(chunk) == as_bytes(case["envelope"])
    assert encode_chunk_envelope(chunk) == as_bytes(case["element"])


@cases("replies", "results.json")
def test_results_on_a_reply_stream_are_encoded_as_in_the_vector(case: Case) -> None:
    packed = as_bytes(case["entry"])
    assert encode_results(map(result_of, case["results"])) == packed
    assert decode_results(packed) == msgpack.unpackb(packed)


@cases("columns", "results.json")
def test_results_as_columns_are_encoded_as_in_the_vector(case: Case) -> None:
    columns = [columns_of(written) for written in case["columns"]]
    assert encode_columns(columns) == as_bytes(case["entry"])
    assert decode_columns(as_bytes(case["entry"])) == columns
    results = [result for of_run in columns for result in of_run.results()]
    assert results == list(map(result_of, case["results"]))


def columns_of(written: Case) -> ResultColumns:
    ids, data = written["correlation_ids"], as_bytes(written["rows"])
    rows = Rows(as_bytes(written["row_head"]), data, len(data) // len(ids))
    measured = (written[name] for name in ("batch_size", "queue_us", "compute_us"))
    return ResultColumns(ids, written["content_type"], rows, *measured)


# --- results by ID -----------------------------------------------------------------------------------------


@cases("arguments", "kept.json")
def test_script_that_keeps_a_result_is_called_as_in_the_vector(case: Case) -> None:
    asked = case["request"]
    keys, args = keep_arguments(
        Keys("square"),
        asked["id"],
        asked["fingerprint"].encode(),
        asked["known_ms"],
        {},
        as_bytes(asked["body"]),
        result_ttl_ms=asked.get("result_ttl_ms"),
        again_after_result=asked.get("again", False),
    )
    assert keys == case["keys"]
    sent = [argument if isinstance(argument, bytes) else str(argument).encode() for argument in args]
    assert sent == list(map(as_bytes, case["arguments"]))


@cases("records", "kept.json")
def test_record_is_read_as_in_the_vector(case: Case) -> None:
    assert status_in_record(case["record"].encode()) == case["state"]


@cases("ids", "kept.json")
def test_id_is_read_as_in_the_vector(case: Case) -> None:
    if case["model"] is None:
        with pytest.raises(InvalidArgumentError, match="must be MODEL/CORRELATION_ID"):
            RequestId.parse(case["id"])
    else:
        assert RequestId.parse(case["id"]) == (case["model"], case["correlation_id"])


@cases("owners", "kept.json")
def test_owner_is_named_as_in_the_vector(case: Case) -> None:
    assert owner_prefix(owner_of_tenant(case["tenant"])) == case["begins_with"]


# --- batches -----------------------------------------------------------------------------------------------


def batched(written: Case) -> BatchedRequest:
    extra = {name: as_bytes(value) for name, value in written["fields"].items()} or None
    own = {name: value for name, value in written.items() if name != "fields"}
    body = StoredBody(*written["stored_body"]) if "stored_body" in written else as_bytes(written["body"])
    own.pop("stored_body", None)
    ticket = own["ticket"] and TicketRange(*own["ticket"])
    sequence = SequencePart(*own["sequence"]) if "sequence" in own else None
    return BatchedRequest(**(own | {"body": body, "extra": extra, "ticket": ticket, "sequence": sequence}))


@cases("batches", "batches.json")
def test_batch_is_decoded_as_in_the_vector(case: Case) -> None:
    becomes = case["becomes"]
    requests = [batched(request) for request in becomes["requests"]]
    batch = decode_batch(b"9-0", flat(case), epoch=2)
    assert (batch.id, batch.epoch, batch.size) == ("9-0", 2, len(requests))
    assert (batch.reason, batch.dispatched_us, batch.lane) == (
        becomes["reason"],
        becomes["dispatched_us"],
        becomes["lane"],
    )
    assert batch.expected_us == becomes["expected_us"]
    assert batch.max_execution_ms == becomes["max_execution_ms"]
    assert batch.max_result_bytes == becomes["max_result_bytes"]
    assert batch.requests == requests
    assert [run.reply_columns for run in batch.runs] == becomes["reply_columns"]


@cases("settled", "batches.json")
def test_settled_entry_is_decoded_as_in_the_vector(case: Case) -> None:
    becomes = case["becomes"]
    kind = BatchSettled if "batch_id" in becomes else ModelProcessesChanged
    if "broken" in becomes:
        becomes = becomes | {"broken": tuple(becomes["broken"])}
    if "failures" in becomes:
        becomes = becomes | {"failures": Failures(becomes["failures"])}
    if "of_producers" in becomes:
        of_producers = [ExecutedOf((*producer,), *numbers) for producer, *numbers in becomes["of_producers"]]
        becomes = becomes | {"of_producers": of_producers}
    assert decode_settled(flat(case)) == kind(**becomes)


# --- tensors and bodies ------------------------------------------------------------------------------------


@cases("tensors", "tensors.json")
def test_tensor_is_the_same_in_every_content_type(case: Case) -> None:
    datatype, shape, data = case["datatype"], case["shape"], as_bytes(case["data"])
    packed = as_bytes(case["msgpack"])
    arrays = [decode_body(MSGPACK, packed, declared=True), from_bytes(datatype, shape, data)]
    if case["json"] is not None:
        arrays.append(decode_body(JSON, case["json"].encode(), declared=True))
    for array in arrays:
        assert list(array.shape) == shape
        if "beyond numbers" not in case["name"]:  # a NaN may have any payload
            assert to_bytes(array, datatype) == data
        np.testing.assert_array_equal(array, arrays[0])


@cases("tensors", "tensors.json")
def test_array_is_encoded_as_in_the_vector(case: Case) -> None:
    packed = as_bytes(case["msgpack"])
    array = decode_body(MSGPACK, packed, declared=True)
    if case["datatype"] == "BF16":  # decoded to float32, and so encoded as FP32
        assert msgpack.unpackb(encode_body(MSGPACK, array))["datatype"] == "FP32"
    else:
        assert encode_body(MSGPACK, array) == packed
        if case["json"] is not None:
            assert json.loads(encode_body(JSON, array)) == json.loads(case["json"])


@cases("nested", "tensors.json")
def test_nested_list_is_the_same_tensor_as_a_flat_one(case: Case) -> None:
    tensor = json.loads(case["json"])
    array = decode_body(JSON, case["json"].encode(), declared=True)
    assert list(array.shape) == tensor["shape"]
    assert to_bytes(array, tensor["datatype"]) == as_bytes(case["data"])


@cases("strings", "tensors.json")
def test_strings_are_a_flat_list_that_is_nested_as_the_shape_is(case: Case) -> None:
    assert decode_body(JSON, case["json"].encode()) == case["texts"]
    assert decode_body(MSGPACK, as_bytes(case["msgpack"])) == case["texts"]


@cases("bf16_roundings", "tensors.json")
def test_bf16_is_rounded_as_in_the_vector(case: Case) -> None:
    array = np.frombuffer(bytes.fromhex(case["fp32"]), ">f4")
    assert to_bytes(array, "BF16")[::-1].hex() == case["bf16"]


@cases("values", "bodies.json")
def test_value_is_the_same_in_every_content_type(case: Case) -> None:
    in_json, in_msgpack = case["json"].encode(), as_bytes(case["msgpack"])
    for content_type, body in ((JSON, in_json), (MSGPACK, in_msgpack)):
        value = decode_body(content_type, body)
        assert value == case["value"] and type(value) is type(case["value"])
        assert encode_body(content_type, value) == body


@cases("refused", "bodies.json", "tensors.json")
def test_body_is_rejected(case: Case) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        decode_body(case["content_type"], as_bytes(case["body"]))
    assert caught.value.status == INVALID_ARGUMENT
    assert caught.value.detail.partition(": ")[0] == case["field"]


# --- the files ---------------------------------------------------------------------------------------------


def test_make_vectors_writes_every_file() -> None:
    assert sorted(make_vectors.files()) == FILES


@pytest.mark.parametrize("file", FILES)
def test_file_is_what_make_vectors_writes(file: str) -> None:
    text = make_vectors.as_text(make_vectors.files()[file])
    assert (VECTORS / file).read_bytes() == text.encode()


def test_no_case_has_changed() -> None:
    """Producers in any language rely on each. New cases may be added; what was written once stays true."""
    changed = sorted(make_vectors.frozen() - make_vectors.digests())
    assert not changed, "cases of these files have changed, or are gone: existing producers would break"


def test_new_cases_are_frozen() -> None:
    new = sorted(make_vectors.digests() - make_vectors.frozen())
    assert not new, "run contract.make_vectors (see its docstring), which adds the digests of new cases"


@pytest.mark.parametrize("file", FILES)
def test_names_of_cases_are_unique(file: str) -> None:
    for of_file in lists_of(file).values():
        names = [case["name"] for case in of_file if "name" in case]
        assert len(names) == len(set(names))
