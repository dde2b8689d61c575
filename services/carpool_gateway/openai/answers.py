"""Answers of OpenAI's API as bytes: documents of completions and chat, and the events of their streams. Pure.

    data: {"id":"cmpl-7","object":"text_completion",...,"choices":[{"index":0,"text":" upon",...}]}

    data: [DONE]

An ID is made of a correlation ID, and is the same in all events of a stream. `finish_reason` is null in each,
but for one at the end of each choice, which has no text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from carpool.messages.requests import JSON
from carpool.spoken import CHAT, COMPLETIONS
from carpool_gateway.answers import HttpError
from carpool_gateway.openai.errors import error_document
from carpool_gateway.openai.pieces import Extras, Usage, Written, usage_of

DONE: Final = b"data: [DONE]\n\n"
COMMENT: Final = b":\n\n"
EVENT_HEADERS: Final = (
    b"content-type: text/event-stream\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
)
# Some clients take these characters for ends of lines.
_LINE_ENDS: Final = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


class Form(NamedTuple):
    """How the answers of an interface differ. `parts`: what stands before and behind a text, as JSON, in the
    choice of an event; `empty`: both, where there is no text."""

    id_prefix: str
    whole: str
    event: str
    parts: tuple[bytes, bytes]
    empty: bytes


FORMS: Final = {
    COMPLETIONS: Form("cmpl-", "text_completion", "text_completion", (b'"text":', b""), b'"text":""'),
    CHAT: Form(
        "chatcmpl-", "chat.completion", "chat.completion.chunk", (b'"delta":{"content":', b"}"), b'"delta":{}'
    ),
}
_ROLE: Final = b'"delta":{"role":"assistant","content":""}'


# --- whole answers -----------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """What was written for one prompt."""

    text: str
    written: Written


def document(
    interface: str, choices: Sequence[Choice], *, correlation_id: str, model: str, created_s: int
) -> bytes:
    """The answer to a request that wants no stream, as JSON."""
    form = FORMS[interface]
    usage = usage_of([choice.written for choice in choices])
    return msgspec.json.encode(
        {
            "id": f"{form.id_prefix}{correlation_id}",
            "object": form.whole,
            "created": created_s,
            "model": model,
            "choices": [_choice(interface, index, choice) for index, choice in enumerate(choices)],
            "usage": None if usage is None else usage.document,
        }
    )


def _choice(interface: str, index: int, choice: Choice) -> dict[str, Any]:
    written = choice.written
    extras = written.take_extras()
    logprobs, calls = (None, {}) if extras is None else extras
    text: dict[str, Any] = {"text": choice.text}
    if interface == CHAT:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text}
        if calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [calls[number] for number in sorted(calls)]
        text = {"message": message}
    return {"index": index, **text, "logprobs": logprobs, "finish_reason": written.finish_reason}


def model_document(name: str, created_s: int, speaks: Sequence[str]) -> dict[str, Any]:
    """A model, as clients list them."""
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "carpool",
        "speaks": list(speaks),
    }


# --- events ------------------------------------------------------------------------------------------------


class EventFormat:
    """The events of one stream. `has_usage`: the client wants the usage at the end."""

    def __init__(
        self, interface: str, *, correlation_id: str, model: str, created_s: int, has_usage: bool
    ) -> None:
        self._form = form = FORMS[interface]
        self._head = (
            f'data: {{"id":"{form.id_prefix}{correlation_id}","object":"{form.event}","created":{created_s},'
            f'"model":{json.dumps(model)},"choices":['
        ).encode()
        self._tail = b'],"usage":null}\n\n' if has_usage else b"]}\n\n"
        self.has_role = interface == CHAT

    def text(self, index: int, text: bytes) -> bytes:
        """The event of a text, which is a JSON string."""
        before, behind = self._form.parts
        return self._event(index, before + text + behind, b"null")

    def piece(self, index: int, text: bytes, extras: Extras) -> bytes:
        """The event of a text, which is a JSON string or empty, and of what came with it."""
        before, behind = self._form.parts
        told = before + text + behind if text else self._form.empty
        if extras.tool_calls:
            delta: dict[str, Any] = {"content": msgspec.Raw(text)} if text else {}
            calls = [{"index": number, **call} for number, call in extras.tool_calls.items()]
            told = b'"delta":' + _on_one_line(msgspec.json.encode({**delta, "tool_calls": calls}))
        return self._event(index, told, b"null", _on_one_line(msgspec.json.encode(extras.logprobs)))

    def role(self, index: int) -> bytes:
        """The first event of a choice of a chat."""
        return self._event(index, _ROLE, b"null")

    def finish(self, index: int, reason: str) -> bytes:
        """The last event of a choice."""
        return self._event(index, self._form.empty, b'"%b"' % reason.encode())

    def usage(self, usage: Usage) -> bytes:
        """The event with the usage, behind all choices."""
        tail = b'],"usage":%b}\n\n' % json.dumps(usage.document, separators=(",", ":")).encode()
        return self._head + tail

    def _event(self, index: int, text: bytes, reason: bytes, logprobs: bytes = b"null") -> bytes:
        return b'%b{"index":%d,%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._head,
            index,
            text,
            logprobs,
            reason,
            self._tail,
        )


def error_event(error: HttpError) -> bytes:
    """The last event of a stream that fails."""
    return b"data: %b\n\n" % error_document(error)


def text_of(content_type: str, body: bytes, written: Written) -> bytes:
    """The text of a chunk or a result as a JSON string, which `written` takes; empty if there is none.
    Raises InternalError.

    A chunk that is a text is JSON already, so it is not decoded.
    """
    if content_type != JSON or body[:1] != b'"':
        body = msgspec.json.encode(written.add(content_type, body))
    return b"" if len(body) == len(b'""') else _on_one_line(body)


def _on_one_line(document: bytes) -> bytes:
    """JSON in which no client finds the end of a line."""
    if not document.isascii():
        for character, escaped in _LINE_ENDS:
            if character in document:
                document = document.replace(character, escaped)
    return document
