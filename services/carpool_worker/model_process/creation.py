"""From a model's location to its object: found, its parameters checked, its settings replaced.

Model processes and decoder processes begin so. Nothing that a caller gets of it quotes a secret.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from carpool.model_settings import ModelSettings
from carpool.plugins import UnusableError, reason_of
from carpool_worker.model_process.configuration import Configuration, without
from carpool_worker.model_process.loader import find_model
from carpool_worker.model_process.parameters import Values, own_name, read_parameters

T = TypeVar("T")


class Given(NamedTuple):
    """What a model is given from outside: parameters, which were checked, settings by name, as values, and a
    version. The last two are in place of what it declares."""

    parameters: Values = Values()
    settings: Mapping[str, Any] = MappingProxyType({})
    version: str = ""


class LoadError(Exception):
    """The model's own code raised while it was loaded. `trace`: the traceback. No secret is in either."""

    def __init__(self, reason: str, trace: str) -> None:
        super().__init__(reason)
        self.trace = trace


def with_model(location: str, configuration: Configuration, use: Callable[[Any, Given], T]) -> T:
    """Find a model, check what it is given, and return what `use` makes of both.

    Raises UnusableError, for what was named, declared or given wrongly, and LoadError.
    """
    settings, parameters = _parsed(configuration.settings), configuration.parameters
    secrets = [str(given.value) for given in parameters.values() if given.is_secret]
    try:
        model = find_model(location, configuration.folder, settings, configuration.declared)
        values = read_parameters(model, location, parameters, configuration.parameters_in)
        secrets += values.secrets
        return use(model, Given(values, settings, configuration.version))
    except UnusableError as error:
        raise UnusableError(without(secrets, str(error))) from None
    except BaseException as error:
        reason, trace = reason_of(error), traceback.format_exc()
        raise LoadError(without(secrets, reason), without(secrets, trace)) from None


def _parsed(settings: Mapping[str, str]) -> dict[str, Any]:
    """The values of settings, from their texts."""
    try:
        parsed = ModelSettings.from_mapping(settings)
    except ValueError as error:
        raise UnusableError(str(error)) from None
    return {name: getattr(parsed, name) for name in settings}


def create(model: Any, given: Given) -> Any:
    """The object, if the model is a class. Its settings are replaced before, so that `__init__` sees them.
    Raises UnusableError, and what `__init__` raises."""
    declare(model, given.settings)
    if not inspect.isclass(model):
        return model
    model = model(**given.parameters.of_init)
    declare(model, given.settings)
    return model


def declare(model: Any, settings: Mapping[str, Any]) -> None:
    """Let the model declare these settings in place of its own. Raises UnusableError."""
    for name, value in settings.items():
        try:
            setattr(model, name, value)
        except (AttributeError, TypeError):
            if getattr(model, name, None) != value:
                raise UnusableError(
                    f"{name} cannot be set: {own_name(model)} takes no attributes; wrap it in a function"
                ) from None
