"""Carpool's own HTTP interface as pure functions: options from headers, answers from results."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool import errors
from carpool.errors import CarpoolError, InvalidArgumentError, error_for
from carpool.messages.results import Result
from carpool_gateway.answers import STATUS_LINES, HttpError, error_body, failure, http_error_of
from carpool_gateway.native.results import (
    content_type_header,
    further_headers,
    lines_of,
    result_line,
)
from carpool_gateway.options import accepted, content_type_of, options_of, preferences


def test_options_are_in_headers() -> None:
    assert options_of({b"host": b"x", b"accept": b"*/*", b"content-type": b"image/png"}) == {}
    assert options_of(
        {
            b"carpool-timeout-ms": b"1500",
            b"carpool-not-before-ms": b"250",
            b"carpool-priority": b"9",
            b"carpool-lane": "größer".encode(),
            b"carpool-cost": b"3",
            b"carpool-tenant": b"acme",
            b"carpool-correlation-id": b"c-1",
            b"carpool-sequence-id": b"s",
            b"carpool-sequence-start": b"TRUE",
            b"carpool-sequence-end": b"0",
            b"carpool-sequence-index": b"0",
            b"carpool-field-a": b"\xff",
            b"traceparent": b"00-x",
            b"accept": b"image/png",
        }
    ) == {
        "timeout": 1.5,
        "not_before": 0.25,
        "priority": 9,
        "lane": "größer",
        "cost": 3,
        "tenant": "acme",
        "correlation_id": "c-1",
        "sequence_id": "s",
        "sequence_start": True,
        "sequence_end": False,
        "sequence_index": 0,
        "fields": {"a": b"\xff", "traceparent": b"00-x"},
        "accept": "image/png",
    }


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        (b"carpool-timeout-ms", b"-1", "Carpool-Timeout-Ms: '-1' must be a whole number"),
        (b"carpool-timeout-ms", b"1.5", "whole number"),
        (b"carpool-timeout-ms", "²".encode(), "whole number"),
        (b"carpool-priority", b"", "Carpool-Priority"),
        (b"carpool-lane", b"\xff", "Carpool-Lane: must be UTF-8"),
        (b"carpool-sequence-start", b"yes", "true or false"),
        (b"carpool-field-", b"x", "no such header"),
        (b"carpool-retries", b"1", "Carpool-Retries: there is no such header"),
    ],
)
def test_what_cannot_be_an_option_is_named(name: bytes, value: bytes, why: str) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        options_of({name: value})


@given(st.dictionaries(st.binary(max_size=20).map(lambda rest: b"carpool-" + rest), st.binary(max_size=20)))
def test_any_headers_are_options_or_refused(headers: dict[bytes, bytes]) -> None:
    with suppress(InvalidArgumentError):
        options_of(headers)


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (b"*/*", ""),
        (b"", ""),
        (b"image/png", "image/png"),
        (b"APPLICATION/JSON", "application/json"),
        (b"image/*", ""),
        (b"text/html, image/png;q=0.5, */*;q=0.1", ""),
        (b"text/plain;q=0.3, image/png;q=0.8", "image/png"),
        (b"image/png;q=0, application/json", "application/json"),
        (b"text/plain; charset=utf-8; q=0.9", "text/plain; charset=utf-8"),
        (b"text/event-stream", ""),
        (b"image/png;q=high", ""),
    ],
)
def test_the_preferred_type_is_wanted(accept: bytes, wanted: str) -> None:
    assert accepted(accept) == wanted


@pytest.mark.parametrize(
    ("header", "content_type"),
    [
        (None, "application/json"),
        (b"", "application/json"),
        (b"application/x-www-form-urlencoded", "application/json"),
        (b"Application/JSON; charset=utf-8", "application/json"),
        (b"image/png", "image/png"),
    ],
)
def test_content_types_of_bodies(header: bytes | None, content_type: str) -> None:
    assert content_type_of(header) == content_type


def test_preferences() -> None:
    assert preferences(b"respond-async, wait=10") == {"respond-async": "", "wait": "10"}
    assert preferences(b'Wait="5"; x=y, wait=7') == {"wait": "5"}


def every_error(kind: type[CarpoolError] = CarpoolError) -> list[type[CarpoolError]]:
    own = [one for one in kind.__subclasses__() if one.__module__ == errors.__name__]
    return [kind, *(further for one in own for further in every_error(one))]


def test_every_error_has_an_answer() -> None:
    for kind in every_error():
        error = http_error_of(kind("why", correlation_id="c"))
        assert error.code in STATUS_LINES
        assert json.loads(error_body(error)) == {"error": "why", "status": kind.status, "correlation_id": "c"}
        assert (b"retry-after" in error.headers) == (error.code in (429, 503))
    assert http_error_of(error_for("OF_A_LATER_VERSION", "why")).code == 500


def test_what_trying_again_does_not_help_is_no_429() -> None:
    error = failure("RESOURCE_EXHAUSTED", "its result has more than max_result_bytes", "c")
    assert (error.code, error.headers) == (500, b"")


@pytest.mark.parametrize(
    "code", [400, 401, 403, 404, 405, 408, 413, 415, 417, 422, 429, 431, 500, 501, 503, 505]
)
def test_errors_of_http_have_a_status(code: int) -> None:
    assert set(json.loads(error_body(HttpError(code, "why")))) == {"error", "status"}


@pytest.mark.parametrize("text", ["image/png\r\nset-cookie: a=b", "image/png\n", "ü/x", "a/b\0"])
def test_no_content_type_becomes_a_header(text: str) -> None:
    assert content_type_header(text) == b"application/octet-stream"


@given(st.text())
def test_no_warning_becomes_a_header(text: str) -> None:
    header = further_headers(None, [text])
    assert header.count(b"\r\n") == 1
    assert header.endswith(b"\r\n")
    assert all(32 <= byte < 127 for byte in header[:-2])


@pytest.mark.parametrize(
    ("body", "lines"),
    [(b"1", [b"1"]), (b"1\n", [b"1"]), (b"1\r\n2", [b"1\r", b"2"]), (b'"a"\n[]\n', [b'"a"', b"[]"])],
)
def test_lines(body: bytes, lines: list[bytes]) -> None:
    assert lines_of(body) == lines


@pytest.mark.parametrize("body", [b"", b"\n", b"1\n\n2", b"1\n \n", b"1\n\n"])
def test_empty_lines_are_refused(body: bytes) -> None:
    with pytest.raises(HttpError, match=r"line \d is empty"):
        lines_of(body)


@pytest.mark.parametrize(
    ("result", "line"),
    [
        (Result("c", body=b"49"), {"result": 49}),
        (Result("c", body=b'{\n "a": 1\n}'), {"result": {"a": 1}}),
        (
            Result("c", content_type="image/png", body=b"\x89"),
            {"result_base64": "iQ==", "content_type": "image/png"},
        ),
        (
            Result("c", "INTERNAL", detail="why"),
            {"error": "why", "status": "INTERNAL", "correlation_id": "c"},
        ),
    ],
)
def test_a_result_is_one_line(result: Result, line: Any) -> None:
    written = result_line(result)
    assert written.count(b"\n") == 1
    assert json.loads(written) == line
