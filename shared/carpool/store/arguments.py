"""The KEYS of a script, and nested lists in its flat ARGV; `lua/arguments.lua` reads the latter.

A list is the number of its elements, followed by the elements. An element is one argument or a group of
several, and a group may contain lists of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from carpool.keys import Keys
from carpool.messages.sequences import SequenceChange
from carpool.store.connection import Argument

Group = Sequence[Argument]  # the arguments of one element


def list_args(elements: Collection[Argument]) -> list[Argument]:
    """A list whose elements are one argument each."""
    return [len(elements), *elements]


def group_list_args(groups: Iterable[Group]) -> list[Argument]:
    """A list whose elements are groups."""
    args: list[Argument] = [0]
    number = 0
    for group in groups:
        args += group
        number += 1
    args[0] = number
    return args


class ScriptKeys:
    """The KEYS of a script. Arguments refer to a key by its index, which Lua counts from 1."""

    def __init__(self, *keys: str) -> None:
        self.keys = list(keys)
        self._index: dict[str, int] = {}

    def index(self, key: str) -> int:
        """The index of `key`, which is appended if it is new."""
        index = self._index.get(key)
        if index is None:
            self.keys.append(key)
            index = self._index[key] = len(self.keys)
        return index

    def append_all(self, keys: Iterable[str]) -> int:
        """The index of the first of these keys; the others follow it. They may be among KEYS already."""
        first = len(self.keys) + 1
        self.keys += keys
        return first


def change_args(keys: Keys, script_keys: ScriptKeys, changes: Sequence[SequenceChange]) -> list[Argument]:
    """The changes of sequences that a script is to carry out, as `lua/sequence.lua` reads them."""
    if not changes:
        return [0]
    number, *groups = group_list_args(
        [
            (
                script_keys.index(keys.sequence(change.part.sequence_id)),
                change.part.sequence_id,
                change.part.place,
                change.correlation_id,
                "started" if change.part.starts and change.outcome == "kept" else change.outcome,
                change.content,
            )
            for change in changes
        ]
    )
    return [number, script_keys.index(keys.sequences), *groups]
