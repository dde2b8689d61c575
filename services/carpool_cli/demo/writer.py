"""A ready-made stepping model: a small language model that continues a text, a character at each step.

It benefits from batching: a step of 32 texts reads the weights once for all of them. Texts of different
lengths are written together, and each begins and ends by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from carpool.errors import InvalidArgumentError
from carpool_cli.demo import writer_network
from carpool_cli.demo.writer_network import ALPHABET, END, Cache, Floats, Network, Row, softmax, symbols_of
from carpool_worker.model_process.stepping.requests import StepRequest

WEIGHTS_FILE: Final = Path(__file__).with_name("writer_weights.npz")

PROMPT_CHARS_MAX: Final = 1000
LENGTH_MAX: Final = 1000
LENGTH_DEFAULT: Final = 200
TEMPERATURE_MAX: Final = 2.0
TEMPERATURE_DEFAULT: Final = 0.6
TEMPERATURE_MIN: Final = 1e-4
"""A lower temperature counts as this one, at which the likeliest character is chosen."""

_END_SYMBOL: Final = ALPHABET.index(END)


class Order(NamedTuple):
    """What a request asks for: `length` is the most characters. Without a seed, the correlation ID is it."""

    prompt: str = ""
    length: int = LENGTH_DEFAULT
    temperature: float = TEMPERATURE_DEFAULT
    seed: int | None = None

    @classmethod
    def read(cls, body: object) -> Order:
        """The order in a body: a prompt, or a map. Raises InvalidArgumentError, which names the field."""
        if isinstance(body, str):
            _check_prompt("body", body)
            return cls(body)
        if not isinstance(body, Mapping):
            raise InvalidArgumentError(f"body: must be a string or a map, not {type(body).__name__}")
        for name, value in body.items():
            check = _CHECKS.get(name)
            if check is None:
                raise InvalidArgumentError(f"body.{name}: unknown; known are {', '.join(_CHECKS)}")
            check(f"body.{name}", value)
        return cls(**body)

    def key(self, correlation_id: str) -> bytes:
        """The key of the order's random numbers."""
        source = f"correlation ID {correlation_id}" if self.seed is None else f"seed {self.seed}"
        return hashlib.blake2b(source.encode(), digest_size=32).digest()


@dataclass(slots=True)
class Text:
    """A text that is being written: its row in the cache, its last symbol, which is not read yet."""

    order: Order
    key: bytes
    row: Row
    last: int
    written: int  # characters

    @property
    def is_complete(self) -> bool:
        """Whether it has the length that was asked for."""
        return self.written >= self.order.length

    @property
    def random_number(self) -> float:
        """From 0 to less than 1. It depends on the key and the position alone, so a text can be continued."""
        position = self.written.to_bytes(8, "little")
        digest = hashlib.blake2b(position, key=self.key, digest_size=6).digest()
        return int.from_bytes(digest, "little") / 2**48


class Writer:
    """Continues a prompt in the style of Python's documentation, until the end of a paragraph or `length`.

    The body is a prompt, or a map with any of the fields of
    `{"prompt": "Return the", "length": 200, "temperature": 0.6, "seed": 1}`. The same body and seed give the
    same text, however it is batched, except where rounding decides between two characters.
    """

    name = "writer"
    max_batch_size = 32
    continues = True

    _network: Network
    _cache: Cache

    def load(self, device: str) -> None:
        """Read the weights. The model uses the CPU whatever `device` is."""
        self._network = Network.load(WEIGHTS_FILE)
        self._cache = Cache(self._network)

    def validate(self, body: object) -> None:
        """Raise InvalidArgumentError unless `body` is a prompt or a map of known fields and valid values."""
        Order.read(body)

    def begin(self, requests: Sequence[StepRequest]) -> None:
        """Read the prompts, and what was already written."""
        beginnings = []
        for request in requests:
            order = Order.read(request.body)
            written = "".join(request.chunks)
            *symbols, last = symbols_of(END + order.prompt + written)
            row = self._cache.add()
            request.state = Text(order, order.key(request.correlation_id), row, last, len(written))
            beginnings.append((row, np.array(symbols, np.intp)))
        writer_network.read(self._network, self._cache, beginnings)

    def step(self, requests: Sequence[StepRequest]) -> None:
        """Write one character of each text."""
        # In the order of their rows, in which the network copies nothing.
        running = sorted(requests, key=lambda request: request.state.row.index)
        texts = [request.state for request in running]
        last = np.array([text.last for text in texts], np.intp)
        logits = writer_network.step(self._network, self._cache, [text.row for text in texts], last)
        for request, symbol in zip(running, choose(logits, texts), strict=True):
            self._write(request, request.state, symbol)

    def end(self, request: StepRequest) -> None:
        """Free the text's row."""
        if request.state is not None:
            self._cache.remove(request.state.row)

    def _write(self, request: StepRequest, text: Text, symbol: int) -> None:
        if (
            symbol != _END_SYMBOL and not text.is_complete
        ):  # complete: one that was continued only to be finished
            request.emit(ALPHABET[symbol])
            text.last = symbol
            text.written += 1
            if not text.is_complete:
                return
        if text.written:
            request.finish()
        else:
            request.finish("")


def choose(logits: Floats, texts: Sequence[Text]) -> list[int]:
    """The next symbol of each text, drawn with its next random number. `logits`: texts x symbols."""
    temperature = np.array([max(text.order.temperature, TEMPERATURE_MIN) for text in texts], np.float32)
    drawn = np.array([text.random_number for text in texts])
    share = np.cumsum(softmax(logits / temperature[:, None]), axis=1, dtype=np.float64)
    chosen: list[int] = (share <= drawn[:, None] * share[:, -1:]).sum(axis=1).tolist()
    return chosen


def _check_prompt(field: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{field}: must be a string, not {type(value).__name__}")
    if len(value) > PROMPT_CHARS_MAX:
        raise InvalidArgumentError(
            f"{field}: must have at most {PROMPT_CHARS_MAX:,} characters, not {len(value):,}"
        )
    unknown = sorted(set(value) - set(ALPHABET[1:]))
    if unknown:
        raise InvalidArgumentError(f"{field}: must be printable ASCII on one line; it has {unknown[0]!a}")


def _check_length(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LENGTH_MAX:
        raise InvalidArgumentError(f"{field}: must be an integer of 1 to {LENGTH_MAX:,}, not {value!r:.40}")


def _check_temperature(field: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 <= value <= TEMPERATURE_MAX):
        raise InvalidArgumentError(
            f"{field}: must be a number of 0 to {TEMPERATURE_MAX:g}, not {value!r:.40}"
        )


def _check_seed(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgumentError(f"{field}: must be an integer, not {value!r:.40}")


_CHECKS: Final[dict[str, Callable[[str, Any], None]]] = {
    "prompt": _check_prompt,
    "length": _check_length,
    "temperature": _check_temperature,
    "seed": _check_seed,
}
