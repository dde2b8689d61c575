"""A user's model: a plain function, or a class with some of these methods. Only `predict` is required.

A stepping model has `begin` and `step` in place of `predict`, or is a generator function: see
`stepping.requests`.

    class Embedder:
        max_batch_size = 64
        inputs = [TensorSpec("text_ids", "INT64", (128,))]     # optional: then batches are stacked arrays
        def load(self, device): ...             # once, before any batch; "cpu" or "cuda:0"
        def validate(self, body): ...           # an exception fails this request alone: INVALID_ARGUMENT
        def preprocess(self, bodies): ...       # list -> what predict takes
        def predict(self, batch): ...           # -> a list or one stacked array, in the order of the batch
        def postprocess(self, outputs): ...     # what predict returned -> results
        def unload(self): ...
        def cost(self, body): ...               # optional: what it counts against max_batch_cost

A model that keeps states of sequences declares them, and gets and returns them with each batch:

        states = [StateSpec("state", "FP32", (2, -1, 128), axis=1)]   # -1: the batch
        def initial_states(self): ...           # optional: name -> the state of one sequence that starts
        def predict(self, batch, states): ...   # name -> array -> (outputs, new states)

A model that has them inside binds each sequence to a *slot* of its process, and executes all slots together:

        binds_sequences = True                  # `max_batch_size` is the number of slots
        def start(self, sequence): ...          # optional; a BoundSequence gets its slot
        def predict(self, batch): ...           # row i is slot i; None, or zeros, if it is not ready
        def end(self, sequence): ...            # optional; once for each `start`, however it ended

A model may decode bodies, and encode results, one by one beside its batches (see the package `decoding`):

        decode_in = "processes"                 # or "threads"
        decode_workers = 4                      # how many at a time
        decoded = [TensorSpec("pixels", "UINT8", (224, 224, 3))]     # optional: then `predict` gets one array
        def load_decoder(self): ...             # optional: once in each process that decodes
        def decode(self, body): ...             # -> what `predict` gets of it
        def encode(self, result): ...           # of what `predict` returned -> the result

`load`, or `__init__`, may declare parameters after a `*`: see `parameters`. A function has none.
`version = "2"` is a name for it, which results, logs and metrics show. `speaks = "completions"`, "chat" or
"embeddings" lets clients of OpenAI's API use it (`carpool.spoken`).

A function such as `def square(batch): return [x * x for x in batch]` is a model too. A model may raise an
exception, or return one in place of an item's result; carpool.errors has one for each status. A method
`predict(self, batch, requests)` also gets a RequestInfo for each item, and `predict(self, batch, clients)` a
client for each, with which to call other models on behalf of that request (`carpool.client.on_behalf`).

`predict` may be `async def`: then a process executes several batches at a time, `max_concurrent_batches`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from carpool.keys import MODEL_VERSION, MODEL_VERSION_CHARS_MAX
from carpool.model_settings import ModelKind, ModelSettings
from carpool.plugins import UnusableError
from carpool.spoken import SPEAKS, UNDERSTANDS, Spoken
from carpool.wire.tensors import StateSpec, TensorSpec
from carpool_worker.model_process.configuration import Configuration
from carpool_worker.model_process.creation import Given, LoadError, create, declare, with_model
from carpool_worker.model_process.decoding.declared import declared_beside, load_decoder
from carpool_worker.model_process.failures import WrongOutputError
from carpool_worker.model_process.loaded import (
    Beside,
    BoundModel,
    BoundSequence,
    LoadedModel,
    RequestInfo,
    SteppingModel,
)
from carpool_worker.model_process.padding import check_padding
from carpool_worker.model_process.parameters import arguments_of, own_name
from carpool_worker.model_process.states import declared_states, initial_state
from carpool_worker.model_process.stepping.requests import GeneratorModel

__all__ = [
    "BoundModel",
    "BoundSequence",
    "Given",
    "LoadError",
    "LoadedModel",
    "RequestInfo",
    "SteppingModel",
    "TensorSpec",
    "adapt",
    "load_configured",
    "load_model",
]

_CONCURRENT: Final = "max_concurrent_batches"
ASYNC_BATCHES_DEFAULT: Final = 16  # of a model with an async `predict` that does not declare a number

# How similar an attribute's name must be to a setting's, from 0 to 1, to be taken for a misspelling. One
# letter that is wrong, missing or transposed is above this, and so is a missing unit; `batch_size` is below.
MISSPELLING_SIMILARITY_MIN: Final = 0.86


_NOTHING: Final = Given()


def load_configured(
    location: str, device: str, configuration: Configuration | None = None
) -> LoadedModel | SteppingModel:
    """Find a model, check what it is given, and load it on `device`.

    Raises UnusableError, for what was named, declared or given wrongly, and LoadError.
    """
    return with_model(
        location,
        configuration or Configuration(),
        lambda model, given: load_model(model, device, given),
    )


def load_model(model: Any, device: str, given: Given = _NOTHING) -> LoadedModel | SteppingModel:
    """Load a user's model of any kind on `device`. Raises UnusableError for a wrong declaration."""
    model = create(model, given)
    if _is_stepping(model):
        return _adapt_stepping(model, device, given)
    return _adapt_bound(model, device, given) if _binds_sequences(model) else adapt(model, device, given)


