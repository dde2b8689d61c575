"""Dead letters are sent again or dropped, one after the other, and what became of them is counted.

Why: docs/decisions/0117.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

from carpool.keys import Keys
from carpool.model_settings import ModelSettings
from carpool.store.connection import Link
from carpool.store.dead_letters import DeadLetters
from carpool.store.dead_pages import LetterId, show_id
from carpool.store.directory import Directory
from carpool.store.operations import Operations
from carpool.wire.audit import Actor
from carpool_console.formats import plural

Action = Literal["replay", "drop"]
DONE: Final[dict[Action, str]] = {"replay": "sent again", "drop": "dropped"}


@dataclass
class Tally:
    """What became of the letters that were meant. `left`: their bodies are gone, so they cannot be sent."""

    meant: int
    done: int = 0
    gone: int = 0
    left: int = 0

    @property
    def looked_at(self) -> int:
        """Of those that were meant."""
        return self.done + self.gone + self.left

    def describe(self, action: Action, model: str) -> str:
        """Such as `37 of 40 requests of square sent again; 3 were gone`."""
        of = f" of {plural(self.meant, 'request')}" if self.done != self.meant else ""
        number = f"{self.done:,}{of}" if of else plural(self.done, "request")
        parts = [f"{number} of {model} {DONE[action]}"]
        if self.gone:
            parts.append(f"{self.gone:,} {'was' if self.gone == 1 else 'were'} gone")
        if self.left:
            parts.append(f"{self.left:,} {'is' if self.left == 1 else 'are'} left: their bodies are gone")
        if missing := self.meant - self.looked_at:
            parts.append(f"{missing:,} {'was' if missing == 1 else 'were'} not reached")
        return "; ".join(parts)


class Replays:
    """Whether requests of a model may be sent again: into a queue that takes them.

    All of it raises LinkError and CommandError.
    """

    def __init__(self, link: Link, keys: Keys, actor: Actor) -> None:
        self._link = link
        self._keys = keys
        self._actor = actor

    def refusal(self) -> str:
        """Why nothing should be sent now; empty if nothing speaks against it."""
        model = self._keys.model
        if model not in Directory(self._link, self._keys.prefix).models():
            return f"{model} is not registered: what is sent would wait until one day a model has this name"
        paused = Operations(self._link, self._keys.prefix, self._actor).paused(model)
        if paused is not None and paused.refuses:
            return f"{model} is {paused.describe()}. What is sent would be refused; resume it first"
        return ""

    def space(self) -> int:
        """How many requests may be sent until half of the queue is taken."""
        registered, overrides = Directory(self._link, self._keys.prefix).settings(self._keys.model)
        try:
            settings = ModelSettings.from_mapping({**registered, **overrides})
        except ValueError:  # the batcher rejects them, and serves without the overrides
            settings = ModelSettings.from_mapping(registered)
        half = max(1, settings.max_queue_size // 2)
        return max(0, half - int(self._link.call("XLEN", self._keys.requests)))


def act_on(
    letters: DeadLetters,
    ids: Iterable[LetterId],
    action: Action,
    actor: Actor,
    tally: Tally,
    on_each: Callable[[LetterId, bool], bool],
) -> None:
    """Send or drop these letters, and count. `on_each` is told of each whether it is in Redis no more, and
    returns whether to go on. Raises LinkError and CommandError."""
    for letter_id in ids:
        letter = letters.find(show_id(letter_id))
        if letter is None:
            tally.gone += 1
        elif action == "replay" and letter.body is None:
            tally.left += 1
        elif letters.replay(letter, actor=actor) if action == "replay" else letters.drop(letter, actor=actor):
            tally.done += 1
        else:
            tally.gone += 1
        is_gone = letter is None or not (action == "replay" and letter.body is None)
        if not on_each(letter_id, is_gone):
            return
