"""Trains the network of `writer` on the documentation of the Python that runs it, with numpy alone.

    OPENBLAS_NUM_THREADS=1 python -m carpool_cli.demo.writer_training --write

The same releases of Python and numpy give the same weights but for rounding, which grows with every step.
With the 1,153,362 characters of Python 3.11.7 it takes about ten minutes of one core, and reaches 1.83 bits
per character on passages that it was not trained on.
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
from carpool_cli.demo.writer_gradient import forward, loss_and_gradient
from carpool_cli.demo.writer_network import (
    ALPHABET,
    END,
    Floats,
    Network,
    Symbols,
    Weights,
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


SHAPE: Final = Shape(recent=4, symbols=len(ALPHABET), width=96, layers=3, heads=4, window=128)
SEED: Final = 1
STEPS: Final = 1900
BATCH: Final = 16
LEARNING_RATE: Final = 0.008
WARMUP_STEPS: Final = 100
COOLDOWN_SHARE: Final = 0.4
MOMENTUM: Final = 0.9
SQUARES_MOMENTUM: Final = 0.99
GRADIENT_NORM_MAX: Final = 1.0
REPORT_STEPS: Final = 100

LETTERS_SHARE_MIN: Final = 0.9
"""Passages with fewer letters and spaces are mostly code."""
HELD_OUT: Final = 20
"""Of this many passages one is not trained on."""


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
    """Train on random pieces of a text. Changes the network, and yields the loss of each step."""
    optimiser = Adam(network.weights)
    piece = np.arange(network.recent + network.window)
    for index in range(steps):
        first = rng.integers(len(text) - len(piece), size=BATCH)
        loss, gradient = loss_and_gradient(network, text[first[:, None] + piece])
        optimiser.update(network.weights, gradient, learning_rate(index, steps))
        yield loss


def learning_rate(index: int, steps: int) -> float:
    """The learning rate of a step: it rises to the highest one, stays there, and falls at last."""
    return LEARNING_RATE * min(1.0, (index + 1) / WARMUP_STEPS, (steps - index) / (COOLDOWN_SHARE * steps))


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
