"""Which sequences of tokens are padded to one length and computed together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

LENGTH_RATIO_MAX: Final = 2  # of the longest to the shortest in a group
SHORT_TOKENS: Final = 32  # sequences that are all as short share a group: padding costs less than a call


def groups_of(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    """The indexes of all sequences in groups, by length. A group has at most `tokens_max` tokens, padding
    included, unless it is a single sequence."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[index]
        if groups:
            group = groups[-1]
            is_similar = length <= max(LENGTH_RATIO_MAX * lengths[group[0]], SHORT_TOKENS)
            if is_similar and (len(group) + 1) * length <= tokens_max:
                group.append(index)
                continue
        groups.append([index])
    return groups
