"""What a request for a text asks for: the fields of its body, checked, and its random numbers. Pure.

The fields are those of OpenAI's API, and `top_k`. A request that is continued after a crash gets the same
random numbers: each depends on the seed and on the number of the token alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from carpool.errors import InvalidArgumentError

TEMPERATURE_MAX: Final = 2.0
STOP_TEXTS_MAX: Final = 4
TOP_K_MAX: Final = 1 << 31
_TEXT_PART: Final = "text"


class Sampling(NamedTuple):
    """How a token is drawn. `temperature` 0: the likeliest one, whatever the others are. `top_p`: of the
    likeliest tokens that have this probability together. `top_k`: of that many; 0: of all."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


class Draw(NamedTuple):
    """How one token is drawn, and the random number for it, from 0 to less than 1."""

    sampling: Sampling
    number: float = 0.0


class Order(NamedTuple):
    """What a request asks for. Either `prompt`, a text or tokens, or `messages` of a chat. None: not said."""

    prompt: str | tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()

    @classmethod
    def read(cls, body: object) -> Order:
        """The order in a body: a prompt, or a map. Raises InvalidArgumentError, which names the field."""
        if isinstance(body, str):
            return cls(body)
        if not isinstance(body, Mapping):
            raise InvalidArgumentError(f"body: must be a text or a map, not {type(body).__name__}")
        if (body.get("prompt") is None) == (body.get("messages") is None):
            raise InvalidArgumentError("body: must have either prompt or messages")
        read = {}
        for name, value in body.items():
            if name not in _READERS:
                raise InvalidArgumentError(f"{name:.60}: unknown; known are {', '.join(_READERS)}")
            if value is not None:
                read[name] = _READERS[name](name, value)
        return cls(**read)

    def sampling(self, usual: Sampling) -> Sampling:
        """With what the model usually does where the request says nothing."""
        return Sampling(
            usual.temperature if self.temperature is None else self.temperature,
            usual.top_p if self.top_p is None else self.top_p,
            usual.top_k if self.top_k is None else self.top_k,
        )

    def key(self, correlation_id: str) -> bytes:
        """The key of its random numbers. Without a seed, the correlation ID is it."""
        source = f"correlation ID {correlation_id}" if self.seed is None else f"seed {self.seed}"
        return hashlib.blake2b(source.encode("utf-8", "surrogatepass"), digest_size=32).digest()


def random_number(key: bytes, token: int) -> float:
    """From 0 to less than 1, for the token of this number."""
    digest = hashlib.blake2b(token.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


# --- fields ------------------------------------------------------------------------------------------------


def _prompt(name: str, value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value):
        return tuple(value)
    raise InvalidArgumentError(f"{name}: must be a text, or a list of tokens, which are whole numbers")


def _messages(name: str, value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise InvalidArgumentError(f"{name}: must be a list of at least one message")
    return tuple(_message(f"{name}[{index}]", message) for index, message in enumerate(value))


def _message(where: str, message: Any) -> Mapping[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidArgumentError(f'{where}: must be a map, such as {{"role": "user", "content": "Hello"}}')
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise InvalidArgumentError(f"{where}.role: must be a text, such as user")
    if isinstance(content, list):
        content = "\n".join(_part(f"{where}.content[{index}]", part) for index, part in enumerate(content))
    if content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise InvalidArgumentError(f"{where}.content: must be a text, or a list of parts of the type text")
    return {**message, "content": content}


def _part(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != _TEXT_PART or not isinstance(part.get("text"), str):
        raise InvalidArgumentError(
            f'{where}: must be a text, as in {{"type": "text", "text": "Hello"}}; nothing else is taken'
        )
    return str(part["text"])


def _stop(name: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > STOP_TEXTS_MAX:
        raise InvalidArgumentError(f"{name}: must be a list of at most {STOP_TEXTS_MAX} texts")
    if not all(isinstance(text, str) and text for text in texts):
        raise InvalidArgumentError(f"{name}: must have texts that are not empty")
    return tuple(texts)


def _whole(least: int, most: int | None = None) -> Callable[[str, Any], int]:
    """A reader of whole numbers from `least` to `most`."""
    limits = f"from {least:,}" if most is None else f"from {least:,} to {most:,}"

    def read(name: str, value: Any) -> int:
        if type(value) is not int or value < least or (most is not None and value > most):
            raise InvalidArgumentError(f"{name}: must be a whole number {limits}, not {value!r:.40}")
        return value

    return read


def _seed(name: str, value: Any) -> int:
    if type(value) is not int:
        raise InvalidArgumentError(f"{name}: must be a whole number, not {value!r:.40}")
    return value


def _temperature(name: str, value: Any) -> float:
    if not _is_number(value) or not 0 <= value <= TEMPERATURE_MAX:
        raise InvalidArgumentError(
            f"{name}: must be a number from 0 to {TEMPERATURE_MAX:g}, not {value!r:.40}"
        )
    return float(value)


def _top_p(name: str, value: Any) -> float:
    if not _is_number(value) or not 0 < value <= 1:
        raise InvalidArgumentError(f"{name}: must be a number above 0, and at most 1, not {value!r:.40}")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_READERS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "prompt": _prompt,
    "messages": _messages,
    "max_tokens": _whole(1),
    "temperature": _temperature,
    "top_p": _top_p,
    "top_k": _whole(0, TOP_K_MAX),
    "seed": _seed,
    "stop": _stop,
}


def checked_tokens(name: str, tokens: Sequence[int], vocabulary: int) -> Sequence[int]:
    """Tokens that the model has. Raises InvalidArgumentError for one that it has not."""
    for index, token in enumerate(tokens):
        if token >= vocabulary:
            raise InvalidArgumentError(
                f"{name}[{index}]: {token:,} is no token: the model has {vocabulary:,}, from 0"
            )
    return tokens