def adapt(model: Any, device: str, given: Given = _NOTHING) -> LoadedModel:
    """Load a user's model with `predict`, and find its hooks. Raises UnusableError, as `load_model` does."""
    model = create(model, given)
    predict = getattr(model, "predict", None) or (model if callable(model) else None)
    if predict is None:
        raise UnusableError(
            f"the model {own_name(model)} is neither a function nor a class with a method 'predict' or 'step'"
        )
    if predict is model and inspect.isasyncgenfunction(model):
        raise UnusableError(
            f"{own_name(model)} is an async generator function: write it as a generator function, with `def`"
        )
    _check_no_async_generator(predict)
    for name in ("load", "unload", "validate", "preprocess", "postprocess"):
        _check_plain(name, getattr(model, name, None))
    _load(model, device, given)
    predict = getattr(model, "predict", predict)  # `load` may set it, once it knows what the model takes
    is_async = _is_async(predict)
    states, declarations = declared_states(model), _declarations(model, given, is_async=is_async)
    _check_takes_states(predict, states)
    if states:
        _check_kind(declarations["settings"], ModelKind.STATEFUL)
    beside = declared_beside(model, _specs(model, "decoded"))
    if beside is not None:
        _check_beside(beside, predict, declarations)
        load_decoder(model)
    return LoadedModel(
        run=_pipeline(model, predict, keeps_states=bool(states), is_async=is_async),
        wants_requests="requests" in arguments_of(predict),
        wants_clients="clients" in arguments_of(predict),
        is_async=is_async,
        states=states,
        initial_state=initial_state(model, states),
        beside=beside,
        **declarations,
    )


def _why_it_waits(*, is_async: bool, wants_clients: bool) -> str:
    """What says that `predict` waits for others; empty if nothing does."""
    if is_async:
        return "is a coroutine function"
    return "has a parameter `clients`" if wants_clients else ""


def _check_beside(beside: Beside, predict: Callable[..., Any], declarations: Mapping[str, Any]) -> None:
    """Raise UnusableError for what has no meaning where single requests are decoded or encoded."""
    if what := _why_it_waits(is_async=_is_async(predict), wants_clients="clients" in arguments_of(predict)):
        raise UnusableError(
            f"the model has 'decode_in' or 'decode_workers', and its 'predict' {what}: such a model decodes "
            "and encodes within 'predict'"
        )
    if beside.encode is not None and declarations["outputs"]:
        raise UnusableError("the model has 'encode' and 'outputs': what encode returns is not declared")
    for spec in declarations["inputs"] if beside.decode is not None else ():
        if spec.buckets:
            raise UnusableError(
                f"input {spec.name!r} has buckets, but 'decode' gets it as it was sent: declare them of the "
                "tensors that it returns, in 'decoded'"
            )
    check_padding(beside.decoded, ())


def _binds_sequences(model: Any) -> bool:
    declared = getattr(model, "binds_sequences", False)
    if declared not in (True, False):
        raise UnusableError(f"the model's 'binds_sequences' must be True or False, not {declared!r:.120}")
    return bool(declared)


