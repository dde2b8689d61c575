"""Trains the network of `writer` on the documentation of the Python that runs it, with numpy alone.

OPENBLAS_NUM_THREADS=1 python -m carpool_cli.demo.writer_training --write
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from carpool_cli.demo.docsearch_corpus import passages
from carpool_cli.demo.writer import WEIGHTS_FILE
from carpool_cli.demo.writer_network import (
    ALPHABET,
    END,
    Floats,
    Network,
    Symbols,
    Weights,
    distance_bias,
    inverse_rms,
    softmax,
    symbols_of,
)


class Shape(NamedTuple):
    """The numbers that determine a network's weights."""

    recent: int
    symbols: int
    width: int
    layers: int
    heads: int
    window: int


SHAPE: Final = Shape(recent=4, symbols=len(ALPHABET), width=96, layers=4, heads=4, window=128)
SEED: Final = 1
STEPS: Final = 3400
BATCH: Final = 16
LEARNING_RATE: Final = 0.008
WARMUP_STEPS: Final = 100
MOMENTUM: Final = 0.9
SQUARES_MOMENTUM: Final = 0.99
GRADIENT_NORM_MAX: Final = 1.0
REPORT_STEPS: Final = 100

LETTERS_SHARE_MIN: Final = 0.9
"""Passages with fewer letters and spaces are mostly code."""
HELD_OUT: Final = 20
"""One passage in so many is not trained on."""


def corpus() -> tuple[str, str]:
    """The text to train on, and the one to test on: passages of documentation, each followed by `END`."""
    kept = [passage.text for passage in passages() if _is_prose(passage.text)]
    tested = set(kept[::HELD_OUT])
    return (
        "".join(text + END for text in kept if text not in tested),
        "".join(text + END for text in kept if text in tested),
    )


def _is_prose(text: str) -> bool:
    letters = sum(character.isalpha() or character == " " for character in text)
    return letters >= LETTERS_SHARE_MIN * len(text) and set(text) <= set(ALPHABET)


def initial(rng: np.random.Generator, shape: Shape) -> Network:
    """A network before training. Each layer adds 0 at first."""

    def normal(*sizes: int, deviation: float) -> Floats:
        return (rng.standard_normal(sizes) * deviation).astype(np.float32)

    recent, symbols, width, layers, heads, window = shape
    hidden = 4 * width
    weights = Weights(
        embedding=normal(recent, symbols, width, deviation=recent**-0.5),
        attention_in=normal(layers, width, 3 * width, deviation=width**-0.5),
        attention_out=np.zeros((layers, width, width), np.float32),
        hidden_in=normal(layers, width, hidden, deviation=width**-0.5),
        hidden_out=np.zeros((layers, hidden, width), np.float32),
        logits=np.zeros((width, symbols), np.float32),
    )
    return Network(weights, heads, window)


class _Layer(NamedTuple):
    """What the backward pass of a layer needs of the forward pass. b: texts, t: positions, h: heads."""

    inverse_in: Floats  # b x t x 1
    normal_in: Floats  # b x t x width
    query: Floats  # b x h x t x width of a head, scaled
    key: Floats  # b x h x t x width of a head
    value: Floats  # b x h x t x width of a head
    share: Floats  # b x h x t x t: how much a position takes of each value
    attended: Floats  # b x t x width
    inverse_mid: Floats  # b x t x 1
    normal_mid: Floats  # b x t x width
    rectified: Floats  # b x t x hidden
    squared: Floats  # b x t x hidden


class Pass(NamedTuple):
    """A forward pass. The logits of the symbol after each position: texts x positions x symbols."""

    inputs: Floats
    layers: list[_Layer]
    inverse_out: Floats
    normal_out: Floats
    logits: Floats


def forward(network: Network, symbols: Symbols) -> Pass:
    """Compute whole texts at once, without a cache. `symbols`: texts x (recent - 1 + positions)."""
    weights = network.weights
    inputs = _inputs(symbols, weights.embedding.shape)
    x = _times(inputs, weights.embedding.reshape(-1, weights.embedding.shape[2]))
    bias = distance_bias(network, x.shape[1])
    layers = []
    for index in range(len(weights.attention_in)):
        inverse_in = inverse_rms(x)
        normal_in = x * inverse_in
        query, key, value = _split(_times(normal_in, weights.attention_in[index]), network.heads)
        query = query * _scale(query)
        score = query @ key.swapaxes(2, 3)
        score += bias
        share = softmax(score)
        attended = _joined(share @ value)
        x = x + _times(attended, weights.attention_out[index])
        inverse_mid = inverse_rms(x)
        normal_mid = x * inverse_mid
        rectified = _times(normal_mid, weights.hidden_in[index])
        np.maximum(rectified, 0, out=rectified)
        squared = rectified * rectified
        x = x + _times(squared, weights.hidden_out[index])
        layers.append(
            _Layer(
                inverse_in,
                normal_in,
                query,
                key,
                value,
                share,
                attended,
                inverse_mid,
                normal_mid,
                rectified,
                squared,
            )
        )
    inverse_out = inverse_rms(x)
    normal_out = x * inverse_out
    logits = _times(normal_out, weights.logits)
    return Pass(inputs, layers, inverse_out, normal_out, logits)


