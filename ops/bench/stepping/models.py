"""Models that generate a given number of tokens for each request; nothing of what they compute is used.

A body has `prompt`, a list of PROMPT_TOKENS tokens, and `length`, the number of tokens to generate. What is
sent for a token is the time at which it was there (ns, of the monotonic clock that all processes share), so
that its reader knows how long it was on its way.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

SLOTS: Final = 32
PROMPT_TOKENS: Final = 4  # as in the post that docs/streaming.md names
LENGTH_MAX: Final = 128
STEP_S: Final = 0.005  # of the sleeper, and also its prefill

Array = np.ndarray[Any, Any]
Body = dict[str, Any]


class Network(Protocol):
    """What generates. `begin` returns a state for each prompt; `step` computes the next token of each."""

    def begin(self, prompts: Sequence[Sequence[int]]) -> list[Any]: ...

    def step(self, states: Sequence[Any]) -> None: ...

    def end(self, state: Any) -> None: ...


class Sleep:
    """Takes STEP_S for whatever is asked of it, and no CPU, as a network on an accelerator."""

    def begin(self, prompts: Sequence[Sequence[int]]) -> list[Any]:
        time.sleep(STEP_S)
        return [None] * len(prompts)

    def step(self, states: Sequence[Any]) -> None:
        time.sleep(STEP_S)

    def end(self, state: Any) -> None:
        pass


class Layer(NamedTuple):
    """The weights of a layer; biases are left out."""

    of_attention: Array  # (width, 3 * width): queries, keys, values
    of_heads: Array  # (width, width)
    up: Array  # (width, 4 * width)
    down: Array  # (4 * width, width)


class Gpt2:
    """The computation of GPT-2 (124 million weights, which are random), in numpy, with a cache of keys and
    values.

    Each request has a row of the cache. A step computes all rows up to the last one in use.
    """

    layers, heads, width, vocabulary = 12, 12, 768, 50257
    context = PROMPT_TOKENS + LENGTH_MAX

    def __init__(self) -> None:
        random = np.random.default_rng(0)

        def weights(*shape: int) -> Array:
            return (random.random(shape, np.float32) - 0.5) * np.float32(0.07)

        width = self.width
        self._of_tokens, self._of_positions = weights(self.vocabulary, width), weights(self.context, width)
        self._layers = [
            Layer(weights(width, 3 * width), weights(width, width), weights(width, 4 * width),
                  weights(4 * width, width))
            for _ in range(self.layers)
        ]  # fmt: skip
        cache = (self.layers, SLOTS, self.context, self.heads, width // self.heads)
        self._keys, self._values = np.zeros(cache, np.float32), np.zeros(cache, np.float32)
        self._next = np.zeros(SLOTS, np.int64)  # by row: the token that the next step takes
        self._position = np.zeros(SLOTS, np.int64)  # its position
        self._free = list(range(SLOTS))  # rows, as a heap

    def begin(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Compute keys and values of the prompts, together, but for the last token of each."""
        rows = np.array([heapq.heappop(self._free) for _ in prompts])
        tokens = np.array(prompts)
        self._compute(rows, tokens[:, :-1], np.zeros(len(rows), np.int64))
        self._next[rows], self._position[rows] = tokens[:, -1], tokens.shape[1] - 1
        return [int(row) for row in rows]

    def step(self, states: Sequence[int]) -> None:
        """Compute the next token of these rows."""
        rows, used = slice(0, max(states) + 1), list(states)
        last = self._compute(rows, self._next[rows, np.newaxis], self._position[rows])[:, -1]
        self._next[rows] = (last @ self._of_tokens.T).argmax(axis=1)
        self._position[used] += 1

    def end(self, state: int) -> None:
        """Free a row."""
        self._position[state] = 0
        heapq.heappush(self._free, state)

    def _compute(self, rows: slice | Array, tokens: Array, first: Array) -> Array:
        """What the layers make of (rows, tokens), whose positions begin at `first`."""
        positions = first[:, np.newaxis] + np.arange(tokens.shape[1])
        length = int(positions.max()) + 1
        is_later = np.arange(length) > positions[..., np.newaxis]  # (rows, tokens, length)
        x = self._of_tokens[tokens] + self._of_positions[positions]
        for number, layer in enumerate(self._layers):
            x = x + self._attend(number, layer, _normalised(x), rows, positions, is_later)
            x = x + _times(_gelu(_times(_normalised(x), layer.up)), layer.down)
        return _normalised(x)

    def _attend(
        self, number: int, layer: Layer, x: Array, rows: slice | Array, positions: Array, is_later: Array
    ) -> Array:
        count, tokens, width = x.shape
        length = is_later.shape[-1]
        of_heads = _times(x, layer.of_attention).reshape(count, tokens, 3, self.heads, width // self.heads)
        at = np.arange(count) if isinstance(rows, slice) else rows
        self._keys[number, at[:, np.newaxis], positions] = of_heads[:, :, 1]
        self._values[number, at[:, np.newaxis], positions] = of_heads[:, :, 2]
        queries = of_heads[:, :, 0].transpose(0, 2, 1, 3)
        scores = queries @ self._keys[number, rows, :length].transpose(0, 2, 3, 1) / np.float32(8)
        scores[np.broadcast_to(is_later[:, np.newaxis], scores.shape)] = -np.inf
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        attended = shares @ self._values[number, rows, :length].transpose(0, 2, 1, 3)
        return _times(attended.transpose(0, 2, 1, 3).reshape(count, tokens, width), layer.of_heads)


def _times(x: Array, weights: Array) -> Array:
    """The product for all rows at once: numpy would multiply each row by itself."""
    product = x.reshape(-1, x.shape[-1]) @ weights
    return product.reshape(*x.shape[:-1], weights.shape[1])


def _normalised(x: Array) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + np.float32(1e-5))  # type: ignore[no-any-return]


