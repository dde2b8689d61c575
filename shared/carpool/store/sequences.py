"""What scripts that write results change in sequences: see `lua/sequence.lua`."""

from __future__ import annotations

from collections.abc import Sequence

from carpool.keys import Keys
from carpool.messages.sequences import SequenceChange
from carpool.store.arguments import ScriptKeys, group_list_args
from carpool.store.connection import Argument


def change_args(keys: Keys, script_keys: ScriptKeys, changes: Sequence[SequenceChange]) -> list[Argument]:
    """What `change_sequences` reads: the changes of sequences that a script is to carry out."""
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
