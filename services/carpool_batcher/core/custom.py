"""Policies of one's own: who may join a batch, said by a user's class.

    class Balanced:                                # carpool batcher --policies mine.py:Balanced
        def initialise(self):                      # a batch begins; what is returned goes to the others
            return {"bytes": 0}
        def include(self, batch, request):         # may this request join? False closes the batch
            batch["bytes"] += len(request.body)
            return batch["bytes"] < 1_000_000
        def finalise(self, batch, requests):       # it is complete, and leaves
            ...

`include` alone is required. It is asked in the order of turns, of those that fit; the first of a batch joins
anyhow. A request for which it raises fails (INTERNAL) and no other does; where initialise or finalise raises,
the batch fails that was being formed. A request is `carpool.messages.Request`, to be looked at, not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from carpool.messages import Request


class PolicyError(Exception):
    """A user's policy raised; the message says what."""


class Formed(NamedTuple):
    """What a policy made of those in turn: who leaves together, and who fails because it raised."""

    leave: list[Request]
    failed: list[tuple[Request, str]]


class CustomPolicy:
    """A user's policy, so that what it raises hits its requests and nobody else."""

    def __init__(self, policy: Any) -> None:
        self.raised = ""  # what it said last, for who wrote it: producers are told its type alone
        include = getattr(policy, "include", None)
        if not callable(include):
            raise ValueError(f"the policy {policy!r:.80} has no method 'include'")
        self._include: Callable[[Any, Request], object] = include
        self._initialise: Callable[[], Any] = getattr(policy, "initialise", _nothing)
        self._finalise: Callable[[Any, Sequence[Request]], object] = getattr(policy, "finalise", _nothing)

    def form(self, in_turn: Sequence[Request]) -> Formed:
        """The next batch of these, who are as many as may leave together at most.

        Where somebody fails nobody leaves: without them the turns are others, and the batch is formed anew.
        """
        hook = "initialise"
        leave: list[Request] = []
        try:
            batch = self._initialise()
            hook = "include"
            for request in in_turn:
                leave.append(request)
                joins = self._include(batch, request)
                if not joins and len(leave) > 1:
                    leave.pop()
                    break
            hook = "finalise"
            self._finalise(batch, leave)
        except Exception as error:
            self.raised = f"{hook} raised {type(error).__name__}: {error}"
            said = f"the batching policy's {hook} raised {type(error).__name__}"
            broken = {"initialise": in_turn, "include": leave[-1:], "finalise": leave}[hook]
            return Formed([], [(request, said) for request in broken])
        return Formed(leave, [])


def _nothing(*_: object) -> None:
    """What a policy does that has no such hook."""