def loss_and_gradient(network: Network, symbols: Symbols) -> tuple[float, Weights]:
    """The mean loss of predicting each symbol, in nats, and its derivatives by the weights.

    `symbols`: texts x (recent + positions). The first `recent` are not predicted.
    """
    weights = network.weights
    done = forward(network, symbols[:, :-1])
    wanted = symbols[:, network.recent :, None]
    change = softmax(done.logits)
    loss = -float(np.mean(np.log(np.take_along_axis(change, wanted, axis=2))))
    np.put_along_axis(change, wanted, np.take_along_axis(change, wanted, axis=2) - 1, axis=2)
    change /= np.float32(wanted.size)
    gradient = Weights(*(np.empty_like(array) for array in weights))
    gradient.logits[:] = _by_weight(done.normal_out, change)
    change = _through_norm(_times(change, weights.logits.T), done.normal_out, done.inverse_out)
    for index in reversed(range(len(done.layers))):
        change = _backward(network, index, done.layers[index], change, gradient)
    gradient.embedding[:] = _by_weight(done.inputs, change).reshape(gradient.embedding.shape)
    return loss, gradient


def _backward(network: Network, index: int, layer: _Layer, change: Floats, gradient: Weights) -> Floats:
    """From the derivatives by a layer's outputs, set those by its weights and return those by its inputs."""
    weights = network.weights
    gradient.hidden_out[index] = _by_weight(layer.squared, change)
    hidden = _times(change, weights.hidden_out[index].T)
    hidden *= 2
    hidden *= layer.rectified
    gradient.hidden_in[index] = _by_weight(layer.normal_mid, hidden)
    hidden = _times(hidden, weights.hidden_in[index].T)
    change = change + _through_norm(hidden, layer.normal_mid, layer.inverse_mid)

    gradient.attention_out[index] = _by_weight(layer.attended, change)
    attended = _times(change, weights.attention_out[index].T)
    # The derivative of a softmax is share * (d - sum(share * d)). That sum is this one, which is smaller.
    by_head = _heads_first(attended, network.heads)
    total = _heads_first(attended * layer.attended, network.heads).sum(axis=3, keepdims=True)
    score = by_head @ layer.value.swapaxes(2, 3)
    score -= total
    score *= layer.share
    projected = np.empty_like(attended, shape=(*attended.shape[:2], 3, network.heads, by_head.shape[3]))
    query, key, value = projected.transpose(2, 0, 3, 1, 4)
    np.matmul(score, layer.key, out=query)
    query *= _scale(query)
    np.matmul(score.swapaxes(2, 3), layer.query, out=key)
    np.matmul(layer.share.swapaxes(2, 3), by_head, out=value)
    projected = projected.reshape(*attended.shape[:2], -1)
    gradient.attention_in[index] = _by_weight(layer.normal_in, projected)
    return change + _through_norm(
        _times(projected, weights.attention_in[index].T), layer.normal_in, layer.inverse_in
    )


def _inputs(symbols: Symbols, shape: tuple[int, ...]) -> Floats:
    """For each position, a 1 for each recent symbol: the product with the embeddings is their sum."""
    recent, count, _ = shape
    positions = symbols.shape[1] - recent + 1
    inputs = np.zeros((len(symbols), positions, recent * count), np.float32)
    for age in range(recent):
        first = recent - 1 - age
        np.put_along_axis(inputs, symbols[:, first : first + positions, None] + age * count, 1, axis=2)
    return inputs


def _split(projected: Floats, heads: int) -> Floats:
    """Queries, keys and values: 3 x texts x heads x positions x width of a head."""
    return projected.reshape(*projected.shape[:2], 3, heads, -1).transpose(2, 0, 3, 1, 4)


def _heads_first(x: Floats, heads: int) -> Floats:
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def _joined(by_head: Floats) -> Floats:
    texts, heads, positions, width = by_head.shape
    return by_head.swapaxes(1, 2).reshape(texts, positions, heads * width)


def _scale(query: Floats) -> np.float32:
    return np.float32(query.shape[-1] ** -0.5)


