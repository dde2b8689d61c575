"""Filters of dead letters in addresses of pages, and how bodies are shown."""

from __future__ import annotations

from urllib.parse import parse_qsl

import pytest

from carpool_console.dead_index import Filter
from carpool_console.dead_query import BODY_CHARS_MAX, filter_query, parse_filter, show_body


def test_filter_is_read_from_the_address_that_it_makes() -> None:
    which = Filter("a&b=ü", "0f3c", 90_000, 7_200_000, (17, 3))
    assert parse_filter(dict(parse_qsl(filter_query(which)[1:]))) == which
    assert filter_query(Filter()) == "" and parse_filter({}) == Filter()
    assert filter_query(Filter(text="x"), page=2) == "?q=x&page=2"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"older": "soon"}, "older than: 'soon' is no time, such as 90s"),
        ({"newer": "5"}, "newer than: '5' is no time"),
        ({"newer": "9" * 40 + "d"}, "newer than"),
        ({"until": "x"}, "is no ID of a dead letter"),
        ({"q": "x" * 201}, "search: 201 characters"),
    ],
)
def test_wrong_parameters_are_named(parameters: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_filter(parameters)


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (b'{"a":[1,"\xc3\xbc"]}', "JSON", '{\n  "a": [\n    1,\n    "ü"\n  ]\n}'),
        (b"hello\nthere", "text", "hello\nthere"),
        (b"\xff\x00A", "bytes", "000000  ff 00 41                                         ..A"),
        (b"a\x00", "bytes", "000000  61 00                                            a."),
        (b"", "text", ""),
        (None, "gone", ""),
        (b"[" * 100_000, "text", "[" * BODY_CHARS_MAX),
    ],
)
def test_bodies_are_shown_as_what_they_are(body: bytes | None, kind: str, text: str) -> None:
    shown = show_body(body)
    assert (shown.kind, shown.text, shown.size_bytes) == (kind, text, len(body or b""))


def test_of_a_large_body_only_a_part_is_shown() -> None:
    for body in (b"x" * 1_000_000, b"\xff" * 1_000_000, b"[" + b"1," * 100_000 + b"1]"):
        shown = show_body(body)
        assert shown.is_cut and len(shown.text) <= BODY_CHARS_MAX + 8 * 1024
        assert shown.size_bytes == len(body)
