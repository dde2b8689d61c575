"""A user's model, loaded, for what executes it: its functions under one interface, and what it declares."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from carpool.messages.requests import JSON, PRIORITY_DEFAULT
from carpool.model_settings import ModelKind, ModelSettings
from carpool.spoken import NOT_SPOKEN, Spoken
from carpool.wire.tensors import StateSpec, TensorSpec
from carpool_worker.model_process.frames import Ready
from carpool_worker.model_process.padding import Cut, cuts_of


class RequestInfo(NamedTuple):
    """What a request has beside its body. `fields`: all that are not in `request_fields.CARPOOL_FIELDS`.

    `sequence_id`: None unless it is a part of a sequence. `slot`: of a model that binds them, its row.
    `priority`: 0 to 9, higher first. `cost`: the producer's.
    `arrival_s`, `deadline_s`: seconds since 1970 by the clock of this host (`time.time`). The arrival of a
    delayed request is the end of its delay. There is no deadline (None) if it does not expire, or is executed
    although it has expired.
    `delivery_count`: 1 unless it may have been executed before, because a worker or a model process died:
    then more each time.
    """

    correlation_id: str
    lane: str
    fields: Mapping[str, bytes]
    sequence_id: str | None = None
    sequence_start: bool = False
    sequence_end: bool = False
    slot: int | None = None
    content_type: str = JSON
    priority: int = PRIORITY_DEFAULT
    cost: int = 1
    arrival_s: float = 0.0
    deadline_s: float | None = None
    delivery_count: int = 1

    @property
    def tenant(self) -> str:
        """The owner of the request; empty if it names none."""
        return self.fields.get("tenant", b"").decode()

    @property
    def accept(self) -> str:
        """The content type that the producer wants; empty if it names none."""
        return self.fields.get("accept", b"").decode("utf-8", "replace")

    @property
    def time_left_s(self) -> float | None:
        """Seconds until its deadline, as of now, at least 0; None if it has none."""
        return None if self.deadline_s is None else max(0.0, self.deadline_s - time.time())


class BoundSequence(NamedTuple):
    """A sequence that is bound to a model process, and its slot there, from 0."""

    sequence_id: str
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDeclarations:
    """What any loaded model has: the hooks beside the one that computes, and what it declares."""

    validate: Callable[[Any], object] | None = None
    unload: Callable[[], object] | None = None
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    settings: ModelSettings = field(default_factory=ModelSettings)
    misspelt: Mapping[str, str] = field(default_factory=dict)  # attribute that has no effect -> setting
    parameters: Mapping[str, str] = field(default_factory=dict)  # for people; secrets are hidden
    version: str = ""  # empty: it declares none
    cost: Callable[[Any], Any] | None = None  # of a body, in the unit of `max_batch_cost`
    spoken: Spoken = NOT_SPOKEN  # what it says of OpenAI's API


@dataclass(slots=True)
class Seen:
    """What was seen of a model since it was loaded: whether what it returns has a row for each request."""

    returns_rows: bool = False


@dataclass(frozen=True, slots=True)
class Beside:
    """What a model does for single requests, beside the execution of batches: see the package `decoding`.

    `decode` makes of a body what the model gets of it, and `encode` of what it returned the result; each
    takes a `request`, if it is in `take_request`. `workers`: how many are called at a time, in threads of
    this process, or `in_processes` of their own. `decoded`: the tensors that `decode` returns, if the model
    gets them stacked.
    """

    decode: Callable[..., Any] | None = None
    encode: Callable[..., Any] | None = None
    take_request: tuple[str, ...] = ()
    workers: int = 1
    in_processes: bool = False
    decoded: tuple[TensorSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadedModel(ModelDeclarations):
    """A user's model, loaded, that executes batches.

    `run` takes a batch and `requests`; one of a model with `states` takes these as well, and returns outputs
    and new states; one that `wants_clients` takes `clients`, by name. Of an async model it is a coroutine
    function. `initial_state`: the bytes of the state of a sequence that starts. `given`: the tensors that
    `run` gets stacked, if any; `cuts`: the outputs that are cut back to the true sizes of these.
    """

    run: Callable[..., Any]
    wants_requests: bool = False
    wants_clients: bool = False
    is_async: bool = False
    states: tuple[StateSpec, ...] = ()
    initial_state: bytes = b""
    beside: Beside | None = None
    output_datatypes: Mapping[str, str] = field(init=False)  # declared ones, by name
    given: tuple[TensorSpec, ...] = field(init=False)
    cuts: tuple[Cut, ...] = field(init=False)
    seen: Seen = field(default_factory=Seen, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "output_datatypes", {spec.name: spec.datatype for spec in self.outputs})
        decodes = self.beside is not None and self.beside.decode is not None
        given = self.beside.decoded if self.beside is not None and decodes else self.inputs
        object.__setattr__(self, "given", given)
        object.__setattr__(self, "cuts", cuts_of(given, self.outputs))


@dataclass(frozen=True, slots=True)
class BoundModel(LoadedModel):
    """A user's model, loaded, that has the states of its sequences inside.

    `run` takes a row for each slot, and `requests` None for those that are not ready.
    """

    start: Callable[[BoundSequence], object] | None = None
    end: Callable[[BoundSequence], object] | None = None

    @property
    def slots(self) -> int:
        """How many sequences it takes at a time."""
        return self.settings.max_batch_size


@dataclass(frozen=True, slots=True)
class SteppingModel(ModelDeclarations):
    """A user's model, loaded, that generates step by step. `continues`: it can go on from chunks.

    Its functions take requests as `stepping.requests` has them.
    """

    begin: Callable[[list[Any]], object]
    step: Callable[[list[Any]], object]
    end: Callable[[Any], object] | None = None
    continues: bool = True


def description_of(model: LoadedModel | SteppingModel) -> Ready:
    """What the worker needs to know of the model."""
    return Ready(
        model.settings.as_text(),
        model.inputs,
        model.outputs,
        isinstance(model, SteppingModel | BoundModel) or model.wants_requests or _hooks_take_request(model),
        dict(model.misspelt),
        kind_of(model),
        b"" if isinstance(model, SteppingModel) else model.initial_state,
        dict(model.parameters),
        model.version,
        model.cost is not None,
        not isinstance(model, SteppingModel) and model.wants_clients,
        not isinstance(model, SteppingModel) and model.is_async,
        model.spoken,
    )


def _hooks_take_request(model: LoadedModel) -> bool:
    return model.beside is not None and bool(model.beside.take_request)


def kind_of(model: LoadedModel | SteppingModel) -> ModelKind:
    """How it takes requests."""
    if isinstance(model, SteppingModel):
        return ModelKind.STEPPING
    if isinstance(model, BoundModel):
        return ModelKind.BOUND
    return ModelKind.STATEFUL if model.states else ModelKind.PLAIN