def _times(x: Floats, matrix: Floats) -> Floats:
    """The product, as one of two matrices: numpy computes one of more dimensions matrix by matrix."""
    product: Floats = (x.reshape(-1, len(matrix)) @ matrix).reshape(*x.shape[:-1], matrix.shape[1])
    return product


def _by_weight(inputs: Floats, change: Floats) -> Floats:
    """The derivatives by a matrix that multiplied `inputs`, from those by the product."""
    gradient: Floats = inputs.reshape(-1, inputs.shape[-1]).T @ change.reshape(-1, change.shape[-1])
    return gradient


def _through_norm(change: Floats, normal: Floats, inverse: Floats) -> Floats:
    """The derivatives by what was normalised."""
    before: Floats = inverse * (change - normal * np.mean(change * normal, axis=-1, keepdims=True))
    return before


class Adam:
    """Kingma and Ba, "Adam" (2015), with a limit on the gradient's norm."""

    def __init__(self, weights: Weights) -> None:
        self._mean = Weights(*map(np.zeros_like, weights))
        self._square = Weights(*map(np.zeros_like, weights))
        self._steps = 0

    def update(self, weights: Weights, gradient: Weights, rate: float) -> None:
        """Change `weights` in place."""
        self._steps += 1
        norm = math.sqrt(sum(float(np.vdot(array, array)) for array in gradient))
        factor = np.float32(min(1.0, GRADIENT_NORM_MAX / norm))
        rate *= math.sqrt(1 - SQUARES_MOMENTUM**self._steps) / (1 - MOMENTUM**self._steps)
        for weight, change, mean, square in zip(weights, gradient, self._mean, self._square, strict=True):
            _move(weight, change * factor, mean, square, rate)


def _move(weight: Floats, change: Floats, mean: Floats, square: Floats, rate: float) -> None:
    mean += (1 - MOMENTUM) * (change - mean)
    square += (1 - SQUARES_MOMENTUM) * (change * change - square)
    weight -= rate * mean / (np.sqrt(square) + 1e-8)


def train(network: Network, text: Symbols, rng: np.random.Generator, *, steps: int) -> Iterator[float]:
    """Train on random pieces of a text. Changes the network in place; yields the loss of each step, in nats.

    The learning rate rises within `WARMUP_STEPS`, and falls in proportion to the steps left.
    """
    optimiser = Adam(network.weights)
    piece = np.arange(network.recent + network.window)
    for index in range(steps):
        first = rng.integers(len(text) - len(piece), size=BATCH)
        loss, gradient = loss_and_gradient(network, text[first[:, None] + piece])
        rate = LEARNING_RATE * min((index + 1) / WARMUP_STEPS, 1 - index / steps)
        optimiser.update(network.weights, gradient, rate)
        yield loss


def bits_per_character(network: Network, text: Symbols) -> float:
    """How badly a network predicts a text, which is cut into pieces of its window's length."""
    length = network.recent + network.window
    first = np.arange(0, len(text) - length + 1, network.window)
    losses = [_nats(network, text[start : start + length][None]) for start in first]
    return sum(losses) / len(losses) / math.log(2)


def _nats(network: Network, symbols: Symbols) -> float:
    """The mean loss of predicting each symbol. `symbols` as for `loss_and_gradient`."""
    share = softmax(forward(network, symbols[:, :-1]).logits)
    return -float(np.mean(np.log(np.take_along_axis(share, symbols[:, network.recent :, None], axis=2))))


def main() -> int:
    """Train and print the progress. With `--write`, replace the weights that `writer` loads."""
    parser = argparse.ArgumentParser(description="Train the network of `writer` on Python's documentation.")
    parser.add_argument("--write", action="store_true", help=f"write the weights to {WEIGHTS_FILE.name}")
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    settings = parser.parse_args()
    text, test = map(symbols_of, corpus())
    print(f"{len(text):,} characters to train on, {len(test):,} to test on", flush=True)
    rng = np.random.default_rng(SEED)
    network = initial(rng, SHAPE)
    losses: list[float] = []
    started_s = time.perf_counter()
    for loss in train(network, text, rng, steps=settings.steps):
        losses.append(loss)
        if len(losses) % REPORT_STEPS == 0:
            bits = sum(losses[-REPORT_STEPS:]) / REPORT_STEPS / math.log(2)
            spent_s = time.perf_counter() - started_s
            print(f"step {len(losses):,}: {bits:.3f} bits per character, {spent_s:,.0f} s", flush=True)
    print(f"on the test text: {bits_per_character(network, test):.3f} bits per character")
    if settings.write:
        network.save(WEIGHTS_FILE)
        bits = bits_per_character(Network.load(WEIGHTS_FILE), test)
        print(f"as written: {bits:.3f} bits per character, {WEIGHTS_FILE.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
