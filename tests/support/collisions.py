"""Strings that have one hash in Lua 5.1, which Redis runs scripts with, and one length."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice, product
from typing import Final

_LETTERS: Final = "0123456789abcdef"


def colliding(count: int, size: int, embeddings: Iterable[Callable[[str], str | bytes]]) -> list[str]:
    """Texts of `size` characters, none of which changes the hash of any of the strings that embed them.

    Lua reads only one of every (length >> 5) + 1 bytes of a string, from its end.
    """
    unread = set(range(size))
    for embed in embeddings:
        head, tail = _around(embed, size)
        length = head + size + tail
        unread -= {at - head for at in range(length - 1, -1, -((length >> 5) + 1))}
    places = sorted(unread)
    digits = next(n for n in range(1, 9) if len(_LETTERS) ** n >= count)
    assert len(places) >= digits, f"only {len(places)} of {size} characters are not read"
    texts = []
    for chosen in islice(product(_LETTERS, repeat=digits), count):
        text = ["x"] * size
        for place, letter in zip(places, chosen, strict=False):
            text[place] = letter
        texts.append("".join(text))
    return texts


def _around(embed: Callable[[str], str | bytes], size: int) -> tuple[int, int]:
    """How many bytes surround the text."""
    embedded, text = embed("x" * size), b"x" * size
    whole = embedded if isinstance(embedded, bytes) else embedded.encode()
    head = whole.index(text)
    return head, len(whole) - head - size
