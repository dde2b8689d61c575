"""The executor: each item gets its own result or its own failure, whatever the model does."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgpack
import numpy as np
import pytest

from carpool.errors import InvalidArgumentError, NotFoundError
from carpool.wire.tensors import TensorSpec
from carpool_worker.model_process.executor import ListItems, Outcome, StackedItems
from carpool_worker.model_process.frame_execution import execute_frame
from carpool_worker.model_process.frames import Failure, FrameHeader
from carpool_worker.model_process.model import LoadedModel, RequestInfo, adapt
from carpool_worker.model_process.outputs import Stacked
from support.executing import execute

HOUR_US: Final = 3_600_000_000


def run(
    predict: Callable[[Any], Any],
    bodies: list[Any] | Stacked,
    outputs: Sequence[TensorSpec] = (),
    **hooks: Any,
) -> Outcome:
    """The outcome of these bodies with this function as the model."""
    model = LoadedModel(lambda batch, _: predict(batch), outputs=tuple(outputs), **hooks)
    if not isinstance(bodies, dict):
        return execute(model, ListItems(bodies), ())
    sent = {name: array.copy() for name, array in bodies.items()}
    return execute(model, StackedItems(bodies, lambda: sent), ())


class Counting:
    """A model that raises on a batch with one of `bad_bodies`, and counts its calls."""

    def __init__(self, *bad_bodies: int, error: Callable[[str], BaseException] = ValueError) -> None:
        self.bad_bodies = set(bad_bodies)
        self.error = error
        self.calls = 0

    def __call__(self, batch: list[int]) -> list[int]:
        self.calls += 1
        found = self.bad_bodies & set(batch)
        if found:
            raise self.error(f"bad body {min(found)}")
        return [-number for number in batch]


def failed(message: str) -> Failure:
    return "INTERNAL", f"the model failed on this request: {message}"


def run_late(model: Counting, count: int, late: Callable[[int], bool]) -> Outcome:
    """The outcome of as many bodies, 0 and up, which are late once the model was called."""
    loaded = LoadedModel(lambda batch, _: model(batch))
    return execute(
        loaded, ListItems(list(range(count))), (), None, lambda index: model.calls > 0 and late(index)
    )


def test_error_that_says_which_request_it_concerns_fails_that_one() -> None:
    """Given an error for two of 64 requests, expect that the others are executed together, and not halved."""
    calls: list[list[int]] = []

    def predict(batch: list[int]) -> list[int]:
        calls.append(batch)
        for place, body in enumerate(batch):
            if body in (7, 50):
                error = InvalidArgumentError(f"bad {body}")
                error.request_index = place
                raise error
        return [-body for body in batch]

    outcome = run(predict, list(range(64)))
    assert list(map(len, calls)) == [64, 63, 62]
    assert outcome.failures == {7: ("INVALID_ARGUMENT", "bad 7"), 50: ("INVALID_ARGUMENT", "bad 50")}
    assert outcome.results == [-body for body in range(64) if body not in (7, 50)]


# --- the model raises --------------------------------------------------------------------------------------


def test_results_are_in_the_order_of_the_items() -> None:
    assert run(lambda batch: [x * x for x in batch], [1, 2, 3]) == Outcome({}, [1, 4, 9], executed_together=3)


def test_batch_that_expired_as_a_whole_is_not_halved() -> None:
    """Given deadlines that passed while the model was executing, and raised, expect no second call."""
    model = Counting(3)
    outcome = run_late(model, 64, lambda index: True)
    assert model.calls == 1
    assert {status for status, _ in outcome.failures.values()} == {"DEADLINE_EXCEEDED"}
    assert len(outcome.failures) == 64
    assert (outcome.results, outcome.executed_together, outcome.raised) == ([], 0, ())


def test_only_those_that_are_awaited_are_executed_again() -> None:
    """Given one request without a deadline in a batch that raised, expect it to be executed alone."""
    model = Counting(3)
    outcome = run_late(model, 64, lambda index: index != 40)
    assert (model.calls, outcome.results) == (2, [-40])
    assert outcome.failures.keys() == set(range(64)) - {40}
    assert "its deadline passed before it was executed again" in outcome.failures[3][1]


def test_late_requests_of_a_batch_that_did_not_raise_get_their_results() -> None:
    assert run_late(Counting(), 3, lambda index: True) == Outcome({}, [0, -1, -2], executed_together=3)


@pytest.mark.parametrize(
    ("ago_us", "late"),
    [((1, None, None), (0,)), ((None, 1, 1), (1, 2)), ((1, 1, 1), (0, 1, 2)), ((-HOUR_US, None, None), ())],
)
def test_request_that_expired_while_its_frame_waited_is_not_executed(
    ago_us: tuple[int | None, ...], late: tuple[int, ...]
) -> None:
    """The worker sends frames ahead. Nobody waits for the result of a request that expired meanwhile."""
    called: list[list[int]] = []

    def predict(batch: list[int]) -> list[int]:
        called.append(list(batch))
        return batch

    redis_ahead_us = 7_000_000
    redis_us = time.monotonic_ns() // 1000 + redis_ahead_us
    deadlines = [(1, None if ago is None else redis_us - ago) for ago in ago_us]
    frame = FrameHeader(0, 3, deadlines=deadlines, redis_ahead_us=redis_ahead_us)
    model, sent = LoadedModel(lambda batch, _: predict(batch)), msgpack.packb([1, 2, 3])
    header, _ = execute_frame(model, frame, sent, lambda: sent)
    in_time = [number + 1 for number in range(3) if number not in late]
    assert called == ([in_time] if in_time else [])
    assert tuple(header.failures) == late and header.executed_together == len(in_time)
    assert {status for status, _ in header.failures.values()} <= {"DEADLINE_EXCEEDED"}


def test_failing_item_fails_alone_and_the_others_get_their_results() -> None:
    model = Counting(5)
    failures, results, *_ = run(model, list(range(16)))
    assert failures == {5: failed("bad body 5")}
    assert results == [-number for number in range(16) if number != 5]
    assert model.calls <= 1 + 2 * 4  # 2 log2(n) after the first


@pytest.mark.parametrize("bad_bodies", [(0,), (6,), (0, 6), (2, 3), (0, 1, 2, 3, 4, 5, 6)])
def test_failing_items_are_isolated_with_at_most_two_calls_for_each_item(bad_bodies: tuple[int, ...]) -> None:
    model = Counting(*bad_bodies)
    failures, results, executed, raised, *_ = run(model, list(range(7)))
    assert (executed, raised) == (0, bad_bodies)
    assert failures == {body: failed(f"bad body {body}") for body in bad_bodies}
    assert results == [-number for number in range(7) if number not in bad_bodies]
    assert model.calls <= 2 * 7 - 1


def test_batch_too_large_for_memory_is_executed_in_halves() -> None:
    def predict(batch: list[int]) -> list[int]:
        if len(batch) > 2:
            raise MemoryError
        return batch

    assert run(predict, [1, 2, 3, 4, 5]) == Outcome({}, [1, 2, 3, 4, 5], executed_together=0)


def test_memory_of_a_failed_call_is_freed_before_the_halves() -> None:
    class Large:
        """Activations in a stack frame, which a traceback would keep alive."""

    alive: list[int] = []
    references: list[weakref.ref[Large]] = []

    def predict(batch: list[int]) -> list[int]:
        alive.append(sum(reference() is not None for reference in references))
        activations = Large()
        references.append(weakref.ref(activations))
        if 3 in batch:
            raise MemoryError
        return batch

    gc.disable()  # it must be freed without a garbage collection
    try:
        failures, _, *_ = run(predict, [1, 2, 3, 4])
    finally:
        gc.enable()
    assert failures.keys() == {2}
    assert set(alive) == {0}


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit])
def test_base_exception_fails_its_item_and_not_the_process(error: type[BaseException]) -> None:
    failures, results, *_ = run(Counting(1, error=error), [0, 1])
    assert failures == {1: failed("bad body 1")}
    assert results == [0]


def test_exception_without_a_usable_message() -> None:
    class BrokenStrError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("a broken __str__")

    assert run(Counting(0, error=lambda _: ValueError()), [0]).failures == {
        0: ("INTERNAL", "the model failed on this request: ValueError, without a message")
    }
    assert run(Counting(0, error=lambda _: BrokenStrError()), [0]).failures == {
        0: ("INTERNAL", "the model failed on this request: BrokenStrError, without a message")
    }


def test_key_error_says_that_it_is_one() -> None:
    assert run(Counting(0, error=lambda _: KeyError("speed")), [0]).failures == {
        0: ("INTERNAL", "the model failed on this request: KeyError: 'speed'")
    }


def test_failure_does_not_contain_the_exceptions_class() -> None:
    (status, detail) = run(Counting(0, error=ZeroDivisionError), [0]).failures[0]
    assert "ZeroDivisionError" not in status + detail and "Traceback" not in detail


def test_carpool_error_keeps_its_status_and_detail() -> None:
    assert run(Counting(1, error=NotFoundError), [0, 1, 2]).failures == {1: ("NOT_FOUND", "bad body 1")}


def test_carpool_error_with_a_detail_that_is_no_string() -> None:
    class DetaillessError(InvalidArgumentError):
        def __init__(self) -> None:  # without super().__init__: it has no detail
            pass

    assert run(Counting(0, error=lambda _: InvalidArgumentError({"x": 1})), [0]).failures == {  # type: ignore[arg-type]
        0: ("INVALID_ARGUMENT", "{'x': 1}")
    }
    assert run(Counting(0, error=lambda _: DetaillessError()), [0]).failures == {0: ("INVALID_ARGUMENT", "")}


# --- the model returns exceptions --------------------------------------------------------------------------


def test_exception_returned_in_place_of_a_result_fails_that_item() -> None:
    calls = []

    def predict(batch: list[int]) -> list[Any]:
        calls.append(batch)
        return [batch[0], ValueError("odd"), NotFoundError("no such number"), batch[3], SystemExit()]

    failures, results, *_ = run(predict, [10, 11, 12, 13, 14])
    assert failures == {
        1: failed("odd"),
        2: ("NOT_FOUND", "no such number"),
        4: ("INTERNAL", "the model failed on this request: SystemExit, without a message"),
    }
    assert results == [10, 13]
    assert len(calls) == 1


def test_exceptions_returned_in_an_object_array_and_from_halves() -> None:
    def predict(batch: list[int]) -> Any:
        if 3 in batch and len(batch) > 1:
            raise ValueError("not together")
        return np.array([ValueError("odd") if x % 2 else x for x in batch], object)

    assert run(predict, [0, 1, 2, 3]) == Outcome({1: failed("odd"), 3: failed("odd")}, [0, 2])


# --- wrong number of results -------------------------------------------------------------------------------


@pytest.mark.parametrize("results", [[], [1, 2], [1, 2, 3, 4], np.zeros(2), np.zeros((2, 5))])
def test_wrong_number_of_results_fails_all_items(results: Any) -> None:
    calls = []

    def predict(batch: list[int]) -> Any:
        calls.append(batch)
        return results

    detail = f"the model returned {len(results)} results for 3 requests"
    assert run(predict, [1, 2, 3]) == Outcome(dict.fromkeys(range(3), ("INTERNAL", detail)), [])
    assert len(calls) == 1  # halves would not show which results are missing


def test_wrong_number_of_results_names_the_output() -> None:
    failures, _, *_ = run(lambda _: {"x": np.zeros(2), "y": np.zeros(3)}, [1, 2])
    assert failures[0] == ("INTERNAL", "the model returned 3 results in output 'y' for 2 requests")
    assert failures[1] == failures[0]


@pytest.mark.parametrize(
    ("results", "error"),
    [
        (None, "a NoneType for 2 requests, not a list"),
        ("ab", "a str for 2 requests, not a list"),
        (b"ab", "a bytes for 2 requests, not a list"),
        ((x for x in (1, 2)), "a generator for 2 requests, not a list"),
        ({1, 2}, "a set for 2 requests, not a list"),
        (np.float32(1), "a single value, a float32 without dimensions, for 2 requests"),
        ({}, "no outputs for 2 requests"),
        ({"x": 1.0}, "a float in output 'x', not a list"),
    ],
)
def test_result_that_is_no_list_fails_all_items(results: Any, error: str) -> None:
    failures = run(lambda _: results, [1, 2]).failures
    assert failures.keys() == {0, 1}
    assert {(status, detail.partition(":")[0]) for status, detail in failures.values()} == {
        ("INTERNAL", f"the model returned {error}")
    }


def test_wrong_number_of_results_from_one_half_fails_that_half() -> None:
    def predict(batch: list[int]) -> list[int]:
        if 3 in batch:
            raise ValueError("bad")
        return batch[:1]

    failures, results, *_ = run(predict, [0, 1, 2, 3])
    wrong = ("INTERNAL", "the model returned 1 results for 2 requests")
    assert failures == {0: wrong, 1: wrong, 3: failed("bad")}
    assert results == [2]


# --- validate ----------------------------------------------------------------------------------------------


def positive(body: int) -> None:
    if body < 0:
        raise ValueError(f"{body} is negative")
    if body > 100:
        raise InvalidArgumentError("body: too large")
    if body == 42:
        raise SystemExit


def test_invalid_item_fails_alone_and_is_not_passed_to_the_model() -> None:
    seen = []

    def predict(batch: list[int]) -> list[int]:
        seen.append(batch)
        return [10 * x for x in batch]

    failures, results, *_ = run(predict, [1, -2, 3, 101, 42], validate=positive)
    assert failures == {
        1: ("INVALID_ARGUMENT", "the model rejected this body: -2 is negative"),
        3: ("INVALID_ARGUMENT", "body: too large"),
        4: ("INVALID_ARGUMENT", "the model rejected this body: SystemExit, without a message"),
    }
    assert results == [10, 30]
    assert seen == [[1, 3]]


def test_model_is_not_called_without_a_valid_item() -> None:
    model = Counting()
    failures, results, *_ = run(model, [-1, -2], validate=positive)
    assert failures.keys() == {0, 1} and results == []
    assert model.calls == 0


def test_failures_have_the_items_indexes_among_invalid_and_failing_ones() -> None:
    failures, results, *_ = run(Counting(3, 5), [-1, 2, 3, -4, 5, 6], validate=positive)
    assert {at: status for at, (status, _) in failures.items()} == {
        0: "INVALID_ARGUMENT",
        2: "INTERNAL",
        3: "INVALID_ARGUMENT",
        4: "INTERNAL",
    }
    assert failures[2] == failed("bad body 3") and failures[4] == failed("bad body 5")
    assert results == [-2, -6]


def test_validate_gets_one_row_and_predict_all_valid_rows() -> None:
    def validate(body: Any) -> None:
        assert body.shape == (2,)
        if body[0] < 0:
            raise ValueError("negative")

    rows = np.array([[1, 2], [-3, 4], [5, 6]])
    failures, results, *_ = run(lambda batch: batch * 2, {"x": rows}, validate=validate)
    assert failures.keys() == {1}
    assert isinstance(results, dict)
    np.testing.assert_array_equal(results[""], [[2, 4], [10, 12]])


# --- tensors -----------------------------------------------------------------------------------------------

Y = TensorSpec("y", "FP32", (2,))
SCORE = TensorSpec("score", "FP32", ())


def stacked(outcome: Outcome) -> dict[str, Any]:
    assert isinstance(outcome.results, dict)
    return {name: array.tolist() for name, array in outcome.results.items()}


def test_one_input_is_passed_as_an_array_and_several_by_name() -> None:
    a, b = np.arange(6).reshape(3, 2), np.arange(3)
    seen: list[Any] = []

    def predict(batch: Any) -> Any:
        seen.append(batch)
        return [0] * 3

    run(predict, {"a": a})
    run(predict, {"a": a, "b": b})
    assert seen[0].tolist() == a.tolist()
    assert {name: array.tolist() for name, array in seen[1].items()} == {"a": a.tolist(), "b": b.tolist()}


def test_halves_of_stacked_items_are_stacked() -> None:
    def predict(batch: dict[str, Any]) -> Any:
        if 2 in batch["a"]:
            raise ValueError("bad")
        return batch["a"] + batch["b"]

    outcome = run(predict, {"a": np.arange(5), "b": np.full(5, 10)}, [TensorSpec("y", "INT64", ())])
    assert outcome.failures == {2: failed("bad")}
    assert stacked(outcome) == {"y": [10, 11, 13, 14]}


def test_model_that_modifies_its_dict_of_inputs_does_not_affect_the_halves() -> None:
    def predict(batch: dict[str, Any]) -> Any:
        a = batch.pop("a")
        if 2 in a:
            raise ValueError("bad")
        return a + batch["b"]

    outcome = run(predict, {"a": np.arange(3), "b": np.full(3, 10)}, [TensorSpec("y", "INT64", ())])
    assert outcome.failures == {2: failed("bad")}
    assert stacked(outcome) == {"y": [10, 11]}


def test_batch_is_brought_again_only_if_the_model_raises_and_never_copied_before() -> None:
    sent = np.arange(8.0)
    brought: list[int] = []
    batches: list[Any] = []

    def again() -> Stacked:
        brought.append(len(batches))
        return {"x": np.arange(8.0)}

    def predict(batch: Any) -> Any:
        batches.append(batch)
        is_bad = 5 in batch
        batch *= 2  # in place
        if is_bad:
            raise ValueError("bad")
        return batch

    model = LoadedModel(lambda batch, _: predict(batch), outputs=(TensorSpec("y", "FP64", ()),))
    outcome = execute(model, StackedItems({"x": sent[:4]}, again), ())
    assert (stacked(outcome), len(batches), brought) == ({"y": [0, 2, 4, 6]}, 1, [])
    assert batches[0].base is sent, "a copy"

    sent[:] = np.arange(8.0)
    outcome = execute(model, StackedItems({"x": sent}, again), ())
    assert outcome.failures == {5: failed("bad")}
    assert stacked(outcome) == {"y": [0, 2, 4, 6, 8, 12, 14]}
    assert brought == [2], "once, after the call that raised"


def test_declared_output_is_stacked_under_its_name() -> None:
    outcome = run(lambda _: np.ones((2, 2)), [1, 2], [Y])
    assert stacked(outcome) == {"y": [[1, 1], [1, 1]]}


def test_undeclared_array_of_numbers_becomes_plain_numbers() -> None:
    results = run(lambda _: np.array([1, 2], np.int16), [1, 2]).results
    assert results == [1, 2] and [type(result) for result in results] == [int, int]


def test_undeclared_array_of_rows_is_stacked() -> None:
    assert stacked(run(lambda _: np.ones((2, 3)), [1, 2])) == {"": [[1, 1, 1], [1, 1, 1]]}


def test_convertible_result_becomes_an_array() -> None:
    class Tensor:
        """Like torch's: no sequence, but numpy can convert it."""

        def __array__(self, *_: Any, **__: Any) -> Any:
            return np.array([1.5, 2.5])

    assert run(lambda _: Tensor(), [1, 2]) == Outcome({}, [1.5, 2.5], executed_together=2)


