"""The delivery checker: no report of faults where there are none, and a report of each planted fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.checker import Checker
from support.models.hashing import digest

COUNT = 20


def payload(number: int) -> str:
    return f"payload {number}"


def ok(number: int, name: str | None = None) -> dict[str, Any]:
    """The right envelope for request `number`."""
    name = name or f"r{number}"
    return {"correlation_id": name, "status": "OK", "body": digest(name, payload(number)), "final": True}


def failed(number: int) -> dict[str, Any]:
    return {"correlation_id": f"r{number}", "status": "INTERNAL", "detail": "no", "final": True}


def sent(count: int = COUNT) -> Checker:
    """A checker for requests r0, r1, ..., all accepted, none answered."""
    checker = Checker()
    for number in range(count):
        checker.attempt(f"r{number}", payload(number))
        checker.accept(f"r{number}")
    return checker


def answered() -> Checker:
    """A checker for requests that were all accepted and answered correctly."""
    checker = sent()
    for number in range(COUNT):
        checker.envelope(f"r{number}", ok(number))
    return checker


# --- no faults


def test_results_and_explicit_errors_are_faultless() -> None:
    checker = sent()
    for number in range(COUNT):
        checker.envelope(f"r{number}", failed(number) if number % 4 == 0 else ok(number))

    report = checker.report()

    assert report.faultless, report
    assert (report.attempted, report.accepted, report.ok, report.error) == (COUNT, COUNT, 15, 5)
    assert report.statuses == {"OK": 15, "INTERNAL": 5}
    assert checker.unsettled() == []


def test_request_with_unknown_acceptance_may_have_a_result_or_none() -> None:
    checker = answered()
    checker.attempt("r20", payload(20))
    checker.attempt("r21", payload(21))
    checker.envelope("r21", ok(21))

    report = checker.report()

    assert report.faultless, report
    assert (report.attempted, report.accepted, report.ok) == (22, 20, 21)


def test_request_sent_twice_may_have_two_results() -> None:
    checker = answered()
    checker.attempt("r3", payload(3))
    checker.accept("r3")
    checker.envelope("r3", ok(3))
    assert checker.report().faultless


def test_envelope_that_is_not_final_is_not_a_result() -> None:
    checker = sent(1)
    checker.envelope("r0", ok(0) | {"final": False})
    assert checker.unsettled() == ["r0"]
    checker.envelope("r0", ok(0))
    assert checker.report().faultless


# --- faults


def lose(checker: Checker) -> None:
    checker.attempt("r20", payload(20))
    checker.accept("r20")


def duplicate(checker: Checker) -> None:
    checker.envelope("r3", ok(3))


def duplicate_with_an_error(checker: Checker) -> None:
    checker.envelope("r3", failed(3))


def duplicate_with_unknown_acceptance(checker: Checker) -> None:
    checker.attempt("r20", payload(20))
    checker.envelope("r20", ok(20))
    checker.envelope("r20", ok(20))


def shuffle_rows(checker: Checker) -> None:
    """Another request's result with this request's correlation ID."""
    checker.attempt("r20", payload(20))
    checker.accept("r20")
    checker.envelope("r20", ok(3) | {"correlation_id": "r20"})


def swap_keys(checker: Checker) -> None:
    """Another request's envelope at this request's key."""
    checker.attempt("r20", payload(20))
    checker.accept("r20")
    checker.envelope("r20", failed(3))


def answer_unknown_request(checker: Checker) -> None:
    checker.envelope("r99", ok(99))


def answer_refused_request(checker: Checker) -> None:
    checker.attempt("r20", payload(20))
    checker.refuse("r20")
    checker.envelope("r20", ok(20))


@pytest.mark.parametrize(
    ("plant", "fault", "correlation_id"),
    [
        (lose, "lost", "r20"),
        (duplicate, "duplicated", "r3"),
        (duplicate_with_an_error, "duplicated", "r3"),
        (duplicate_with_unknown_acceptance, "duplicated", "r20"),
        (shuffle_rows, "misrouted", "r20"),
        (swap_keys, "misrouted", "r20"),
        (answer_unknown_request, "unexpected", "r99"),
        (answer_refused_request, "unexpected", "r20"),
    ],
)
def test_checker_reports_planted_fault(
    plant: Callable[[Checker], None], fault: str, correlation_id: str
) -> None:
    checker = answered()
    assert checker.report().faultless

    plant(checker)

    report = checker.report()
    found = {name: getattr(report, name) for name in ("lost", "duplicated", "misrouted", "unexpected")}
    assert found == {"lost": [], "duplicated": [], "misrouted": [], "unexpected": []} | {
        fault: [correlation_id]
    }
    assert not report.faultless
    assert f"{fault} 1 ['{correlation_id}']" in str(report)


def test_retry_with_another_payload_is_a_bug_in_the_test() -> None:
    checker = sent(1)
    with pytest.raises(ValueError, match="payload of the first attempt"):
        checker.attempt("r0", "something else")
