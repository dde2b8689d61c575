"""Runs: what a producer reads is the same, however its requests were divided into runs and columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings

from carpool.keys import Keys
from carpool.messages.batches import BatchedRun
from carpool.messages.requests import JSON, MSGPACK, RAW
from carpool.messages.results import Result
from carpool.rows import Bodies, Rows
from carpool.store.arguments import ScriptKeys
from carpool.store.results import addresses_of, result_groups
from carpool.tickets import TicketRange, Tickets
from carpool.wire.bodies import encode_body
from carpool.wire.results import decode_columns
from carpool.wire.tensors import TensorSpec, tensor_head
from carpool_worker.codec import Codec
from carpool_worker.execution import Execution
from support.executions import NOW_US, codec_of, executed, execution_of, positions, prepared

X = TensorSpec("x", "FP32", (2,))
ANY = TensorSpec("x", "FP32", (-1,))
BAD = 13.0  # a number on which the model fails


def predict(batch: Any) -> Any:
    """Doubles each row, and fails on some; the sums of rows of unequal length are as long as these."""
    if (batch == BAD).any():
        raise ValueError("unlucky")
    return batch * 2


def array_of(number: int, length: int = 2) -> np.ndarray[Any, Any]:
    return np.arange(number, number + length, dtype=np.float32)


def run_of(
    bodies: Bodies,
    name: str = "a",
    content_type: str = MSGPACK,
    reply_to: str | None = "replies",
    reply_columns: bool = True,
    deadline_us: int | None = None,
    tickets: Tickets | None = None,
) -> BatchedRun:
    ids = [f"{name}{index}" for index in range(len(bodies))]
    return BatchedRun(
        "1-0", ids, bodies, content_type, reply_to, NOW_US - 5000, deadline_us, None, reply_columns, tickets
    )


def rows_of(numbers: Sequence[int], content_type: str = MSGPACK) -> Rows:
    head = tensor_head("FP32", (2,), 8) if content_type == MSGPACK else b""
    return Rows(head, b"".join(array_of(number).tobytes() for number in numbers), 8)


def execute(codec: Codec, execution: Execution) -> None:
    while not execution.is_finished:
        if execution.undecoded and not codec.prepare_next(execution, NOW_US):
            continue
        frame = execution.frames.pop(0)
        codec.give_results(execution, frame, *executed(codec, frame, predict))


def read(execution: Execution, answered: frozenset[int] = frozenset()) -> dict[str, tuple[Any, ...]]:
    """What producers read after the commit, by correlation ID. `answered`: positions answered elsewhere."""
    execution.drop(answered)
    addresses = addresses_of(execution.batch)
    results = [(addresses[position], result) for position, result in execution.results.items()]
    script_keys = ScriptKeys()
    groups = list(result_groups(Keys("m"), script_keys, results, execution.run_results))
    envelopes: list[tuple[str, dict[str, Any]]] = []
    for key, kind, _, payload in groups:
        place = script_keys.keys[int(key) - 1]
        assert isinstance(payload, bytes)
        if kind == "columns":
            of_columns = [result for columns in decode_columns(payload) for result in columns.results()]
            envelopes += [(place, envelope_of(result)) for result in of_columns]
        elif kind == "list":
            decoded = msgpack.unpackb(payload) if payload[:1] != b"{" else {"json": payload}
            envelopes.append((place, decoded))
        else:
            envelopes += [(place, envelope) for envelope in msgpack.unpackb(payload)]
    read = {envelope.get("correlation_id", place): (place, envelope) for place, envelope in envelopes}
    assert len(read) == len(envelopes), "a request got two results"
    return read


def envelope_of(result: Result) -> dict[str, Any]:
    envelope = {name: value for name, value in result._asdict().items() if value not in (None, (), "")}
    envelope["final"] = True
    return envelope


def alone(codec: Codec, runs: Sequence[BatchedRun]) -> list[BatchedRun]:
    """The same requests, each in a run of its own with its whole body, for a producer without columns."""
    return [
        run._replace(
            correlation_ids=[correlation_id],
            bodies=[run.bodies[index]],
            reply_columns=False,
            tickets=None if run.tickets is None else run.tickets.slice(index, index + 1),
        )
        for run in runs
        for index, correlation_id in enumerate(run.correlation_ids)
    ]


# --- the property ------------------------------------------------------------------------------------------

numbers = st.lists(st.integers(0, 20), min_size=1, max_size=6)


@st.composite
def random_runs(draw: st.DrawFn) -> list[BatchedRun]:
    runs: list[BatchedRun] = []
    for at in range(draw(st.integers(1, 5))):
        content_type = draw(st.sampled_from((MSGPACK, MSGPACK, RAW, JSON)))
        of_run = draw(numbers)
        bodies: Bodies
        if content_type == JSON:
            bodies = [encode_body(JSON, array_of(number).tolist()) for number in of_run]
        elif draw(st.booleans()):
            bodies = rows_of(of_run, content_type)
            if draw(st.booleans()) and len(bodies.head) > 3:  # divided elsewhere: rows of other content
                cut = draw(st.integers(0, len(bodies.head) - 1))
                tail = bodies.head[cut:]
                whole = [tail + bytes(bodies.data[row * 8 : row * 8 + 8]) for row in range(len(of_run))]
                bodies = Rows(bodies.head[:cut], b"".join(whole), 8 + len(tail))
        else:
            one = rows_of(of_run, content_type)
            bodies = [one[index] for index in range(len(of_run))]
            if draw(st.booleans()):
                bodies[draw(st.integers(0, len(bodies) - 1))] = b"\xc1"  # malformed in all content types
        to_stream = draw(st.booleans())
        runs.append(
            run_of(
                bodies,
                f"run{at}.",
                content_type,
                draw(st.sampled_from(("one", "two"))) if to_stream else None,
                draw(st.booleans()),
                draw(st.sampled_from((None, NOW_US - 1, NOW_US + 1))),
                Tickets.of("1-0", 100 * at, len(of_run)) if draw(st.booleans()) else None,
            )
        )
    return runs


@given(runs=random_runs(), data=st.data(), spec=st.sampled_from((X, ANY)))
@settings(max_examples=100, deadline=None)
def test_requests_in_runs_are_served_as_each_alone(
    runs: list[BatchedRun], data: st.DataObject, spec: TensorSpec
) -> None:
    codec = codec_of(spec, outputs=[spec])
    together, separate = prepared(codec, *runs), prepared(codec_of(spec), *alone(codec, runs))
    execute(codec, together)
    execute(codec, separate)
    for execution in (together, separate):
        execution.compute_us = 0
    size = together.batch.size
    answered = data.draw(st.frozensets(st.integers(0, size - 1), max_size=3))
    statuses, by_run = together.counts()
    assert sum(statuses.values()) == size == sum(number for _, number in by_run)
    got, expected = read(together, answered), read(separate, answered)
    assert len(got) == size - len(answered)
    assert _without_times(got) == _without_times(expected)


def _without_times(read: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    return {
        correlation_id: (place, {name: value for name, value in envelope.items() if name != "compute_us"})
        if "json" not in envelope
        else (place, envelope["json"].partition(b'"compute_us"')[0])
        for correlation_id, (place, envelope) in read.items()
    }


# --- what the property would not show ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content_type", "head"), [(RAW, b""), (MSGPACK, tensor_head("BOOL", [2], 2))], ids=["raw", "msgpack"]
)
def test_row_that_is_no_bool_fails_its_request_alone(content_type: str, head: bytes) -> None:
    rows = Rows(head, b"\0\1\1\1\1\2\0\0", 2)
    execution = prepared(codec_of(TensorSpec("x", "BOOL", (2,))), run_of(rows, "a", content_type))
    assert [list(frame.positions) for frame in execution.frames] == [[0, 1, 3]]
    assert {position: one.status for position, one in execution.results.items()} == {2: "INVALID_ARGUMENT"}


def test_rows_become_one_frame_and_columns_without_a_step_for_each_request() -> None:
    codec = codec_of(X, outputs=[X])
    runs = [run_of(rows_of(range(20, 60)), "a"), run_of(rows_of(range(20, 44), RAW), "b", RAW)]
    execution = prepared(codec, *runs)
    (frame,) = execution.frames
    assert b"".join(frame.payload) == bytes(runs[0].bodies.data) + bytes(runs[1].bodies.data)  # type: ignore[union-attr]
    execute(codec, execution)
    assert not execution.results
    assert [(of.run, list(of.positions)) for of in execution.run_results] == [
        (runs[0], list(range(40))),
        (runs[1], list(range(40, 64))),
    ]
    first, second = execution.run_results
    assert first.correlation_ids is runs[0].correlation_ids and first.are_columns and second.are_columns
    assert isinstance(first.bodies, Rows) and isinstance(second.bodies, Rows)
    assert first.bodies.head == tensor_head("FP32", (2,), 8) and second.bodies.head == b""
    assert (first.batch_size, first.queue_us) == (64, 3000)
    assert "requests" not in vars(execution.batch), "single requests were made"


def test_one_failure_leaves_columns_for_the_others_of_its_run() -> None:
    codec = codec_of(X, outputs=[X])
    execution = prepared(codec, run_of(rows_of([0, 12, 2, 3])))
    execute(codec, execution)
    assert execution.results.keys() == {1} and execution.results[1].status == "INTERNAL"
    (of_run,) = execution.run_results
    assert list(of_run.positions) == [0, 2, 3] and of_run.are_columns
    assert of_run.correlation_ids == ["a0", "a2", "a3"] and isinstance(of_run.bodies, Rows)
    assert bytes(of_run.bodies.data) == b"".join((array_of(n) * 2).tobytes() for n in (0, 2, 3))


def test_position_answered_meanwhile_separates_the_results_of_its_run_only() -> None:
    codec = codec_of(X, outputs=[X])
    execution = prepared(codec, run_of(rows_of([0, 1]), "a"), run_of(rows_of([2, 3]), "b"))
    execute(codec, execution)
    execution.drop({1})
    assert {result.correlation_id for result in execution.results.values()} == {"a0"}
    assert [list(of.positions) for of in execution.run_results] == [[2, 3]]


def test_columns_have_the_tickets_of_their_requests() -> None:
    codec = codec_of(X, outputs=[X])
    tickets = Tickets((TicketRange("1-0", 0, 2), TicketRange("1-0", 5, 2)))
    execution = prepared(codec, run_of(rows_of([0, 1, 2, 3]), tickets=tickets))
    execute(codec, execution)
    groups = list(result_groups(Keys("m"), ScriptKeys(), [], execution.run_results))
    ((_, _, ranges, payload),) = groups
    assert re.sub(r"=\d+", "", str(ranges)) == "1-0:0+2 1-0:5+2"
    assert isinstance(payload, bytes)
    packed = msgpack.unpackb(payload)
    assert [columns["correlation_ids"] for columns in packed] == ["a0 a1", "a2 a3"]
    assert len(packed[0]["rows"]) == len(packed[1]["rows"])


@pytest.mark.parametrize(
    "run",
    [
        run_of(rows_of([0, 1]), reply_columns=False),
        run_of(rows_of([0, 1]), reply_to=None),
        run_of(rows_of([0])),
    ],
    ids=["not asked for", "lists", "one request"],
)
def test_run_whose_results_are_not_columns(run: BatchedRun) -> None:
    codec = codec_of(X, outputs=[X])
    execution = prepared(codec, run)
    execute(codec, execution)
    (of_run,) = execution.run_results
    assert not of_run.are_columns and list(of_run.positions) == list(range(len(run.bodies)))


def test_suspect_run_has_a_frame_for_each_request() -> None:
    codec = codec_of(X, outputs=[X])
    execution = prepared(codec, run_of(rows_of([0, 1, 2])), epoch=2, answered_before=frozenset({1}))
    assert positions(execution) == [[0], [2]]
    execute(codec, execution)
    assert [list(of.positions) for of in execution.run_results] == [[0], [2]]


def test_process_that_dies_after_columns_keeps_them() -> None:
    codec = codec_of(ANY, outputs=[ANY])
    long = [encode_body(MSGPACK, array_of(number, 3)) for number in (5, 6)]
    execution = prepared(codec, run_of(rows_of([0, 1]), "a"), run_of([*long], "b"))
    first, second = execution.frames
    codec.give_results(execution, first, *executed(codec, first, predict))
    del execution.frames[0]
    execution.split(second)
    assert [list(of.positions) for of in execution.run_results] == [[0, 1]]
    assert positions(execution) == [[2], [3]]
    execute(codec, execution)
    execution.separate()
    assert sorted(execution.results) == [0, 1, 2, 3]


def test_batch_without_requests_has_nothing_to_do() -> None:
    execution = execution_of()
    codec_of(X).prepare(execution, NOW_US)
    assert not execution.frames and execution.unanswered == range(0)
