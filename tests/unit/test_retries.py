"""Sending a request again: after which errors, how often, and until when."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from carpool.client import retries
from carpool.client.options import TIMEOUT_S_MIN, RequestOptions, left_of
from carpool.client.retries import with_retries
from carpool.errors import (
    AbortedError,
    CarpoolError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
)


class Sender:
    """Fails with these errors, one after the other, and then succeeds."""

    def __init__(self, errors: Sequence[CarpoolError]) -> None:
        self.errors = list(errors)
        self.options: list[RequestOptions] = []

    async def __call__(self, options: RequestOptions) -> Any:
        self.options.append(options)
        if self.errors:
            raise self.errors.pop(0)
        return "sent"


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses, none of which is waited for."""
    passed: list[float] = []

    async def pass_by(pause_s: float) -> None:
        passed.append(pause_s)

    monkeypatch.setattr(asyncio, "sleep", pass_by)
    monkeypatch.setattr(retries, "with_jitter", lambda pause_s: pause_s)
    return passed


async def retry(sender: Sender, options: RequestOptions, timeout_s: float | None = None) -> Any:
    return await with_retries(sender, options, timeout_s, lambda: False)


async def test_pauses_double_up_to_a_limit(pauses: list[float]) -> None:
    sender = Sender([ResourceExhaustedError("full")] * 9)
    assert await retry(sender, {"retries": 9, "lane": "a"}) == "sent"
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10])
    assert all(options == {"lane": "a"} for options in sender.options)


@pytest.mark.parametrize("kind", [ResourceExhaustedError, UnavailableError, InternalError])
async def test_last_error_is_raised(kind: type[CarpoolError], pauses: list[float]) -> None:
    sender = Sender([kind("first"), kind("second"), kind("third")])
    with pytest.raises(kind, match="second"):
        await retry(sender, {"retries": 1})
    assert len(pauses) == 1


@pytest.mark.parametrize(
    "kind",
    [InvalidArgumentError, DeadlineExceededError, AbortedError, NotFoundError, PermissionDeniedError],
)
async def test_error_that_would_come_again_is_raised_at_once(kind: type[CarpoolError]) -> None:
    sender = Sender([kind("no")])
    with pytest.raises(kind):
        await retry(sender, {"retries": 5})
    assert len(sender.options) == 1


async def test_timeout_is_for_all_attempts(pauses: list[float]) -> None:
    sender = Sender([InternalError(str(number)) for number in range(9)])
    with pytest.raises(InternalError, match="2"):  # the pauses 0.1 and 0.2 are passed by, 0.4 is too long
        await retry(sender, {"retries": 9, "timeout": 0.35})
    assert pauses == [0.1, 0.2]
    assert sender.options[0] == {"timeout": 0.35}
    assert all(0 < options["timeout"] < 0.35 for options in sender.options[1:])  # type: ignore[operator]


async def test_delay_is_counted_from_the_first_attempt() -> None:
    sender = Sender([InternalError(str(number)) for number in range(3)])
    assert await retry(sender, {"retries": 3, "timeout": 5.0, "not_before": 4.9}) == "sent"
    first, *later = sender.options
    assert first == {"timeout": 5.0, "not_before": 4.9}
    for options in later:
        assert options["timeout"] - options["not_before"] == pytest.approx(0.1)  # type: ignore[operator]
        assert options["not_before"] < 4.9  # type: ignore[operator]


@pytest.mark.parametrize(
    ("options", "timeout_s", "left"),
    [
        ({"lane": "a"}, None, {"lane": "a"}),
        ({"not_before": 3}, None, {"not_before": 1}),
        ({"not_before": 3, "timeout": 5}, 5, {"not_before": 1, "timeout": 3}),
        ({"not_before": 1.5}, 5, {"not_before": 0, "timeout": 3}),
        ({"timeout": 1}, 1, {"timeout": TIMEOUT_S_MIN}),
        ({"not_before": "soon"}, None, {"not_before": "soon"}),  # which is refused when it is sent
        ({"not_before": -1}, None, {"not_before": -1}),
    ],
)
def test_what_is_left_of_options(options: Any, timeout_s: float | None, left: Any) -> None:
    assert left_of(options, timeout_s, 2) == left


async def test_closed_client_sends_nothing_again(pauses: list[float]) -> None:
    sender = Sender([UnavailableError("closed")] * 2)
    with pytest.raises(UnavailableError):
        await with_retries(sender, {"retries": 5}, None, lambda: True)
    assert pauses == []


@pytest.mark.parametrize("number", [-1, 1.5, "3", None, True, 1001])
async def test_number_of_retries_is_checked(number: Any) -> None:
    sender = Sender([])
    with pytest.raises(InvalidArgumentError, match=r"retries: .* must be a whole number"):
        await retry(sender, {"retries": number})
    assert sender.options == []
