"""What is said of dead letters that were sent again or dropped."""

from __future__ import annotations

import pytest

from carpool_console.dead_actions import Action, Tally


@pytest.mark.parametrize(
    ("action", "tally", "sentence"),
    [
        ("replay", Tally(40, done=40), "40 requests of m sent again"),
        ("replay", Tally(1, done=1), "1 request of m sent again"),
        ("replay", Tally(40, done=37, gone=3), "37 of 40 requests of m sent again; 3 were gone"),
        ("drop", Tally(2000, done=1000), "1,000 of 2,000 requests of m dropped; 1,000 were not reached"),
        ("drop", Tally(3, done=2, left=1), "2 of 3 requests of m dropped; 1 is left: their bodies are gone"),
        ("drop", Tally(1, gone=1), "0 of 1 request of m dropped; 1 was gone"),
    ],
)  # fmt: skip
def test_sentence_has_all_that_were_meant(action: Action, tally: Tally, sentence: str) -> None:
    assert tally.describe(action, "m") == sentence
