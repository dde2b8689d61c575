"""What a loaded model declares about itself, as its worker gets it."""

from __future__ import annotations

from carpool.model_settings import ModelKind
from carpool_worker.model_process.frames import Ready
from carpool_worker.model_process.model import BoundModel, LoadedModel, SteppingModel


def description_of(model: LoadedModel | SteppingModel) -> Ready:
    """What the worker needs to know of the model."""
    return Ready(
        model.settings.as_text(),
        model.inputs,
        model.outputs,
        isinstance(model, SteppingModel | BoundModel) or model.wants_requests,
        dict(model.misspelt),
        kind_of(model),
        b"" if isinstance(model, SteppingModel) else model.initial_state,
    )


def kind_of(model: LoadedModel | SteppingModel) -> ModelKind:
    """How it takes requests."""
    if isinstance(model, SteppingModel):
        return ModelKind.STEPPING
    if isinstance(model, BoundModel):
        return ModelKind.BOUND
    return ModelKind.STATEFUL if model.states else ModelKind.PLAIN
