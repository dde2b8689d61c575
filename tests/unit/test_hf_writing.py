"""Tokens become pieces: characters are whole, stop texts are left out, and a crash changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import AbortedError
from carpool_worker.models.hf.writing import HELD_TOKENS_MAX, REPLACEMENT, TextDecoder, Writing

END: Final = 256  # behind the tokens that are bytes
WORDS: Final = ("Hello", "▁world", "▁", "s", "<0xE2>", "<0x82>", "<0xAC>")


def read_bytes(tokens: Sequence[int]) -> str:
    """As vocabularies of bytes are read: each token is a byte."""
    return bytes(token for token in tokens if token != END).decode("utf-8", "replace")


def read_words(tokens: Sequence[int]) -> str:
    """As sentencepiece is read: without the first space, and a run of bytes is valid as a whole or not."""
    text, run = "", b""
    for token in [*tokens, -1]:
        word = WORDS[token] if token >= 0 else ""
        if word.startswith("<0x"):
            run += bytes.fromhex(word[3:5])
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += REPLACEMENT * len(run)
        text, run = text + word.replace("▁", " "), b""
    return text.removeprefix(" ")


def pieces_of(writing: Writing, tokens: Sequence[int]) -> list[dict[str, Any]]:
    pieces = []
    for token in tokens:
        if writing.finish_reason:
            break
        pieces.append(writing.add(token))
    return pieces


@given(st.one_of(st.text(max_size=30).map(str.encode), st.binary(max_size=60)))
def test_text_in_parts_is_the_text_as_a_whole(data: bytes) -> None:
    """Also of bytes that are no UTF-8."""
    decoder = TextDecoder(read_bytes)
    parts = [decoder.add(token) for token in data]
    assert "".join([*parts, decoder.rest()]) == data.decode("utf-8", "replace")


@given(st.text(max_size=30))
def test_no_part_has_half_a_character(text: str) -> None:
    decoder = TextDecoder(read_bytes)
    parts = [decoder.add(token) for token in text.encode()]
    assert "".join(parts) == text
    assert all(REPLACEMENT not in part for part in parts) or REPLACEMENT in text


def test_characters_come_as_soon_as_they_are_complete() -> None:
    decoder = TextDecoder(read_bytes)
    assert [decoder.add(token) for token in "a€b".encode()] == ["a", "", "", "€", "b"]


def test_bytes_that_are_never_a_character_are_not_held_back_for_ever() -> None:
    decoder = TextDecoder(read_bytes)
    parts = [decoder.add(0xFF) for _ in range(100)]
    assert len("".join(parts)) >= 100 - HELD_TOKENS_MAX - 1


@given(st.lists(st.sampled_from([[0], [1], [2], [3], [4, 5, 6]]), max_size=12))
def test_words_keep_their_spaces(words: list[list[int]]) -> None:
    """Given a prompt before the text, expect that both together read as one text."""
    prompt, tokens = [0], [token for word in words for token in word]
    decoder = TextDecoder(read_words, prompt)
    text = "".join([*[decoder.add(token) for token in tokens], decoder.rest()])
    assert f"Hello{text}" == read_words(prompt + tokens)


def test_a_prompt_that_ends_within_a_character_is_no_context() -> None:
    decoder = TextDecoder(read_bytes, "a€".encode()[:-1])
    assert decoder.add(ord("b")) == "b"


# --- endings -----------------------------------------------------------------------------------------------


def test_text_ends_at_an_end_token_which_is_counted_and_not_shown() -> None:
    writing = Writing([1, 2, 3], read_bytes, 10, {END, 7})
    assert pieces_of(writing, [*b"ab", END]) == [
        {"text": "a", "token": 97},
        {"text": "b", "token": 98},
        {"text": "", "token": END, "finish_reason": "stop", "prompt_tokens": 3, "completion_tokens": 3},
    ]
    assert writing.result == {
        "text": "ab", "finish_reason": "stop", "prompt_tokens": 3, "completion_tokens": 3,
    }  # fmt: skip


def test_text_ends_at_its_length_with_all_that_was_held_back() -> None:
    """Given a beginning of a stop text, and half a character, expect both."""
    writing = Writing([1], read_bytes, 4, stop=["bcd"])
    pieces = pieces_of(writing, [*"ab€".encode(), *b"x"])
    assert [piece["text"] for piece in pieces] == ["a", "", "", f"b{REPLACEMENT}"]
    assert (writing.finish_reason, len(writing.tokens)) == ("length", 4)
    assert [piece["token"] for piece in pieces] == [97, 98, 0xE2, 0x82]


@pytest.mark.parametrize("stop", ["cd", "d", "€", "abcd"])
def test_text_ends_before_a_stop_text(stop: str) -> None:
    writing = Writing([1], read_bytes, 50, {END}, [stop, "no such text"])
    pieces = pieces_of(writing, [*"abcd€e".encode(), END])
    text = "abcd€e".partition(stop)[0]
    assert "".join(piece["text"] for piece in pieces) == text == writing.text
    assert writing.finish_reason == "stop"
    assert len(writing.tokens) == len((text + stop).encode()), "all tokens that were computed are counted"


@given(
    st.lists(st.one_of(st.sampled_from([*b"aab", *"€".encode(), END]), st.integers(0, 255)), max_size=25),
    st.lists(st.sampled_from(["ab", "aa", "€", "b€a", "\n"]), max_size=3),
    st.integers(1, 20),
)
def test_resumed_text_goes_on_as_if_nothing_had_happened(
    tokens: list[int], stop: list[str], most: int
) -> None:
    """Given any number of pieces that were sent, expect that the others are as before."""
    whole = Writing([97], read_bytes, most, {END}, stop)
    pieces = pieces_of(whole, tokens)
    for count in range(len(pieces) + 1):
        resumed = Writing([97], read_bytes, most, {END}, stop)
        resumed.resume(pieces[:count])
        rest = tokens[len(resumed.tokens) :]
        assert pieces_of(resumed, rest) == pieces[count:]
        assert (resumed.text, resumed.finish_reason) == (whole.text, whole.finish_reason)


@pytest.mark.parametrize("sent", [["Once"], [{"text": "a"}], [{"text": "b", "token": 97}]])
def test_pieces_of_another_model_are_refused(sent: list[Any]) -> None:
    with pytest.raises(AbortedError, match="send the request again"):
        Writing([1], read_bytes, 9).resume(sent)
