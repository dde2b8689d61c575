"""A user's function or class becomes a model, or is rejected with an error that says what to change."""

from __future__ import annotations

from typing import Any

import pytest

from carpool.model_settings import ModelSettings
from carpool.plugins import UnusableError
from carpool.wire.tensors import TensorSpec
from carpool_worker.model_process.model import ASYNC_BATCHES_DEFAULT, RequestInfo, adapt, load_model

X = TensorSpec("x", "FP32", (3,))


def double(batch: list[int]) -> list[int]:
    return [2 * x for x in batch]


class Everything:
    """Every hook and some settings; `calls` lists the hooks that were called."""

    max_batch_size = 7
    max_queue_delay_ms = 2.5
    inputs = (X,)
    outputs = (TensorSpec("label", "BYTES", ()), TensorSpec("score", "FP32", (-1,)))

    def __init__(self) -> None:
        self.calls: list[str] = []

    def load(self, device: str) -> None:
        self.calls.append(f"load on {device}")

    def validate(self, body: Any) -> None:
        self.calls.append(f"validate {body}")

    def preprocess(self, bodies: list[Any]) -> list[Any]:
        return [f"{body}?" for body in bodies]

    def predict(self, batch: list[Any], requests: list[RequestInfo]) -> list[Any]:
        return [f"{x}{info.correlation_id}" for x, info in zip(batch, requests, strict=True)]

    def postprocess(self, outputs: list[Any]) -> list[Any]:
        return [f"{x}!" for x in outputs]

    def unload(self) -> None:
        self.calls.append("unload")


def test_function_is_a_model() -> None:
    model = adapt(double, "cpu")
    assert model.run([1, 2], ()) == [2, 4]
    assert (model.validate, model.unload, model.wants_requests) == (None, None, False)
    assert (model.inputs, model.outputs) == ((), ())
    assert model.settings == ModelSettings()


def test_class_or_instance_is_a_model_with_all_its_hooks() -> None:
    a, b = RequestInfo("a", "", {}), RequestInfo("b", "", {})
    for given in (Everything, Everything()):
        model = adapt(given, "cuda:1")
        assert model.wants_requests
        assert model.run([1, 2], [a, b]) == ["1?a!", "2?b!"]
        assert model.validate is not None and model.unload is not None
        model.validate(5)
        model.unload()
        assert model.validate.__self__.calls == ["load on cuda:1", "validate 5", "unload"]  # type: ignore[attr-defined]
        assert model.inputs == Everything.inputs and model.outputs == Everything.outputs
        assert model.settings == ModelSettings(max_batch_size=7, max_queue_delay_ms=2.5)


def test_callable_object_is_a_model() -> None:
    class Callable:
        max_batch_size = 3

        def __call__(self, batch: list[int]) -> list[int]:
            return batch

    assert adapt(Callable(), "cpu").run([1], ()) == [1]
    assert adapt(Callable, "cpu").settings.max_batch_size == 3


def test_function_can_have_settings() -> None:
    def function(batch: list[int]) -> list[int]:
        return batch

    function.max_batch_cost = 100  # type: ignore[attr-defined]
    assert adapt(function, "cpu").settings.max_batch_cost == 100


def test_function_without_a_signature_is_accepted() -> None:
    assert adapt(max, "cpu").run([[1, 2], [0, 3]], ()) == [1, 2]


def test_declarations_are_read_after_load() -> None:
    class Late:
        max_batch_size = 1
        inputs: tuple[TensorSpec, ...] = ()

        def load(self, _device: str) -> None:
            self.max_batch_size = 64
            self.inputs = (X,)

        def predict(self, batch: Any) -> Any:
            return batch

    model = adapt(Late, "cpu")
    assert model.settings.max_batch_size == 64
    assert model.inputs == (X,)


@pytest.mark.parametrize("name", ["inputs", "outputs"])
@pytest.mark.parametrize("declared", [X, "x", [("x", "FP32", (3,))], {"x": X}, 3, [X, None], len])
def test_declaration_that_is_no_list_of_tensors_is_rejected(name: str, declared: Any) -> None:
    model = type("Model", (), {"predict": double, name: declared})
    with pytest.raises(ValueError, match=f"the model's '{name}' must be a list of TensorSpec, not "):
        adapt(model, "cpu")


@pytest.mark.parametrize("name", ["inputs", "outputs"])
def test_tensor_named_twice_is_rejected(name: str) -> None:
    model = type("Model", (), {"predict": double, name: [X, TensorSpec("x", "INT8", ())]})
    with pytest.raises(ValueError, match=f"the model's '{name}' name a tensor more than once"):
        adapt(model, "cpu")


