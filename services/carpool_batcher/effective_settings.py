"""The settings that are in effect for a model: those its workers registered, with the operator's overrides.

Both come from Redis and may be invalid, or name a policy that this batcher cannot use. Then they are rejected
as a whole, and the model is served with other settings. The batcher's report says so.

Why: docs/decisions/0018.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Final

import structlog

from carpool.model_settings import POLICIES, ModelKind, ModelSettings
from carpool.store.directory import ModelSnapshot
from carpool_batcher.core.policies.custom import CustomPolicy
from carpool_batcher.custom_policies import Policies, create_policy

DEFAULT_POLICY: Final = POLICIES[0]
RETRY_S: Final = 10.0  # how often rejected settings are tried again: a policy's constructor may succeed later


class EffectiveSettings:
    """Reads the settings of one model from its snapshots, and creates the custom policy that they name.

    `rejected_settings`: why the settings in Redis are rejected; empty if they are in effect.
    """

    def __init__(self, policies: Policies, log: structlog.stdlib.BoundLogger) -> None:
        self.rejected_settings = ""
        self._policies = policies
        self._log = log
        self._source: tuple[Mapping[str, str], Mapping[str, str]] | None = None  # what was read last ...
        self._accepted: ModelSettings | None = None  # ... and its settings; None: it was rejected
        self._retry_at_s = 0.0
        self._custom: tuple[str, CustomPolicy] | None = None

    @property
    def policies(self) -> tuple[str, ...]:
        """The names of the custom policies that settings may have."""
        return tuple(self._policies)

    @property
    def custom_policy(self) -> CustomPolicy | None:
        """The instance of the custom policy of the settings that `read` returned; None if it is built in."""
        return None if self._custom is None else self._custom[1]

    def read(self, snapshot: ModelSnapshot, current: ModelSettings | None) -> ModelSettings:
        """The settings in this snapshot, or if they must be rejected, `current`.

        A batcher that has just taken over has no `current` settings. It falls back to the registered settings
        without the overrides, then to these with the default policy, then to the defaults of all settings.
        """
        source = (snapshot.registration, snapshot.overrides)
        is_due = self.rejected_settings and time.monotonic() >= self._retry_at_s
        if current is None:
            self._custom = None  # each time that this batcher takes over, a policy begins anew
        if current is None or source != self._source or is_due:  # reading them takes 50 µs
            self._accept_or_reject({**snapshot.registration, **snapshot.overrides}, snapshot.registration)
            self._source = source
        if self._accepted is not None:
            return self._accepted
        return current or self._fallback(snapshot.registration)

    def _accept_or_reject(self, values: Mapping[str, str], registration: Mapping[str, str]) -> None:
        try:
            self._accepted, reason = self._check(values, registration), ""
        except ValueError as error:
            self._accepted, reason = None, str(error)
            self._retry_at_s = time.monotonic() + RETRY_S
            if reason != self.rejected_settings:  # log it once, not with every attempt
                self._log.error("settings rejected, not applied", reason=reason)
        self.rejected_settings = reason

    def _fallback(self, registration: Mapping[str, str]) -> ModelSettings:
        for values in (registration, {**registration, "policy": DEFAULT_POLICY}):
            with contextlib.suppress(ValueError):
                return self._check(values, registration)
        return ModelSettings()

    def _check(self, values: Mapping[str, str], registration: Mapping[str, str]) -> ModelSettings:
        """These settings, whose custom policy is created, if they name one. Raises ValueError."""
        settings = ModelSettings.from_mapping(values)
        kind = ModelKind.of(registration)  # an override cannot change it
        settings.check_kind(kind)
        if kind is ModelKind.BOUND:
            settings.check_slots(ModelSettings.from_mapping(registration).max_batch_size)
        policy = settings.policy
        if policy in POLICIES:
            self._custom = None
        elif policy not in self._policies:
            raise ValueError(f"policy: {policy!r} is not one of this batcher's --policies")
        elif self._custom is None or self._custom[0] != policy:
            try:
                self._custom = policy, create_policy(self._policies, policy)
            except ValueError as error:
                raise ValueError(f"policy: {error}") from None
        return settings
