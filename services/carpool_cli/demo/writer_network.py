"""The network of `writer` with numpy alone: a decoder-only transformer over characters, and its cache.

Its parts are the plainest that work: the sum of the last four symbols' embeddings, attention within a window
with a bias against distance (ALiBi: Press, Smith and Lewis, "Train Short, Test Long", 2022), root mean square
normalisation without gain, hidden layers of squared rectifiers, no biases. Positions are relative only, so
the cache of a text is a ring of the window's size, and a text can be of any length.

A symbol is an index of `ALPHABET`. Floats are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
Symbols: TypeAlias = npt.NDArray[np.intp]

END: Final = "\n"
"""Ends a text. A text begins after one, too."""
ALPHABET: Final = END + "".join(map(chr, range(32, 127)))

EPSILON: Final = np.float32(1e-5)
LEVELS: Final = 127
"""Weights in a file are integers from -LEVELS to LEVELS, times a scale."""

_SYMBOL: Final = {character: symbol for symbol, character in enumerate(ALPHABET)}


def symbols_of(text: str) -> Symbols:
    """The symbols of a text, whose characters must be in `ALPHABET`."""
    return np.fromiter((_SYMBOL[character] for character in text), np.intp, count=len(text))


class Weights(NamedTuple):
    """All trained weights, each kind in one array. `recent` is how many symbols' embeddings are added."""

    embedding: Floats  # recent x symbols x width; the newest symbol first
    attention_in: Floats  # layers x width x 3 width: queries, keys and values, each by head
    attention_out: Floats  # layers x width x width
    hidden_in: Floats  # layers x width x hidden
    hidden_out: Floats  # layers x hidden x width
    logits: Floats  # width x symbols


class Network(NamedTuple):
    """The weights, and what their shapes do not tell.

    A position attends to itself and those before it, `window` in all.
    """

    weights: Weights
    heads: int
    window: int

    @property
    def recent(self) -> int:
        """How many symbols are embedded at a position: its own and those before it."""
        return len(self.weights.embedding)

    @property
    def sight(self) -> int:
        """How many symbols the logits at a position depend on, its own included."""
        return len(self.weights.attention_in) * (self.window - 1) + self.recent

    @property
    def slopes(self) -> Floats:
        """How much the score of a key falls with each position of distance, for each head."""
        slopes: Floats = np.exp2(-8 / self.heads * np.arange(1, self.heads + 1)).astype(np.float32)
        return slopes

    def save(self, file: Path) -> None:
        """Write the weights as 8-bit integers with a scale for each column, without pickle."""
        arrays: dict[str, Any] = {"heads": self.heads, "window": self.window}
        for name, weights in self.weights._asdict().items():
            scale = np.abs(weights).max(axis=-2, keepdims=True) / LEVELS
            arrays[name] = np.round(weights / scale).astype(np.int8)
            arrays[f"{name}_scale"] = scale
        np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, file: Path) -> Network:
        """Read what `save` wrote."""
        with np.load(file, allow_pickle=False) as arrays:
            weights = Weights(*(arrays[name] * arrays[f"{name}_scale"] for name in Weights._fields))
            return cls(weights, int(arrays["heads"]), int(arrays["window"]))