def test_several_outputs_by_name() -> None:
    scores = np.array([0.5, 0.25])
    outcome = run(lambda _: {"y": np.ones((2, 2)), "score": scores}, [1, 2], [Y, SCORE])
    assert stacked(outcome) == {"y": [[1, 1], [1, 1]], "score": [0.5, 0.25]}


def test_results_have_the_same_form_whether_or_not_another_item_failed() -> None:
    def predict(batch: list[int]) -> Any:
        if 3 in batch:
            raise ValueError("bad")
        return {"y": np.array([[x, x] for x in batch], np.float64), "n": np.array(batch)}

    outputs = [Y, TensorSpec("n", "INT64", ())]
    at_once = run(predict, [0, 1, 2], outputs)
    in_parts = run(predict, [0, 3, 1, 2], outputs)
    assert stacked(in_parts) == stacked(at_once) == {"y": [[0, 0], [1, 1], [2, 2]], "n": [0, 1, 2]}
    assert in_parts.failures.keys() == {1}


def test_parts_of_different_shape_are_joined_as_rows() -> None:
    def predict(batch: list[int]) -> Any:
        """Pads to the longest item, as text models do."""
        if 9 in batch:
            raise ValueError("bad")
        return np.array([[1] * x + [0] * (max(batch) - x) for x in batch])

    failures, results, *_ = run(predict, [1, 9, 3, 2])
    assert failures.keys() == {1} and isinstance(results, list)
    assert [row.tolist() for row in results] == [[1], [1, 1, 1], [1, 1, 0]]


