"""What operators did: entries of the streams `audit`, of each model and of all nodes.

An entry has the fields `who`, `via`, `action` and `details`, a JSON map of texts. Its ID has the time. It is
written together with the change, in one script or transaction. The entry says what was really done: values
before and after, and how many.

Why: docs/decisions/0114.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

AUDIT_ENTRIES_MAX: Final = 1000  # about, in a stream; older ones are dropped
WHO_CHARS_MAX: Final = 200
TEXT_CHARS_MAX: Final = 500  # of a detail
DETAILS_MAX: Final = 100  # of an action

Command = tuple[str | int, ...]


class Actor(NamedTuple):
    """Who does something, such as `ann@host` or a user of the console, and by which way: command, console or
    gateway."""

    who: str
    via: str

    @property
    def arguments(self) -> list[str]:
        """The arguments of scripts that write to an audit."""
        return [self.who[:WHO_CHARS_MAX], self.via, str(AUDIT_ENTRIES_MAX)]


class Action(NamedTuple):
    """What somebody did. `at_ms` is of Redis's clock; `details` are texts for people, by name."""

    id: str
    at_ms: int
    who: str
    via: str
    action: str
    details: dict[str, str]


def append_command(key: str, actor: Actor, action: str, details: Mapping[str, str]) -> Command:
    """The command that adds an entry to the audit under this key."""
    who, via, entries_max = actor.arguments
    few = list(details.items())[:DETAILS_MAX]
    texts = {name[:TEXT_CHARS_MAX]: text[:TEXT_CHARS_MAX] for name, text in few}
    fields = ("who", who, "via", via, "action", action, "details", json.dumps(texts))
    return "XADD", key, "MAXLEN", "~", int(entries_max), "*", *fields


def decode_action(entry_id: bytes, flat: Sequence[bytes]) -> Action:
    """An entry. What a user wrote there by hand is shown as far as it can be."""
    texts = [text.decode("utf-8", "replace") for text in flat]
    fields = dict(zip(texts[::2], texts[1::2], strict=False))
    try:
        found = json.loads(fields.get("details", "{}"))
    except (ValueError, RecursionError):
        found = fields["details"]
    details = found if isinstance(found, dict) else {"details": found}
    name = entry_id.decode()
    return Action(
        name,
        int(name.partition("-")[0]),
        fields.get("who", ""),
        fields.get("via", ""),
        fields.get("action", ""),
        {name: str(text) for name, text in details.items()},
    )