class Row:
    """A running text's place in a cache: `index`, which changes when another text ends."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Cache:
    """The keys and values of the last `window` positions of running texts, and their last symbols.

    The key and the value of position p are at place p % window. The texts have the first rows, without gaps,
    so that a step of all of them copies nothing. Memory is allocated as rows are added, and kept.
    """

    def __init__(self, network: Network) -> None:
        layers, width, _ = network.weights.attention_out.shape
        ring = (layers, 0, network.heads, network.window, width // network.heads)
        self.keys: Floats = np.zeros(ring, np.float32)  # layers x rows x heads x window x width of a head
        self.values: Floats = np.zeros(ring, np.float32)
        self.recent: Symbols = np.zeros((0, network.recent), np.intp)  # rows x recent, the newest first
        self.lengths: Symbols = np.zeros(0, np.intp)  # symbols read
        self._rows: list[Row] = []

    def add(self) -> Row:
        """A row for a new text, of which nothing is read. Before it, there are only `END`."""
        row = Row(len(self._rows))
        self._rows.append(row)
        if row.index == len(self.lengths):
            self._grow(max(1, row.index))
        self.recent[row.index] = _SYMBOL[END]
        self.lengths[row.index] = 0
        return row

    def remove(self, row: Row) -> None:
        """Give up a row. The last one takes its place."""
        last = self._rows.pop()
        if last is not row:
            for rings in (self.keys, self.values):
                rings[:, row.index] = rings[:, last.index]
            self.recent[row.index] = self.recent[last.index]
            self.lengths[row.index] = self.lengths[last.index]
            last.index = row.index
            self._rows[last.index] = last

    def _grow(self, rows: int) -> None:
        """Add rows to all arrays."""
        layers, _, *ring = self.keys.shape
        free = np.zeros((layers, rows, *ring), np.float32)
        self.keys = np.concatenate([self.keys, free], axis=1)
        self.values = np.concatenate([self.values, free], axis=1)
        self.recent = np.concatenate([self.recent, np.zeros((rows, self.recent.shape[1]), np.intp)])
        self.lengths = np.concatenate([self.lengths, np.zeros(rows, np.intp)])


def step(network: Network, cache: Cache, rows: Sequence[Row], symbols: Symbols) -> Floats:
    """Read one more symbol of each text. Returns the logits of the symbols that follow: texts x symbols.

    Copies nothing of the cache if the texts are the first ones in it, in order.
    """
    weights = network.weights
    indexes = np.array([row.index for row in rows], np.intp)
    view = slice(len(rows)) if np.array_equal(indexes, np.arange(len(rows))) else indexes
    positions = cache.lengths[indexes]
    cache.lengths[indexes] += 1
    recent = np.column_stack([symbols, cache.recent[indexes, :-1]])
    cache.recent[indexes] = recent
    places = positions % network.window
    bias = _ring_bias(network, positions)
    x = _embedded(weights, recent)
    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        query, key, value = _by_head(network, layer, x)
        keys[indexes, :, places] = key
        values[indexes, :, places] = value
        scores = (keys[view] @ query[..., None])[..., 0] + bias
        attended = (softmax(scores)[..., None, :] @ values[view])[..., 0, :]
        x = _after_attention(weights, layer, x, attended)
    logits: Floats = normalised(x) @ weights.logits
    return logits


def read(network: Network, cache: Cache, texts: Sequence[tuple[Row, Symbols]]) -> None:
    """Read the beginnings of texts, of which nothing was read before. One matrix product serves all texts.

    Of a long one only the last `sight` symbols are read: what follows depends on no others.
    """
    read_texts = [(row, symbols[-network.sight :]) for row, symbols in texts if len(symbols)]
    if not read_texts:
        return
    ends = np.cumsum([len(symbols) for _, symbols in read_texts])
    spans = [slice(end - len(symbols), end) for end, (_, symbols) in zip(ends, read_texts, strict=True)]
    recent = np.concatenate([_recent(network, symbols) for _, symbols in read_texts])
    for (row, symbols), span in zip(read_texts, spans, strict=True):
        cache.recent[row.index] = recent[span][-1]
        cache.lengths[row.index] = len(symbols)
    bias = distance_bias(network, max(len(symbols) for _, symbols in read_texts))
    x = _embedded(network.weights, recent)
    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        query, key, value = _by_head(network, layer, x)
        attended = np.empty_like(query)
        for (row, _), span in zip(read_texts, spans, strict=True):
            attended[span] = _attended(query[span], key[span], value[span], bias)
            _fill(keys[row.index], key[span])
            _fill(values[row.index], value[span])
        x = _after_attention(network.weights, layer, x, attended)


def _recent(network: Network, symbols: Symbols) -> Symbols:
    """For each position, its symbol and those before it: positions x recent."""
    before = np.full(network.recent - 1, _SYMBOL[END])
    windows = np.lib.stride_tricks.sliding_window_view(np.concatenate([before, symbols]), network.recent)
    newest_first: Symbols = windows[:, ::-1]
    return newest_first


def _embedded(weights: Weights, recent: Symbols) -> Floats:
    """The inputs of the first layer, from the recent symbols at each position."""
    embedded: Floats = weights.embedding[np.arange(recent.shape[1]), recent].sum(axis=1)
    return embedded


def _by_head(network: Network, layer: int, x: Floats) -> Floats:
    """Queries, scaled, keys and values: 3 x positions x heads x width of a head."""
    projected = normalised(x) @ network.weights.attention_in[layer]
    by_head: Floats = projected.reshape(len(x), 3, network.heads, -1).swapaxes(0, 1)
    by_head[0] *= np.float32(by_head.shape[-1] ** -0.5)
    return by_head


def _attended(query: Floats, key: Floats, value: Floats, bias: Floats) -> Floats:
    """Attention within one text. All but `bias` are positions x heads x width of a head."""
    length = len(query)
    scores = query.swapaxes(0, 1) @ key.transpose(1, 2, 0) + bias[:, :length, :length]
    attended: Floats = softmax(scores) @ value.swapaxes(0, 1)
    return attended.swapaxes(0, 1)


def _fill(ring: Floats, read: Floats) -> None:
    """Put the keys or values of a text's first positions into its ring, as far as it has room for them."""
    window = ring.shape[1]
    places = np.arange(len(read))[-window:] % window
    ring[:, places] = read[-window:].swapaxes(0, 1)


def _after_attention(weights: Weights, layer: int, x: Floats, attended: Floats) -> Floats:
    """The rest of a layer."""
    x = x + attended.reshape(x.shape) @ weights.attention_out[layer]
    hidden = np.maximum(normalised(x) @ weights.hidden_in[layer], 0)
    after: Floats = x + hidden * hidden @ weights.hidden_out[layer]
    return after


def normalised(x: Floats) -> Floats:
    """Each row divided by its root mean square."""
    return x * inverse_rms(x)


def inverse_rms(x: Floats) -> Floats:
    """1 / the root mean square of each row, as a column."""
    inverse: Floats = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPSILON)
    return inverse


def softmax(scores: Floats) -> Floats:
    """Positive numbers in the last axis, with the sum 1."""
    weights: Floats = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def distance_bias(network: Network, length: int) -> Floats:
    """What is added to the scores of a text's positions: heads x queries x keys. Outside the window: -inf."""
    distance = (np.arange(length)[:, None] - np.arange(length))[:, None]
    bias: Floats = _bias(network, distance, (distance >= 0) & (distance < network.window)).swapaxes(0, 1)
    return bias


def _ring_bias(network: Network, positions: Symbols) -> Floats:
    """What is added to the scores of a ring's places: texts x heads x window. Without a key: -inf."""
    distance = (positions[:, None] - np.arange(network.window)) % network.window
    return _bias(network, distance[:, None], (distance <= positions[:, None])[:, None])


def _bias(network: Network, distance: Symbols, is_seen: npt.NDArray[np.bool_]) -> Floats:
    """The bias of each head, for arrays of which the last axis but one is that of heads."""
    bias: Floats = np.where(is_seen, -network.slopes[:, None] * distance, -np.inf).astype(np.float32)
    return bias
