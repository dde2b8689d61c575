"""The dead letters of a model: requests that were given up, to be looked at, sent again or dropped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from carpool.keys import Keys
from carpool.messages.results import KeptDeadLetter
from carpool.model_settings import ModelSettings
from carpool.store.connection import Argument, Link, Script
from carpool.store.directory import no_errors
from carpool.wire.batches import FIELDS_ADDED, decode_dead_letter

# The settings that limit the dead letters of a model, in the order of `trim_dead.lua`.
DEAD_LETTER_LIMITS: Final = ("max_dead_letter_age_ms", "max_dead_letters", "max_dead_letter_bytes")
_TRIM_DEAD: Final = Script("trim_dead")
_PAGE: Final = 16  # dead letters read at a time: each has the body of its request


class DeadLetters:
    """Those of one model. All methods raise LinkError and CommandError."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._keys = keys

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

    def replay(self, letter: KeptDeadLetter) -> bool:
        """Send its request again under the same correlation ID, and delete it. False: someone else did.

        All at once or not at all, in a transaction. What nobody has read of its result is deleted, and so is
        a result that is read by ID: readers get the new one.
        """
        result: tuple[tuple[Argument, ...], ...] = ()
        if "reply_to" not in letter.fields:
            result = (("DEL", self._keys.result(letter.correlation_id)),)
        elif letter.text("reply_to") == letter.correlation_id:
            result = (("XTRIM", self._keys.replies(letter.correlation_id), "MAXLEN", 0),)
        while True:
            self._link.call("WATCH", self._keys.dead)
            found = self._link.call("XRANGE", self._keys.dead, letter.id, letter.id)
            if not found:
                self._link.call("UNWATCH")
                return False
            sent: list[Argument] = found[0][1][: -2 * FIELDS_ADDED]
            if self._execute(
                ("XADD", self._keys.requests, "*", *sent), ("XDEL", self._keys.dead, letter.id), *result
            ):
                return True  # else another dead letter was written or deleted meanwhile

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

    def _execute(self, *commands: tuple[Argument, ...]) -> bool:
        """Run these commands, unless the dead letters have changed since they were watched."""
        executed: list[Any] | None
        *_, executed = no_errors(self._link.call_many(("MULTI",), *commands, ("EXEC",)))
        if executed is None:
            return False
        no_errors(executed)
        return True

    def drop(self, letter: KeptDeadLetter) -> bool:
        """Delete it. False: someone else did."""
        return bool(self._link.call("XDEL", self._keys.dead, letter.id))
