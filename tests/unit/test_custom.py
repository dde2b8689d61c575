"""Custom policies: what they decide, and which requests fail when they raise."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from carpool.errors import INTERNAL
from carpool.messages.requests import Entry, Request, Run
from carpool.messages.results import Refusal
from carpool.model_settings import ModelSettings
from carpool_batcher.core.policies.custom import CustomPolicy
from carpool_batcher.core.scheduler import Decision, Dispatch, Scheduler
from support.scheduler_harness import names_of, run


class Recorder:
    """Allows `limit` bytes in a batch. Raises in the hooks, or for the requests, named in `raises`."""

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
        run = Run(entry, ["abcdefgh"[at]], [b"x" * size])
        entry.runs.append(run)
        assert scheduler.offer(run, 0) == []
    return scheduler


def outcomes(decisions: Sequence[Decision]) -> list[tuple[str, str]]:
    """Which requests were dispatched together, and which were refused."""
    result = []
    for decision in decisions:
        if type(decision) is Dispatch:
            result.append(("dispatch", "".join(names_of(decision.runs).split())))
        else:
            assert type(decision) is Refusal
            assert (decision.status, decision.reason) == (INTERNAL, "policy")
            result += [("refuse", name) for name in decision.correlation_ids]
    return result


def test_request_that_is_not_included_closes_the_batch() -> None:
    policy = Recorder(10)
    scheduler = scheduler_with(policy, 4, 4, 4, 1)
    assert outcomes(scheduler.poll(0)) == [("dispatch", "ab")]
    scheduler.in_flight.unreserve()
    assert outcomes(scheduler.poll(0)) == [("dispatch", "cd")]
    assert policy.finalised == [["a", "b"], ["c", "d"]]


def test_first_request_joins_in_any_case() -> None:
    assert outcomes(scheduler_with(Recorder(10), 50, 1).poll(0)) == [("dispatch", "a")]


def test_limits_of_the_settings_apply_as_well() -> None:
    assert outcomes(scheduler_with(Recorder(10), 1, 1, 1, max_batch_size=2).poll(0)) == [("dispatch", "ab")]


def test_request_for_which_include_raises_fails_alone() -> None:
    scheduler = scheduler_with(Recorder(10, "b"), 1, 1, 1)
    assert outcomes(scheduler.poll(0)) == [("refuse", "b"), ("dispatch", "ac")]
    assert scheduler.queue.count == 0


@pytest.mark.parametrize("hook", ["initialise", "finalise"])
def test_all_requests_of_a_batch_fail_if_another_hook_raises(hook: str) -> None:
    scheduler = scheduler_with(Recorder(2, hook), 1, 1, 1)
    first = outcomes(scheduler.poll(0))
    assert first[:2] == [("refuse", "a"), ("refuse", "b")]
    assert scheduler.queue.count == 0
    assert scheduler.wake_at_us() is None


def test_policy_sees_single_requests_of_a_run() -> None:
    policy = Recorder(2, "d")
    scheduler = scheduler_with(policy)
    assert scheduler.offer(run("a b c d e"), 0) == []
    assert outcomes(scheduler.poll(0)) == [("dispatch", "ab")]
    scheduler.in_flight.unreserve()
    # Given that the policy raises for a request in the middle of a run, the others are dispatched without it
    assert outcomes(scheduler.poll(0)) == [("refuse", "d"), ("dispatch", "ce")]
    assert policy.finalised == [["a", "b"], ["c", "e"]]


def test_other_hooks_are_optional() -> None:
    class OnlyInclude:
        def include(self, _batch: None, request: Request) -> bool:
            return request.correlation_id != "c"

    assert outcomes(scheduler_with(OnlyInclude(), 1, 1, 1).poll(0)) == [("dispatch", "ab")]


def includes(_batch: object, _request: Request) -> bool:
    return True


async def includes_later(_batch: object, _request: Request) -> bool:
    return True


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ({}, r"^has no method 'include': write include\(self, batch, request\)$"),
        ({"include": 7}, "^has 'include', which is not a method: write include"),
        ({"include": includes_later}, "^has a coroutine function 'include', .*: write def, not async def$"),
        (
            {"include": lambda request: True},
            r"'include' with other parameters \(too many .*\): write include\(self, batch, request\)",
        ),
        (
            {"include": includes, "initialise": lambda batch: {}},
            r"'initialise' with other parameters \(missing .* 'batch'\): write initialise\(self\)",
        ),
        ({"include": includes, "finalise": None}, "^has 'finalise', which is not a method"),
    ],
)
def test_policy_with_a_hook_that_cannot_be_called_is_rejected(hooks: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CustomPolicy(SimpleNamespace(**hooks))


def test_hook_without_a_signature_is_accepted() -> None:
    assert CustomPolicy(SimpleNamespace(include=max)).form([]).size == 0


def test_what_a_policy_raised_is_named_without_its_text() -> None:
    """The text may quote a request."""

    class Quoting:
        def include(self, batch: Any, request: Any) -> bool:
            return float(request.body) > 0

    scheduler = scheduler_with(Quoting(), 4)
    assert outcomes(scheduler.poll(0)) == [("refuse", "a")]
    assert scheduler.custom_policy is not None
    raised = scheduler.custom_policy.raised
    assert re.fullmatch(r"include raised ValueError: .*test_custom\.py, line \d+", raised)
