"""What a model that speaks completions or chat writes: pieces, read from its results and chunks. Pure.

A piece is a text, or a map with any of `text`, `finish_reason`, `prompt_tokens`, `completion_tokens`; and
`logprobs` and `tool_calls`, if the model understands the parameters that ask for them. Other names in it are
the model's own. A list is several pieces, and null is none.

Parts of `logprobs` and of a tool call are joined as OpenAI's clients join those of a stream: lists and the
texts of arguments one behind the other, and of anything else the last value stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from carpool.errors import InternalError
from carpool.messages.requests import JSON
from carpool.spoken import CHAT, COMPLETIONS
from carpool.wire.bodies import decode_result

FINISH_REASONS: Final = ("stop", "length", "tool_calls", "content_filter")
LOGPROBS: Final = "logprobs"
TOOL_CALLS: Final = "tool_calls"
# By interface: what pieces may have, by the parameter that asks for it.
_EXTRAS: Final[Mapping[str, Mapping[str, str]]] = {
    COMPLETIONS: {"logprobs": LOGPROBS},
    CHAT: {"logprobs": LOGPROBS, "tools": TOOL_CALLS},
}
_COUNTS: Final = ("prompt_tokens", "completion_tokens")
_IN_PARTS: Final = ("arguments", "input")  # texts of a tool call


class Usage(NamedTuple):
    """How many tokens a request had, and how many were made for it."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def document(self) -> dict[str, int]:
        """As clients read it."""
        return {**self._asdict(), "total_tokens": sum(self)}


def extras_of(interface: str, understood: Iterable[str]) -> tuple[str, ...]:
    """The names of what pieces may have beside their text and counts, if the model understands these."""
    return tuple(extra for parameter, extra in _EXTRAS[interface].items() if parameter in understood)


class Extras(NamedTuple):
    """What pieces have beside their text. `tool_calls`: by number, joined."""

    logprobs: dict[str, Any] | None
    tool_calls: dict[int, dict[str, Any]]


class Written:
    """What a model has written for one request so far: how it ended, and its counts. `names`: which of
    LOGPROBS and TOOL_CALLS its pieces may have; else these are names of its own."""

    __slots__ = (
        "_calls", "_calls_count", "_finish_reason", "_logprobs", "_names",
        "completion_tokens", "prompt_tokens",
    )  # fmt: skip

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self._names = names
        self._finish_reason: str | None = None
        self._logprobs: dict[str, Any] | None = None
        self._calls: dict[int, dict[str, Any]] = {}
        self._calls_count = 0

    @property
    def finish_reason(self) -> str:
        """As the model told it last, or else what is usual."""
        return self._finish_reason or ("tool_calls" if self._calls_count else "stop")

    def take_extras(self) -> Extras | None:
        """What came beside the text since the last call; None if nothing did."""
        if self._logprobs is None and not self._calls:
            return None
        extras = Extras(self._logprobs, self._calls)
        self._logprobs, self._calls = None, {}
        return extras

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
            self._finish_reason = reason
        for name in _COUNTS:
            count = piece.get(name)
            if count is not None:
                setattr(self, name, checked_count(name, count))
        for name in self._names:
            extra = piece.get(name)
            if extra is not None:
                _ADD[name](self, extra)
        text = piece.get("text", "")
        if type(text) is not str:
            raise _wrong("text", text, "text")
        return text

    def _add_logprobs(self, logprobs: Any) -> None:
        if type(logprobs) is not dict:
            raise _wrong(LOGPROBS, logprobs, "an object")
        self._logprobs = self._logprobs or {}
        for name, value in logprobs.items():
            before = self._logprobs.get(name)
            if type(before) is list and type(value) is list:
                before += value
            elif value is not None or name not in self._logprobs:
                self._logprobs[name] = value

    def _add_tool_calls(self, calls: Any) -> None:
        if type(calls) is not list or not all(type(call) is dict for call in calls):
            raise _wrong(TOOL_CALLS, calls, "a list of objects")
        for call in calls:
            number = call.pop("index", None)
            if number is None:  # it is whole
                number = self._calls_count
            elif type(number) is not int or number < 0:
                raise _wrong(f"{TOOL_CALLS}.index", number, "a whole number, 0 or more")
            self._calls_count = max(self._calls_count, number + 1)
            _join_call(self._calls.setdefault(number, {}), call)

    @property
    def usage(self) -> Usage | None:
        """Its counts, if the model has told both."""
        if self.prompt_tokens is None or self.completion_tokens is None:
            return None
        return Usage(self.prompt_tokens, self.completion_tokens)


_ADD: Final = {LOGPROBS: Written._add_logprobs, TOOL_CALLS: Written._add_tool_calls}


def _join_call(call: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        before = call.get(name)
        if type(before) is dict and type(value) is dict:
            _join_call(before, value)
        elif name in _IN_PARTS and type(before) is str and type(value) is str:
            call[name] = before + value
        elif value is not None or name not in call:
            call[name] = value


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
