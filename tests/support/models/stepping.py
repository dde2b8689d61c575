"""Stepping models whose output can be computed without them: each chunk depends on all before it.

    chunk i = the first letters of a hash of the correlation ID, `seed` in the body, and all chunks before it

A body is a map: `length`, the number of chunks; `seed`; `step_s`, what a step takes (the longest of those
that take part); `gate`, a file for which the request waits before its first chunk, or before that with the
number `gate_at`; and faults at a chunk: `kills_at`, `raises_at`; or `kills_after`, the number of steps after
each beginning.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

SLOTS = 8


def chunk_after(correlation_id: str, seed: object, before: str) -> str:
    """The chunk that follows the text `before`."""
    return hashlib.sha256(f"{correlation_id}|{seed}|{before}".encode()).hexdigest()[:6] + " "


def text_of(correlation_id: str, length: int, seed: object = None) -> str:
    """The whole output."""
    text = ""
    for _ in range(length):
        text += chunk_after(correlation_id, seed, text)
    return text


class Chain:
    """Emits a chunk for each request in each step."""

    max_batch_size = SLOTS

    def begin(self, requests: Sequence[Any]) -> None:
        for request in requests:
            chunks = request.chunks
            request.state = {"text": "".join(chunks), "at": len(chunks), "begun_at": len(chunks)}

    def step(self, requests: Sequence[Any]) -> None:
        time.sleep(max(float(request.body.get("step_s", 0)) for request in requests))
        for request in requests:
            self._step(request)

    def _step(self, request: Any) -> None:
        body, state = request.body, request.state
        gate = body.get("gate")
        if gate and state["at"] == body.get("gate_at", 0) and not Path(gate).exists():
            return
        if state["at"] in (body.get("kills_at"), state["begun_at"] + body.get("kills_after", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
        if state["at"] == body.get("raises_at"):
            raise ValueError(f"chunk {state['at']} is not possible")
        if state["at"] < body["length"]:
            chunk = chunk_after(request.correlation_id, body.get("seed"), state["text"])
            state["text"] += chunk
            state["at"] += 1
            request.emit(chunk)
        if state["at"] >= body["length"]:
            request.finish()


class Named(Chain):
    """Has a version."""

    version = "1"


class Other(Chain):
    """The same model in another version."""

    version = "2"


class Forgetful(Chain):
    """Cannot go on from chunks."""

    continues = False


def countdown(body: int) -> Iterator[int]:
    """The numbers from `body` to 1."""
    yield from range(body, 0, -1)


def words(body: str) -> Iterator[str]:
    """Forty words after the text `body`."""
    for number in range(40):
        yield f"{body} {number} "


def endless(body: dict[str, Any]) -> Iterator[str]:
    """The text `text`, `count` times or without an end. A file `closed` is written when that is over."""
    try:
        yield from repeat(body["text"], *([body["count"]] if "count" in body else []))
    finally:
        if "closed" in body:
            Path(body["closed"]).touch()


class Told(Chain):
    """Speaks completions and chat: writes `max_tokens` chunks of a text that depends on the prompt alone, or
    on the last message."""

    speaks = ("completions", "chat")
    step_s = 0.01

    def begin(self, requests: Sequence[Any]) -> None:
        for request in requests:
            request.state = {"text": "".join(request.chunks), "at": len(request.chunks)}

    def _step(self, request: Any) -> None:
        body, state = request.body, request.state
        prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        if state["at"] < body["max_tokens"]:
            chunk = chunk_after("", prompt, state["text"])
            state["text"] += chunk
            state["at"] += 1
            request.emit(chunk)
        if state["at"] >= body["max_tokens"]:
            request.finish()

    def step(self, requests: Sequence[Any]) -> None:
        time.sleep(self.step_s)
        for request in requests:
            self._step(request)
