"""The memory that a decoder process and its model process have in common, and values in it.

One side writes a value, tells the other where its parts are, and writes nothing more until that has answered.
Arrays are copied once on each side, and no side converts single numbers. All else is packed as in frames.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import numpy as np

from carpool.parts import Buffer
from carpool.wire.tensors import WIDTHS, Array, datatype_of, for_numpy, from_bytes
from carpool_worker.model_process.apart import moved
from carpool_worker.model_process.frames import pack_exactly, unpack_exactly

_GRAIN_BYTES: Final = 1024 * 1024
KEPT_BYTES_MAX: Final = 64 * 1024 * 1024  # of what was needed once
_ALIGNMENT_BYTES: Final = 64

# What was written: its kind and how many bytes, or where each array is: name, datatype, shape, offset.
Written = tuple[str, Any]
_BYTES, _PACKED, _ARRAY, _ARRAYS = "bytes", "packed", "array", "arrays"


class SharedMemory:
    """A file in memory, which grows as needed. Both processes see by its size whether to map it again."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls) -> Self:
        """A new one, which a child inherits if it is told to."""
        if hasattr(os, "memfd_create"):
            return cls(moved(os.memfd_create("carpool-decoder", os.MFD_CLOEXEC)))
        with tempfile.TemporaryFile() as file:  # not on Linux
            return cls(moved(os.dup(file.fileno())))

    def space(self, size_bytes: int) -> memoryview:
        """The first bytes of it. What was there before stays only where it is not written to."""
        if os.fstat(self.descriptor).st_size < max(1, size_bytes):
            os.ftruncate(self.descriptor, (size_bytes // _GRAIN_BYTES + 1) * _GRAIN_BYTES)
        return memoryview(self._mapped())[:size_bytes]

    def trim(self) -> None:
        """Free what is seldom needed. Only while nothing is written, or read, on either side."""
        if os.fstat(self.descriptor).st_size > KEPT_BYTES_MAX:
            self._map = None
            os.ftruncate(self.descriptor, KEPT_BYTES_MAX)

    def close(self) -> None:
        """Let go of it. Arrays that were read without a copy keep it in memory."""
        self._map = None
        os.close(self.descriptor)

    def _mapped(self) -> mmap.mmap:
        size_bytes = os.fstat(self.descriptor).st_size
        if self._map is None or len(self._map) != size_bytes:
            self._map = mmap.mmap(self.descriptor, size_bytes)
        return self._map


def write_packed(memory: SharedMemory, data: Buffer) -> Written:
    """Write a value that is packed already."""
    memory.space(len(data))[:] = data
    return _PACKED, len(data)


def write(memory: SharedMemory, value: Any) -> Written:
    """Write a value. Raises TypeError, ValueError or OverflowError for one that cannot be sent."""
    if type(value) is bytes:
        memory.space(len(value))[:] = value
        return _BYTES, len(value)
    if hasattr(value, "__array__") and not isinstance(value, np.ndarray | np.generic | type):
        value = np.asarray(for_numpy(value))
    if _is_plain_array(value):
        return _ARRAY, _write_arrays(memory, [("", value)])
    if isinstance(value, Mapping) and value and all(map(_is_plain_array, value.values())):
        return _ARRAYS, _write_arrays(memory, list(value.items()))
    return write_packed(memory, pack_exactly(value))


def write_returned(memory: SharedMemory, hook: str, value: Any) -> Written:
    """Write what a method of the model returned. Raises TypeError for what cannot be sent."""
    try:
        return write(memory, value)
    except Exception as error:
        raise TypeError(f"what {hook} returned cannot be sent to the model process: {error}") from error


def _is_plain_array(value: Any) -> bool:
    """Whether it is an array whose bytes are its value."""
    if type(value) is not np.ndarray or not value.size or value.dtype.kind not in "biuf":
        return False
    return datatype_of(value) in WIDTHS  # ValueError for one that cannot be sent


def _write_arrays(memory: SharedMemory, arrays: Sequence[tuple[str, Array]]) -> list[tuple[Any, ...]]:
    places: list[tuple[Any, ...]] = []
    end = 0
    for name, array in arrays:
        places.append((name, datatype_of(array), array.shape, end))
        end += array.nbytes + -array.nbytes % _ALIGNMENT_BYTES
    space = memory.space(end)
    for (_, array), (_, _, shape, start) in zip(arrays, places, strict=True):
        dtype = array.dtype.newbyteorder("<")
        np.frombuffer(space[start : start + array.nbytes], dtype).reshape(shape)[...] = array
    return places


def read(memory: SharedMemory, written: Sequence[Any], *, copy: bool) -> Any:
    """The value that the other side wrote. Without `copy`, arrays are those in the memory, until the next
    value is written there."""
    kind, where = written
    if kind == _BYTES:
        return bytes(memory.space(where))
    if kind == _PACKED:
        return unpack_exactly(memory.space(where))
    arrays = {name: _read_array(memory, *place, copy=copy) for name, *place in where}
    return arrays[""] if kind == _ARRAY else arrays


def _read_array(
    memory: SharedMemory, datatype: str, shape: Sequence[int], start: int, *, copy: bool
) -> Array:
    size_bytes = WIDTHS[datatype] * int(np.prod(shape, dtype=np.int64))
    array = from_bytes(datatype, shape, memory.space(start + size_bytes)[start:])
    return array.copy() if copy else array