def test_strings_are_returned_as_rows() -> None:
    labels = np.array(["cat", "dog"])
    label, score = TensorSpec("label", "BYTES", ()), TensorSpec("score", "FP32", ())
    assert run(lambda _: labels, [1, 2]).results == ["cat", "dog"]
    assert run(lambda _: labels, [1, 2], [label]).results == ["cat", "dog"]
    assert run(lambda _: labels.astype(object), [1, 2], [label]).results == ["cat", "dog"]
    assert run(lambda _: {"label": ["cat", "dog"]}, [1, 2]).results == ["cat", "dog"]
    both = run(lambda _: {"label": labels, "score": np.array([0.5, 1])}, [1, 2], [label, score])
    assert both.results == [{"label": "cat", "score": 0.5}, {"label": "dog", "score": 1}]


def test_rows_of_unequal_shape_are_preserved() -> None:
    calls = []

    def predict(batch: list[int]) -> Any:
        calls.append(batch)
        return {"boxes": [np.ones((x, 4)) for x in batch], "count": batch}

    results = run(predict, [1, 3]).results
    assert isinstance(results, list)
    assert [(row["boxes"].shape, row["count"]) for row in results] == [((1, 4), 1), ((3, 4), 3)]
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("datatype", "column", "error"),
    [
        ("BYTES", np.ones(2), "float64 in output 'y', which is declared as BYTES"),
        ("FP32", np.array(["a", "b"]), "<U1 in output 'y', which is declared as FP32"),
    ],
)
def test_output_of_another_kind_than_declared_fails_all_items(datatype: str, column: Any, error: str) -> None:
    spec = TensorSpec("y", datatype, ())
    failures = dict.fromkeys((0, 1), ("INTERNAL", f"the model returned {error}"))
    assert run(lambda _: column, [1, 2], [spec]) == Outcome(failures, [])
    assert run(lambda _: {"y": column}, [1, 2], [spec]) == Outcome(failures, [])


