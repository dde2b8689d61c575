"""From the models that a test gives to engines that serve them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from carpool.keys import Keys
from carpool.plugins import UnusableError
from carpool_testing.engine import BatchEngine, Deliver, Engine, StepEngine
from carpool_testing.waiting_engine import LocalSender, WaitingEngine
from carpool_worker.model_process.configuration import Parameter
from carpool_worker.model_process.loaded import SteppingModel
from carpool_worker.model_process.model import Given, load_model
from carpool_worker.model_process.parameters import read_parameters


class Models(NamedTuple):
    """What a client is made with. `models`, and their `parameters`, by the names under which they are called.
    `sender`: with which they call each other."""

    models: Mapping[str, Any]
    parameters: Mapping[str, Mapping[str, Any]]
    device: str
    sender: LocalSender

    def check(self) -> None:
        """Raise ValueError if there are parameters of a model that there is not."""
        for name in self.parameters:
            if name not in self.models:
                raise ValueError(
                    f"parameters: there is no model {name!r}; there are {', '.join(self.models) or 'none'}"
                )


def new_engine(
    name: str,
    given: Models,
    keys: Keys,
    deliver: Deliver,
    bodies: Mapping[str, bytes],
    on_finished: Callable[[], object],
) -> Engine:
    """Load the model of this name, of any kind. Raises UnusableError, and what the model raises.

    `deliver` is called with results. `bodies`: what producers stored, by key. `on_finished` is called when
    something has ended outside of a turn.
    """
    model = given.models[name]
    if isinstance(model, str):
        raise TypeError(f"the model {model!r} is text: give the class, the function or an object itself")
    loaded = load_model(model, given.device, _given_of(name, model, given.parameters.get(name, {})))
    if isinstance(loaded, SteppingModel):
        return StepEngine(loaded, keys, deliver, bodies)
    if loaded.is_async or loaded.wants_clients:
        return WaitingEngine(loaded, keys, deliver, bodies, given.sender, on_finished)
    return BatchEngine(loaded, keys, deliver, bodies)


def _given_of(name: str, model: Any, parameters: Mapping[str, Any]) -> Given:
    """The checked parameters of a model. A relative path starts at the working directory."""
    folder, source = str(Path.cwd()), f"parameters[{name!r}]"
    given = {key: Parameter(value, source, folder) for key, value in parameters.items()}
    try:
        return Given(read_parameters(model, name, given))
    except UnusableError as error:
        raise UnusableError(
            f"{error}. In a test they are given as parameters={{{name!r}: {{...}}}}"
        ) from None
