"""The audit of all models as one list, in pages that leave nothing out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from carpool.wire.audit import Action
from carpool_console.pages.audit import Told, newest


def told(model: str, at_ms: int, number: int) -> Told:
    return Told(model, Action(f"{at_ms}-{number}", at_ms, "ann", "command", "config", {}))


IDS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 1)), unique=True, max_size=8)


@given(streams=st.lists(IDS, max_size=4), count=st.integers(1, 4))
def test_pages_have_each_action_once_the_newest_first(
    streams: list[list[tuple[int, int]]], count: int
) -> None:
    """Given actions of several models at the same time, expect that they stay together on a page."""
    kept = [
        [told(f"m{model}", *one) for one in sorted(ids, reverse=True)] for model, ids in enumerate(streams)
    ]
    seen: list[Told] = []
    before = (99, 0)
    while True:
        found = [[one for one in of if _id(one) < before][: count + 1] for of in kept]
        page, older = newest(found, count)
        seen += page
        if not older:
            break
        before = _id(page[-1])
    assert sorted(seen) == sorted(one for of in kept for one in of)
    assert [_id(one) for one in seen] == sorted(map(_id, seen), reverse=True)


def test_actions_that_were_not_looked_at_are_on_the_next_page() -> None:
    """Given an audit of which only a part was looked at, expect nothing older of the others."""
    found = [[told("a", 5, 0), told("a", 1, 0)], [told("b", 3, 0)]]
    page, older = newest(found, 10, "3-0")
    assert ([_id(one) for one in page], older) == ([(5, 0), (3, 0)], "3-0")


def _id(one: Told) -> tuple[int, int]:
    at_ms, _, number = one.action.id.partition("-")
    return int(at_ms), int(number)
