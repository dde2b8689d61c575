"""Custom policies: the classes that a batcher is started with (`--policies`), and an instance for each model.

A policy that cannot be used is refused as early as possible: most when the batcher starts, and a constructor
that raises only later when a model's settings name the policy (`effective_settings`).

Why: docs/decisions/0019.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from carpool.plugins import UnusableError, find_object, reason_of
from carpool_batcher.core.policies.custom import INCLUDE, CustomPolicy

Policies = Mapping[str, Callable[[], Any]]  # classes of custom policies, by the name that settings refer to


def load_policies(names: Sequence[str]) -> Policies:
    """The classes with these names. Each is tried: one instance is created, and discarded.

    Raises UnusableError for the first that cannot be used.
    """
    try:
        policies = {name: _find_class(name) for name in names}
        for name in names:
            create_policy(policies, name)
    except UnusableError as error:
        raise UnusableError(f"--policies: {error}") from None
    return policies


def create_policy(policies: Policies, name: str) -> CustomPolicy:
    """A new instance of a policy that was loaded. Raises UnusableError."""
    policy = policies[name]
    try:
        instance = policy()
    except (Exception, SystemExit) as error:
        raise UnusableError(
            f"{name!r} cannot be created: its constructor, which gets no arguments, raised "
            f"{type(error).__name__}: {error}"
        ) from None
    try:
        return CustomPolicy(instance)
    except ValueError as error:
        raise UnusableError(f"{name!r} {error}") from None


def _find_class(name: str) -> Callable[[], Any]:
    try:
        found = find_object(name)
    except UnusableError:
        raise
    except (Exception, SystemExit) as error:
        raise UnusableError(f"{name!r} cannot be imported: {reason_of(error)}") from None
    if not inspect.isclass(found):
        kind = "a function" if inspect.isroutine(found) else f"an object of the type {type(found).__name__}"
        raise UnusableError(f"{name!r} is {kind}: name a class with a method {INCLUDE}")
    return found
