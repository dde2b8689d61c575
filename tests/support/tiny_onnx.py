"""ONNX files of one or two nodes, encoded by hand: enough protobuf to test what a loader accepts and rejects.

Field numbers are those of onnx.proto3; a message is the concatenation of its fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

# TensorProto.DataType
FLOAT, INT32, INT64, STRING, BOOL, UINT64 = 1, 6, 7, 8, 9, 13
COMPLEX64, COMPLEX128, BFLOAT16 = 14, 15, 16

IR_VERSION: Final = 8
OPSET: Final = 17
ML_OPSET: Final = 3
INT_ATTRIBUTE, INTS_ATTRIBUTE, STRINGS_ATTRIBUTE = 2, 7, 8
ML: Final = "ai.onnx.ml"  # the domain of ZipMap


@dataclass(frozen=True)
class Value:
    """A graph's input or output. A size is a number, a name (a varying dimension) or None (varying, unnamed).

    A `shape` of None is omitted from the file. With `sequence` it is a sequence of such tensors, and with
    `keys`, a type, a sequence of maps from such keys to such numbers.
    """

    name: str
    shape: Sequence[int | str | None] | None
    kind: int = FLOAT
    sequence: bool = False
    keys: int | None = None


@dataclass(frozen=True)
class Node:
    """One operation; attributes are integers, or lists of integers or of texts."""

    op: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    attributes: Mapping[str, int | Sequence[int] | Sequence[str]] = field(default_factory=dict)
    domain: str = ""


def model(
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    nodes: Sequence[Node],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """The bytes of a model file (ModelProto)."""
    graph = b"".join(
        [
            *(_message(1, _node(node)) for node in nodes),
            _text(2, "tiny"),
            *(_message(11, _value(value)) for value in inputs),
            *(_message(12, _value(value)) for value in outputs),
        ]
    )
    entries = (_text(1, key) + _text(2, value) for key, value in (metadata or {}).items())
    return b"".join(
        [
            _number(1, IR_VERSION),
            _message(7, graph),
            _message(8, _text(1, "") + _number(2, OPSET)),
            _message(8, _text(1, ML) + _number(2, ML_OPSET)),
            *(_message(14, entry) for entry in entries),
        ]
    )


def identity(value: Value, metadata: Mapping[str, str] | None = None) -> bytes:
    """A model `y = value`, with y of the same type and shape."""
    y = Value("y", value.shape, value.kind)
    return model([value], [y], [Node("Identity", [value.name], ["y"])], metadata)


def _node(node: Node) -> bytes:
    attributes = (_text(1, name) + _attribute(value) for name, value in node.attributes.items())
    return b"".join(
        [
            *(_text(1, name) for name in node.inputs),
            *(_text(2, name) for name in node.outputs),
            _text(4, node.op),
            *(_message(5, attribute) for attribute in attributes),
            _text(7, node.domain),
        ]
    )


def _attribute(value: int | Sequence[int] | Sequence[str]) -> bytes:
    if isinstance(value, int):
        return _number(3, value) + _number(20, INT_ATTRIBUTE)
    if all(isinstance(item, int) for item in value):
        return b"".join(_number(8, int(item)) for item in value) + _number(20, INTS_ATTRIBUTE)
    return b"".join(_text(9, str(item)) for item in value) + _number(20, STRINGS_ATTRIBUTE)


def _value(value: Value) -> bytes:
    shape = b"" if value.shape is None else _message(2, b"".join(map(_dimension, value.shape)))
    tensor = _message(1, _number(1, value.kind) + shape)
    if value.keys is not None:
        tensor = _message(5, _number(1, value.keys) + _message(2, tensor))
    is_sequence = value.sequence or value.keys is not None
    return _text(1, value.name) + _message(2, _message(4, _message(1, tensor)) if is_sequence else tensor)


def _dimension(size: int | str | None) -> bytes:
    if size is None:
        return _message(1, b"")
    return _message(1, _number(1, size) if isinstance(size, int) else _text(2, size))


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1  # negative numbers are encoded as 64-bit two's complement
    digits = []
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*digits, number])


def _number(tag: int, number: int) -> bytes:
    return _varint(tag << 3) + _varint(number)


def _message(tag: int, body: bytes) -> bytes:
    return _varint(tag << 3 | 2) + _varint(len(body)) + body


def _text(tag: int, text: str) -> bytes:
    return _message(tag, text.encode())
