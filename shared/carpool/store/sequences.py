"""What scripts that write results change in sequences: see `lua/sequence.lua`."""

from __future__ import annotations

from collections.abc import Iterable

from carpool.keys import Keys
from carpool.messages import SequenceChange
from carpool.store.arguments import ScriptKeys, group_list_args
from carpool.store.connection import Argument


def change_args(keys: Keys, script_keys: ScriptKeys, changes: Iterable[SequenceChange]) -> list[Argument]:
    """The argument of a script that is a list of changes of sequences."""
    return group_list_args(
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
