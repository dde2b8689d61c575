"""Any tensor survives the way through the gateway, and of any bytes comes a request or a ProtocolError."""

from __future__ import annotations

import json
import math
from typing import Any, Final

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from carpool.errors import CarpoolError
from carpool.wire.tensors import DATATYPES, WIDTHS, TensorSpec
from carpool_gateway.oip.elements import from_json, from_list, to_binary, to_json
from carpool_gateway.oip.errors import ProtocolError
from carpool_gateway.oip.json_text import parse
from carpool_gateway.oip.models import OfferedModel
from carpool_gateway.oip.plans import plan
from carpool_gateway.oip.requests import decode_request
from support.fuzzing import bounded
from support.oip import binary_part, document, echo, identity, offered

fast = settings(deadline=None)

IN_JSON: Final = sorted(DATATYPES - {"FP16", "BF16"})
SHAPES: Final = st.lists(st.integers(0, 3), min_size=1, max_size=4)
TEXTS: Final = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@st.composite
def tensors(draw: st.DrawFn, datatypes: list[str]) -> tuple[str, list[int], bytes | list[bytes]]:
    """A datatype, a shape with the batch first, and the data."""
    datatype, shape = draw(st.sampled_from(datatypes)), draw(SHAPES)
    count = math.prod(shape)
    if datatype == "BYTES":
        return (
            datatype,
            shape,
            [text.encode() for text in draw(st.lists(TEXTS, min_size=count, max_size=count))],
        )
    size = count * WIDTHS[datatype]
    data = draw(st.binary(min_size=size, max_size=size))
    return datatype, shape, bytes(byte % 2 for byte in data) if datatype == "BOOL" else data


def request_of(
    datatype: str, shape: list[int], data: bytes | list[bytes], *, binary: bool, binary_output: bool
) -> tuple[bytes, bytes]:
    """A request for the model x -> x, and the length of its JSON."""
    written: dict[str, Any] = {"name": "x", "datatype": datatype, "shape": shape}
    after = bytes(to_binary(data)) if binary else b""
    if binary:
        written["parameters"] = {"binary_data_size": len(after)}
    else:
        written["data"] = json.loads(to_json(data, datatype, ""))
    parameters = {"binary_data_output": binary_output}
    header = json.dumps({"inputs": [written], "parameters": parameters}).encode()
    return header + after, str(len(header)).encode()


def same(datatype: str, one: bytes | list[bytes], other: bytes | list[bytes]) -> bool:
    """Whether two tensors have the same elements. In JSON one NaN is like another."""
    if isinstance(one, list) or isinstance(other, list) or datatype not in ("FP32", "FP64"):
        return one == other
    dtype = "<f4" if datatype == "FP32" else "<f8"
    return np.array_equal(np.frombuffer(one, dtype), np.frombuffer(other, dtype), equal_nan=True)


