"""Names of models, correlation IDs and keys: which are valid, and that a model's keys share a hash tag."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.keys import CORRELATION_ID, MODEL_NAME, Keys, loading_key, models_key

NAMED = {
    "result": "c",
    "replies": "r",
    "body": "b",
    "sequence": "s",
    "inbox": "p",
    "progress": "1-0",
    "batches_of": "2",
    "answer": "a",
}

fast = settings(deadline=None)


def all_of(keys: Keys) -> list[str]:
    """Every kind of key that Carpool uses for a model."""
    properties = [name for name, member in vars(Keys).items() if isinstance(member, property)]
    own = [getattr(keys, name) for name in properties if name != "of_model"]
    return [*own, *(getattr(keys, method)(name) for method, name in NAMED.items())]


def test_keys_have_the_names_in_the_wire_contract() -> None:
    assert sorted(all_of(Keys("square"))) == [
        "carpool:{square}:answer:a",
        "carpool:{square}:audit",
        "carpool:{square}:batcher",
        "carpool:{square}:batches",
        "carpool:{square}:batches:2",
        "carpool:{square}:body:b",
        "carpool:{square}:config",
        "carpool:{square}:dead",
        "carpool:{square}:dead_dropped",
        "carpool:{square}:declared",
        "carpool:{square}:detail",
        "carpool:{square}:drained",
        "carpool:{square}:draining",
        "carpool:{square}:inbox:p",
        "carpool:{square}:loading",
        "carpool:{square}:model",
        "carpool:{square}:order",
        "carpool:{square}:paused",
        "carpool:{square}:progress:1-0",
        "carpool:{square}:replies:r",
        "carpool:{square}:requests",
        "carpool:{square}:result:c",
        "carpool:{square}:sequence:s",
        "carpool:{square}:sequences",
        "carpool:{square}:settled",
        "carpool:{square}:shares",
        "carpool:{square}:stats",
        "carpool:{square}:status",
        "carpool:{square}:tickets",
        "carpool:{square}:versions",
        "carpool:{square}:watched",
        "carpool:{square}:workers",
    ]
    assert models_key() == "carpool:models"
    assert loading_key() == "carpool:loading"


def test_prefixes_share_no_key() -> None:
    ours, others = all_of(Keys("m")), all_of(Keys("m", prefix="staging"))
    assert not {*ours, models_key()} & {*others, models_key("staging")}
    assert all(key.startswith("staging:{m}:") for key in others)


@fast
@given(st.from_regex(MODEL_NAME, fullmatch=True))
def test_keys_of_a_model_are_on_one_hash_slot(model: str) -> None:
    # Redis hashes the text between the first brace and the next closing one, unless it is empty.
    tags = {re.sub(r"[^{]*\{([^}]+)\}.*", r"\1", key) for key in all_of(Keys(model))}
    assert tags == {model}


@fast
@given(*[st.from_regex(MODEL_NAME, fullmatch=True)] * 2)
def test_models_share_no_key(one: str, other: str) -> None:
    shared = set(all_of(Keys(one))) & set(all_of(Keys(other)))
    assert bool(shared) == (one == other)


@pytest.mark.parametrize("model", ["m", "M", "0", "a.b_c-d", "a" * 128])
def test_valid_model_name(model: str) -> None:
    assert Keys(model).model == model


@pytest.mark.parametrize(
    "model",
    ["", ".a", "-a", "_a", "a b", "a:b", "a/b", "a{b", "a}b", "ä", "a\n", "\na", "a" * 129, "a*", "٣"],
)
def test_invalid_model_name(model: str) -> None:
    with pytest.raises(ValueError, match="model name") as caught:
        Keys(model)
    assert repr(model) in str(caught.value)


@pytest.mark.parametrize("name", ["a", ".", "1700000000000-0", "a:b.c_d-e", "-", "a" * 128])
def test_valid_correlation_id(name: str) -> None:
    assert CORRELATION_ID.fullmatch(name)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "{a}", "ä", "a\n", "a" * 129, "a,b", "٣"])
def test_invalid_correlation_id(name: str) -> None:
    assert not CORRELATION_ID.fullmatch(name)
