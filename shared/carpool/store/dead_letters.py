"""The dead letters of a model: requests that were given up, to be looked at, sent again or dropped.

What is sent again or dropped stands in the audit, which is written in the same transaction. One entry of the
audit has all that one object did in the same way, with how many these are: it replaces the one before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from carpool.keys import Keys
from carpool.messages.results import KeptDeadLetter
from carpool.model_settings import ModelSettings
from carpool.store.connection import Argument, Link, Script
from carpool.store.directory import no_errors
from carpool.wire.audit import Actor, append_command
from carpool.wire.batches import FIELDS_ADDED, decode_dead_letter

# The settings that limit the dead letters of a model, in the order of `trim_dead.lua`.
DEAD_LETTER_LIMITS: Final = ("max_dead_letter_age_ms", "max_dead_letters", "max_dead_letter_bytes")
_TRIM_DEAD: Final = Script("trim_dead")
_PAGE: Final = 16  # dead letters read at a time: each has the body of its request


class _Done(NamedTuple):
    """What was done in one way: the ID of its entry in the audit, with how many, from which on."""

    entry_id: str
    number: int
    first: str


class DeadLetters:
    """Those of one model. All methods raise LinkError and CommandError. What an operator does together, such
    as to drop all that match, is done with one object."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._keys = keys
        self._done: dict[tuple[Actor, str], _Done] = {}

    def __iter__(self) -> Iterator[KeptDeadLetter]:
        """The dead letters that there are now, the oldest first."""
        last = self._link.call("XREVRANGE", self._keys.dead, "+", "-", "COUNT", 1)
        after = "-"
        while last:
            page = self._link.call("XRANGE", self._keys.dead, after, last[0][0], "COUNT", _PAGE)
            for entry_id, flat in page:
                yield decode_dead_letter(entry_id, flat)
            if len(page) < _PAGE:
                return
            after = f"({page[-1][0].decode()}"

    def find(self, letter_id: str) -> KeptDeadLetter | None:
        """The one with this ID, if there is one."""
        for entry_id, flat in self._link.call("XRANGE", self._keys.dead, letter_id, letter_id):
            return decode_dead_letter(entry_id, flat)
        return None

    def replay(self, letter: KeptDeadLetter, *, actor: Actor) -> bool:
        """Send its request again under the same correlation ID, and delete it. False: someone else did.

        All at once or not at all, in a transaction. What nobody has read of its result is deleted, and so is
        a result that is read by ID: readers get the new one.
        """
        result: tuple[tuple[Argument, ...], ...] = ()
        if "reply_to" not in letter.fields:
            result = (("DEL", self._keys.result(letter.correlation_id)),)
        elif letter.text("reply_to") == letter.correlation_id:
            result = (("XTRIM", self._keys.replies(letter.correlation_id), "MAXLEN", 0),)
        return self._remove(letter, actor, "dead replay", result, is_sent=True)

    def drop(self, letter: KeptDeadLetter, *, actor: Actor) -> bool:
        """Delete it. False: someone else did."""
        return self._remove(letter, actor, "dead drop")

    def _remove(
        self,
        letter: KeptDeadLetter,
        actor: Actor,
        action: str,
        also: tuple[tuple[Argument, ...], ...] = (),
        *,
        is_sent: bool = False,
    ) -> bool:
        """Delete it, and with it do what follows from that; `is_sent`: also send its request again."""
        done = self._done.get((actor, action), _Done("", 0, letter.id))
        details = {"letters": str(done.number + 1), "first": done.first, "last": letter.id}
        while True:
            self._link.call("WATCH", self._keys.dead)
            found = self._link.call("XRANGE", self._keys.dead, letter.id, letter.id)
            if not found:
                self._link.call("UNWATCH")
                return False
            sent: list[Argument] = found[0][1][: -2 * FIELDS_ADDED]
            send = (("XADD", self._keys.requests, "*", *sent),) if is_sent else ()
            before = (("XDEL", self._keys.audit, done.entry_id),) if done.entry_id else ()
            executed = self._execute(
                ("XDEL", self._keys.dead, letter.id),
                *send,
                *also,
                *before,
                append_command(self._keys.audit, actor, action, details),
            )
            if executed is not None:  # else another dead letter was written or deleted meanwhile
                self._done[actor, action] = _Done(executed[-1].decode(), done.number + 1, done.first)
                return True

    def dropped(self) -> dict[str, int]:
        """How many were dropped since the model was first registered, by the setting that they were over."""
        flat = self._link.call("HGETALL", self._keys.dead_dropped)
        counts = dict(zip(flat[::2], flat[1::2], strict=True))
        return {name: int(counts[name.encode()]) for name in DEAD_LETTER_LIMITS if name.encode() in counts}

    def trim(self) -> dict[str, int]:
        """Drop the oldest ones over the model's settings. Returns how many, by the setting they were over."""
        keys, defaults = self._keys, ModelSettings()
        script_keys = [keys.dead, keys.dead_dropped, keys.overrides, keys.registration]
        values = [getattr(defaults, name) for name in DEAD_LETTER_LIMITS]
        counts = self._link.run(_TRIM_DEAD, script_keys, values)
        return {name: count for name, count in zip(DEAD_LETTER_LIMITS, counts, strict=True) if count}

    def _execute(self, *commands: tuple[Argument, ...]) -> list[Any] | None:
        """Run these commands, unless the dead letters have changed since they were watched: then None."""
        executed: list[Any] | None
        *_, executed = no_errors(self._link.call_many(("MULTI",), *commands, ("EXEC",)))
        return None if executed is None else no_errors(executed)
