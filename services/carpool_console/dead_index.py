"""The index of a model's dead letters: what is known of them without their bodies, in memory, and no I/O.

It is built page by page, the newest letters first, and says which range to read next:

    of = index.next_range(); page = read_page(link, keys, of); index.take(of, page)

- Unread are ranges of IDs of which no page was read: at first all IDs, then those that are newer than the
  newest one that was seen. Once no range is unread, only what is new is asked for.
- Others may delete letters, anywhere in the stream. Those before its oldest one are gone. If the index then
  has more than Redis, all of it is read again (`check`), also page by page, and what a page does not have is
  gone. Meanwhile the index serves on.

A model has at most 100,000 dead letters (`DEAD_LETTERS_MAX`), so the index is bounded.

Why: docs/decisions/0117.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from carpool.error_groups import group_of
from carpool.store.dead_pages import NEWEST, OLDEST, Letter, LetterId, Page, Range

_ALL: Final = Range(OLDEST, NEWEST)
_REASONS_SPARE: Final = 1000
_PART_OF_ID: Final = re.compile(r"[0-9-]{5,}")


class _Reason(NamedTuple):
    """`folded`: as it is compared. `key`: of its group."""

    text: str
    folded: str
    key: str


class Filter(NamedTuple):
    """Which letters are meant. The defaults mean all.

    `text`: is part of the reason, of the correlation ID or of the letter's ID, in upper or lower case.
    `error`: the key of a group. `older_ms`, `newer_ms`: given up longer ago than this, or less long, when a
    page was read last. `until`: not those that came after this one.
    """

    text: str = ""
    error: str = ""
    older_ms: int | None = None
    newer_ms: int | None = None
    until: LetterId | None = None


class Group(NamedTuple):
    """Letters with the same error, up to numbers and IDs (`carpool.error_groups`).

    `number`: of letters. `key`: for addresses of pages. `sentence`: the error, with "#" in place of what
    differs.
    """

    key: str
    sentence: str
    number: int
    newest_ms: int
    oldest_ms: int
    example: Letter


class Found(NamedTuple):
    """A page of what was found, the newest first, and how much that is in all."""

    letters: list[Letter]
    total: int


def key_of(sentence: str) -> str:
    """The key of the group with this sentence."""
    return hashlib.blake2b(sentence.encode("utf-8", "replace"), digest_size=6).hexdigest()


class DeadIndex:
    """Not for several threads at a time."""

    def __init__(self) -> None:
        self._ids: list[LetterId] = []  # ascending
        self._letters: list[Letter] = []  # those of `_ids`
        self._folded: list[str] = []  # their correlation IDs, as they are compared
        self._groups: list[str] = []  # the keys of their groups
        self._reasons: dict[str, _Reason] = {}
        self._sentences: dict[str, str] = {}  # by key
        self._unread: list[Range] = [_ALL]
        self._is_checking = False
        self._seen: LetterId = OLDEST  # the newest letter that there was
        self.length = 0  # letters in Redis, when a page was read last
        self.now_ms = 0  # that time, by Redis's clock

    def __len__(self) -> int:
        return len(self._ids)

    # --- reading -------------------------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Whether each letter was read that there was when a page was read last."""
        return self._is_checking or not self._unread

    @property
    def newest(self) -> LetterId:
        """The newest letter that there was when a page was read last."""
        return self._seen

    @property
    def is_settled(self) -> bool:
        """Whether only what is new is to be read: no range is unread."""
        return not self._unread

    @property
    def must_check(self) -> bool:
        """Whether others have deleted letters that the index still has."""
        return not self._unread and len(self._ids) != self.length

    def check(self) -> None:
        """Read all of it again, and leave out what is gone."""
        self._unread, self._is_checking = [_ALL], True

    def next_range(self) -> Range:
        """What to read next: of what is unread the newest, else what is new."""
        return self._unread[0] if self._unread else Range(self._seen, NEWEST)

    def take(self, of: Range, page: Page) -> None:
        """A page of `next_range()` was read."""
        end = of.after if page.is_all or not page.letters else page.letters[-1].id
        if self._unread and self._unread[0] == of:
            self._unread[:1] = [] if page.is_all else [of._replace(before=end)]
        elif not page.is_all:
            self._unread.insert(0, of._replace(before=end))
        self._replace(end, of.before, page)
        self._see(of, page)
        self._trim(page)
        self.length, self.now_ms = page.length, page.now_ms
        if not self._unread:
            self._is_checking = False

    def _replace(self, end: LetterId, before: LetterId, page: Page) -> None:
        """From `end` to `before` there are the letters of the page and no others."""
        low = bisect_right(self._ids, end) if page.is_all else bisect_left(self._ids, end)
        high = bisect_left(self._ids, before)
        self._put(low, high, page.letters[::-1])

    def _put(self, low: int, high: int, letters: Sequence[Letter]) -> None:
        """These letters are in place of those from `low` to `high`."""
        reasons = [self._reason(letter.reason) for letter in letters]
        texts = zip(letters, reasons, strict=True)
        self._ids[low:high] = [letter.id for letter in letters]
        self._letters[low:high] = [letter._replace(reason=reason.text) for letter, reason in texts]
        self._folded[low:high] = [letter.correlation_id.casefold() for letter in letters]
        self._groups[low:high] = [reason.key for reason in reasons]

    def _reason(self, text: str) -> _Reason:
        """Equal reasons are one text: there are few among many letters."""
        known = self._reasons.get(text)
        if known is None:
            sentence = group_of(text)
            key = key_of(sentence)
            self._sentences.setdefault(key, sentence)
            known = self._reasons[text] = _Reason(text, text.casefold(), key)
        return known

    def _see(self, of: Range, page: Page) -> None:
        """Letters that came while older ones were read are read next."""
        newest = page.newest or OLDEST
        if newest > self._seen and of.before != NEWEST:
            self._unread.insert(0, Range(self._seen, (newest[0], newest[1] + 1)))
        self._seen = newest

    def _trim(self, page: Page) -> None:
        """Letters before the oldest one of the stream, and after the newest one, are gone; and so are the
        reasons that only letters had which are gone, once they are many."""
        self._put(0, len(self._ids) if page.oldest is None else bisect_left(self._ids, page.oldest), ())
        self._put(bisect_right(self._ids, page.newest or OLDEST), len(self._ids), ())
        if len(self._reasons) > 2 * len(self._ids) + _REASONS_SPARE:
            self._reasons, self._sentences = {}, {}
            self._put(0, len(self._ids), self._letters)

    def discard(self, letter_id: LetterId) -> None:
        """This letter is gone."""
        at = bisect_left(self._ids, letter_id)
        if at < len(self._ids) and self._ids[at] == letter_id:
            self._put(at, at + 1, ())
            self.length = max(0, self.length - 1)

    # --- looking up ----------------------------------------------------------------------------------------

    def get(self, letter_id: LetterId) -> Letter | None:
        """The letter with this ID, if it is known."""
        at = bisect_left(self._ids, letter_id)
        return self._letters[at] if at < len(self._ids) and self._ids[at] == letter_id else None

    def error_of(self, letter: Letter) -> str:
        """The key of the group that it belongs to."""
        return self._reason(letter.reason).key

    def sentence_of(self, key: str) -> str:
        """The sentence of a group; empty if no letter has it."""
        return self._sentences.get(key, "")

    def find(self, which: Filter, *, first: int = 0, count: int | None = None) -> Found:
        """Those that are meant, the newest first: `count` of them from the number `first` on, or all."""
        meant = self._meant(which)
        total = len(meant)
        end = max(0, total - first)
        start = 0 if count is None else max(0, end - count)
        return Found([self._letters[at] for at in meant[start:end][::-1]], total)

    def ids(self, which: Filter) -> list[LetterId]:
        """The IDs of those that are meant, the oldest first."""
        return [self._ids[at] for at in self._meant(which)]

    def of_request(self, correlation_id: str) -> list[Letter]:
        """The letters with this correlation ID, the newest first."""
        return [letter for letter in self._letters if letter.correlation_id == correlation_id][::-1]

    def groups(self, which: Filter) -> list[Group]:
        """Those that are meant by their errors, the largest group first."""
        meant = self._meant(which)
        keys = [self._groups[at] for at in meant]
        newest = dict(zip(keys, meant, strict=True))
        oldest = dict(zip(reversed(keys), reversed(meant), strict=True))
        groups = [
            Group(
                key,
                self._sentences[key],
                number,
                self._ids[newest[key]][0],
                self._ids[oldest[key]][0],
                self._letters[newest[key]],
            )
            for key, number in Counter(keys).items()
        ]
        return sorted(groups, key=lambda group: (-group.number, -group.newest_ms))

    def _meant(self, which: Filter) -> Sequence[int]:
        """Their places, ascending. Reasons are compared once each: there are few among many letters."""
        places: Sequence[int] = range(self._first_of(which), self._end_of(which))
        if which.error:
            places = [at for at in places if self._groups[at] == which.error]
        if which.text:
            text, folded = which.text.casefold(), self._folded
            reasons = {of.text for of in self._reasons.values() if text in of.folded}
            is_id = _PART_OF_ID.fullmatch(text) is not None
            places = [
                at
                for at in places
                if text in folded[at]
                or self._letters[at].reason in reasons
                or (is_id and text in self._letters[at].name)
            ]
        return places

    def _first_of(self, which: Filter) -> int:
        if which.newer_ms is None:
            return 0
        return bisect_left(self._ids, (self.now_ms - which.newer_ms, 0))

    def _end_of(self, which: Filter) -> int:
        ends: Iterable[LetterId] = (
            *([] if which.older_ms is None else [(max(0, self.now_ms - which.older_ms), 0)]),
            *([] if which.until is None else [(which.until[0], which.until[1] + 1)]),
        )
        return min([bisect_left(self._ids, end) for end in ends], default=len(self._ids))
