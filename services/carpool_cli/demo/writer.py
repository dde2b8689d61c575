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
from carpool.stop_texts import StopTexts
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
    """What a request asks for: `length` is the most characters. Without a seed, the correlation ID is it.

    `stop`: texts before which the text ends. `top_p`: of the likeliest characters that have this probability
    together, one is chosen. `tells_end`: the last chunk tells why the text ended, and the counts.
    """

    prompt: str = ""
    length: int = LENGTH_DEFAULT
    temperature: float = TEMPERATURE_DEFAULT
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_p: float = 1.0
    tells_end: bool = False

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
        fields = {name: value for name, value in body.items() if name != "max_tokens"}
        if "max_tokens" in body:
            fields.setdefault("length", min(body["max_tokens"], LENGTH_MAX))
        fields["stop"] = tuple(body.get("stop", ()))
        return cls(**fields, tells_end="prompt" in body and "length" not in body)

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
    stops: StopTexts
    has_chunks: bool = False
    has_ended: bool = False  # a process that died had sent all of it

    def emit(self, request: StepRequest, value: Any) -> None:
        """Send a chunk, unless it is an empty text."""
        if value:
            self.has_chunks = True
            request.emit(value)

    @property
    def is_complete(self) -> bool:
        """Whether it has the length that was asked for."""
        return self.written >= self.order.length

    def end(self, reason: str) -> dict[str, Any]:
        """The last chunk. The tokens of this model are characters."""
        counts = {"prompt_tokens": len(self.order.prompt), "completion_tokens": self.written}
        return {"finish_reason": reason, **counts}

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

    It speaks completions of OpenAI's API: a map may also have `stop`, `top_p`, and `max_tokens` in place of
    `length`. If it has a prompt and no `length`, the last chunk is a map with `finish_reason` and the counts.
    """

    name = "writer"
    speaks = "completions"
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
            chunks = request.chunks
            written = "".join([chunk for chunk in chunks if isinstance(chunk, str)])
            *symbols, last = symbols_of(END + order.prompt + written)
            row = self._cache.add()
            key, stops = order.key(request.correlation_id), StopTexts(order.stop, written)
            has_ended = bool(chunks) and not isinstance(chunks[-1], str)
            text = Text(order, key, row, last, len(written), stops, bool(chunks), has_ended)
            request.state = text
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
        if text.has_ended:  # it was continued only to be finished
            request.finish()
            return
        reason = "stop" if symbol == _END_SYMBOL else "length"
        if symbol != _END_SYMBOL and not text.is_complete:
            text.last = symbol
            text.written += 1
            text.emit(request, text.stops.add(ALPHABET[symbol]))
            if text.stops.has_stopped:
                reason = "stop"
            elif not text.is_complete:
                return
        if not text.stops.has_stopped:
            text.emit(request, text.stops.rest())
        if text.order.tells_end:
            text.emit(request, text.end(reason))
        if text.has_chunks:
            request.finish()
        else:
            request.finish("")


def choose(logits: Floats, texts: Sequence[Text]) -> list[int]:
    """The next symbol of each text, drawn with its next random number. `logits`: texts x symbols."""
    temperature = np.array([max(text.order.temperature, TEMPERATURE_MIN) for text in texts], np.float32)
    drawn = np.array([text.random_number for text in texts])
    probabilities = softmax(logits / temperature[:, None])
    for probability, text in zip(probabilities, texts, strict=True):
        if text.order.top_p < 1:
            _keep_likeliest(probability, text.order.top_p)
    share = np.cumsum(probabilities, axis=1, dtype=np.float64)
    chosen: list[int] = (share <= drawn[:, None] * share[:, -1:]).sum(axis=1).tolist()
    return chosen


def _keep_likeliest(probability: Floats, top_p: float) -> None:
    """Set to 0 all but the likeliest symbols that have `top_p` together."""
    order = np.argsort(-probability, kind="stable")
    before = np.cumsum(probability[order]) - probability[order]
    probability[order[before >= top_p]] = 0.0


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


def _check_max_tokens(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgumentError(f"{field}: must be an integer, 1 or more, not {value!r:.40}")


def _check_stop(field: str, value: object) -> None:
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise InvalidArgumentError(f"{field}: must be a list of texts, not {value!r:.40}")


def _check_top_p(field: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 < value <= 1):
        raise InvalidArgumentError(f"{field}: must be a number of more than 0 to 1, not {value!r:.40}")


_CHECKS: Final[dict[str, Callable[[str, Any], None]]] = {
    "prompt": _check_prompt,
    "length": _check_length,
    "temperature": _check_temperature,
    "seed": _check_seed,
    "max_tokens": _check_max_tokens,
    "stop": _check_stop,
    "top_p": _check_top_p,
}