@fast
@given(tensors(sorted(DATATYPES)), st.booleans(), st.booleans())
@example(("FP32", [2, 1], b"\x00\x00\xc0\x7f\x00\x00\x80\xff"), False, False)
@example(("UINT64", [1], b"\xff" * 8), False, False)
def test_a_tensor_survives(
    given: tuple[str, list[int], bytes | list[bytes]], binary: bool, binary_output: bool
) -> None:
    datatype, shape, data = given
    if datatype in ("FP16", "BF16"):
        binary = binary_output = True
    model = identity(datatype, shape[1:])
    response = echo(model, *request_of(*given, binary=binary, binary_output=binary_output))
    (output,) = document(response)["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("x", datatype, shape)
    if binary_output:
        assert output["parameters"]["binary_data_size"] == len(binary_part(response))
        found: bytes | list[bytes] = binary_part(response)
        expected = bytes(to_binary(data))
        assert found == expected if binary else same(datatype, found, expected)
    else:
        count = math.prod(shape)
        found = from_list(output["data"], datatype, count, "")  # type: ignore[assignment]
        assert same(datatype, found, data)


@fast
@given(st.lists(tensors([*IN_JSON, "FP16"]), min_size=2, max_size=3), st.integers(0, 3))
def test_several_tensors_survive(given: list[tuple[str, list[int], bytes | list[bytes]]], rows: int) -> None:
    specs, inputs, after = [], [], []
    for number, (datatype, shape, data) in enumerate(given):
        per_row = math.prod(shape[1:])
        width = per_row * (1 if isinstance(data, list) else WIDTHS[datatype])
        repeated = (data * rows)[: width * rows] if shape[0] else None
        if repeated is None or len(repeated) != width * rows:
            repeated = [b""] * (width * rows) if isinstance(data, list) else bytes(width * rows)
        specs.append(TensorSpec(f"t{number}", datatype, tuple(shape[1:])))
        after.append(bytes(to_binary(repeated)))
        inputs.append(
            {"name": f"t{number}", "datatype": datatype, "shape": [rows, *shape[1:]],
             "parameters": {"binary_data_size": len(after[-1])}}
        )  # fmt: skip
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    response = echo(offered(specs, specs), header + b"".join(after), str(len(header)).encode())
    assert binary_part(response) == b"".join(after)
    assert document(response)["outputs"] == inputs


# --- the fast way and the careful way ----------------------------------------------------------------------

LITERALS: Final = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.floats()
    .map(repr)
    .map(lambda text: {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(text, text)),
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr),
    st.from_regex(r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?", fullmatch=True),
    st.sampled_from(
        ["true", "false", "null", '"1"', '"a:b"', "[1]", "{}", "1e39", "1e400", "-0", "01", "1."]
    ),
)


@fast
@given(
    st.sampled_from(IN_JSON), st.lists(LITERALS, max_size=4), st.sampled_from(["[%s]", "[[%s]]", " [ %s ]"])
)
@example("FP32", [str((1 << 62) + (1 << 38) + 1)], "[%s]")
@example("FP32", ["3.4028235677973366e38"], "[%s]")
@example("INT64", ["9223372036854775808"], "[%s]")
def test_what_msgspec_reads_is_what_the_standard_library_reads(
    datatype: str, literals: list[str], form: str
) -> None:
    text = (form % ", ".join(literals)).encode()
    count = len(literals)

    def tried(act: Any) -> Any:
        try:
            return act()
        except ProtocolError as error:
            return error.detail

    quick = tried(lambda: from_json(text, datatype, count, "x"))
    careful = tried(lambda: from_list(parse(text), datatype, count, "x"))
    assert quick == careful


# --- any bytes ---------------------------------------------------------------------------------------------

_SCALARS: Final = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4),
    st.sampled_from(["x", "y", "FP32", "BYTES", "INT8", "BOOL", "a:b", "\ud800"]),
)  # fmt: skip
_ANYTHING: Final = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
_NEARLY: Final = st.integers(-1, 4) | _ANYTHING
_PARAMETERS: Final = st.dictionaries(
    st.sampled_from(
        ["binary_data_size", "binary_data", "binary_data_output", "classification", "priority", "timeout",
         "sequence_id", "sequence_start", "accept", "content_type", "triton_x", "a"]
    ),
    st.integers(-1, 12) | st.booleans() | _ANYTHING,
    max_size=3,
)  # fmt: skip
_INPUT: Final = st.fixed_dictionaries(
    {"name": st.sampled_from(["x", "y", "body"]) | _ANYTHING,
     "datatype": st.sampled_from(sorted(DATATYPES)) | _ANYTHING,
     "shape": st.lists(_NEARLY, max_size=3) | _ANYTHING},
    optional={"data": st.lists(_NEARLY, max_size=4) | _ANYTHING, "parameters": _PARAMETERS | _ANYTHING},
)  # fmt: skip
_REQUEST: Final = st.fixed_dictionaries(
    {"inputs": st.lists(_INPUT, max_size=2) | _ANYTHING},
    optional={
        "id": _SCALARS,
        "outputs": st.lists(
            st.fixed_dictionaries(
                {"name": st.sampled_from(["x", "y", "result"])}, optional={"parameters": _PARAMETERS}
            ),
            max_size=2,
        ) | _ANYTHING,
        "parameters": _PARAMETERS | _ANYTHING,
    },
)  # fmt: skip
_TEXT: Final = _REQUEST.map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass"))


@st.composite
def _bodies(draw: st.DrawFn) -> tuple[bytes, bytes | None]:
    text = draw(_TEXT | st.binary(max_size=30))
    for where, new in draw(st.lists(st.tuples(st.integers(0, 300), st.binary(max_size=3)), max_size=2)):
        at = where % (len(text) + 1)
        text = text[:at] + new + text[at + len(new) :]
    if draw(st.booleans()):
        return text, draw(st.none() | st.binary(max_size=4))
    return text + draw(st.binary(max_size=24)), str(len(text)).encode()


MODELS: Final[list[OfferedModel]] = [
    offered(),
    identity("FP32"),
    identity("BYTES", (1,)),
    identity("BOOL", ()),
    offered(
        [TensorSpec("x", "INT8", (2,)), TensorSpec("y", "FP32", (-1, -1))], [TensorSpec("y", "BF16", (1,))]
    ),
]


@settings(deadline=None, max_examples=200)
@given(_bodies(), st.sampled_from(MODELS))
@example((b"\x00" * 9, b"0"), MODELS[1])
@example(
    (b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[' + b"9" * 4500 + b"]}]}", None),
    MODELS[1],
)
def test_any_bytes_are_a_request_or_a_protocol_error(
    given: tuple[bytes, bytes | None], model: OfferedModel
) -> None:
    def act() -> None:
        try:
            found = plan(model, decode_request(*given))
        except ProtocolError as error:
            error.detail.encode("utf-8", "surrogateescape")
        else:
            assert len(found.bodies) <= 1024

    bounded(act, len(given[0]))


@settings(deadline=None, max_examples=200)
@given(
    st.binary(max_size=40) | _ANYTHING.map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass"))
)
def test_any_bytes_are_json_or_a_protocol_error(body: bytes) -> None:
    try:
        parse(body)
    except CarpoolError as error:
        assert isinstance(error, ProtocolError)