def _gelu(x: Array) -> Array:
    return x * (np.float32(1) + np.tanh(np.float32(0.7978846) * (x + np.float32(0.044715) * x * x * x))) / 2  # type: ignore[no-any-return]


class Steps:
    """A network as a stepping model."""

    max_batch_size = SLOTS
    network: type[Network]

    def load(self, device: str) -> None:
        """Make the network."""
        self._network = self.network()

    def begin(self, requests: Sequence[Any]) -> None:
        """Prefill."""
        states = self._network.begin([request.body["prompt"] for request in requests])
        for request, state in zip(requests, states, strict=True):
            request.state = state

    def step(self, requests: Sequence[Any]) -> None:
        """A token for each."""
        self._network.step([request.state for request in requests])
        now_ns = time.monotonic_ns()
        for request in requests:
            request.emit(now_ns)
            if request.emitted >= request.body["length"]:
                request.finish()

    def end(self, request: Any) -> None:
        """Free what the network keeps."""
        self._network.end(request.state)


class Batches:
    """A network as a model of static batches: each is generated until its longest request has ended."""

    max_batch_size = SLOTS
    network: type[Network]

    def load(self, device: str) -> None:
        """Make the network."""
        self._network = self.network()

    def predict(self, batch: Sequence[Body]) -> list[list[int]]:
        """The tokens of each request."""
        network = self._network
        states = network.begin([body["prompt"] for body in batch])
        times_ns = []
        for _ in range(max(body["length"] for body in batch)):
            network.step(states)
            times_ns.append(time.monotonic_ns())
        for state in states:
            network.end(state)
        return [times_ns[: body["length"]] for body in batch]


class SleeperSteps(Steps):
    """The sleeper, stepping."""

    network = Sleep


class SleeperBatches(Batches):
    """The sleeper in static batches."""

    network = Sleep


class Gpt2Steps(Steps):
    """The network of GPT-2's shape, stepping."""

    network = Gpt2


class Gpt2Batches(Batches):
    """The network of GPT-2's shape in static batches."""

    network = Gpt2