def _adapt_bound(model: Any, device: str, given: Given) -> BoundModel:
    if getattr(model, "states", None) is not None:
        raise UnusableError(
            "the model has 'states' and 'binds_sequences': its states are in Redis or inside it, not both"
        )
    loaded = adapt(model, device, given)
    _check_unpadded(loaded.inputs, "binds sequences")
    if loaded.beside is not None:
        raise UnusableError("the model has 'decode_in' or 'decode_workers' and 'binds_sequences'")
    if what := _why_it_waits(is_async=loaded.is_async, wants_clients=loaded.wants_clients):
        raise UnusableError(
            f"the model has 'binds_sequences', and its 'predict' {what}: all slots of a process would wait "
            "for the slowest call"
        )
    _check_kind(loaded.settings, ModelKind.BOUND)
    if loaded.cost is not None:
        raise UnusableError(
            "the model has 'cost' and 'binds_sequences': it executes all slots together, always"
        )
    start, end = getattr(model, "start", None), getattr(model, "end", None)
    for name, hook in (("start", start), ("end", end)):
        _check_plain(name, hook)
    loaded_fields = {spec.name: getattr(loaded, spec.name) for spec in fields(loaded) if spec.init}
    return BoundModel(**loaded_fields, start=start, end=end)


def _is_stepping(model: Any) -> bool:
    if callable(getattr(model, "step", None)):
        return True
    return getattr(model, "predict", None) is None and _is_generator(model)


def _is_generator(model: Any) -> bool:
    """Whether it is a generator function, or an object that is called like one."""
    return inspect.isgeneratorfunction(model) or (
        callable(model) and inspect.isgeneratorfunction(model.__call__)
    )


def _adapt_stepping(model: Any, device: str, given: Given) -> SteppingModel:
    stepping = model if callable(getattr(model, "step", None)) else GeneratorModel(model)
    for name in ("predict", "preprocess", "postprocess"):
        if getattr(model, name, None) is not None:
            raise UnusableError(
                f"the model has {name!r} and generates step by step: it is one or the other, and a stepping "
                "model has only 'begin', 'step' and 'end'"
            )
    if getattr(model, "states", None) is not None:
        raise UnusableError("the model has 'states' and generates step by step: it keeps none for sequences")
    if _binds_sequences(model):
        raise UnusableError("the model has 'binds_sequences' and generates step by step: it takes none")
    begin = getattr(stepping, "begin", None)
    if begin is None:
        raise UnusableError("the model has 'step' but no 'begin', which each request needs first")
    end = getattr(stepping, "end", None)
    for name, hook in (("begin", begin), ("step", stepping.step), ("end", end)):
        _check_plain(name, hook)
        if inspect.isgeneratorfunction(hook):
            raise UnusableError(f"the model's {name!r} has a 'yield': it must emit with request.emit(value)")
    _load(model, device, given)
    declarations = _declarations(model, given, takes_optional=True)
    _check_unpadded(declarations["inputs"], "generates step by step")
    _check_kind(declarations["settings"], ModelKind.STEPPING)
    return SteppingModel(
        begin=begin,
        step=stepping.step,
        end=end,
        continues=bool(getattr(stepping, "continues", True)),
        **declarations,
    )


def _is_async(predict: Any) -> bool:
    """Whether it is a coroutine function, or an object that is called like one."""
    return inspect.iscoroutinefunction(predict) or inspect.iscoroutinefunction(
        getattr(predict, "__call__", None)  # noqa: B004 (not whether it can be called, but how)
    )


def _check_no_async_generator(predict: Any) -> None:
    if inspect.isasyncgenfunction(predict):
        raise UnusableError(
            "the model's 'predict' is an async generator function: it must return all results, with `return`"
        )


def _check_plain(name: str, hook: Any) -> None:
    if inspect.iscoroutinefunction(hook) or inspect.isasyncgenfunction(hook):
        raise UnusableError(f"the model's {name!r} is a coroutine function: it must be a plain function")