# --- hooks -------------------------------------------------------------------------------------------------


def test_preprocess_and_postprocess_run_before_and_after_predict() -> None:
    class Model:
        def preprocess(self, bodies: list[str]) -> Any:
            return np.array([float(body) for body in bodies])

        def predict(self, batch: Any) -> Any:
            return batch * 2

        def postprocess(self, outputs: Any) -> list[str]:
            return [f"{x:g}" for x in outputs]

    model = adapt(Model, "cpu")
    failures, results, *_ = execute(model, ListItems(["1", "x", "2.5"]), ())
    assert results == ["2", "5"]
    assert failures == {1: failed("could not convert string to float: 'x'")}


def test_model_that_asks_gets_the_fields_of_exactly_its_requests() -> None:
    class Model:
        def validate(self, body: int) -> None:
            if body < 0:
                raise ValueError

        def predict(self, batch: list[int], requests: Sequence[RequestInfo]) -> list[str]:
            assert len(batch) == len(requests)
            if 3 in batch:
                raise ValueError("bad")
            return [f"{x} {info.correlation_id}" for x, info in zip(batch, requests, strict=True)]

    model = adapt(Model(), "cpu")
    infos = [RequestInfo(name, "", {}) for name in "abcd"]
    failures, results, *_ = execute(model, ListItems([-1, 2, 3, 4]), infos)
    assert results == ["2 b", "4 d"]
    assert failures.keys() == {0, 2}


def test_batch_of_one() -> None:
    assert run(Counting(), [1]) == Outcome({}, [-1], executed_together=1)
    model = Counting(1)
    assert run(model, [1]) == Outcome({0: failed("bad body 1")}, [], raised=(0,))
    assert model.calls == 1


# --- what was executed -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad_bodies", "refused", "executed"),
    [((), (), 6), ((), (2,), 5), ((), (0, 1, 2, 3, 4, 5), 0), ((4,), (), 0), ((4,), (2,), 0)],
)
def test_executed_items_are_those_of_one_call_that_did_not_raise(
    bad_bodies: tuple[int, ...], refused: tuple[int, ...], executed: int
) -> None:
    def validate(body: int) -> None:
        if body in refused:
            raise ValueError("refused")

    assert run(Counting(*bad_bodies), list(range(6)), validate=validate).executed_together == executed


def test_items_with_an_exception_in_place_of_a_result_were_executed() -> None:
    assert run(lambda batch: [ValueError("odd"), *batch[1:]], [1, 2, 3]).executed_together == 3
