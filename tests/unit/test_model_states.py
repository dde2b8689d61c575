"""What a model may declare about the states that it keeps for sequences, and what is wrong otherwise."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool import StateSpec
from carpool.model_settings import ModelKind
from carpool.plugins import UnusableError
from carpool.wire.tensors import WIDTHS
from carpool_worker.model_process import states
from carpool_worker.model_process.failures import WrongOutputError
from carpool_worker.model_process.loaded import description_of
from carpool_worker.model_process.model import RequestInfo, load_model
from carpool_worker.model_process.states import States

# --- a state -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "detail"),
    [
        ({"shape": (2, -1)}, "shape [2, -1] must have -1, for the batch, at axis 0; set axis=1"),
        ({"shape": (2, 3)}, "shape [2, 3] must have -1, for the batch, at axis 0"),
        ({"shape": (-1,), "axis": 1}, "must have -1, for the batch, at axis 1; set axis=0"),
        ({"shape": (-1,), "axis": -1}, "at axis -1; set axis=0"),
        ({"shape": (-1,), "axis": True}, "at axis True; set axis=0"),
        ({"shape": ()}, "shape [] must have -1, for the batch, at axis 0"),
        ({"shape": (-1, -1)}, "shape [-1, -1] must have fixed sizes, 1 or more, except for the batch"),
        ({"shape": (-1, 0)}, "must have fixed sizes, 1 or more, except for the batch"),
        ({"shape": 3}, "shape 3 must be a list of integers"),
        ({"shape": (-1,), "datatype": "BYTES"}, "datatype 'BYTES' is not one of BF16, BOOL"),
        ({"shape": (-1,), "datatype": "float"}, "datatype 'float' is not one of"),
        ({"shape": (-1, 3), "initial": [1, 2]}, "the initial state has shape [2], but the state of one"),
        ({"shape": (2, -1, 3), "axis": 1, "initial": np.zeros((2, 1, 3))}, "one sequence has [2, 3]"),
        ({"shape": (-1,), "initial": "x"}, "<U1 is not converted to FP32"),
        ({"shape": (-1,), "datatype": "INT8", "initial": 1.5}, "float64 is not converted to INT8"),
        ({"shape": (-1,), "datatype": "INT8", "initial": 128}, "a number is outside INT8's range"),
        ({"shape": (-1,), "datatype": "UINT8", "initial": -1}, "a number is outside UINT8's range"),
        ({"shape": (-1,), "datatype": "BOOL", "initial": 1}, "int64 is not converted to BOOL"),
    ],
)  # fmt: skip
def test_wrong_state_is_refused(declared: dict[str, Any], detail: str) -> None:
    with pytest.raises(ValueError, match=rf"^state 'h': .*{re.escape(detail)}"):
        StateSpec(**({"name": "h", "datatype": "FP32"} | declared))


@pytest.mark.parametrize("name", ["", None, 3])
def test_state_without_a_name_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="a state needs a name"):
        StateSpec(name, "FP32", (-1,))


def test_initial_row_is_zeros_or_one_number_or_an_array() -> None:
    def row(initial: Any, datatype: str = "FP32") -> list[float]:
        spec = StateSpec("h", datatype, (2, -1, 2), 1, initial)
        (split,) = spec.split(np.frombuffer(spec.row(spec.initial), np.uint8)[None]).transpose(1, 0, 2)
        return [float(number) for number in split.ravel()]

    assert row(None) == [0, 0, 0, 0]
    assert row(1.5) == [1.5] * 4
    assert row(7, "UINT8") == [7] * 4
    assert row(True, "BOOL") == [1] * 4
    assert row([[1, 2], [3, 4]], "BF16") == [1, 2, 3, 4]
    assert row(np.array([[1, 2], [3, 4]], "i8"), "INT16") == [1, 2, 3, 4]


@given(st.data())
def test_states_are_split_as_they_were_joined(data: st.DataObject) -> None:
    """Given any declaration and any bytes, expect each row at its index of the axis, and the same bytes."""
    datatype = data.draw(st.sampled_from(sorted(set(WIDTHS) - {"BOOL", "BF16"})))
    sizes = data.draw(st.lists(st.integers(1, 3), max_size=3))
    axis = data.draw(st.integers(0, len(sizes)))
    count, before, after = (data.draw(st.integers(low, 4)) for low in (1, 0, 0))
    spec = StateSpec("h", datatype, (*sizes[:axis], -1, *sizes[axis:]), axis)
    width = before + spec.row_bytes + after
    drawn = data.draw(st.binary(min_size=count * width, max_size=count * width))
    rows = np.frombuffer(drawn, np.uint8).reshape(count, width)[:, before : before + spec.row_bytes]
    stacked = spec.split(rows)
    assert stacked.shape == (*sizes[:axis], count, *sizes[axis:])
    for index in range(count):
        assert stacked.take(index, axis).tobytes() == rows[index].tobytes()
    assert (spec.join(stacked, count) == rows).all()
    stacked.fill(0)
    assert rows.tobytes() == b"".join(drawn[at * width + before :][: spec.row_bytes] for at in range(count))


# --- a model -----------------------------------------------------------------------------------------------


class Vad:
    states = (
        StateSpec("hidden", "FP32", (2, -1, 3), axis=1),
        StateSpec("steps", "INT32", (-1,), initial=3),
    )

    def predict(self, batch: Any, states: Any) -> Any:
        return batch, states


def test_model_with_states_is_stateful_and_says_what_a_sequence_begins_with() -> None:
    ready = description_of(load_model(Vad, "cpu"))
    assert ready.kind is ModelKind.STATEFUL
    assert ready.initial_state == bytes(24) + b"\3\0\0\0"
    assert not ready.wants_requests
    assert description_of(load_model(len, "cpu")).initial_state == b""


def test_initial_states_are_asked_for_once_the_model_is_loaded() -> None:
    class Learned(Vad):
        def load(self, device: str) -> None:
            self.learned = np.arange(6).reshape(2, 3)

        def initial_states(self) -> dict[str, Any]:
            return {"hidden": self.learned}

    ready = description_of(load_model(Learned, "cpu"))
    assert ready.initial_state == np.arange(6, dtype="<f4").tobytes() + b"\3\0\0\0"


def test_model_may_declare_its_states_while_it_loads() -> None:
    class OfFile:
        predict: Any = len

        def load(self, device: str) -> None:
            self.states, self.predict = Vad.states, Vad().predict

    assert description_of(load_model(OfFile, "cpu")).kind is ModelKind.STATEFUL


def model_with(**attributes: Any) -> type:
    return type("Model", (Vad,), attributes)


@pytest.mark.parametrize(
    ("attributes", "detail"),
    [
        ({"states": 5}, "the model's 'states' must be a list of StateSpec, not 5"),
        ({"states": ["x"]}, "the model's 'states' must be a list of StateSpec, not ['x']"),
        ({"states": (Vad.states[0],) * 2}, "the model's 'states' name a state more than once"),
        ({"predict": lambda self, batch: batch}, "its 'predict' must have a parameter `states`"),
        ({"states": ()}, "the model's 'predict' has a parameter `states`, but the model declares none"),
        ({"states": None}, "the model's 'predict' has a parameter `states`, but the model declares none"),
        ({"initial_states": lambda self: None}, "a dict with the names hidden, steps, not None"),
        ({"initial_states": lambda self: {"c": 1}}, "names hidden, steps, not {'c': 1}"),
        ({"initial_states": lambda self: {"steps": 1}}, "state 'steps': it has an 'initial', and"),
        ({"initial_states": lambda self: {"hidden": [1]}}, "the initial state has shape [1]"),
        (
            {"states": (), "predict": lambda self, batch: 1, "initial_states": lambda self: {}},
            "the model has 'initial_states', but declares no 'states'",
        ),
        ({"preserve_ordering": True}, "preserve_ordering: results of a sequence come in its order anyway"),
        (
            {"predict": None, "begin": lambda self, r: r, "step": lambda self, r: r},
            "the model has 'states' and generates step by step",
        ),
    ],
)  # fmt: skip
def test_wrong_declaration_is_refused(attributes: dict[str, Any], detail: str) -> None:
    with pytest.raises(UnusableError, match=re.escape(detail)):
        load_model(model_with(**attributes), "cpu")


def test_states_of_a_sequence_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "STATE_BYTES_MAX", 28)
    load_model(Vad, "cpu")
    monkeypatch.setattr(states, "STATE_BYTES_MAX", 27)
    with pytest.raises(UnusableError, match="'states' take 28 bytes for a sequence; the limit is 27"):
        load_model(Vad, "cpu")


def test_model_without_states_may_have_an_optional_parameter_of_that_name() -> None:
    model = load_model(lambda batch, states=None: batch, "cpu")
    assert description_of(model).kind is ModelKind.PLAIN


def test_requests_are_passed_by_name() -> None:
    class Curious:
        states = Vad.states

        def predict(self, batch: Any, requests: Any, states: Any) -> Any:
            return [(info.sequence_id, info.sequence_start, info.sequence_end) for info in requests], states

    model = load_model(Curious, "cpu")
    infos = [RequestInfo("r1", "", {}, "mic7", True, False)]
    outputs, _ = model.run(["x"], infos, {})  # type: ignore[union-attr]
    assert outputs == [("mic7", True, False)]
    assert RequestInfo("r1", "", {})[3:7] == (None, False, False, None)


# --- the states of a frame ---------------------------------------------------------------------------------


def test_new_states_replace_those_of_their_own_requests_only() -> None:
    specs = (StateSpec("a", "UINT8", (-1,)), StateSpec("b", "UINT8", (2, -1), axis=1))
    held = States(specs, bytes(range(9)), 3)
    assert {name: array.tolist() for name, array in held.select([2, 0]).items()} == {
        "a": [6, 0],
        "b": [[7, 1], [8, 2]],
    }
    held.replace([2, 0], {"a": [60, 10], "b": [[70, 20], [80, 30]]})
    held.replace([1], {"b": np.array([[5], [6]], "u1"), "a": np.array([4], "u1")})
    assert bytes(held.without(())) == bytes([10, 20, 30, 4, 5, 6, 60, 70, 80])
    assert bytes(held.without({0})) == bytes([4, 5, 6, 60, 70, 80])
    assert bytes(held.without({0, 1, 2})) == b""
    assert held.select(range(3))["a"].tolist() == [0, 3, 6], "what a repetition begins with"


def test_state_that_raises_when_it_is_converted_is_a_wrong_output() -> None:
    class OnDevice:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("move it to the CPU first")

    held = States((StateSpec("a", "UINT8", (-1,)),), bytes(2), 2)
    with pytest.raises(
        WrongOutputError, match="the model's new state cannot be kept: move it to the CPU first"
    ):
        held.replace(range(2), {"a": OnDevice()})
