"""What a model declares of OpenAI's API: what is valid, how it is registered, and what else it may not be."""

from __future__ import annotations

from typing import Any

import pytest

from carpool import StateSpec, TensorSpec
from carpool.plugins import UnusableError
from carpool.spoken import NOT_SPOKEN, Spoken
from carpool.wire.registration import combined, encode_registration
from carpool_worker.model_process.loaded import description_of
from carpool_worker.model_process.model import load_model
from support.models import speaking


def model(**attributes: Any) -> Any:
    """A class of a model with these attributes."""
    return type("Model", (), {"predict": lambda self, batch: batch, **attributes})


@pytest.mark.parametrize(
    ("speaks", "understands", "expected"),
    [
        (None, None, NOT_SPOKEN),
        ("chat", None, Spoken(("chat",))),
        (["embeddings", "completions"], "tools", Spoken(("completions", "embeddings"), ("tools",))),
        (("chat",), ("tools", "logprobs", "tools"), Spoken(("chat",), ("logprobs", "tools"))),
    ],
)
def test_declared(speaks: Any, understands: Any, expected: Spoken) -> None:
    spoken = Spoken.declared(speaks, understands)
    assert spoken == expected
    assert Spoken.of(encode_registration({}, [], [], spoken=spoken)) == expected
    assert load_model(model(speaks=speaks, understands=understands), "cpu").spoken == expected


@pytest.mark.parametrize(
    ("attributes", "error"),
    [
        ({"speaks": "complete"}, "'speaks' has 'complete'; there are completions, chat, embeddings"),
        ({"speaks": ()}, "'speaks' is ()"),
        ({"speaks": 7}, "must be one of completions, chat, embeddings, or a tuple of these"),
        ({"understands": "tools"}, "'understands' has no meaning without 'speaks'"),
        ({"speaks": "chat", "understands": ("n",)}, "'n', which means the same for all models"),
        ({"speaks": "chat", "understands": ("a b",)}, "'a b', which is no name of a parameter"),
        ({"speaks": "chat", "inputs": [TensorSpec("x", "FP32", ())]}, "'speaks' and 'inputs'"),
        ({"speaks": "chat", "binds_sequences": True}, "'speaks' and 'binds_sequences'"),
    ],
)
def test_wrong_declarations_are_errors_that_say_what_is_possible(
    attributes: dict[str, Any], error: str
) -> None:
    with pytest.raises(UnusableError) as raised:
        load_model(model(**attributes), "cpu")
    assert error in str(raised.value)


def test_a_model_with_states_speaks_nothing() -> None:
    class Keeping:
        speaks = "completions"
        states = (StateSpec("sum", "FP64", (-1,)),)

        def predict(self, batch: Any, states: Any) -> Any:
            return batch, states

    with pytest.raises(UnusableError, match="'speaks' and 'states'"):
        load_model(Keeping, "cpu")


@pytest.mark.parametrize("declared", [speaking.Story, speaking.tell, speaking.repeat])
def test_classes_that_step_generators_and_functions_may_speak(declared: Any) -> None:
    spoken = description_of(load_model(declared, "cpu")).spoken
    assert "completions" in spoken.speaks


def test_the_worker_that_registered_last_decides() -> None:
    old = encode_registration({"max_batch_size": "8"}, [], [], spoken=Spoken(("completions",)))
    new = encode_registration({"max_batch_size": "8"}, [], [], spoken=Spoken(("chat",), ("tools",)))
    assert Spoken.of(combined(new, [old])) == Spoken(("chat",), ("tools",))
    assert Spoken.of(combined(old, [], new)) == Spoken(("completions",))


@pytest.mark.parametrize("text", ["", "7", "[7]", "{", '"chat"', "[" * 100_000])
def test_what_is_registered_and_malformed_counts_as_nothing(text: str) -> None:
    assert Spoken.of({"speaks": text}) == NOT_SPOKEN
