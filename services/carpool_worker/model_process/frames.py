"""How a worker and its model process talk: frames over a socket pair. A msgpack header, then raw bytes.

No pickle: what a producer sent is never more than data on its way to the model. Stacked tensors travel as
they lie in memory, so that neither side touches a request's numbers.
"""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Sequence
from typing import Any, Final

import msgpack
import numpy as np

from carpool.wire.tensors import WIDTHS, Array, datatype_of, from_bytes, tensor_map, to_bytes

_LENGTHS: Final = struct.Struct("<II")
_BUFFER_BYTES: Final = 64 * 1024
_TENSOR: Final = 1

Header = dict[str, Any]
Part = tuple[str, str, tuple[int, ...]]  # name, datatype, shape of one item


class ProcessGoneError(ConnectionError):
    """The other side hung up: its process is gone."""


def send_frame(sock: socket.socket, header: Header, payload: bytes | bytearray | memoryview = b"") -> None:
    """Send one frame. Raises ProcessGoneError."""
    head = msgpack.packb(header, unicode_errors="replace")  # what an exception says is any text
    try:
        if len(payload) < 1 << 16:
            sock.sendall(b"".join((_LENGTHS.pack(len(head), len(payload)), head, payload)))
        else:
            sock.sendall(_LENGTHS.pack(len(head), len(payload)) + head)
            sock.sendall(payload)
    except OSError as error:
        raise ProcessGoneError(str(error)) from error


class FrameReader:
    """Takes frames from a socket: a small one with one system call, a large one straight into its place."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray(_BUFFER_BYTES)
        self._start = 0
        self._end = 0

    def receive(self) -> tuple[Header, bytearray]:
        """The next frame. Raises ProcessGoneError at the end of the stream."""
        head_bytes, payload_bytes = _LENGTHS.unpack(self._take(_LENGTHS.size))
        header = msgpack.unpackb(self._take(head_bytes), strict_map_key=False)
        return header, self._take(payload_bytes)

    def _take(self, size_bytes: int) -> bytearray:
        if self._end - self._start < size_bytes <= _BUFFER_BYTES:
            self._fill(size_bytes)
        if size_bytes <= self._end - self._start:
            data = self._buffer[self._start : self._start + size_bytes]
            self._start += size_bytes
            return data
        return self._take_large(size_bytes)

    def _fill(self, size_bytes: int) -> None:
        """Have at least `size_bytes` in the buffer, and as many more as have come."""
        held = self._end - self._start
        self._buffer[:held] = self._buffer[self._start : self._end]
        self._start, self._end = 0, held
        while self._end < size_bytes:
            self._end += self._receive_into(memoryview(self._buffer)[self._end :])

    def _take_large(self, size_bytes: int) -> bytearray:
        data = bytearray(size_bytes)
        view = memoryview(data)
        held = self._end - self._start
        view[:held] = self._buffer[self._start : self._end]
        self._start = self._end = 0
        while held < size_bytes:
            held += self._receive_into(view[held:])
        return data

    def _receive_into(self, view: memoryview) -> int:
        try:
            got = self._sock.recv_into(view)
        except OSError as error:
            raise ProcessGoneError(str(error)) from error
        if not got:
            raise ProcessGoneError("the other side hung up")
        return got


# --- values ------------------------------------------------------------------------------------------------


def pack_values(values: Any) -> bytes:
    """Python values and arrays as bytes. Raises TypeError, ValueError or OverflowError for anything else.

    Arrays of text become their tensor's map, which is how they look in every body.
    """
    return bytes(msgpack.packb(values, default=_pack_other, strict_types=False))


def unpack_values(data: bytes | bytearray | memoryview) -> Any:
    """The inverse of `pack_values`; tuples come back as lists."""
    return msgpack.unpackb(data, ext_hook=_unpack_ext, strict_map_key=False)


def unpack_each(data: bytes | bytearray | memoryview) -> list[Any]:
    """A packed list's values, each on its own: in place of one that cannot be read stands the exception."""
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    unpacker.feed(data)
    values: list[Any] = []
    for _ in range(unpacker.read_array_header()):
        start = unpacker.tell()
        unpacker.skip()
        try:
            values.append(unpack_values(data[start : unpacker.tell()]))
        except Exception as error:  # a tuple that was a map's key is a list now, for one
            values.append(error)
    return values


def _pack_other(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "US":
            return tensor_map(value)
        if value.dtype == object and all(isinstance(item, str) for item in value.flat):
            return {"datatype": "BYTES", "shape": list(value.shape), "data": value.ravel().tolist()}
        return msgpack.ExtType(_TENSOR, msgpack.packb(tensor_map(value)))
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "__array__"):  # a torch tensor on the CPU, for one
        try:
            array = np.asarray(value)
        except Exception as error:  # one that requires a gradient, for another
            raise TypeError(f"a {type(value).__name__} cannot be sent: {error}") from None
        return _pack_other(array)
    if isinstance(value, int):
        raise OverflowError("a number in it is beyond 64 bits")
    raise TypeError(f"a {type(value).__name__} cannot be sent as a result")


def _unpack_ext(code: int, data: bytes) -> Any:
    if code != _TENSOR:
        return msgpack.ExtType(code, data)
    tensor = msgpack.unpackb(data)
    return from_bytes(tensor["datatype"], tensor["shape"], tensor["data"])


# --- stacked tensors ---------------------------------------------------------------------------------------


def part_bytes(part: Part, count: int) -> int:
    """The length of `count` stacked items of a tensor of numbers."""
    return WIDTHS[part[1]] * math.prod(part[2]) * count


def unstack(parts: Sequence[Part], count: int, data: bytearray | memoryview) -> dict[str, Array]:
    """The stacked arrays that lie one behind the other in `data`: shape (count, *shape) each.

    A BYTES tensor's item is a packed list of its texts; stacked they are an array of str objects: numpy's own
    strings would all be as long as the longest, and lose the zeros at their end.
    """
    arrays: dict[str, Array] = {}
    view, start = memoryview(data), 0
    for name, datatype, shape in parts:
        if datatype == "BYTES":
            texts, length = _unpack_texts(view[start:], count)
            array = np.empty(len(texts), object)
            array[:] = texts
            arrays[name] = array.reshape((count, *shape))
            start += length
            continue
        end = start + part_bytes((name, datatype, shape), count)
        arrays[name] = from_bytes(datatype, (count, *shape), view[start:end])
        start = end
    return arrays


def _unpack_texts(data: memoryview, count: int) -> tuple[list[str], int]:
    """The texts of `count` items of a BYTES tensor, and how many bytes they took."""
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    unpacker.feed(data)
    texts = [text for _ in range(count) for text in unpacker.unpack()]
    return texts, unpacker.tell()


def stack(arrays: dict[str, Array], declared: dict[str, str]) -> tuple[list[Part], bytes]:
    """Stacked arrays of numbers as parts and bytes; `declared` datatypes by name win over the arrays' own.

    Raises ValueError for what cannot travel so.
    """
    parts: list[Part] = []
    data: list[bytes] = []
    for name, array in arrays.items():
        datatype = declared.get(name) or datatype_of(array)
        if datatype == "BYTES":
            raise ValueError(f"output {name!r}: texts do not stack")
        parts.append((name, datatype, tuple(array.shape[1:])))
        data.append(to_bytes(array, datatype))
    return parts, b"".join(data)
