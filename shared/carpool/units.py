"""Numbers with a unit, as people write sizes and durations: `1GiB`, `1.5s`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

BYTES: Final[Mapping[str, int]] = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
MILLISECONDS: Final[Mapping[str, int]] = {"ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_NUMBER_WITH_UNIT: Final = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]+)\s*")


def number_in(units: Mapping[str, int], text: str) -> float | None:
    """The number of base units that the text says, exactly; None if it is no number with one of these units.

    `units`: how many base units each has, by its name in lower case. Upper and lower case do not differ.
    """
    found = _NUMBER_WITH_UNIT.fullmatch(text)
    factor = None if found is None else units.get(found[2].lower())
    if found is None or factor is None:
        return None
    return float(Decimal(found[1]) * factor)
