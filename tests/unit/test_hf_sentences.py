"""The model for `st:FOLDER` around its encoder: bodies, folders, and which texts are padded together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import InvalidArgumentError
from carpool.messages.requests import JSON
from carpool.wire.bodies import decode_body, encode_body
from carpool.wire.tensors import Array
from carpool_worker.dry_run import DryRun
from carpool_worker.model_process.model import LoadedModel, load_model
from carpool_worker.models.hf.grouping import LENGTH_RATIO_MAX, SHORT_TOKENS, groups_of
from carpool_worker.models.hf.pooling import Pooling, read_pooling
from carpool_worker.models.hf.sentence_model import SentenceModel


class Letters:
    """A vector counts the letters a, b, c and d of a text of at most ten."""

    tokens_max, width = 10, 4

    def tokens(self, text: str) -> list[int]:
        return [*text.encode()]

    def encode(self, texts: Sequence[Sequence[int]]) -> Array:
        return np.array([[[*text].count(letter) for letter in b"abcd"] for text in texts], np.float32)


class Toy(SentenceModel):
    def __init__(self, **options: bool) -> None:
        super().__init__("toy")
        self._options = options

    def load(self, device: str) -> None:  # type: ignore[override]  # without parameters
        self.use(Letters(), **self._options)


def loaded(**options: bool) -> LoadedModel:
    model = load_model(Toy(**options), "cpu")
    assert isinstance(model, LoadedModel)
    return model


def results(model: LoadedModel, *bodies: Any) -> list[Any]:
    tried = DryRun(model).execute([encode_body(JSON, body) for body in bodies], JSON)
    return [decode_body(JSON, result.body or b"") for result in tried.results]


def test_each_request_gets_its_vector() -> None:
    plain, named = results(loaded(), "abba", {"input": "dcd"})
    assert plain.tolist() == [2, 2, 0, 0] and plain.dtype == np.float32
    assert named["embedding"].tolist() == [0, 0, 1, 2] and named["prompt_tokens"] == 3


def test_fewer_dimensions_are_a_vector_of_length_one_where_the_model_is_trained_so() -> None:
    (shorter,) = results(loaded(matryoshka=True), {"input": "aaabbbbc", "dimensions": 2})
    assert shorter["embedding"].tolist() == pytest.approx([0.6, 0.8])
    (whole,) = results(loaded(), {"input": "aab", "dimensions": 4})
    assert whole["embedding"].tolist() == [2, 1, 0, 0]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"input": "a", "dimensions": 2}, "dimensions: the vectors have 4 numbers"),
        ({"input": "a", "dimensions": 5}, "dimensions: must be a whole number from 1 to 4, not 5"),
        ({"input": [1, 2]}, "input: must be a text; tokens are refused"),
        ({"input": "a", "model": "b"}, "model: unknown; known are input and dimensions"),
        ({"text": "a"}, "body: must be a text, or a map"),
        (7, "body: must be a text, or a map"),
        ("a" * 11, "input: has 11 tokens, and the model takes 10; divide it"),
    ],
)
def test_body_is_refused_with_its_field(body: Any, error: str) -> None:
    model = loaded()
    assert model.validate is not None
    with pytest.raises(InvalidArgumentError, match=f"^INVALID_ARGUMENT: {error}"):
        model.validate(body)


def test_long_text_is_cut_if_that_is_wanted() -> None:
    """The last token stays: it is the special one that ends a text."""
    (vector,) = results(loaded(truncate=True), "a" * 12 + "d")
    assert vector.tolist() == [9, 0, 0, 1]


# --- folders -----------------------------------------------------------------------------------------------


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def modules(*kinds: str) -> list[dict[str, str]]:
    return [
        {"path": "" if kind == "Transformer" else f"1_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for kind in kinds
    ]


def test_folder_says_how_its_vectors_are_made(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == Pooling("mean", False)
    files = {
        "modules.json": modules("Transformer", "Pooling", "Normalize"),
        "1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        "sentence_bert_config.json": {"max_seq_length": 256, "do_lower_case": True},
        "config_sentence_transformers.json": {
            "prompts": {"query": "query: "},
            "default_prompt_name": "query",
        },
    }
    expected = Pooling("cls", True, 256, "query: ", "", True)
    assert read_pooling(write(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({"modules.json": modules("Transformer", "Pooling", "Dense")}, "has a module Dense; supported are"),
        (
            {
                "modules.json": modules("Transformer", "Pooling"),
                "1_Pooling/config.json": {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
            },
            "pools by mean and max; supported is one of",
        ),
        ({"modules.json": modules("Pooling"), "1_Pooling/config.json": {}}, "pools by nothing"),
        ({"modules.json": modules("Pooling")}, r"1_Pooling/config.json cannot be read"),
    ],
)
def test_folder_with_what_is_not_supported_is_refused(
    files: dict[str, Any], error: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=error):
        read_pooling(write(tmp_path, files))


# --- padding -----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(1, 20_000))
def test_groups_have_all_and_waste_little(lengths: list[int], most: int) -> None:
    groups = groups_of(lengths, most)
    assert sorted(index for group in groups for index in group) == [*range(len(lengths))]
    for group in groups:
        sizes = [lengths[index] for index in group]
        assert len(group) == 1 or len(group) * max(sizes) <= most
        assert max(sizes) <= max(LENGTH_RATIO_MAX * min(sizes), SHORT_TOKENS) or len(group) == 1
