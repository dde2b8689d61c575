"""Statuses, their exceptions, and what other protocols have for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from carpool import errors
from carpool.errors import GRPC_CODE, HTTP_STATUS, OK, CarpoolError, InternalError, error_for

STATUSES = [value for name, value in vars(errors).items() if name.isupper() and value == name]


def kinds(base: type[CarpoolError] = CarpoolError) -> Iterator[type[CarpoolError]]:
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_each_status_has_one_code_of_http_and_of_grpc() -> None:
    assert OK in STATUSES
    assert {kind.status for kind in kinds()} == set(STATUSES) - {OK}
    assert sorted(HTTP_STATUS) == sorted(GRPC_CODE) == sorted(STATUSES)
    assert len(set(HTTP_STATUS.values())) == len(set(GRPC_CODE.values())) == len(STATUSES)


@pytest.mark.parametrize("status", STATUSES)
def test_codes_are_those_of_google_rpc(status: str) -> None:
    google = {
        "OK": (0, 200),
        "CANCELLED": (1, 499),
        "INVALID_ARGUMENT": (3, 400),
        "DEADLINE_EXCEEDED": (4, 504),
        "NOT_FOUND": (5, 404),
        "PERMISSION_DENIED": (7, 403),
        "RESOURCE_EXHAUSTED": (8, 429),
        "ABORTED": (10, 409),
        "UNIMPLEMENTED": (12, 501),
        "INTERNAL": (13, 500),
        "UNAVAILABLE": (14, 503),
    }
    assert (GRPC_CODE[status], HTTP_STATUS[status]) == google[status]


@pytest.mark.parametrize("status", [status for status in STATUSES if status != OK])
def test_each_status_has_an_exception(status: str) -> None:
    error = error_for(status, "why", "x")
    assert (error.status, error.detail, error.correlation_id) == (status, "why", "x")
    assert status == "INTERNAL" or type(error) is not InternalError


def test_a_status_that_is_not_known_is_internal() -> None:
    error = error_for("DATA_LOSS", "why")
    assert type(error) is InternalError
    assert error.detail == "unknown status DATA_LOSS: why"
