"""Requests of OpenAI's API -> bodies for a model. Pure.

    {"model": "writer", "prompt": ["a", "b"], "max_tokens": 5, "stop": "x"}
        -> {"prompt": "a", "max_tokens": 5, "stop": ["x"]} and {"prompt": "b", ...}

Each prompt, and each input of embeddings, is a request of its own. Parameters are checked here, so that
models need not; they get those of `_USUAL`, and those that they understand as the client sent them. One
that has an effect, and that the model does not understand, is refused. Names that are not known are ignored,
because clients begin to send new ones.

Why: docs/decisions/0107.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from carpool.keys import MODEL_NAME
from carpool.spoken import CHAT, COMPLETIONS, EMBEDDINGS, Spoken
from carpool_gateway.openai.errors import RequestError, unknown_model
from carpool_gateway.openai.pieces import extras_of

PROMPTS_MAX: Final = 2048  # in one call, as OpenAI has it for embeddings
_STOP_MAX: Final = 4
_WHOLE_MAX: Final = 1 << 63
_PATHS: Final = {
    COMPLETIONS: "/v1/completions",
    CHAT: "/v1/chat/completions",
    EMBEDDINGS: "/v1/embeddings",
}

Document = Mapping[str, Any]


class Asked(NamedTuple):
    """What a client asks for. `bodies`: of the requests for the model, as JSON. `has_tokens`: some prompt is
    token IDs. `is_base64`: embeddings are wanted as base64. `extras`: what an answer may have beside its
    text, see `pieces.Written`."""

    bodies: list[bytes]
    is_stream: bool = False
    has_usage: bool = False
    has_tokens: bool = False
    is_base64: bool = False
    extras: tuple[str, ...] = ()


# --- the document ------------------------------------------------------------------------------------------


def read_document(body: bytes) -> Document:
    """The JSON object in a body. Raises RequestError."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = "it is empty" if not body.strip() else str(error)
        raise RequestError(f"the body must be a JSON object: {why:.200}", None) from None
    except RecursionError:
        raise RequestError("the body must be a JSON object: it is nested too deep", None) from None
    if type(document) is not dict:
        raise RequestError(f"the body must be a JSON object, and is {_kind_of(document)}", None)
    return document


def model_of(document: Document) -> str:
    """The name of the model that is asked for. Raises RequestError, also for what cannot be such a name."""
    name = document.get("model")
    if name is None:
        raise _missing("model")
    if type(name) is not str:
        raise _wrong_type("model", "text", name)
    if not MODEL_NAME.fullmatch(name):
        raise unknown_model(name)
    return name


def read_request(interface: str, document: Document, spoken: Spoken, model: str) -> Asked:
    """What a document asks of a model through this interface. Raises RequestError."""
    if interface not in spoken.speaks:
        raise RequestError(_does_not_speak(interface, spoken, model), "model", "unsupported_interface")
    return _READERS[interface](document, spoken.understands)


def _does_not_speak(interface: str, spoken: Spoken, model: str) -> str:
    if not spoken.speaks:
        return f"the model {model!r} does not speak OpenAI's API: it declares no `speaks`"
    others = " and ".join(_PATHS[name] for name in spoken.speaks)
    return f"the model {model!r} does not speak {interface}: use {others}"


# --- the interfaces ----------------------------------------------------------------------------------------


def _read_completions(document: Document, understood: Iterable[str]) -> Asked:
    prompts = _prompts("prompt", document)
    return _asked("prompt", prompts, document, understood, _NEUTRAL_COMPLETIONS, COMPLETIONS)


def _read_chat(document: Document, understood: Iterable[str]) -> Asked:
    messages = document.get("messages")
    if messages is None:
        raise _missing("messages")
    if type(messages) is not list:
        raise _wrong_type("messages", "a list of messages", messages)
    if not messages:
        raise _wrong("messages", "must have at least one message")
    read = [_message(f"messages[{at}]", one, understood) for at, one in enumerate(messages)]
    return _asked("messages", [read], document, understood, _NEUTRAL_CHAT, CHAT)


