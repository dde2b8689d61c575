"""Errors that differ only in numbers and IDs are one; others are not."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.error_groups import TEXT_CHARS_MAX, group_of


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("the queue is full: 100 requests wait", "the queue is full: 1,000,000 requests wait"),
        ("took 1.5 s of 2 s", "took 30 s of 2.25 s"),
        ("sequence_id: 'order-a17' has ended", "sequence_id: 'order-a9' has ended"),
        ("after 3f2a9c1e-77b0-4a55-9d4e-0a1b2c3d4e5f", "after 00000000-1111-2222-3333-444444444444"),
        ("worker web-5d9c7b6f4-x2x9q ended", "worker web-9f8e7d6c5-k3k4p ended"),
        ("at 0x7f32a1b4", "at 0x00ff00ff"),
        ("entry 1795246747119-0", "entry 9-7"),
    ],
)  # fmt: skip
def test_sentences_with_other_numbers_and_ids_are_one_group(one: str, other: str) -> None:
    assert group_of(one) == group_of(other)
    assert "#" in group_of(one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("KeyError at model.py:14", "KeyError at model.py:15"),
        ("KeyError at model.py:14", "ValueError at model.py:14"),
        ("expected float32", "expected int32"),
        ("body: missing", "body: too large"),
        ("", "0"),
    ],
)
def test_other_sentences_are_other_groups(one: str, other: str) -> None:
    assert group_of(one) != group_of(other)


def test_words_without_digits_stay() -> None:
    text = "its model process or worker died while it was executed alone (accelerated-facade)"
    assert group_of(text) == text


@given(st.text(max_size=600))
def test_a_group_is_bounded_and_is_its_own_group(text: str) -> None:
    group = group_of(text)
    assert len(group) <= TEXT_CHARS_MAX
    if len(text) <= TEXT_CHARS_MAX:
        assert group_of(group) == group


@pytest.mark.parametrize("text", ["a1" * 500_000, "1." * 500_000, "-" * 1_000_000, "a.py:" * 200_000])
def test_hostile_texts_take_no_longer_than_others(text: str) -> None:
    """The time is that of the text's beginning: a million characters in a few microseconds each would take
    seconds."""
    began_s = time.process_time()
    for _ in range(20):
        group_of(text)
    assert time.process_time() - began_s < 1
