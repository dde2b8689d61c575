"""Tensors in every encoding, and what is none."""

from __future__ import annotations

import struct
from fractions import Fraction
from typing import Any, Final

from contract.cases.notation import JSON, MSGPACK, Case, as_hex, as_vector, compact, pack, times

CODES: Final = {
    "BOOL": "?", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b", "INT16": "h",
    "INT32": "i", "INT64": "q", "FP16": "e", "FP32": "f", "FP64": "d",
}  # fmt: skip


def data_of(datatype: str, values: list[Any]) -> bytes:
    """Little-endian bytes. BF16 is the upper half of an FP32, whose lower half must be 0 here."""
    if datatype != "BF16":
        return struct.pack(f"<{len(values)}{CODES[datatype]}", *values)
    floats = [struct.pack("<f", value) for value in values]
    assert all(data[:2] == b"\0\0" for data in floats)
    return b"".join(data[2:] for data in floats)


def tensor(name: str, datatype: str, shape: list[int], values: list[Any], in_json: bool = True) -> Case:
    """One tensor in both content types."""
    data = data_of(datatype, values)
    packed = pack({"datatype": datatype, "shape": shape, "data": data})
    return {
        "name": name,
        "datatype": datatype,
        "shape": shape,
        "data": as_hex(data),
        "msgpack": as_hex(packed),
        "json": compact({"datatype": datatype, "shape": shape, "data": values}) if in_json else None,
    }


def tensors() -> list[Case]:
    floats = {
        "FP16": [0.5, -2.0, 65504.0, 2.0**-24, -0.0],
        "BF16": [0.5, -2.0, 3.3895313892515355e38, 2.0**-133, -0.0],
        "FP32": [0.5, -2.0, 3.4028234663852886e38, 2.0**-149, -0.0, 0.10000000149011612],
        "FP64": [0.5, -2.0, 1.7976931348623157e308, 5e-324, -0.0, 0.1],
    }
    bounds = {
        **{f"UINT{bits}": [0, 1, 2**bits - 1] for bits in (8, 16, 32, 64)},
        **{f"INT{bits}": [-(2 ** (bits - 1)), -1, 2 ** (bits - 1) - 1] for bits in (8, 16, 32, 64)},
    }
    listed = {"BOOL": [True, False, True], **bounds, **floats}
    special = [float("inf"), float("-inf"), float("nan")]
    return [
        *(tensor(f"{datatype}", datatype, [len(some)], some) for datatype, some in listed.items()),
        *(
            tensor(f"{datatype} with NaN and infinities", datatype, [3], special, in_json=False)
            for datatype in floats
        ),
        *(tensor(f"{datatype}, a scalar", datatype, [], some[:1]) for datatype, some in listed.items()),
        *(tensor(f"{datatype}, nothing", datatype, [0], []) for datatype in listed),
        tensor("two rows of three", "INT16", [2, 3], [1, 2, 3, 4, 5, 6]),
        tensor("empty rows", "FP32", [2, 0, 3], []),
        tensor("the maximum number of dimensions", "UINT8", [1] * 32, [7]),
        tensor("data of 255 bytes", "UINT8", [255], [0] * 255),
        tensor("data of 256 bytes", "UINT8", [256], [0] * 256),
        _large_tensor(),
    ]


def _large_tensor() -> Case:
    zeros = times(b"\0", 65536)
    head = pack({"datatype": "UINT8", "shape": [65536], "data": b""})[:-2] + b"\xc6\0\1\0\0"
    return {
        "name": "data of 65536 bytes",
        "datatype": "UINT8",
        "shape": [65536],
        "data": zeros,
        "msgpack": [as_vector(head), zeros],
        "json": None,
    }


def nested_tensors() -> list[Case]:
    """JSON whose `data` is nested as the shape is: the same tensor as the flat one."""
    rows = {"datatype": "INT16", "shape": [2, 3], "data": [[1, 2, 3], [4, 5, 6]]}
    empty = {"datatype": "FP32", "shape": [2, 0], "data": [[], []]}
    return [
        {"name": "rows", "json": compact(rows), "data": as_hex(data_of("INT16", [1, 2, 3, 4, 5, 6]))},
        {"name": "empty rows", "json": compact(empty), "data": as_hex(b"")},
    ]


