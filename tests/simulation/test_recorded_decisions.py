"""The batcher decides about recorded traffic as it did when that was recorded."""

from __future__ import annotations

from typing import Final

import pytest

from support.recorded_decisions import SCENARIOS, digest_of, recorded_digests

COMMAND: Final = "cd tests && ../.venv/bin/python -m support.recorded_decisions"


def test_each_scenario_is_recorded() -> None:
    assert list(recorded_digests()) == list(SCENARIOS), f"{COMMAND} --renew"


@pytest.mark.parametrize("name", SCENARIOS)
def test_decisions_are_those_that_were_recorded(name: str) -> None:
    """A change of the code that is not to change decisions must pass. Any other renews the record."""
    assert digest_of(name) == recorded_digests()[name], (
        f"the batcher decides otherwise in the scenario {name!r}. This shows where first:\n"
        f"    {COMMAND} --against main {name!r}\n"
        f"If it is intended, record what is decided now, and say in the commit what changes:\n"
        f"    {COMMAND} --renew"
    )
