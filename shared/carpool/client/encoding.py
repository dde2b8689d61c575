"""Values -> bodies, when a call is made: what the program does to a value afterwards changes nothing.

Remembers the heads of tensors, because most have the dtype and shape of others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from carpool.client.entries import Encoded
from carpool.client.options import RequestOptions
from carpool.errors import InternalError, InvalidArgumentError
from carpool.messages.requests import MSGPACK, RAW
from carpool.rows import LARGE_BODY_BYTES
from carpool.wire.bodies import encode_body
from carpool.wire.content_types import canonical, checked
from carpool.wire.tensors import Array, datatype_of, is_bfloat16, tensor_head, to_bytes
from carpool.wire.values import bodies_of

_CACHED_HEADS_MAX: Final = 1000
_NO_HEAD: Final = b""


class TensorHead(NamedTuple):
    """What the bodies of arrays of one dtype and shape have in common."""

    datatype: str
    encoded: bytes
    exact: bool  # an array's own bytes are the data


class _Unencodable(NamedTuple):
    """A body that cannot be encoded, and why."""

    error: Exception


# Types of what nobody can change.
CONSTANT_TYPES: Final = frozenset({type(None), bool, int, float, str, bytes, Encoded, _Unencodable})


def encoded(content_type: str, body: bytes) -> Encoded:
    """A body that somebody else has encoded, to be sent as it is. Raises InvalidArgumentError unless the
    content type is one."""
    return Encoded(checked("content_type", content_type), _NO_HEAD, body)


class BodyEncoder:
    """Encodes bodies, on any thread. What tensors of one dtype and shape begin with is made once."""

    def __init__(self) -> None:
        self._heads: dict[tuple[Any, tuple[int, ...]], TensorHead] = {}  # by dtype and shape

    def snapshot(self, body: Any, options: RequestOptions) -> tuple[Any, RequestOptions]:
        """What stands for the body and options of a request that is sent later. Never raises: why they cannot
        be sent is found again then."""
        content_type = None
        if options:
            fields, content_type = options.get("fields"), options.get("content_type")
            if isinstance(fields, Mapping):
                options = {**options, "fields": dict(fields)}
        if type(body) in CONSTANT_TYPES or not isinstance(content_type, str | None):
            return body, options
        try:
            return Encoded(*self.encode(body, content_type)), options
        except Exception as error:
            return _Unencodable(error), options

    def snapshot_each(self, bodies: Iterable[Any], options: RequestOptions) -> list[Any]:
        """What stands for bodies that an iterator gives, which may be the same object again and again. Those
        in a list are not: its owner waits."""
        if isinstance(bodies, list | tuple):
            return list(bodies)
        return [self.snapshot(body, options)[0] for body in bodies]

    def encode(self, body: Any, content_type: str | None) -> tuple[str, bytes, bytes]:
        """The content type of a body in its canonical form, its head, and what follows the head. Raises
        InvalidArgumentError."""
        kind = type(body)
        if kind is Encoded:
            already: Encoded = body
            return already
        if kind is _Unencodable:
            raise body.error
        if content_type is not None:
            content_type = canonical(content_type)
        if kind is np.ndarray and (content_type is None or content_type == MSGPACK):
            head = self._heads.get((body.dtype, body.shape)) or self._make_head(body.dtype, body.shape)
            if head is not None:
                if head.exact and body.nbytes >= LARGE_BODY_BYTES:  # copied once
                    return MSGPACK, _NO_HEAD, b"".join((head.encoded, np.ascontiguousarray(body).data))
                return MSGPACK, head.encoded, body.tobytes() if head.exact else to_bytes(body, head.datatype)
        if content_type is None:
            content_type = RAW if isinstance(body, bytes | bytearray | memoryview) else MSGPACK
        try:
            return content_type, _NO_HEAD, encode_body(content_type, body, of_request=True)
        except InternalError as error:
            raise InvalidArgumentError(f"body: {error.detail}") from None

    def head_of_rows(self, array: Array, options: RequestOptions) -> TensorHead | None:
        """The head of the rows of an array; None if they cannot be sent as columns, or are large."""
        if array.ndim == 0:
            raise InvalidArgumentError("body: an array without dimensions has no rows")
        if "correlation_id" in options:
            raise InvalidArgumentError("correlation_id: cannot be the same for several requests")
        content_type = options.get("content_type")
        if isinstance(content_type, str) and canonical(content_type) != MSGPACK:
            return None
        if not 0 < array.nbytes < LARGE_BODY_BYTES * len(array):
            return None
        key = (array.dtype, array.shape[1:])
        return self._heads.get(key) or self._make_head(*key)

    def _make_head(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> TensorHead | None:
        """The head of arrays of this dtype and shape, kept for the next; None for those of strings."""
        try:
            datatype = datatype_of(np.empty(0, dtype))
        except ValueError as error:
            raise InvalidArgumentError(f"body: {error}") from None
        if datatype == "BYTES":
            return None
        if len(self._heads) >= _CACHED_HEADS_MAX:
            self._heads.clear()
        encoded = tensor_head(datatype, shape, math.prod(shape) * dtype.itemsize)
        exact = dtype == dtype.newbyteorder("<") and not is_bfloat16(dtype)
        head = TensorHead(datatype, encoded, exact)
        self._heads[dtype, shape] = head
        return head


def bodies_to_send(bodies: Any, call: str) -> Any:
    """What `infer_many` and `map` are given, as `bodies_of`. Raises InvalidArgumentError."""
    try:
        return bodies_of(bodies, call)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"bodies: {error}") from None
