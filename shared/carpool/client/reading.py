"""Results as a reply stream has them -> values. Raises the CarpoolError of a result's status."""

from __future__ import annotations

from typing import Any

import numpy as np

from carpool.errors import OK, error_for
from carpool.messages.requests import MSGPACK
from carpool.messages.results import ResultColumns
from carpool.rows import Rows
from carpool.wire.bodies import decode_result
from carpool.wire.tensors import Array, HeadMemo, datatype_of, from_bytes, tensor_head


class ResultReader:
    """Decodes results. Remembers the layout of the last tensor, because most have the same."""

    def __init__(self) -> None:
        self._memo = HeadMemo()  # of single results
        self._head = b""  # of columns
        self._width = 0
        self._datatype = ""
        self._shape: tuple[int, ...] = ()

    def value(self, envelope: dict[str, Any]) -> Any:
        """The value in an envelope."""
        status = envelope["status"]
        if status != OK:
            raise error_for(status, envelope.get("detail", ""), envelope["correlation_id"])
        body, content_type = envelope["body"], envelope["content_type"]
        if content_type != MSGPACK:
            return decode_result(content_type, body)
        memo = self._memo
        data = memo.data_of(body)
        if data is not None:
            return from_bytes(memo.datatype, memo.shape, bytearray(data))  # which may be written to
        value = decode_result(content_type, body)
        if type(value) is np.ndarray:
            memo.remember(body, datatype_of(value), value.shape, value.nbytes)
        return value

    def array(self, columns: ResultColumns) -> Array | None:
        """The results as the rows of one array over the columns' bytes; None if they are not tensors."""
        rows = columns.rows
        if columns.content_type != MSGPACK:
            return None
        if (rows.head != self._head or rows.width != self._width) and not self._remember(rows):
            return None
        return from_bytes(self._datatype, (len(rows), *self._shape), rows.data)

    def _remember(self, rows: Rows) -> bool:
        """Remember the layout of these rows, if each is the data of a tensor."""
        value = decode_result(MSGPACK, rows[0])
        if type(value) is not np.ndarray:
            return False
        datatype = datatype_of(value)
        if rows.width != value.nbytes or rows.head != tensor_head(datatype, value.shape, value.nbytes):
            return False
        self._head, self._width = rows.head, rows.width
        self._datatype, self._shape = datatype, value.shape
        return True
