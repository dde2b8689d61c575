"""Pages of dead letters as Redis has them: without bodies, and with bounded work for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from carpool.keys import Keys
from carpool.store.connection import Link
from carpool.store.dead_pages import BYTES_MAX, NEWEST, OLDEST, Page, Range, parse_id, read_page
from support.stack import Stack

KEYS: Final = Keys("m")
ALL: Final = Range(OLDEST, NEWEST)


@pytest.fixture
def link(stack: Stack) -> Iterator[Link]:
    opened = Link(stack.url, name="test")
    yield opened
    opened.close()


def write(stack: Stack, number: int, body: bytes = b"1", **fields: str) -> list[str]:
    """Write dead letters as workers do."""
    pipeline = stack.redis.pipeline(transaction=False)
    for at in range(number):
        of_request = {"correlation_id": f"r{at}", "content_type": "application/json", "body": body, **fields}
        pipeline.xadd(KEYS.dead, {**of_request, "reason": f"error {at}", "attempts": 2, "entry_id": "1-1"})
    return [letter_id.decode() for letter_id in pipeline.execute()]


def names(page: Page) -> list[str]:
    return [letter.name for letter in page.letters]


def test_pages_have_all_letters_the_newest_first(stack: Stack, link: Link) -> None:
    assert read_page(link, KEYS, ALL)[1:] == (0, None, None, True, [])
    ids = write(stack, 7)
    first = read_page(link, KEYS, ALL, 3)
    assert names(first) == ids[:3:-1] and not first.is_all
    assert (first.length, first.oldest, first.newest) == (7, parse_id(ids[0]), parse_id(ids[-1]))
    rest = read_page(link, KEYS, Range(OLDEST, first.letters[-1].id))
    assert names(rest) == ids[3::-1] and rest.is_all
    assert abs(rest.now_ms - rest.letters[0].id[0]) < 60_000
    assert names(read_page(link, KEYS, Range(parse_id(ids[1]), parse_id(ids[4])))) == ids[3:1:-1]


def test_letter_has_what_is_known_without_its_body(stack: Stack, link: Link) -> None:
    """Expect Carpool's own fields, which are the last ones, also where a producer's have their names."""
    write(stack, 1, b"\xff" * 100, reply_to="me", colour="red")
    producers = [b"correlation_id", b"a", b"content_type", b"x" * 1000, b"reason", b"mine", b"attempts", b"9"]
    carpools = [b"reason", b"\xffdied", b"attempts", b"3", b"entry_id", b"1-1"]
    stack.redis.execute_command("XADD", KEYS.dead, "*", *producers, *carpools)
    gone, letter = read_page(link, KEYS, ALL).letters
    assert letter[1:] == (100, "r0", "application/json", "error 0", 2)
    assert (gone.body_bytes, gone.reason, gone.attempts, len(gone.content_type)) == (
        None,
        "\ufffddied",
        3,
        400,
    )


def test_number_that_is_none_does_not_hide_the_letters(stack: Stack, link: Link) -> None:
    """A number of attempts that no worker writes, but Redis keeps."""
    write(stack, 1, attempts="9" * 399)
    stack.redis.xadd(KEYS.dead, {"reason": "it died", "attempts": "9" * 399, "entry_id": "1-1"})
    assert [letter.attempts for letter in read_page(link, KEYS, ALL).letters] == [0, 2]


def test_large_bodies_are_not_copied_many_at_a_time(stack: Stack, link: Link) -> None:
    """Expect pages that end after their bytes, in steps that do not grow; and all letters in the end."""
    ids = write(stack, 12, b"x" * (BYTES_MAX // 4))
    found: list[str] = []
    of = ALL
    while True:
        page = read_page(link, KEYS, of)
        assert len(page.letters) <= 5
        found += names(page)
        if page.is_all:
            break
        of = of._replace(before=page.letters[-1].id)
    assert found == ids[::-1]