def _asked(
    name: str,
    prompts: list[Any],
    document: Document,
    understood: Iterable[str],
    neutral: Mapping[str, Any],
    interface: str,
) -> Asked:
    _check_neutral(document, neutral, understood)
    shared = _parameters(document, understood)
    is_stream, has_usage = _stream(document)
    bodies = [msgspec.json.encode({name: prompt, **shared}) for prompt in prompts]
    extras = extras_of(interface, understood)
    return Asked(bodies, is_stream, has_usage, _has_tokens(prompts), extras=extras)


def _read_embeddings(document: Document, understood: Iterable[str]) -> Asked:
    inputs = _prompts("input", document)
    shared = {name: document[name] for name in understood if document.get(name) is not None}
    dimensions = document.get("dimensions")
    if dimensions is not None:
        shared["dimensions"] = _whole("dimensions", dimensions, 1)
    encoding = document.get("encoding_format")
    if encoding not in (None, "float", "base64"):
        raise _wrong("encoding_format", f"is {encoding!r:.60}; there are float and base64")
    bodies = [msgspec.json.encode({"input": one, **shared}) for one in inputs]
    return Asked(bodies, has_tokens=_has_tokens(inputs), is_base64=encoding == "base64")


_READERS: Final = {COMPLETIONS: _read_completions, CHAT: _read_chat, EMBEDDINGS: _read_embeddings}


# --- prompts and messages ----------------------------------------------------------------------------------


def _prompts(name: str, document: Document) -> list[Any]:
    """The prompts or inputs of a call: of one text, a list of texts, token IDs, or a list of these."""
    given = document.get(name)
    if given is None:
        raise _missing(name)
    if type(given) is str:
        return [given]
    if type(given) is not list:
        raise _wrong_type(name, "text, token IDs, or a list of these", given)
    if not given:
        raise _wrong(name, "is an empty list")
    if type(given[0]) is int:
        return [_tokens(name, given)]
    if len(given) > PROMPTS_MAX:
        raise _wrong(name, f"has {len(given)} items; at most {PROMPTS_MAX} are possible in one call")
    for at, one in enumerate(given):
        if type(one) is list:
            _tokens(f"{name}[{at}]", one)
        elif type(one) is not str:
            raise _wrong_type(f"{name}[{at}]", "text, or a list of token IDs", one)
    return given


def _tokens(name: str, tokens: list[Any]) -> list[int]:
    if not tokens:
        raise _wrong(name, "is an empty list")
    if {*map(type, tokens)} != {int} or min(tokens) < 0 or max(tokens) >= _WHOLE_MAX:
        raise _wrong(name, "must be token IDs: whole numbers, 0 or more")
    return tokens


def _has_tokens(prompts: list[Any]) -> bool:
    return any(type(prompt) is list and type(prompt[0]) is int for prompt in prompts)


def _message(where: str, message: Any, understood: Iterable[str]) -> Mapping[str, Any]:
    """A message whose content is text; or parts, of which the model understands each kind."""
    if type(message) is not dict:
        raise _wrong_type(where, "an object", message)
    role, content = message.get("role"), message.get("content")
    if type(role) is not str or not role:
        raise _wrong_type(f"{where}.role", "text", role)
    if type(content) is str or (content is None and role == "assistant"):
        return message
    if type(content) is not list:
        raise _wrong_type(f"{where}.content", "text, or a list of parts", content)
    texts: list[str] = []
    for at, part in enumerate(content):
        kind = part.get("type") if type(part) is dict else None
        if kind == "text" and type(part.get("text")) is str:
            texts.append(part["text"])
        elif type(kind) is not str or kind == "text":
            raise _wrong_type(f"{where}.content[{at}]", "a part such as {'type': 'text', 'text': ...}", part)
        elif kind not in understood:
            raise _unsupported(f"{where}.content[{at}].type", f"{kind!r:.60}")
    if len(texts) < len(content):
        return message
    return {**message, "content": "\n".join(texts)}


# --- parameters --------------------------------------------------------------------------------------------

# What has no effect, by parameter: of one that the model does not understand, anything else is refused.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
}
_NEUTRAL_COMPLETIONS: Final[Mapping[str, tuple[Any, ...]]] = {
    **_NEUTRAL,
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "suffix": ("",),
}
_NEUTRAL_CHAT: Final[Mapping[str, tuple[Any, ...]]] = {
    **_NEUTRAL,
    "audio": (),
    "function_call": ("none", "auto"),  # as long as there are no functions
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}


_PENALTIES: Final = frozenset({"frequency_penalty", "presence_penalty"})


