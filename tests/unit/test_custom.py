"""Policies of a user's own: what they decide, and that what they raise hits its requests and nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from carpool.errors import INTERNAL
from carpool.messages import Entry, Refusal, Request
from carpool.model_settings import ModelSettings
from carpool_batcher.core.custom import CustomPolicy
from carpool_batcher.core.scheduler import Decision, Dispatch, Scheduler


class Recorder:
    """Lets as many bytes ride together as `limit`; raises where it is told to."""

    def __init__(self, limit: int = 10, *raises: str) -> None:
        self.limit = limit
        self.raises = raises
        self.finalised: list[list[str]] = []

    def initialise(self) -> dict[str, int]:
        self._maybe_raise("initialise")
        return {"bytes": 0}

    def include(self, batch: dict[str, int], request: Request) -> bool:
        self._maybe_raise(request.correlation_id)
        batch["bytes"] += len(request.body)
        return batch["bytes"] <= self.limit

    def finalise(self, _batch: dict[str, int], requests: Sequence[Request]) -> None:
        self._maybe_raise("finalise")
        self.finalised.append([request.correlation_id for request in requests])

    def _maybe_raise(self, where: str) -> None:
        if where in self.raises:
            raise RuntimeError(where)


def scheduler_with(policy: Any, *sizes: int, **settings: Any) -> Scheduler:
    scheduler = Scheduler(ModelSettings(**settings), model_processes=1)
    scheduler.custom_policy = CustomPolicy(policy)
    for at, size in enumerate(sizes):
        entry = Entry(f"{at}-0", 0)
        request = Request(entry, "abcdefgh"[at], b"x" * size)
        entry.requests.append(request)
        assert scheduler.offer(request, 0) is None
    return scheduler


def told(decisions: Sequence[Decision]) -> list[tuple[str, str]]:
    """Who left together, and who was refused."""
    said = []
    for one in decisions:
        if type(one) is Dispatch:
            said.append(("leave", "".join(request.correlation_id for request in one.requests)))
        else:
            assert type(one) is Refusal
            assert (one.status, one.reason) == (INTERNAL, "policy")
            said.append(("refuse", one.correlation_id))
    return said


def test_a_batch_is_closed_by_who_is_not_let_in() -> None:
    policy = Recorder(10)
    scheduler = scheduler_with(policy, 4, 4, 4, 1)
    assert told(scheduler.poll(0)) == [("leave", "ab")]
    scheduler.cancel()
    assert told(scheduler.poll(0)) == [("leave", "cd")]
    assert policy.finalised == [["a", "b"], ["c", "d"]]


def test_the_first_rides_whatever_the_policy_says() -> None:
    assert told(scheduler_with(Recorder(10), 50, 1).poll(0)) == [("leave", "a")]


def test_limits_hold_beside_the_policy() -> None:
    assert told(scheduler_with(Recorder(10), 1, 1, 1, max_batch_size=2).poll(0)) == [("leave", "ab")]


def test_a_request_for_which_include_raises_fails_alone() -> None:
    scheduler = scheduler_with(Recorder(10, "b"), 1, 1, 1)
    assert told(scheduler.poll(0)) == [("refuse", "b"), ("leave", "ac")]
    assert scheduler.waiting == 0


@pytest.mark.parametrize("hook", ["initialise", "finalise"])
def test_a_hook_that_raises_fails_the_batch_that_was_formed(hook: str) -> None:
    scheduler = scheduler_with(Recorder(2, hook), 1, 1, 1)
    first = told(scheduler.poll(0))
    assert first[:2] == [("refuse", "a"), ("refuse", "b")]
    assert scheduler.waiting == 0
    assert scheduler.wake_at_us() is None


def test_hooks_may_be_left_out() -> None:
    class OnlyInclude:
        def include(self, _batch: None, request: Request) -> bool:
            return request.correlation_id != "c"

    assert told(scheduler_with(OnlyInclude(), 1, 1, 1).poll(0)) == [("leave", "ab")]


def test_what_is_no_policy_is_refused_with_its_name() -> None:
    with pytest.raises(ValueError, match="has no method 'include'"):
        CustomPolicy(object())
