"""What a model that speaks completions or chat writes: pieces, read from its results and chunks. Pure.

A piece is a text, or a map with any of `text`, `finish_reason`, `prompt_tokens`, `completion_tokens`. Other
names in it are the model's own. A list is several pieces, and null is none.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from carpool.errors import InternalError
from carpool.messages.requests import JSON
from carpool.wire.bodies import decode_result

FINISH_REASONS: Final = ("stop", "length", "tool_calls", "content_filter")
_COUNTS: Final = ("prompt_tokens", "completion_tokens")


class Usage(NamedTuple):
    """How many tokens a request had, and how many were made for it."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def document(self) -> dict[str, int]:
        """As clients read it."""
        return {**self._asdict(), "total_tokens": sum(self)}


class Written:
    """What a model has written for one request so far: how it ended, and its counts."""

    __slots__ = ("completion_tokens", "finish_reason", "prompt_tokens")

    def __init__(self) -> None:
        self.finish_reason = "stop"
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None

    def add(self, content_type: str, body: bytes) -> str:
        """Take a result or a chunk; return its text. Raises InternalError for what is no piece."""
        return self._add(read_value(content_type, body))

    def _add(self, value: Any) -> str:
        if type(value) is str:
            return value
        if type(value) is dict:
            return self._add_map(value)
        if type(value) is list:
            return "".join([self._add(one) for one in value])
        if value is None:
            return ""
        raise InternalError(
            f"the model's result has the type {type(value).__name__}; a model that speaks completions or "
            "chat writes texts, or maps with a text"
        )

    def _add_map(self, piece: dict[Any, Any]) -> str:
        reason = piece.get("finish_reason")
        if reason is not None:
            if reason not in FINISH_REASONS:
                raise _wrong("finish_reason", reason, f"one of {', '.join(FINISH_REASONS)}")
            self.finish_reason = reason
        for name in _COUNTS:
            count = piece.get(name)
            if count is not None:
                setattr(self, name, checked_count(name, count))
        text = piece.get("text", "")
        if type(text) is not str:
            raise _wrong("text", text, "text")
        return text

    @property
    def usage(self) -> Usage | None:
        """Its counts, if the model has told both."""
        if self.prompt_tokens is None or self.completion_tokens is None:
            return None
        return Usage(self.prompt_tokens, self.completion_tokens)


def usage_of(all_written: list[Written]) -> Usage | None:
    """The sums of the counts, if the model has told all of them."""
    usages = [written.usage for written in all_written]
    known = [usage for usage in usages if usage is not None]
    return Usage(*map(sum, zip(*known, strict=True))) if len(known) == len(usages) else None


def read_value(content_type: str, body: bytes) -> Any:
    """The value of a result. Raises InternalError for one that is bytes."""
    if content_type == JSON:
        try:
            return msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # numbers of any size
    value = decode_result(content_type, body)
    if isinstance(value, bytes):
        raise InternalError(f"the model's result is bytes of {content_type:.60}")
    return value


def checked_count(name: str, count: Any) -> int:
    """A number of tokens that a model tells. Raises InternalError."""
    if type(count) is not int or count < 0:
        raise _wrong(name, count, "a whole number, 0 or more")
    return count


def _wrong(name: str, value: Any, expected: str) -> InternalError:
    return InternalError(f"the model's result has a {name} {value!r:.60}, which must be {expected}")