def _check_neutral(
    document: Document, neutral: Mapping[str, tuple[Any, ...]], understood: Iterable[str]
) -> None:
    """Refuse parameters that would have an effect, and that the model does not understand."""
    for name, without_effect in neutral.items():
        value = document.get(name)
        if value is None or name in understood:
            continue
        if not any(value == one and (type(value) is bool) == (type(one) is bool) for one in without_effect):
            raise _unsupported(name, f"{value!r:.60}")


def _parameters(document: Document, understood: Iterable[str]) -> dict[str, Any]:
    """The parameters that are the same for all prompts of a call, checked."""
    found: dict[str, Any] = {}
    for name, read in _USUAL.items():
        value = document.get(name)
        if value is not None:
            found[name] = read(name, value)
    limit = found.pop("max_completion_tokens", None)
    if limit is not None:
        found["max_tokens"] = limit
    if not found.get("stop", True):
        del found["stop"]
    for name in understood:
        if document.get(name) is not None:
            found[name] = document[name]
    for name in _PENALTIES & found.keys():
        _number(name, found[name], 2.0, -2.0)
    return found


def _whole(name: str, value: Any, least: int) -> int:
    if type(value) is not int:
        raise _wrong_type(name, "a whole number", value)
    if not least <= value < _WHOLE_MAX:
        raise _wrong(name, f"is {value}; it must be at least {least}, and of 63 bits")
    return value


def _number(name: str, value: Any, highest: float, lowest: float = 0.0) -> float:
    if type(value) is not float and type(value) is not int:
        raise _wrong_type(name, "a number", value)
    if not lowest <= value <= highest:
        raise _wrong(name, f"is {value}; it must be from {lowest:g} to {highest:g}")
    return value


def _top_p(name: str, value: Any) -> float:
    if not _number(name, value, 1.0):
        raise _wrong(name, "is 0; it must be more than 0, and at most 1")
    return float(value)


def _stop(name: str, value: Any) -> list[str]:
    texts = [value] if type(value) is str else value
    if type(texts) is not list:
        raise _wrong_type(name, "text, or a list of texts", value)
    for at, text in enumerate(texts):
        if type(text) is not str:
            raise _wrong_type(f"{name}[{at}]", "text", text)
        if not text:
            raise _wrong(name, "has an empty text, which would end every text at once")
    if len(texts) > _STOP_MAX:
        raise _wrong(name, f"has {len(texts)} texts; at most {_STOP_MAX} are possible")
    return texts


_USUAL: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "max_tokens": lambda name, value: _whole(name, value, 1),
    "max_completion_tokens": lambda name, value: _whole(name, value, 1),
    "temperature": lambda name, value: _number(name, value, 2.0),
    "top_p": _top_p,
    "stop": _stop,
    "seed": lambda name, value: _whole(name, value, -_WHOLE_MAX),
}


def _stream(document: Document) -> tuple[bool, bool]:
    """Whether a stream is wanted, and whether it is to tell the usage."""
    stream, options = document.get("stream"), document.get("stream_options")
    if stream is not None and type(stream) is not bool:
        raise _wrong_type("stream", "true or false", stream)
    if options is None:
        return bool(stream), False
    if not stream:
        raise _wrong("stream_options", "is only possible with stream: true")
    if type(options) is not dict:
        raise _wrong_type("stream_options", "an object", options)
    has_usage = options.get("include_usage")
    if has_usage is not None and type(has_usage) is not bool:
        raise _wrong_type("stream_options.include_usage", "true or false", has_usage)
    return True, bool(has_usage)


# --- errors ------------------------------------------------------------------------------------------------


def _missing(name: str) -> RequestError:
    return RequestError(f"{name}: is missing", name, "missing_required_parameter")


def _wrong(name: str, why: str) -> RequestError:
    return RequestError(f"{name}: {why}", name, "invalid_value")


def _wrong_type(name: str, expected: str, value: Any) -> RequestError:
    return RequestError(f"{name}: must be {expected}, and is {_kind_of(value)}", name, "invalid_type")


def _unsupported(name: str, value: str) -> RequestError:
    return RequestError(f"{name}: the model does not support {value}", name, "unsupported_parameter")


def _kind_of(value: Any) -> str:
    return _KINDS[type(value)]


_KINDS: Final = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}
