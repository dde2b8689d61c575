"""The keys and values of the texts that take steps together, in one array for each layer.

Row i of the arrays is a text. All texts end at the same column, so shorter ones have padding on the left. A
step writes one column, and copies nothing else. A text that joins is copied into a free row. Only if it is
longer than the columns before the end, or if the columns are used up, all are copied to larger arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from transformers.cache_utils import Cache, DynamicLayer

COLUMNS_FREE_MIN: Final = 64  # steps until all is copied, at least
COLUMNS_FREE_SHARE: Final = 4  # a quarter of the longest text, if that is more

Layers = list[tuple[torch.Tensor, torch.Tensor] | None]  # None: a layer that uses those of another one


class Row:
    """The keys and values of one text.

    `size`: for how many tokens. `layers`: keys and values, each (heads, tokens, width); None when joined.
    """

    __slots__ = ("layers", "size")

    def __init__(self, layers: Layers, size: int) -> None:
        self.layers: Layers | None = layers
        self.size = size


class _Window:
    """The columns that are in use, the same in all layers."""

    def __init__(self) -> None:
        self.start = self.end = 0


class _JoinedLayer(DynamicLayer):
    """The arrays of one layer, as a network uses them."""

    def __init__(self, window: _Window, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True
        self._window = window

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write those of the new tokens behind the end, and return all."""
        rows, start, end = key_states.shape[0], self._window.start, self._window.end
        new_end = end + key_states.shape[-2]
        self.keys[:rows, :, end:new_end] = key_states
        self.values[:rows, :, end:new_end] = value_states
        return self.keys[:rows, :, start:new_end], self.values[:rows, :, start:new_end]

    def get_seq_length(self) -> int:
        """The columns before the new tokens."""
        return self._window.end - self._window.start

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """How many columns there are with the new tokens, and the first one's number. The first releases of
        transformers 5 pass the places of the new tokens, not their number."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + new, 0

    def row(self, index: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of one text."""
        columns = slice(self._window.end - size, self._window.end)
        return self.keys[index, :, columns], self.values[index, :, columns]

    def write(self, index: int, row: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Make these the ones of one text."""
        keys, values = row
        columns = slice(self._window.end - keys.shape[-2], self._window.end)
        self.keys[index, :, columns] = keys
        self.values[index, :, columns] = values


class JoinedCache:
    """The rows that take steps together. `cache`: for the network; valid until the next call."""

    def __init__(self, slots: int) -> None:
        """`slots`: how many rows are usually joined at most. Memory is not taken for more."""
        self._slots = slots
        self._window = _Window()
        self._rows: list[Row | None] = []  # None: a free row
        self._layers: list[_JoinedLayer | None] = []
        self._size = (0, 0)  # of the arrays: rows, columns

    @property
    def cache(self) -> Cache:
        """The joined rows. A step is to be followed by `advance`."""
        return Cache(layers=[DynamicLayer() if layer is None else layer for layer in self._layers])

    @property
    def columns(self) -> int:
        """How many columns are in use: the tokens of the longest row."""
        return self._window.end - self._window.start

    def arrange(self, rows: Sequence[Row]) -> list[Row]:
        """Join these rows, with one column for a step, and no others. Returns them in their order.

        If it raises, for example because there is too little memory, all rows that were joined are lost, and
        it raises for them at the next call, too.
        """
        try:
            wanted = set(rows)
            for index, row in enumerate(self._rows):
                if row is not None and row not in wanted:
                    self._part(index, row)
            self._join(rows)
            if wanted.difference(self._rows):
                raise RuntimeError("texts were lost when their arrays could not be made larger")
        except BaseException:
            self._clear()
            raise
        self._window.start = self._window.end - max(row.size for row in rows)
        return [row for row in self._rows if row is not None]

    def advance(self) -> None:
        """The step was taken: each row has a token more."""
        self._window.end += 1
        for row in self._rows:
            if row is not None:
                row.size += 1

    def release(self, row: Row) -> None:
        """The row is not needed any more; it may have been lost."""
        row.layers = None
        self._rows = [None if other is row else other for other in self._rows]
        if not any(self._rows):
            self._clear()

    def _clear(self) -> None:
        self._rows, self._layers, self._size = [], [], (0, 0)
        self._window.start = self._window.end = 0

    def _part(self, index: int, row: Row) -> None:
        """Take a row out, for it does not take the next step."""
        parts = [None if layer is None else layer.row(index, row.size) for layer in self._layers]
        row.layers = [None if part is None else (part[0].clone(), part[1].clone()) for part in parts]
        self._rows[index] = None

    def _join(self, rows: Sequence[Row]) -> None:
        joining = [row for row in rows if row.layers is not None]
        end = self._window.end
        is_full = len(rows) > self._size[0] or end + 1 > self._size[1]
        if is_full or any(row.size > end for row in joining):
            self._move(rows)
            return
        for row in joining:
            self._place(row)
        while None in self._rows:
            last = self._rows.pop()
            if last is not None:
                hole = self._rows.index(None)
                for layer in self._layers:
                    if layer is not None:
                        layer.write(hole, layer.row(len(self._rows), last.size))
                self._rows[hole] = last

    def _place(self, row: Row) -> None:
        """Copy a row into a free one."""
        assert row.layers is not None
        if None in self._rows:
            index = self._rows.index(None)
            self._rows[index] = row
        else:
            index = len(self._rows)
            self._rows.append(row)
        for layer, part in zip(self._layers, row.layers, strict=True):
            if layer is not None and part is not None:
                layer.write(index, part)
        row.layers = None

    def _move(self, rows: Sequence[Row]) -> None:
        """Copy all rows to new arrays, one layer after the other, so that little more memory is needed."""
        longest = max(row.size for row in rows)
        free = columns_free(longest)
        count = max(len(rows), min(self._slots, 1 << (len(rows) - 1).bit_length()))
        size = (count, longest + free)
        places = {row: index for index, row in enumerate(self._rows) if row is not None}
        window = _Window()
        window.end = longest
        layers = max(len(self._layers), *(len(row.layers or ()) for row in rows))
        moved: list[_JoinedLayer | None] = []
        for number in range(layers):
            old = self._layers[number] if self._layers else None
            parts = [
                row.layers[number] if row.layers is not None else old and old.row(places[row], row.size)
                for row in rows
            ]
            moved.append(_joined(window, size, parts))
            if self._layers:
                self._layers[number] = None
        self._rows, self._layers, self._size, self._window = list(rows), moved, size, window
        for row in rows:
            row.layers = None


def columns_free(longest: int) -> int:
    """How many columns there are beside those of the longest text when arrays are made."""
    return max(COLUMNS_FREE_MIN, longest // COLUMNS_FREE_SHARE)


def _joined(
    window: _Window, size: tuple[int, int], parts: Sequence[tuple[torch.Tensor, torch.Tensor] | None]
) -> _JoinedLayer | None:
    """New arrays of a layer, with these rows."""
    if parts[0] is None:
        return None
    # Zeros, because padding is multiplied by zero, and what is not a number would stay so.
    keys, values = (part.new_zeros((size[0], part.shape[0], size[1], part.shape[-1])) for part in parts[0])
    layer = _JoinedLayer(window, keys, values)
    for index, part in enumerate(parts):
        assert part is not None
        layer.write(index, part)
    return layer
