"""A version of a model comes beside others, or in their place, and what becomes of it: nodes and shares.

What is wanted of nodes and the shares of traffic are under keys of two hash slots. So they are changed one
after the other, in an order in which no request goes to a version that nobody serves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Final, NamedTuple

from carpool.store.nodes import NodeStore
from carpool.store.traffic import Traffic
from carpool.wire.audit import Actor
from carpool.wire.nodes import OutcomeState, Wanted

SHORTAGE_S_MAX: Final = 3.0  # nodes may come, and processes end; then there is no room
_HOW: Final = {OutcomeState.FAILED: "is not loaded", OutcomeState.GONE: "does not serve"}

OpenTraffic = Callable[[str], AbstractContextManager[Traffic]]
"""The traffic of a model, for the time of a `with`."""


class Progress(NamedTuple):
    """How a load goes: `text` for people. `has_ended`: it serves, or with `has_failed` will not."""

    text: str
    has_ended: bool = False
    has_failed: bool = False


class Following:
    """What becomes of a generation, looked at again and again. A generation for which there is no room for a
    while is given up, unless it served before. Raises LinkError and CommandError."""

    def __init__(self, nodes: NodeStore, model: str, generation: int) -> None:
        self.model: Final = model
        self.generation: Final = generation
        self._nodes = nodes
        self._lacking_since_s: float | None = None

    def look(self, now_s: float) -> Progress:
        """How it goes now. `now_s`: of any clock that does not go back."""
        state, reason = self._nodes.outcome(self.model, self.generation)
        if state is OutcomeState.SERVING:
            return Progress(reason, has_ended=True)
        if state in _HOW:
            return Progress(f"{self.model} {_HOW[state]}: {reason}", has_ended=True, has_failed=True)
        if state is not OutcomeState.WAITING:
            self._lacking_since_s = None
        elif self._lacking_since_s is None:
            self._lacking_since_s = now_s
        elif now_s - self._lacking_since_s > SHORTAGE_S_MAX:
            given_up = self._nodes.fail(self.model, self.generation, reason)
            rest = "" if given_up else ". It remains wanted, for nodes that have room later"
            return Progress(f"{reason}{rest}", has_ended=True, has_failed=True)
        return Progress(reason)


class Rollouts:
    """What an operator does with versions that nodes serve. All of it raises LinkError, CommandError and, for
    what cannot be done, ValueError."""

    def __init__(self, nodes: NodeStore, open_traffic: OpenTraffic, actor: Actor) -> None:
        self._nodes = nodes
        self._open_traffic = open_traffic
        self._actor = actor

    def load(
        self,
        model: str,
        version: str | None,
        parameters: Mapping[str, str],
        replicas: int | None,
        share: int | None,
        *,
        entry: str,
    ) -> int:
        """A version is wanted; returns its generation. With a `share` (per cent) it gets that before any of
        its processes takes a batch."""
        generation = self._nodes.load(
            model, version, parameters, replicas, share, actor=self._actor, entry=entry
        )
        if share is not None:
            self.set_share(model, self._version_of(generation), share)
        return generation

    def take_over(self, trial: Wanted) -> int:
        """A version that has a share is wanted in place of the others; returns the new generation. Call
        `finish` when it serves."""
        of_trial = trial.version, trial.parameters, None, None
        return self._nodes.load(
            trial.model, *of_trial, actor=self._actor, entry=trial.entry, settings=trial.settings
        )

    def finish(self, model: str, generation: int, *, with_share: bool, has_failed: bool) -> None:
        """After a load has ended: shares that mean nothing any more are removed. That of a version stays as
        long as it is wanted with one."""
        snapshot = self._nodes.snapshot()
        if with_share:
            is_over = snapshot.generation(generation) is None
        else:
            is_over = not has_failed and snapshot.trial(model) is None
        if is_over:
            self.set_share(model, None)

    def unload(self, model: str, version: str | None) -> int:
        """A model, or one version, is wanted no more. Returns how many generations were."""
        number = self._nodes.unload(model, version, actor=self._actor)
        if number and self._nodes.snapshot().trial(model) is None:
            self.set_share(model, None)
        return number

    def set_share(self, model: str, version: str | None, share: int = 0) -> None:
        """Give this share of the traffic to a version, and the rest to the others; None: no version has
        one."""
        with self._open_traffic(model) as traffic:
            shares = {} if version is None else {version: share}
            if shares != traffic.shares():
                traffic.set(shares, actor=self._actor)

    def _version_of(self, generation: int) -> str:
        wanted = self._nodes.snapshot().generation(generation)
        if wanted is None:
            raise ValueError(f"generation {generation} was unloaded meanwhile")
        return wanted.version