def _check_unpadded(inputs: Sequence[TensorSpec], what: str) -> None:
    for spec in inputs:
        if spec.buckets:
            raise UnusableError(
                f"input {spec.name!r} has buckets, but the model {what}: it gets no batches to pad"
            )


def _check_optional(
    may_be: Sequence[TensorSpec], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> None:
    for spec in (*inputs, *outputs):
        if spec.optional and spec not in may_be:
            raise UnusableError(
                f"tensor {spec.name!r} is optional: only an input of a model that steps may be, because a "
                "batch is one array of each input, and an output is always there"
            )
    if may_be and all(spec.optional for spec in may_be):
        raise UnusableError("all inputs are optional: a request must have one, so declare one that is not")


def _check_kind(settings: ModelSettings, kind: ModelKind) -> None:
    try:
        settings.check_kind(kind)
    except ValueError as error:
        raise UnusableError(str(error)) from None


def _check_takes_states(predict: Callable[..., Any], states: Sequence[StateSpec]) -> None:
    parameter = arguments_of(predict).get("states")
    if states and parameter is None:
        raise UnusableError("the model declares 'states', so its 'predict' must have a parameter `states`")
    if not states and parameter is not None and parameter.default is parameter.empty:
        raise UnusableError("the model's 'predict' has a parameter `states`, but the model declares none")


def _load(model: Any, device: str, given: Given) -> None:
    load = getattr(model, "load", None)
    if load is not None:
        _check_positional(load)
        load(device, **given.parameters.of_load)
        declare(model, given.settings)  # `load` may have declared others


def _check_positional(load: Callable[..., Any]) -> None:
    _, *others = [
        argument.name
        for argument in arguments_of(load).values()
        if argument.kind in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD)
        and argument.default is argument.empty
    ] or [""]
    if others:
        raise UnusableError(
            f"`load` has an argument {others[0]!r} that nobody gives: parameters are after a `*`, as in "
            f"`load(self, device, *, {', '.join(others)})`"
        )


def _declarations(
    model: Any, given: Given, *, is_async: bool = False, takes_optional: bool = False
) -> dict[str, Any]:
    """The fields of ModelDeclarations. `takes_optional`: each request gets by itself what it has."""
    inputs, outputs = _specs(model, "inputs"), _specs(model, "outputs")
    _check_optional(inputs if takes_optional else (), inputs, outputs)
    check_padding(inputs, outputs)
    return {
        "validate": getattr(model, "validate", None),
        "unload": getattr(model, "unload", None),
        "inputs": inputs,
        "outputs": outputs,
        "settings": _settings(model, is_async=is_async),
        "misspelt": dict(_misspelt(model)),
        "parameters": given.parameters.shown,
        "version": given.version or _version(model),
        "cost": _cost(model),
        "spoken": _spoken(model),
    }


def _pipeline(
    model: Any, predict: Callable[..., Any], *, keeps_states: bool, is_async: bool
) -> Callable[..., Any]:
    """What `LoadedModel.run` is."""
    preprocess, postprocess = getattr(model, "preprocess", None), getattr(model, "postprocess", None)
    wanted = [name for name in ("requests", "states", "clients") if name in arguments_of(predict)]
    if not keeps_states and "states" in wanted:  # it has a default
        wanted.remove("states")

    def begin(batch: Any, requests: Any, states: Any, clients: Any) -> Any:
        if preprocess is not None:
            batch = preprocess(batch)
        if not wanted:
            return predict(batch)
        given = {"requests": requests, "states": states, "clients": clients}
        return predict(batch, **{name: given[name] for name in wanted})

    def finish(returned: Any) -> Any:
        if not keeps_states:
            return returned if postprocess is None else postprocess(returned)
        if not (
            isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[1], Mapping)
        ):
            raise WrongOutputError(
                f"the model returned a {type(returned).__name__}, not the outputs and a dict of new states"
            )
        outputs, new_states = returned
        return outputs if postprocess is None else postprocess(outputs), new_states

    def run(
        batch: Any,
        requests: Sequence[RequestInfo],
        states: Mapping[str, Any] | None = None,
        *,
        clients: Sequence[Any] = (),
    ) -> Any:
        return finish(begin(batch, requests, states, clients))

    async def run_async(
        batch: Any,
        requests: Sequence[RequestInfo],
        states: Mapping[str, Any] | None = None,
        *,
        clients: Sequence[Any] = (),
    ) -> Any:
        return finish(await begin(batch, requests, states, clients))

    return run_async if is_async else run