def strings() -> list[Case]:
    """BYTES: a flat list of strings in both content types; decoded, lists nested as the shape is."""
    cases: dict[str, tuple[list[int], list[str], Any]] = {
        "texts": ([2], ["ä", ""], ["ä", ""]),
        "rows of texts": ([2, 1], ["a", "b"], [["a"], ["b"]]),
        "no texts": ([0], [], []),
        "a text": ([], ["a"], "a"),
    }
    return [
        {
            "name": name,
            "msgpack": as_hex(pack({"datatype": "BYTES", "shape": shape, "data": texts})),
            "json": compact({"datatype": "BYTES", "shape": shape, "data": texts}),
            "texts": nested,
        }
        for name, (shape, texts, nested) in cases.items()
    ]


def bf16_roundings() -> list[Case]:
    """FP32 rounded to BF16, to nearest with ties to even, computed with exact fractions."""

    def value(bits: int) -> Fraction:
        return Fraction(struct.unpack(">f", struct.pack(">I", bits))[0])

    def nearest(bits: int) -> int:
        below, above = bits >> 16, (bits >> 16) + 1
        to_below = abs(value(bits) - value(below << 16))
        to_above = abs(value(above << 16) - value(bits))
        if to_below == to_above:
            return below if below % 2 == 0 else above
        return below if to_below < to_above else above

    between = [0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0x3F81FFFF, 0x00000001, 0x00008000]
    cases = {bits: nearest(bits) for sign in (0, 1 << 31) for bits in (sign | one for one in between)}
    infinite = {0x7F800000: 0x7F80, 0xFF800000: 0xFF80, 0x7F7F7FFF: 0x7F7F, 0xFF7F7FFF: 0xFF7F}
    return [{"fp32": f"{bits:08x}", "bf16": f"{half:04x}"} for bits, half in {**cases, **infinite}.items()]


def refused_tensors() -> list[Case]:
    def case(name: str, field: str, datatype: Any, shape: Any, data: Any, where: str = "body") -> Case:
        value: Any = {"datatype": datatype, "shape": shape, "data": data}
        if where != "body":
            value = {"rows": [1, value]}
        content_type = MSGPACK if type(data) is bytes else JSON
        body = pack(value) if type(data) is bytes else compact(value).encode()
        return {
            "name": name, "content_type": content_type, "body": as_vector(body), "field": f"{where}.{field}"
        }  # fmt: skip

    four = b"\0" * 4
    outside = {"UINT8": [256], "INT8": [-129], "UINT64": [2**64], "INT64": [2**63], "INT16": [-(2**70)]}
    too_large = {"FP16": [65520], "FP32": [1e39], "BF16": [-1e39], "FP64": [10**400]}
    return [
        case("an unknown datatype", "datatype", "FP8", [1], b"\0"),
        case("a lower-case datatype", "datatype", "fp32", [1], four),
        case("a datatype that is not text", "datatype", 32, [1], four),
        case("a shape that is not a list", "shape", "FP32", 1, four),
        case("a size below 0", "shape", "FP32", [-1], four),
        case("a size that is not a whole number", "shape", "FP32", [1.0], four),
        case("a size that is true", "shape", "FP32", [True], four),
        case("33 dimensions", "shape", "FP32", [1] * 33, four),
        case("no data, with an impossibly large shape", "shape", "FP32", [0, 2**62], b""),
        case("too little data", "data", "FP32", [2], four),
        case("too much data", "data", "FP32", [], four + four),
        case("a shape larger than memory", "data", "FP64", [2**64 - 1] * 32, four),
        case("data that is text", "data", "FP32", [1], "AAAA"),
        case("too few numbers", "data", "FP32", [2], [1]),
        case("numbers nested in another shape", "data", "FP32", [2, 3], [[1, 2], [3, 4], [5, 6]]),
        case("rows of unequal length", "data", "FP32", [3], [[1, 2], [3]]),
        case("a number beside a row", "data", "FP32", [2], [1, [2]]),
        *(
            case(f"outside {kind}", "data", kind, [1], some)
            for kind, some in {**outside, **too_large}.items()
        ),
        case("a fraction among whole numbers", "data", "INT32", [2], [1, 1.5]),
        case("true among numbers", "data", "FP32", [2], [1.5, True]),
        case("numbers for BOOL", "data", "BOOL", [2], [0, 1]),
        case("texts for numbers", "data", "FP32", [1], ["1"]),
        case("null among numbers", "data", "FP32", [2], [1, None]),
        case("a number for BYTES", "data", "BYTES", [1], [1]),
        case("BYTES as bytes", "data", "BYTES", [1], b"a"),
        case("too few BYTES", "data", "BYTES", [2], ["a"]),
        case("a tensor within a value", "shape", "FP32", [-1], [1], where="body.rows[1]"),
    ]
