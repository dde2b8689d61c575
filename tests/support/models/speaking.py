"""Models that speak OpenAI's API, whose texts can be computed without them.

A prompt, or the last message of a chat, may have words such as `length=5`: see `options_of`. The text is
`text_of(prompt)`: a piece for each number from 0 to `length`.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from carpool import InvalidArgumentError, StopTexts


def prompt_of(body: dict[str, Any]) -> str:
    """The prompt, or the last message."""
    text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
    if not isinstance(text, str):
        raise InvalidArgumentError("prompt: must be text, not token IDs")
    return text


def options_of(prompt: str) -> dict[str, str]:
    """`length`: pieces; `step_s`: what each takes; `raise`: the piece at which the model raises; `kill`: at
    which it ends its process; `gate`: a file for which it waits, before the piece `gate_at`; `closed`: one
    that it writes at the end."""
    return dict(word.split("=", 1) for word in prompt.split() if "=" in word)


def piece_of(prompt: str, at: int) -> str:
    """A piece of the text: some letters that cannot be guessed."""
    return hashlib.sha256(f"{prompt}|{at}".encode()).hexdigest()[:6] + " "


def text_of(prompt: str, length: int) -> str:
    """The whole text."""
    return "".join(piece_of(prompt, at) for at in range(length))


class Story:
    """Writes a piece for each request in each step, with its tokens, and tells how it ended."""

    speaks = ("completions", "chat")
    understands = ("presence_penalty",)
    max_batch_size = 8

    def validate(self, body: dict[str, Any]) -> None:
        prompt_of(body)

    def begin(self, requests: Sequence[Any]) -> None:
        for request in requests:
            prompt = prompt_of(request.body)
            stops = StopTexts(request.body.get("stop", ()))
            stops.add(text_of(prompt, len(request.chunks)))  # what a process wrote that died
            request.state = prompt, stops

    def step(self, requests: Sequence[Any]) -> None:
        asked = [options_of(request.state[0]) for request in requests]
        time.sleep(max(float(options.get("step_s", 0)) for options in asked))
        for request, options in zip(requests, asked, strict=True):
            self._step(request, options)

    def _step(self, request: Any, options: dict[str, str]) -> None:
        prompt, stops = request.state
        at, length = request.emitted, int(options.get("length", 3))
        if "gate" in options and at >= int(options.get("gate_at", 0)) and not Path(options["gate"]).exists():
            return
        if at == int(options.get("raise", -1)):
            raise ValueError(f"piece {at} is not possible")
        if at == int(options.get("kill", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
        most = request.body.get("max_tokens", length)
        piece = {"text": stops.add(piece_of(prompt, at)), "token": at}
        if not stops.has_stopped and at + 1 < min(most, length):
            request.emit(piece)
            return
        piece["text"] += stops.rest()
        reason = "length" if most < length and not stops.has_stopped else "stop"
        counts = {"prompt_tokens": len(prompt), "completion_tokens": at + 1}
        request.emit({**piece, "finish_reason": reason, **counts})
        request.finish()


def tell(body: dict[str, Any]) -> Iterator[str]:
    """Yields texts, some of them empty, without counts."""
    options = options_of(body["prompt"])
    try:
        for at in range(int(options.get("length", 3))):
            time.sleep(float(options.get("step_s", 0)))
            yield from (piece_of(body["prompt"], at), "")
    finally:
        if "closed" in options:
            Path(options["closed"]).touch()


tell.speaks = "completions"  # type: ignore[attr-defined]


def repeat(batch: Sequence[dict[str, Any]]) -> list[Any]:
    """A plain function: the prompt again, as one piece or as a list of them."""
    return [body["prompt"] if len(body["prompt"]) < 10 else [*body["prompt"]] for body in batch]


repeat.speaks = "completions"  # type: ignore[attr-defined]


def call_tools(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields pieces with log probabilities if asked for, and then a call of each tool: of the first one in
    parts."""
    for at in range(2):
        text = piece_of(prompt_of(body), at)
        token = {"token": text, "logprob": -0.5 * at, "bytes": [*text.encode()], "top_logprobs": []}
        is_chat = "messages" in body
        told = (
            {"content": [token], "refusal": None} if is_chat else {"tokens": [text], "text_offset": [7 * at]}
        )
        yield {"text": text, "token": at, **({"logprobs": told} if body.get("logprobs") else {})}
    for number, tool in enumerate(body.get("tools", ())):
        function = {"name": tool["function"]["name"], "arguments": '{"at": 1}'}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        if number:
            yield {"tool_calls": [call]}
        else:
            begun = {**call, "index": 0, "function": {**function, "arguments": '{"at":'}}
            yield {"tool_calls": [begun]}
            yield {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]}


call_tools.speaks = ("completions", "chat")  # type: ignore[attr-defined]
call_tools.understands = ("logprobs", "top_logprobs", "tools")  # type: ignore[attr-defined]


class Vectors:
    """A vector of the batch's size, the length of the input, and a third that is not exact in FP32."""

    speaks = "embeddings"
    max_batch_size = 64

    def validate(self, body: dict[str, Any]) -> None:
        if not isinstance(body["input"], str):
            raise InvalidArgumentError("input: must be text")

    def predict(self, batch: Sequence[dict[str, Any]]) -> list[Any]:
        def vector(text: str, size: int) -> Any:
            return np.array([len(batch), len(text), 1 / 3, *[0.0] * (size - 3)], np.float32)

        return [
            {
                "embedding": vector(body["input"], body.get("dimensions", 3)),
                "prompt_tokens": len(body["input"]),
            }
            for body in batch
        ]
