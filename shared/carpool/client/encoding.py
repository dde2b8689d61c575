"""Values -> bodies. Remembers the heads of tensors, because most have the dtype and shape of others."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np

from carpool.client.entries import LARGE_BODY_BYTES
from carpool.client.options import RequestOptions
from carpool.errors import InternalError, InvalidArgumentError
from carpool.messages import MSGPACK, RAW
from carpool.wire.bodies import encode_body
from carpool.wire.tensors import Array, datatype_of, tensor_head, to_bytes

_CACHED_HEADS_MAX: Final = 1000
_NO_HEAD: Final = b""


class TensorHead(NamedTuple):
    """What the bodies of arrays of one dtype and shape have in common."""

    datatype: str
    encoded: bytes
    exact: bool  # an array's own bytes are the data


class BodyEncoder:
    """Encodes bodies. The bytes that tensors of one dtype and shape begin with are made once."""

    def __init__(self) -> None:
        self._heads: dict[tuple[Any, tuple[int, ...]], TensorHead] = {}  # by dtype and shape

    def encode(self, body: Any, content_type: str | None) -> tuple[str, bytes, bytes]:
        """The content type of a body, its head, and what follows the head."""
        if type(body) is np.ndarray and (content_type is None or content_type == MSGPACK):
            head = self._heads.get((body.dtype, body.shape)) or self._make_head(body.dtype, body.shape)
            if head is not None:
                if head.exact and body.nbytes >= LARGE_BODY_BYTES:  # copied once
                    return MSGPACK, _NO_HEAD, b"".join((head.encoded, np.ascontiguousarray(body).data))
                return MSGPACK, head.encoded, body.tobytes() if head.exact else to_bytes(body, head.datatype)
        if content_type is None:
            content_type = RAW if isinstance(body, bytes | bytearray | memoryview) else MSGPACK
        try:
            return content_type, _NO_HEAD, encode_body(content_type, body)
        except InternalError as error:
            raise InvalidArgumentError(f"body: {error.detail}") from None

    def head_of_rows(self, array: Array, options: RequestOptions) -> TensorHead | None:
        """The head of the rows of an array; None if they cannot be sent as columns, or are large."""
        if array.ndim == 0:
            raise InvalidArgumentError("body: an array without dimensions has no rows")
        if "correlation_id" in options:
            raise InvalidArgumentError("correlation_id: cannot be the same for several requests")
        if options.get("content_type") not in (None, MSGPACK):
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
        head = TensorHead(datatype, encoded, exact=dtype == dtype.newbyteorder("<"))
        self._heads[dtype, shape] = head
        return head
