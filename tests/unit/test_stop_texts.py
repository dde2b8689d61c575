"""Texts at which a model stops: the same however what it writes is divided, and whatever dies meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool import StopTexts

TEXTS = st.text("ab\n", max_size=12)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """What of a text is sent, and whether it is stopped: by trying all its beginnings."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(TEXTS, STOPS, st.lists(st.integers(0, 12)), st.integers(0, 12))
def test_any_division_and_any_crash_give_the_same(
    text: str, stop: list[str], cuts: list[int], crash: int
) -> None:
    """Pieces end at the cuts. Before one of them the process dies: another one goes on behind what was sent,
    with the text from there on."""
    ends = sorted({cut for cut in cuts if cut < len(text)} | {len(text)})
    stops, sent, at = StopTexts(stop), "", 0
    for number, end in enumerate(ends):
        if number == crash:
            stops, at = StopTexts(stop, sent), len(sent)
        sent += stops.add(text[at:end])
        at = end
        if stops.has_stopped:
            break
    else:
        sent += stops.rest()
    assert (sent, stops.has_stopped) == reference(text, stop)


@given(TEXTS, STOPS, st.integers(0, 12))
def test_adding_again_what_was_written_before_is_as_good(text: str, stop: list[str], crash: int) -> None:
    """A process that knows all that was written, as from tokens, needs not to know what of that was sent."""
    first, again = StopTexts(stop), StopTexts(stop)
    sent = first.add(text[:crash])
    assert again.add(text[:crash]) == sent
    assert first.add(text[crash:]) == again.add(text[crash:])
    assert (first.rest(), first.has_stopped) == (again.rest(), again.has_stopped)


def test_what_may_be_the_beginning_of_a_stop_text_is_held_back() -> None:
    stops = StopTexts(["END", "\n\n"])
    assert [stops.add(piece) for piece in ("one E", "N", "E", "\n", "x", "\n", "\ny")] == [
        "one ", "", "EN", "E", "\nx", "", "",
    ]  # fmt: skip
    assert (stops.has_stopped, stops.rest(), stops.add("z")) == (True, "", "")


def test_wrong_stop_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="an empty text"):
        StopTexts(["a", ""])
    with pytest.raises(TypeError, match="must be a list of texts"):
        StopTexts("END")
