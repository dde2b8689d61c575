"""The settings that are in effect for a model: those its workers registered, with the operator's overrides.

Both come from Redis and may be invalid, or name a policy that this batcher was not started with. Then they
are rejected as a whole, and the model is served with other settings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import structlog

from carpool.model_settings import POLICIES, ModelSettings
from carpool.store.directory import ModelSnapshot
from carpool_batcher.core.custom import CustomPolicy

Policies = Mapping[str, Callable[[], Any]]  # classes of custom policies, by the name that settings refer to

DEFAULT_POLICY: Final = POLICIES[0]


class EffectiveSettings:
    """Reads the settings of one model from its snapshots."""

    def __init__(self, policies: Policies, log: structlog.stdlib.BoundLogger) -> None:
        self._policies = policies
        self._log = log
        self.rejected_settings = ""  # why the settings in Redis are rejected; "" if they are in effect
        self._accepted: tuple[Mapping[str, str], Mapping[str, str], ModelSettings] | None = None

    def read(self, snapshot: ModelSnapshot, current: ModelSettings | None) -> ModelSettings:
        """The settings in this snapshot, or if they must be rejected, `current`.

        A batcher that has just taken over has no `current` settings. It falls back to the registered settings
        without the overrides, then to these with the default policy, then to the defaults of all settings.
        """
        source = (snapshot.registration, snapshot.config)
        if self._accepted is not None and self._accepted[:2] == source:  # parsing takes 50 µs
            return self._accepted[2]
        self._accepted = None
        try:
            settings = self._parse({**snapshot.registration, **snapshot.config})
        except ValueError as error:
            if str(error) != self.rejected_settings:  # log it once, not with every snapshot
                self._log.error("settings rejected, not applied", reason=str(error))
            self.rejected_settings = str(error)
        else:
            self.rejected_settings = ""
            self._accepted = (*source, settings)
            return settings
        if current is not None:
            return current
        for fallback in (snapshot.registration, {**snapshot.registration, "policy": DEFAULT_POLICY}):
            with contextlib.suppress(ValueError):
                return self._parse(fallback)
        return ModelSettings()

    def _parse(self, values: Mapping[str, str]) -> ModelSettings:
        settings = ModelSettings.from_mapping(values)
        if settings.policy not in (*POLICIES, *self._policies):
            raise ValueError(f"policy: {settings.policy!r} is not one of this batcher's --policies")
        return settings

    def create_policy(self, settings: ModelSettings) -> CustomPolicy | None:
        """A new instance of the custom policy that the settings name.

        None if they name a built-in policy, or if the custom one cannot be created: the scheduler then uses
        its default policy.
        """
        if settings.policy in POLICIES:
            return None
        try:
            return CustomPolicy(self._policies[settings.policy]())
        except Exception as error:
            self._log.error(
                "policy cannot be created, using eager", policy=settings.policy, reason=str(error)
            )
            return None