def _settings(model: Any, *, is_async: bool) -> ModelSettings:
    declared = {name: getattr(model, name, None) for name in ModelSettings.names()}
    if is_async and declared[_CONCURRENT] is None:
        declared[_CONCURRENT] = ASYNC_BATCHES_DEFAULT
    try:
        settings = ModelSettings.from_mapping(declared)
        if not is_async and settings.max_concurrent_batches > 1:
            raise ValueError(
                f"{_CONCURRENT}: {settings.max_concurrent_batches} batches at a time need an "
                "`async def predict`; a plain one executes one after the other"
            )
        settings.check_sizes()
    except ValueError as error:
        raise UnusableError(str(error)) from None
    return settings


def _cost(model: Any) -> Callable[[Any], Any] | None:
    cost = getattr(model, "cost", None)
    if cost is None:
        return None
    if not callable(cost):
        raise UnusableError(
            f"the model's 'cost' is {cost!r:.80}: it must be a method cost(self, body) that tells what a "
            "body counts against max_batch_cost"
        )
    _check_plain("cost", cost)
    try:
        inspect.signature(cost).bind(None)
    except TypeError:
        raise UnusableError("the model's 'cost' must take one argument: the body of a request") from None
    except ValueError:  # some C functions have no signature
        pass
    return cost  # type: ignore[no-any-return]


def _spoken(model: Any) -> Spoken:
    try:
        spoken = Spoken.declared(getattr(model, SPEAKS, None), getattr(model, UNDERSTANDS, None))
    except ValueError as error:
        raise UnusableError(f"the model's {error}") from None
    for name in ("inputs", "states", "binds_sequences") if spoken.speaks else ():
        if getattr(model, name, None):
            raise UnusableError(
                f"the model has '{SPEAKS}' and {name!r}: a request of OpenAI's API is a map such as "
                '{"prompt": "Once"}, without tensors, and no part of a sequence'
            )
    return spoken


def _version(model: Any) -> str:
    declared = getattr(model, "version", None)
    if declared is None:
        return ""
    if not isinstance(declared, str) or not MODEL_VERSION.fullmatch(declared):
        raise UnusableError(
            f"the model's 'version' is {declared!r:.80}: it must be text of 1 to {MODEL_VERSION_CHARS_MAX} "
            "letters, digits and characters of . _ : + -, such as '2' or '2025-03-01'"
        )
    return declared


def _misspelt(model: Any) -> Iterator[tuple[str, str]]:
    """Attributes whose names are probably misspelt settings, each with that setting.

    Methods and names with a leading underscore are ignored, and so are names similar to a setting that the
    model declares as well.
    """
    settings = (*ModelSettings.names(), "decode_workers")
    undeclared = {_normalised(name): name for name in settings if getattr(model, name, None) is None}
    owners = [model, *type(model).__mro__]
    for name in sorted({name for owner in owners for name in getattr(owner, "__dict__", ())}):
        if name.startswith("_") or name in settings or callable(inspect.getattr_static(model, name)):
            continue
        for match in difflib.get_close_matches(
            _normalised(name), undeclared, n=1, cutoff=MISSPELLING_SIMILARITY_MIN
        ):
            yield name, undeclared[match]


def _normalised(name: str) -> str:
    """A name without its style: max_batch_size, maxBatchSize and MAX_BATCH_SIZE become equal."""
    return name.replace("_", "").lower()


def _specs(model: Any, name: str) -> tuple[TensorSpec, ...]:
    declared = getattr(model, name, None)
    if declared is None:
        return ()
    specs = tuple(declared) if isinstance(declared, Iterable) else (None,)
    if not all(isinstance(spec, TensorSpec) for spec in specs):
        raise UnusableError(f"the model's {name!r} must be a list of TensorSpec, not {declared!r:.120}")
    if len({spec.name for spec in specs}) != len(specs):
        raise UnusableError(f"the model's {name!r} name a tensor more than once")
    return specs