@pytest.mark.parametrize("declared", [None, [], ()])
def test_model_without_declarations(declared: Any) -> None:
    assert adapt(type("Model", (), {"predict": len, "inputs": declared}), "cpu").inputs == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_batch_size", 0),
        ("max_batch_size", 2.5),
        ("max_batch_size", "many"),
        ("max_batch_size", True),
        ("max_batch_size", [8]),
        ("max_batch_cost", -1),
        ("max_queue_delay_ms", -0.5),
        ("max_queue_delay_ms", float("nan")),
        ("default_expiration_ms", 0),
        ("result_ttl_ms", float("inf")),
    ],
)
def test_invalid_setting_is_rejected_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} is .*must be a"):
        adapt(type("Model", (), {"predict": double, name: value}), "cpu")


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("max_batch_sise", "max_batch_size"),
        ("max_bacth_size", "max_batch_size"),
        ("maxBatchSize", "max_batch_size"),
        ("MAX_BATCH_SIZE", "max_batch_size"),
        ("max_queue_delay", "max_queue_delay_ms"),
        ("prefered_batch_size", "preferred_batch_sizes"),
        ("preserve_order", "preserve_ordering"),
        ("tenant_weight", "tenant_weights"),
        ("priority_policy", "priority_policies"),
        ("polcy", "policy"),
    ],
)
def test_misspelt_setting_is_found_wherever_it_is_declared(name: str, setting: str) -> None:
    class Instance:
        def __init__(self) -> None:
            setattr(self, name, 4)

        predict = staticmethod(double)

    def function(batch: list[int]) -> list[int]:
        return batch

    setattr(function, name, 4)
    of_a_class = type("Model", (), {"predict": double, name: 4})
    inherits = type("Subclass", (of_a_class,), {})
    for model in (of_a_class, inherits, Instance, function):
        assert adapt(model, "cpu").misspelt == {name: setting}


ORDINARY = """
    batch_size min_batch_size max_batch_tokens max_batch_rows max_length max_seq_len max_tokens max_size
    device name policy_network policies weights tenants priority target latency_ms result results queue
    queue_size timeout_ms body_size training dump_patches call_super_init T_destination tokenizer
    net model input output input_names labels classes _max_batch_sise __max_batch_size__
"""


@pytest.mark.parametrize("name", ORDINARY.split())
def test_ordinary_attribute_is_not_taken_for_a_misspelling(name: str) -> None:
    assert adapt(type("Model", (), {"predict": double, name: 4}), "cpu").misspelt == {}


def test_methods_and_names_beside_a_declared_setting_are_no_misspellings() -> None:
    class Model:
        max_batch_size = 8
        max_batch_sizes = (4, 8)  # similar to a setting that is declared as well

        def priority_policy(self) -> None:
            """A method."""

        predict = staticmethod(double)

    assert adapt(Model, "cpu").misspelt == {}
    assert adapt(Everything, "cpu").misspelt == adapt(max, "cpu").misspelt == {}


def test_preferred_size_above_the_maximum_is_rejected() -> None:
    class Model:
        preferred_batch_sizes = (16, 32, 48, 64)
        predict = staticmethod(double)

    with pytest.raises(ValueError, match=r"^preferred_batch_sizes: 48, 64 can never be filled, .* is 32$"):
        adapt(Model, "cpu")
    Model.max_batch_size = 64  # type: ignore[attr-defined]
    assert adapt(Model, "cpu").settings.preferred_batch_sizes == (16, 32, 48, 64)


@pytest.mark.parametrize("given", [3, "a model", None, object()])
def test_object_that_cannot_predict_is_rejected(given: Any) -> None:
    with pytest.raises(ValueError, match="neither a function nor a class with a method 'predict'"):
        adapt(given, "cpu")


class Async:
    """An async model."""

    async def predict(self, batch: list[int]) -> list[int]:
        return batch

    async def __call__(self, batch: list[int]) -> list[int]:
        return batch


async def twice(batch: list[int]) -> list[int]:
    return [2 * number for number in batch]


@pytest.mark.parametrize("given", [Async, twice])
def test_async_model_has_several_batches_at_a_time(given: Any) -> None:
    loaded = adapt(given, "cpu")
    assert loaded.is_async and loaded.settings.max_concurrent_batches == ASYNC_BATCHES_DEFAULT


def test_async_model_may_declare_how_many() -> None:
    loaded = adapt(type("Few", (Async,), {"max_concurrent_batches": 2}), "cpu")
    assert loaded.settings.max_concurrent_batches == 2


@pytest.mark.parametrize(
    ("attributes", "error"),
    [
        ({"binds_sequences": True}, "'predict' is a coroutine function: all slots"),
        ({"load": twice}, "'load' is a coroutine function: it must be a plain function"),
        ({"postprocess": twice}, "'postprocess' is a coroutine function"),
        ({"predict": lambda _, batch: batch, "max_concurrent_batches": 2}, "need an `async def predict`"),
    ],
)
def test_async_model_that_cannot_be_executed_is_rejected(attributes: dict[str, Any], error: str) -> None:
    with pytest.raises(UnusableError, match=error):
        load_model(type("Model", (Async,), attributes), "cpu")


def test_error_in_load_is_passed_on() -> None:
    class Model:
        def load(self, device: str) -> None:
            raise FileNotFoundError(f"no weights for {device}")

        def predict(self, batch: list[int]) -> list[int]:
            return batch

    with pytest.raises(FileNotFoundError, match="no weights for cpu"):
        adapt(Model, "cpu")
