"""Custom policies: a user's class decides which requests may join a batch.

    class Balanced:                                # carpool batcher --policies mine.py:Balanced
        def initialise(self):                      # a new batch: the other hooks get what this returns
            return {"bytes": 0}
        def include(self, batch, request):         # may this request join? False closes the batch
            batch["bytes"] += len(request.body)
            return batch["bytes"] < 1_000_000
        def finalise(self, batch, requests):       # the batch is complete, and will be dispatched
            ...

Only `include` is required. It is called in the order of dispatch, for the requests that fit into a batch; the
first one joins in any case. A request for which it raises fails with INTERNAL, and no other does. If
`initialise` or `finalise` raises, the requests of that batch fail. Requests are of the type
`carpool.messages.Request`: read them, but do not change them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from carpool.errors import INTERNAL
from carpool.messages.batches import DispatchReason
from carpool.messages.requests import Request
from carpool.messages.results import Refusal
from carpool_batcher.core.applied_settings import AppliedSettings
from carpool_batcher.core.decisions import refusal
from carpool_batcher.core.policies.eager import Eager
from carpool_batcher.core.waiting.lane import Lane
from carpool_batcher.core.waiting.queue import Queue

INCLUDE: Final = "include(self, batch, request)"


class FormedBatch(NamedTuple):
    """How many requests from the front form a batch. Or, by index, which ones failed because the policy
    raised, and the error for them."""

    size: int
    failed: Sequence[int] = ()
    detail: str = ""


class CustomPolicy:
    """Calls a user's policy, and confines its exceptions to the requests concerned.

    `raised` is the last exception and where it was raised, for the log, without its text, which may quote a
    body; producers only learn the type.

    Raises ValueError for a policy without `include`, or with a hook that cannot be called; the message has no
    subject, so that the caller can name the policy.
    """

    def __init__(self, policy: Any) -> None:
        self.raised = ""
        if not hasattr(policy, "include"):
            raise ValueError(f"has no method 'include': write {INCLUDE}")
        self._include: Callable[[Any, Request], object] = _hook(policy, INCLUDE)
        self._initialise: Callable[[], Any] = _hook(policy, "initialise(self)")
        self._finalise: Callable[[Any, Sequence[Request]], object] = _hook(
            policy, "finalise(self, batch, requests)"
        )

    def form(self, candidates: Sequence[Request]) -> FormedBatch:
        """Form a batch from the front of these requests, which would all fit into one.

        If a request fails, none is dispatched: without it the fair turns change, so the batch is formed anew.
        """
        hook = "initialise"
        size = 0
        try:
            batch = self._initialise()
            hook = "include"
            for request in candidates:
                size += 1
                may_join = self._include(batch, request)
                if not may_join and size > 1:
                    size -= 1
                    break
            hook = "finalise"
            self._finalise(batch, candidates[:size])
        except Exception as error:
            self.raised = f"{hook} raised {type(error).__name__}: {_place_of(error)}"
            detail = f"the model's batching policy raised {type(error).__name__} in {hook}"
            failed = {"initialise": range(len(candidates)), "include": [size - 1], "finalise": range(size)}
            return FormedBatch(0, failed[hook], detail)
        return FormedBatch(size)


class Custom(Eager):
    """A batch is ready as under `eager`, and has the requests that a user's policy includes."""

    is_full_final = False

    def __init__(self, applied: AppliedSettings, queue: Queue, policy: CustomPolicy) -> None:
        super().__init__(applied, queue)
        self._policy = policy

    def form(self, lane: Lane, reason: DispatchReason, now_us: int) -> tuple[int, Sequence[Refusal]]:
        parts = lane.peek_batch(self._applied.batch, self._applied.shares)
        requests = [request for run, start, count in parts for request in run.requests(start, start + count)]
        formed = self._policy.form(requests)
        failed = self._queue.take_from(parts, formed.failed)
        return formed.size, [refusal(run, INTERNAL, "policy", formed.detail) for run in failed]


def _place_of(error: BaseException) -> str:
    """The file and the line that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno}" if trace is not None else "unknown"


def _hook(policy: Any, declaration: str) -> Callable[..., Any]:
    """The policy's method with this name, which can be called with these arguments."""
    name, _, parameters = declaration.partition("(")
    hook = getattr(policy, name, _no_hook)
    if not callable(hook):
        raise ValueError(f"has {name!r}, which is not a method: write {declaration}")
    if inspect.iscoroutinefunction(hook):
        raise ValueError(
            f"has a coroutine function {name!r}, which is never awaited: write def, not async def"
        )
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):  # some C functions have no signature
        return hook
    try:
        signature.bind(*[None] * parameters.count(","))
    except TypeError as error:
        raise ValueError(
            f"has a method {name!r} with other parameters ({error}): write {declaration}"
        ) from None
    return hook


def _no_hook(*_: object) -> None:
    """Stands for a hook that the user's policy does not have."""
