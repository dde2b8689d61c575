"""What takes back a change of settings, from its entry in the audit. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_ARROW: Final = " -> "
_NONE: Final = "none"  # no override
_CUT_CHARS: Final = 490  # a value of so many may be cut in the audit


def changes_back(details: Mapping[str, str], overrides: Mapping[str, str]) -> list[str]:
    """The changes, NAME=VALUE or NAME=, that restore the overrides before an action `config`.

    `details`: of the action. `overrides`: those that hold now. Raises ValueError if a setting was changed
    since, or if its value before is not known in full.
    """
    changes = []
    for name, text in details.items():
        before, arrow, after = text.partition(_ARROW)
        if not arrow or _ARROW in after or max(len(before), len(after)) >= _CUT_CHARS:
            raise ValueError(f"{name}: the audit does not have its whole value")
        now = overrides.get(name, _NONE)
        if now != after:
            raise ValueError(f"{name} was changed since: its override is {now:.100} now, not {after:.100}")
        changes.append(f"{name}=" if before == _NONE else f"{name}={before}")
    if not changes:
        raise ValueError("the audit does not say what was changed")
    return changes
