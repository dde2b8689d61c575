"""The index of dead letters: read page by page while letters come and go, it has what the stream has."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.store.dead_pages import NEWEST, OLDEST, Letter, LetterId, Page, Range, parse_id
from carpool_console.dead_index import DeadIndex, Filter, key_of

NOW_MS: Final = 1_000_000


def letter(at_ms: int, number: int = 0, reason: str = "it died", correlation_id: str = "") -> Letter:
    return Letter((at_ms, number), 7, correlation_id or f"r{at_ms}", "application/json", reason, 2)


class Stream:
    """Dead letters as Redis has them, and pages of them as `dead_page.lua` returns them."""

    def __init__(self, letters: list[Letter]) -> None:
        self.letters = letters

    def page(self, of: Range, letters_max: int) -> Page:
        within = [one for one in self.letters if of.after < one.id < of.before][::-1]
        return Page(
            NOW_MS,
            len(self.letters),
            self.letters[0].id if self.letters else None,
            self.letters[-1].id if self.letters else None,
            len(within) < letters_max,
            within[:letters_max],
        )


def read(index: DeadIndex, stream: Stream, letters_max: int = 100) -> None:
    of = index.next_range()
    index.take(of, stream.page(of, letters_max))


def settle(index: DeadIndex, stream: Stream, letters_max: int = 100) -> None:
    """Read until nothing is unread, and once more if letters are gone."""
    for _ in range(2 * len(stream.letters) + 10):
        read(index, stream, letters_max)
        if index.must_check:
            index.check()
        elif index.is_settled:
            return
    pytest.fail("it is never settled")


def index_of(*letters: Letter) -> DeadIndex:
    index = DeadIndex()
    settle(index, Stream(sorted(letters)))
    return index


KINDS: Final = ("add", "add", "add", "delete", "trim", "read", "read", "set back")
CHANGES: Final = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 30)), max_size=60)


@given(changes=CHANGES, letters_max=st.integers(1, 4), there=st.integers(0, 12))
def test_index_has_what_the_stream_has_after_any_changes(
    changes: list[tuple[str, int]], letters_max: int, there: int
) -> None:
    stream = Stream([letter(number) for number in range(1, there + 1)])
    index, now_ms, last = DeadIndex(), there, (there, 0)
    for change, number in changes:
        if change == "add":
            now_ms += number // 10  # several within a millisecond
            last = (now_ms, 0) if (now_ms, 0) > last else (last[0], last[1] + 1)
            stream.letters.append(letter(*last, reason=f"reason {number} of {number % 3}"))
        elif change == "delete" and stream.letters:
            del stream.letters[number % len(stream.letters)]
        elif change == "trim":
            del stream.letters[: number // 8]
        elif change == "set back":  # as after a failover that lost the newest writes
            del stream.letters[max(0, len(stream.letters) - number // 8) :]
        elif change == "read":
            read(index, stream, letters_max)
    settle(index, stream, letters_max)
    assert index.find(Filter()).letters == stream.letters[::-1]
    assert len(index) == index.length == len(stream.letters)


def test_newest_letters_are_there_first_and_progress_is_told() -> None:
    stream = Stream([letter(number) for number in range(1, 11)])
    index = DeadIndex()
    read(index, stream, 3)
    assert [one.id[0] for one in index.find(Filter()).letters] == [10, 9, 8]
    assert (len(index), index.length, index.is_complete) == (3, 10, False)
    stream.letters.append(letter(11))
    read(index, stream, 3)  # older ones, and it learns of the new one
    assert index.next_range() == Range((10, 0), (11, 1))
    settle(index, stream, 3)
    assert index.is_complete and len(index) == 11


def test_index_serves_while_it_is_checked() -> None:
    stream = Stream([letter(number) for number in range(1, 11)])
    index = DeadIndex()
    settle(index, stream)
    del stream.letters[4]
    read(index, stream)
    assert index.must_check
    index.check()
    read(index, stream, 2)
    assert index.is_complete and not index.is_settled and len(index) == 10
    settle(index, stream, 2)
    assert len(index) == 9


def test_what_is_discarded_needs_no_check() -> None:
    stream = Stream([letter(number) for number in range(1, 5)])
    index = DeadIndex()
    settle(index, stream)
    del stream.letters[1]
    index.discard((2, 0))
    index.discard((2, 0))
    read(index, stream)
    assert not index.must_check and index.get((2, 0)) is None and index.get((3, 0)) is not None


def test_letters_at_both_ends_that_others_dropped_are_gone_at_once() -> None:
    stream = Stream([letter(number) for number in range(1, 6)])
    index = DeadIndex()
    settle(index, stream)
    del stream.letters[4], stream.letters[0]
    read(index, stream)
    assert [one.id[0] for one in index.find(Filter()).letters] == [4, 3, 2] and not index.must_check


def test_pages_of_what_is_meant() -> None:
    index = index_of(*[letter(number) for number in range(1, 8)])
    pages = [index.find(Filter(), first=first, count=3) for first in (0, 3, 6, 9)]
    assert [[one.id[0] for one in page.letters] for page in pages] == [[7, 6, 5], [4, 3, 2], [1], []]
    assert {page.total for page in pages} == {7}


@pytest.mark.parametrize(
    ("which", "meant"),
    [
        (Filter(), [4, 3, 2, 1]),
        (Filter(text="SEGMENTATION"), [2]),
        (Filter(text="order-7"), [3]),
        (Filter(text="order"), [3, 1]),
        (Filter(text="nothing"), []),
        (Filter(older_ms=NOW_MS - 2), [1]),
        (Filter(newer_ms=NOW_MS - 3), [4, 3]),
        (Filter(newer_ms=NOW_MS * 2), [4, 3, 2, 1]),
        (Filter(older_ms=NOW_MS * 2), []),
        (Filter(until=(3, 0)), [3, 2, 1]),
        (Filter(until=(3, 0), newer_ms=NOW_MS - 2, text="it died"), [3]),
        (Filter(error=key_of("it died # times")), [4, 3, 1]),
        (Filter(error="unknown"), []),
    ],
)
def test_filters_mean_what_they_say(which: Filter, meant: list[int]) -> None:
    index = index_of(
        letter(1, reason="it died 2 times", correlation_id="Order-1"),
        letter(2, reason="segmentation fault"),
        letter(3, reason="it died 3 times", correlation_id="order-7"),
        letter(4, reason="it died 3 times"),
    )
    found = index.find(which)
    assert ([one.id[0] for one in found.letters], found.total) == (meant, len(meant))
    assert index.ids(which) == [(at_ms, 0) for at_ms in reversed(meant)]


def test_errors_are_grouped_up_to_what_differs() -> None:
    index = index_of(
        letter(1, reason="its model process died 2 times while executing it; the last time: signal 9"),
        letter(2, reason="its model process died 12 times while executing it; the last time: signal 11"),
        letter(3, reason="no such file at 0xfe1200"),
        letter(4, reason="no such file at 0x1"),
        letter(5, reason="no such file at 0x2"),
        letter(6, reason="request 4fe0a1b2-0000-4000-8000-00000000abcd failed"),
    )
    groups = index.groups(Filter())
    assert [(group.sentence, group.number, group.newest_ms, group.oldest_ms) for group in groups[:2]] == [
        ("no such file at #x#", 2, 5, 4),
        ("its model process died # times while executing it; the last time: signal #", 2, 2, 1),
    ]
    assert index.find(Filter(error=groups[1].key)).total == 2
    assert index.sentence_of(groups[1].key).startswith("its model process")
    assert [letter.id for letter in index.of_request("r3")] == [(3, 0)]
    (found,) = index.groups(Filter(text="4fe0a1b2"))
    assert (found.sentence, found.example.id) == ("request # failed", (6, 0))


def test_reasons_that_no_letter_has_are_forgotten() -> None:
    """Expect that an index through which many reasons pass does not keep them all."""
    stream, index = Stream([]), DeadIndex()
    for number in range(1, 4001):
        stream.letters = [letter(number, reason="x" * number)]
        read(index, stream)
    assert len(index._reasons) < 1500
    assert index.groups(Filter())[0].number == 1


def test_ids_are_those_of_a_stream() -> None:
    assert parse_id("1795246747119-3") == (1795246747119, 3)
    for text in ("", "1", "1-", "-1", "a-1", "1-1-1", "٣-1", "9" * 50 + "-1", f"{1 << 64}-0", f"1-{1 << 64}"):
        with pytest.raises(ValueError, match="is no ID"):
            parse_id(text)
    ordered: list[LetterId] = [OLDEST, (1, 0), (1, 10), (2, 0), NEWEST]
    assert ordered == sorted(ordered) and bisect_left(ordered, (1, 9)) == 2
