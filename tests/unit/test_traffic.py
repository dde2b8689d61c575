"""Shares of traffic: what is read and written, and which version a request gets."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.wire.traffic import (
    Division,
    check_shares,
    parse_share,
    promoted,
    read_shares,
    rolled_back,
)

NAMES = [f"order-{number}" for number in range(2000)]


@pytest.mark.parametrize(("text", "share"), [("10%", 10), ("0", 0), (" 100 %", 100)])
def test_share_as_people_write_it(text: str, share: int) -> None:
    assert parse_share(text) == share


@pytest.mark.parametrize("text", ["", "%", "101%", "-1", "1.5", "\u0663"])
def test_no_share(text: str) -> None:
    with pytest.raises(ValueError, match="whole number from 0 to 100"):
        parse_share(text)


@pytest.mark.parametrize(
    ("shares", "problem"),
    [({"a b": 1}, "version 'a b'"), ({"1": 101}, "101"), ({"1": 60, "2": 41}, "60% [+] 41%")],
)
def test_invalid_shares_are_refused(shares: dict[str, int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_shares(shares)


def test_what_a_user_wrote_into_the_hash_is_left_out() -> None:
    assert read_shares({"2": "10", "3": "x", "a b": "1", "4": "95"}) == {"2": 10}


def test_promote_and_rollback_are_about_the_only_version_with_a_share() -> None:
    assert promoted({"2": 10}) == {"2": 100}
    assert rolled_back({"2": 10}) == {"2": 0}
    assert promoted({}, "3") == {"3": 100}
    for shares in ({}, {"1": 10, "2": 10}):
        with pytest.raises(ValueError, match="--version"):
            promoted(shares)


def counted(division: Division) -> Counter[str]:
    return Counter(map(division.version_of, NAMES))


def test_a_share_is_about_that_part_of_the_requests() -> None:
    found = counted(Division({"2": 10}, ["1", "2"]))
    assert 140 < found["2"] < 260  # of 2000
    assert found["1"] == 2000 - found["2"]


def test_the_rest_is_divided_evenly_among_the_versions_without_a_share() -> None:
    found = counted(Division({"3": 20}, ["1", "2", "3", ""]))
    assert all(
        abs(found[version] - wanted) < 150 for version, wanted in {"1": 800, "2": 800, "3": 400}.items()
    )


def test_a_version_that_has_no_worker_gets_nothing() -> None:
    assert counted(Division({"2": 10}, ["1"])) == {"1": 2000}
    assert counted(Division({"2": 10}, ["2"])) == {"2": 2000}  # nobody else has the rest


def test_a_version_without_traffic_gets_it_only_if_no_other_one_is_there() -> None:
    assert counted(Division({"2": 0}, ["1", "2"])) == {"1": 2000}
    assert counted(Division({"2": 0}, ["2"])) == {"2": 2000}
    assert Division({"2": 0}, ["1", "2"]).versions == ["1"]
    assert Division({"2": 100}, ["1", "2"]).versions == ["2"]


def test_without_shares_or_named_versions_any_worker_takes_them() -> None:
    assert not Division({}, ["1", "2"])
    assert not Division({"2": 10}, [""])
    assert not Division({}, ["1"])


@given(st.text(max_size=20), st.integers(0, 99))
def test_a_version_keeps_its_requests_while_its_share_grows(name: str, share: int) -> None:
    before, after = (Division({"2": of}, ["1", "2"]).version_of(name) for of in (share, share + 1))
    assert before == "1" or after == "2"
