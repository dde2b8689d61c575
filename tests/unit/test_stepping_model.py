"""A user's stepping class or generator function becomes a model, or is rejected with a sentence."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from carpool.plugins import UnusableError
from carpool.wire.tensors import TensorSpec
from carpool_worker.model_process.model import LoadedModel, SteppingModel, adapt, load_model
from carpool_worker.model_process.stepping.requests import GeneratorModel, StepRequest


class Writer:
    """Every hook; `calls` lists those that were called."""

    max_batch_size = 5
    max_batch_cost = 100
    max_prefill_cost = 20
    inputs = (TensorSpec("x", "FP32", (3,)),)

    def __init__(self) -> None:
        self.calls: list[str] = []

    def load(self, device: str) -> None:
        self.calls.append(f"load on {device}")

    def validate(self, body: Any) -> None: ...

    def begin(self, requests: Sequence[StepRequest]) -> None: ...

    def step(self, requests: Sequence[StepRequest]) -> None: ...

    def end(self, request: StepRequest) -> None: ...

    def unload(self) -> None: ...


def countdown(body: int) -> Iterator[int]:
    yield from range(body, 0, -1)


class Countdown:
    max_batch_size = 3

    def __call__(self, body: int) -> Iterator[int]:
        yield from range(body, 0, -1)


def loaded(model: Any) -> SteppingModel:
    result = load_model(model, "cpu")
    assert isinstance(result, SteppingModel)
    return result


def class_with(**attributes: Any) -> type:
    return type("Model", (), {"begin": Writer.begin, "step": Writer.step, **attributes})


@pytest.mark.parametrize("given", [Writer, Writer()])
def test_class_or_instance_with_step_is_a_stepping_model(given: Any) -> None:
    model = loaded(given)
    owner = model.step.__self__  # type: ignore[attr-defined]
    assert owner.calls == ["load on cpu"]
    assert model == SteppingModel(
        begin=owner.begin,
        step=owner.step,
        end=owner.end,
        validate=owner.validate,
        unload=owner.unload,
        inputs=Writer.inputs,
        settings=model.settings,
    )
    settings = model.settings
    assert (settings.max_batch_size, settings.max_batch_cost, settings.max_prefill_cost) == (5, 100, 20)


def test_only_begin_and_step_are_required() -> None:
    model = loaded(class_with())
    assert (model.end, model.validate, model.unload, model.continues) == (None, None, None, True)


def test_class_that_cannot_go_on_from_chunks_says_so() -> None:
    assert loaded(class_with(continues=False)).continues is False


@pytest.mark.parametrize(
    "given",
    [countdown, Countdown, Countdown(), Countdown().__call__, partial(countdown), lambda body: (yield)],
)
def test_generator_function_is_a_stepping_model(given: Any) -> None:
    model = loaded(given)
    assert isinstance(model.step.__self__, GeneratorModel)  # type: ignore[attr-defined]
    assert model.continues


def test_settings_of_a_generator_are_its_attributes() -> None:
    assert loaded(Countdown).settings.max_batch_size == 3

    def limited(body: int) -> Iterator[int]:
        yield body

    limited.max_batch_size = 2  # type: ignore[attr-defined]
    assert loaded(limited).settings.max_batch_size == 2


@pytest.mark.parametrize(
    "given", [len, lambda batch: batch, class_with(step=4, predict=len), class_with(step=4, __call__=len)]
)
def test_other_models_execute_batches(given: Any) -> None:
    assert isinstance(load_model(given, "cpu"), LoadedModel)
    assert isinstance(adapt(given, "cpu"), LoadedModel)


async def asynchronous(self: Any, requests: Any) -> None: ...


async def asynchronous_generator(body: int) -> AsyncIterator[int]:
    yield body


def yielding(self: Any, requests: Any) -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: class_with(predict=len), "'predict' and generates step by step: it is one or the other"),
        (lambda: class_with(preprocess=len), "'preprocess' and generates step by step"),
        (lambda: class_with(postprocess=len), "'postprocess' and generates step by step"),
        (lambda: class_with(begin=None), "'step' but no 'begin'"),
        (lambda: class_with(step=asynchronous), "'step' is a coroutine function"),
        (lambda: class_with(begin=asynchronous), "'begin' is a coroutine function"),
        (lambda: class_with(end=asynchronous), "'end' is a coroutine function"),
        (lambda: class_with(step=yielding), r"'step' has a 'yield': it must emit with request\.emit"),
        (lambda: asynchronous_generator, "is an async generator function: write it as a generator function"),
        (
            lambda: type("Model", (), {"begin": len}),
            "neither a function nor a class with a method 'predict' or",
        ),
        (lambda: class_with(max_batch_size=0), "max_batch_size"),
        (lambda: class_with(inputs="x"), "must be a list of TensorSpec"),
    ],
)
def test_unusable_model_is_refused_with_a_sentence(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(UnusableError, match=sentence):
        load_model(make(), "cpu")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policy", "deferred"),
        ("target_latency_ms", 5),
        ("max_queue_delay_ms", 1),
        ("preferred_batch_sizes", (4,)),
        ("preserve_ordering", True),
    ],
)
def test_setting_without_a_meaning_is_refused(name: str, value: Any) -> None:
    with pytest.raises(UnusableError, match=rf"^{name}: .*stepping model"):
        load_model(class_with(**{name: value}), "cpu")


def test_misspelt_setting_is_found() -> None:
    assert loaded(class_with(max_prefil_cost=4)).misspelt == {"max_prefil_cost": "max_prefill_cost"}
