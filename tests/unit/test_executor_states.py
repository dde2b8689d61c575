"""Models that keep states of sequences: what a batch of several sequences gets, returns and changes."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest

from carpool import StateSpec
from carpool.errors import ABORTED, INTERNAL, INVALID_ARGUMENT, OK, InvalidArgumentError
from carpool.messages.requests import JSON, MSGPACK, RAW
from carpool.rows import Rows
from carpool.wire.bodies import decode_body
from carpool.wire.tensors import TensorSpec
from carpool_worker.model_process.model import RequestInfo
from support.executions import codec_of_model, finish_with_states, prepared, run_of_one, run_of_sequence
from support.executions import request_of as plain_request_of

POISON: Final = 666


class Sums:
    """Adds each body to the sum of its sequence. Records the sequences' sums that each call gets."""

    states = (StateSpec("sum", "INT64", (-1,)),)

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def predict(self, batch: list[int], states: dict[str, Any]) -> Any:
        sums = states["sum"]
        self.calls.append(sums.tolist())
        sums += batch  # in place: the model may
        if POISON in batch:
            raise ValueError("poison")
        return [int(value) for value in sums], {"sum": sums}


def state(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


def served(model: Any, *requests: Any, states: dict[int, bytes] | None = None) -> dict[str, Any]:
    """By sequence: the status, the result or the detail, the outcome and the content of the change."""
    codec, loaded = codec_of_model(model)
    execution = prepared(codec, *requests, states=states or {})
    by_sequence = finish_with_states(codec, loaded, execution)
    return {
        sequence_id: (
            result.status,
            decode_body(result.content_type, result.body) if result.body is not None else result.detail,
            change.outcome,
            change.content,
        )
        for sequence_id, (result, change) in by_sequence.items()
    }


def test_sequences_that_start_and_others_are_executed_together() -> None:
    """Given a start, a middle and an end in one batch, expect one call with each sequence's own state."""
    model = Sums()
    assert served(
        model,
        run_of_sequence("a", 1, starts=True),
        run_of_sequence("b", 2),
        run_of_sequence("c", 3, ends=True),
        run_of_sequence("d", 4, starts=True, ends=True),
        states={1: state(10), 2: state(20)},
    ) == {
        "a": (OK, 1, "kept", state(1)),
        "b": (OK, 12, "kept", state(12)),
        "c": (OK, 23, "ended", b""),
        "d": (OK, 4, "ended", b""),
    }
    assert model.calls == [[0, 10, 20, 0]]


def test_request_on_which_the_model_raises_breaks_its_own_sequence_only() -> None:
    """Given one of four on which it raises, expect halves with states as they were before."""
    model = Sums()
    runs = [run_of_sequence(name, body) for name, body in zip("abcd", (1, 2, POISON, 4), strict=True)]
    results = served(model, *runs, states={at: state(10 * at) for at in range(4)})
    assert results.pop("c") == (
        INTERNAL,
        "the model failed on this request: poison",
        "broken",
        "its request r:c ended with INTERNAL",
    )
    assert results == {
        "a": (OK, 1, "kept", state(1)),
        "b": (OK, 12, "kept", state(12)),
        "d": (OK, 34, "kept", state(34)),
    }
    assert model.calls == [[0, 10, 20, 30], [0, 10], [20, 30], [20], [30]]


def test_exception_in_place_of_a_result_breaks_its_own_sequence_only() -> None:
    class Picky(Sums):
        def predict(self, batch: list[int], states: dict[str, Any]) -> Any:
            sums = states["sum"] + batch
            outputs = [InvalidArgumentError("odd") if value % 2 else int(value) for value in sums]
            return outputs, {"sum": sums}

    runs = [run_of_sequence(name, body, starts=True) for name, body in zip("abc", (2, 3, 4), strict=True)]
    assert served(Picky(), *runs) == {
        "a": (OK, 2, "kept", state(2)),
        "b": (INVALID_ARGUMENT, "odd", "broken", "its request r:b ended with INVALID_ARGUMENT"),
        "c": (OK, 4, "kept", state(4)),
    }


def test_result_that_cannot_be_sent_or_encoded_breaks_its_own_sequence_only() -> None:
    """Given results that one of the processes cannot encode, expect the others to have their own states."""

    class Strange(Sums):
        def predict(self, batch: list[int], states: dict[str, Any]) -> Any:
            sums = states["sum"] + batch
            return [{2: object(), 3: float("nan")}.get(int(value), int(value)) for value in sums], {
                "sum": sums
            }

    runs = [run_of_sequence(name, body, starts=True) for name, body in zip("abcd", (1, 2, 3, 4), strict=True)]
    results = served(Strange(), *runs)
    assert {name: result[0] for name, result in results.items()} == {
        "a": OK, "b": INTERNAL, "c": INTERNAL, "d": OK,
    }  # fmt: skip
    assert [results[name][2:] for name in "ad"] == [("kept", state(1)), ("kept", state(4))]


def test_invalid_body_breaks_its_sequence_and_the_others_keep_their_states() -> None:
    class Validating(Sums):
        def validate(self, body: int) -> None:
            if body < 0:
                raise ValueError("negative")

    runs = [
        run_of_sequence("a", 1),
        run_of_sequence("b", -1),
        run_of_sequence("c", b"{"),
        run_of_sequence("d", 4),
    ]
    results = served(Validating(), *runs, states={at: state(10 * at) for at in range(4)})
    assert {name: result[0] for name, result in results.items()} == {
        "a": OK, "b": INVALID_ARGUMENT, "c": INVALID_ARGUMENT, "d": OK,
    }  # fmt: skip
    assert [results[name][2] for name in "bc"] == ["broken"] * 2
    assert [results[name][1:] for name in "ad"] == [(1, "kept", state(1)), (34, "kept", state(34))]


def test_lost_state_or_one_of_another_model_is_aborted() -> None:
    runs = [run_of_sequence("a", 1), run_of_sequence("b", 2), run_of_sequence("c", 3)]
    results = served(Sums(), *runs, states={1: bytes(4), 2: state(5)})
    assert results["a"][:3] == (
        ABORTED,
        "sequence_id: the state of a is lost; begin it again with sequence_start",
        "broken",
    )
    assert results["b"][:3] == (
        ABORTED,
        "sequence_id: the state of b has 4 bytes, but this model's states take 8: the model was replaced; "
        "begin it again with sequence_start",
        "broken",
    )
    assert results["c"] == (OK, 8, "kept", state(8))


def test_request_of_another_kind_of_model_is_aborted() -> None:
    """Given a request dispatched when another kind of model had the name, expect it not to be executed."""
    codec, _ = codec_of_model(Sums())
    execution = prepared(codec, run_of_one(plain_request_of(1)))
    assert not execution.frames
    assert (execution.results[0].status, execution.changes()) == (ABORTED, [])
    codec, _ = codec_of_model(Cell())
    rows = run_of_one(plain_request_of(1))._replace(
        correlation_ids=["a", "b"], bodies=Rows(b"", bytes(24), 12), content_type=RAW
    )
    execution = prepared(codec, rows)
    assert not execution.frames
    assert [execution.results[at].status for at in range(2)] == [ABORTED] * 2
    codec, _ = codec_of_model(lambda batch: batch)
    execution = prepared(codec, run_of_sequence("a", 1, starts=True))
    assert not execution.frames
    assert execution.results[0].status == ABORTED
    assert [change.outcome for change in execution.changes()] == ["broken"]


class Cell:
    """Several states, of several datatypes, stacked at several axes; tensors in and out."""

    inputs = (TensorSpec("x", "FP32", (3,)),)
    outputs = (TensorSpec("y", "FP32", (3,)),)
    states = (
        StateSpec("hidden", "FP32", (2, -1, 3), axis=1, initial=0.5),
        StateSpec("steps", "INT32", (-1,)),
        StateSpec("seen", "BOOL", (1, 2, -1), axis=2),
        StateSpec("rough", "BF16", (-1, 2), initial=[1.0, -2.0]),
    )

    def initial_states(self) -> dict[str, Any]:
        return {"steps": 7}

    def predict(self, batch: Any, states: dict[str, Any], requests: list[RequestInfo]) -> Any:
        count = len(batch)
        assert [states[spec.name].shape for spec in self.states] == [
            (2, count, 3), (count,), (1, 2, count), (count, 2),
        ]  # fmt: skip
        assert all(array.flags.c_contiguous and array.flags.writeable for array in states.values())
        assert all(info.sequence_id and info.correlation_id == f"r:{info.sequence_id}" for info in requests)
        hidden = states["hidden"] + batch
        seen = states["seen"].copy()
        seen[0, 0] = True
        seen[0, 1] = [info.sequence_start for info in requests]
        return hidden.sum(0), {
            "hidden": hidden, "steps": states["steps"] + 1, "seen": seen, "rough": states["rough"] * 2,
        }  # fmt: skip


def test_states_of_several_axes_and_datatypes_are_the_same_alone_and_in_a_batch() -> None:
    """Given five sequences of three requests, in mixed batches, expect what each alone would get."""

    def body(sequence: int, step: int) -> Any:
        return np.arange(3, dtype="f4") + 10 * sequence + step

    def play(groups: list[list[int]]) -> tuple[dict[int, Any], dict[int, bytes]]:
        codec, loaded = codec_of_model(Cell())
        states: dict[int, bytes] = {}
        outputs: dict[int, Any] = {}
        for step in range(3):
            for group in groups:
                runs = [
                    run_of_sequence(str(at), body(at, step), starts=step == 0, content_type=MSGPACK)
                    for at in group
                ]
                known = {index: states[at] for index, at in enumerate(group) if at in states}
                execution = prepared(codec, *runs, states=known)
                for name, (result, change) in finish_with_states(codec, loaded, execution).items():
                    assert (result.status, change.outcome) == (OK, "kept")
                    assert isinstance(change.content, bytes)
                    assert result.body is not None
                    states[int(name)] = change.content
                    outputs.setdefault(int(name), []).append(decode_body(MSGPACK, result.body).tolist())
        return outputs, states

    alone, together = play([[at] for at in range(5)]), play([[3, 0, 4], [1, 2]])
    assert alone == together
    outputs, states = alone
    assert outputs[1] == [
        (2 * (0.5 + np.sum([body(1, s) for s in range(n + 1)], 0))).tolist() for n in range(3)
    ]
    hidden, steps, seen, rough = (24, 28, 30, 34)
    assert len(states[1]) == rough
    assert np.frombuffer(states[1][hidden:steps], "<i4").tolist() == [10]
    assert states[1][steps:seen] == b"\1\0", "it was started earlier"
    assert states[1][seen:] == np.array([8.0, -16.0], "<f4").view("<u2")[1::2].tobytes()


@pytest.mark.parametrize(
    ("returned", "detail"),
    [
        (lambda sums: sums.tolist(), "the model returned a list, not the outputs and a dict of new states"),
        (lambda sums: (sums.tolist(), sums), "a tuple, not the outputs and a dict of new states"),
        (lambda sums: (sums.tolist(), {}), "the model returned the new states (none), not sum"),
        (lambda sums: (sums.tolist(), {"sum": sums, "x": sums}), "the new states sum, x, not sum"),
        (lambda sums: (sums.tolist(), {"sum": sums[:1]}), "state 'sum': shape [1], not [2]"),
        (lambda sums: (sums.tolist(), {"sum": sums[:, None]}), "state 'sum': shape [2, 1], not [2]"),
        (lambda sums: (sums.tolist(), {"sum": sums / 2}), "state 'sum': float64 is not converted to INT64"),
        (lambda sums: (sums.tolist(), {"sum": ["a", "b"]}), "state 'sum': <U1 is not converted to INT64"),
        (lambda sums: (sums.tolist(), {"sum": [[1], [1, 2]]}), "the model's new state cannot be kept"),
        (lambda sums: (sums.tolist(), {"sum": np.array([2**63, 2**63], "u8")}), "outside INT64's range"),
        (lambda sums: (sums.tolist()[:1], {"sum": sums}), "the model returned 1 results for 2 requests"),
    ],
)
def test_wrong_new_states_fail_the_batch_and_say_why(returned: Any, detail: str) -> None:
    """Given a wrong return value, expect one call, and each sequence broken: it is unknown which is wrong."""

    class Wrong(Sums):
        def predict(self, batch: list[int], states: dict[str, Any]) -> Any:
            self.calls.append(batch)
            return returned(states["sum"] + batch)

    model = Wrong()
    results = served(model, run_of_sequence("a", 1, starts=True), run_of_sequence("b", 2, starts=True))
    assert len(model.calls) == 1
    for status, found, outcome, _ in results.values():
        assert (status, outcome) == (INTERNAL, "broken")
        assert detail in found


@pytest.mark.parametrize(
    ("new", "detail"),
    [
        (np.array([2**63, 1], "u8"), "outside INT64's range"),
        (np.ma.masked_array([7, 1], [True, False]), "a masked array cannot be sent"),
    ],
)
def test_state_that_cannot_be_kept_breaks_its_own_sequence(new: Any, detail: str) -> None:
    class Wrong(Sums):
        def predict(self, batch: list[int], states: dict[str, Any]) -> Any:
            return batch, {"sum": new}

    results = served(Wrong(), run_of_sequence("a", 1, starts=True), run_of_sequence("b", 2, starts=True))
    status, found, outcome, _ = results["a"]
    assert (status, outcome) == (INTERNAL, "broken") and detail in found
    assert results["b"] == (OK, 2, "kept", np.array([1], "<i8").tobytes())


@pytest.mark.parametrize(("shape", "axis"), [((-1, 2), 0), ((2, -1), 1)])
def test_state_in_a_list_keeps_its_integers_beside_the_floats_of_others(
    shape: tuple[int, int], axis: int
) -> None:
    """As an array, [[2**53 + 1, 1], [0.5, 0.5]] has 2**53."""

    class Listed(Sums):
        states = (StateSpec("sum", "FP64", shape, axis=axis),)

        def predict(self, batch: list[Any], states: dict[str, Any]) -> Any:
            rows = [[body, body] for body in batch]
            return batch, {"sum": rows if axis == 0 else [list(column) for column in zip(*rows, strict=True)]}

    def outcomes(*bodies: float) -> list[Any]:
        runs = [run_of_sequence(str(at), body, starts=True) for at, body in enumerate(bodies)]
        return list(served(Listed(), *runs).values())

    large, half = outcomes(2**53 + 1, 0.5)
    assert [large] == outcomes(2**53 + 1) and large[0] == INTERNAL and "a whole number" in large[1]
    assert half == (OK, 0.5, "kept", np.array([0.5, 0.5]).tobytes())


def test_masked_state_in_a_list_is_not_kept() -> None:
    masked: Any = np.ma.masked_array

    class Masked(Sums):
        def predict(self, batch: list[int], states: dict[str, Any]) -> Any:
            return batch, {"sum": [masked(7, True), 1][: len(batch)]}

    results = served(Masked(), run_of_sequence("a", 1, starts=True), run_of_sequence("b", 2, starts=True))
    assert results["a"][0] == INTERNAL and "masked" in results["a"][1]
    assert results["b"] == (OK, 2, "kept", state(1))


def test_states_and_results_that_are_views_of_one_array_are_those_of_each_call() -> None:
    class Static(Sums):
        filled = np.zeros(8, np.int64)

        def predict(self, batch: list[int], states: dict[str, Any]) -> Any:
            if POISON in batch:
                raise ValueError("poison")
            sums = self.filled[: len(batch)]
            sums[:] = states["sum"] + batch
            return sums, {"sum": sums}

    runs = [
        run_of_sequence(name, body, starts=True) for name, body in zip("abcd", (1, 2, POISON, 4), strict=True)
    ]
    results = served(Static(), *runs)
    assert [results[name][1:] for name in "abd"] == [(n, "kept", state(n)) for n in (1, 2, 4)]


def test_integers_of_another_width_are_converted() -> None:
    class Narrow(Sums):
        states = (StateSpec("sum", "UINT8", (-1,), initial=250),)

        def predict(self, batch: list[int], states: dict[str, Any]) -> Any:
            sums = states["sum"].astype(np.int64) + batch
            return sums.tolist(), {"sum": sums}

    assert served(Narrow(), run_of_sequence("a", 5, starts=True))["a"] == (OK, 255, "kept", b"\xff")
    assert served(Narrow(), run_of_sequence("a", 6, starts=True))["a"][0] == INTERNAL


def test_hooks_see_bodies_and_outputs_only() -> None:
    class Hooked(Sums):
        def preprocess(self, bodies: list[str]) -> list[int]:
            return [int(body) for body in bodies]

        def postprocess(self, outputs: list[int]) -> list[str]:
            return [str(value) for value in outputs]

    assert served(Hooked(), run_of_sequence("a", "5", starts=True))["a"] == (OK, "5", "kept", state(5))


def test_frames_of_several_shapes_have_the_states_of_their_own_requests() -> None:
    """Given tensors of two shapes, which take turns, expect two frames and each state at its place."""

    class Lengths:
        inputs = (TensorSpec("x", "INT64", (-1,)),)
        states = (StateSpec("sum", "INT64", (-1,)),)

        def predict(self, batch: Any, states: dict[str, Any]) -> Any:
            sums = states["sum"] + batch.sum(1)
            return sums, {"sum": sums}

    runs = [
        run_of_sequence(str(at), np.ones(1 + at % 2, "i8"), content_type=MSGPACK if at < 2 else JSON)
        for at in range(4)
    ]
    results = served(Lengths(), *runs, states={at: state(10 * at) for at in range(4)})
    assert [results[str(at)][3] for at in range(4)] == [state(1), state(12), state(21), state(32)]
