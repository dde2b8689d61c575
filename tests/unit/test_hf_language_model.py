"""The model for `hf:FOLDER` around its network: bodies, pieces, endings, continuation. Without PyTorch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from carpool.errors import INTERNAL, INVALID_ARGUMENT, OK, InvalidArgumentError
from carpool.messages.requests import JSON
from carpool.wire.bodies import decode_body, encode_body
from carpool_cli.check import comparing
from carpool_cli.check.bodies import Bodies
from carpool_cli.check.resuming import resume_all
from carpool_worker.dry_run import DryRun
from carpool_worker.model_process.loader import find_model
from carpool_worker.model_process.model import SteppingModel, load_model
from carpool_worker.models.hf.language_model import LanguageModel
from carpool_worker.models.hf.order import Sampling
from carpool_worker.models.hf.sentence_model import SentenceModel
from carpool_worker.models.hf.source import check_source, model_name
from support.toy_language import CONTEXT, TEXT, Toy, ToyNetwork, ToyTokenizer


def loaded(toy: Toy) -> SteppingModel:
    model = load_model(toy, "cpu")
    assert isinstance(model, SteppingModel)
    return model


def bodies(*values: Any) -> Bodies:
    return Bodies([encode_body(JSON, value) for value in values], [""] * len(values), JSON, {})


def output(toy: Toy, body: Any) -> Any:
    (result,) = DryRun(loaded(toy)).execute([encode_body(JSON, body)], JSON).results
    assert result.status == OK and result.body is not None, result
    return decode_body(JSON, result.body)


def test_output_is_one_piece_with_exact_counts() -> None:
    assert output(Toy(), {"prompt": "a", "max_tokens": 6}) == {
        "text": (TEXT * 9).encode()[1:7].decode(),
        "finish_reason": "length",
        "prompt_tokens": 1,
        "completion_tokens": 6,
    }
    ended = output(Toy(), "!")
    assert ended["text"].endswith("世界!") and ended["finish_reason"] == "stop"
    assert ended["completion_tokens"] == len(ended["text"].encode()) + 1


def test_batches_and_cut_streams_give_the_same_texts() -> None:
    """Given greedy and seeded requests, characters of several bytes and stop texts, expect that neither the
    batch nor a crash changes a text, and that no row is left."""
    toy = Toy()
    dry_run = DryRun(loaded(toy))
    all_bodies = bodies(
        {"prompt": "a", "max_tokens": 25},
        {"prompt": "abcd", "stop": ["世界! G"]},
        {"prompt": "b", "temperature": 1, "seed": 3, "max_tokens": 9},
        {"prompt": [33]},
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3},
        "long " * 5,
    )
    alone = [dry_run.execute([body], JSON).results[0] for body in all_bodies.encoded]
    assert {result.status for result in alone} == {OK}
    assert b"\xef\xbf\xbd" not in (alone[1].body or b"")
    for size in (2, 3, 6):
        for batch in all_bodies.batches(size):
            for body, result in zip(batch, dry_run.execute(batch, JSON).results, strict=True):
                assert result.body == alone[all_bodies.encoded.index(body)].body
    resuming = resume_all(dry_run, all_bodies, comparing.are_same)
    assert resuming.cuts > 20 and not resuming.wrong and not resuming.random
    assert toy.network.rows == []


def test_new_requests_are_prefilled_together() -> None:
    toy = Toy()
    DryRun(loaded(toy)).execute(bodies("a", "bc", "d", "e", "f").encoded, JSON)
    assert toy.network.prefilled[0] == Toy.max_batch_size and sum(toy.network.prefilled) == 5


def test_samples_as_the_model_does_unless_the_request_says_otherwise() -> None:
    """Given a model that samples, expect other texts from other seeds, and the same from the same."""
    toy = Toy(ToyNetwork(Sampling(0.7)))
    texts = [output(toy, {"prompt": "a", "seed": seed, "max_tokens": 8})["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2] and len({*texts[0]}) > 2
    assert output(toy, {"prompt": "a", "temperature": 0, "max_tokens": 3})["text"] in TEXT


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"prompt": ""}, "prompt: has no tokens"),
        ({"prompt": [1, 257]}, r"prompt\[1\]: 257 is no token: the model has 257, from 0"),
        (
            {"prompt": "a" * CONTEXT},
            r"prompt: has 64 tokens, and the model takes 63 at most: its context of 64",
        ),
        (
            {"prompt": "abcd", "max_tokens": 61},
            "max_tokens: 61 and the 4 tokens of prompt are more than the context of 64; 60 are left",
        ),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages: the chat template of the model"),
        ({"prompt": "a", "tools": []}, "tools: unknown"),
    ],
)
def test_body_is_refused_with_its_field(body: Any, error: str) -> None:
    model = loaded(Toy())
    assert model.validate is not None and model.cost is not None
    with pytest.raises(InvalidArgumentError, match=f"^INVALID_ARGUMENT: {error}"):
        model.validate(body)
    assert model.cost(body) == 1
    (result,) = DryRun(model).execute([encode_body(JSON, body)], JSON).results
    assert result.status == INVALID_ARGUMENT


def test_cost_is_all_that_may_be_kept() -> None:
    model = loaded(Toy())
    assert model.cost is not None
    assert model.cost({"prompt": "abc", "max_tokens": 5}) == 8
    assert model.cost("abc") == CONTEXT
    toy = Toy()
    toy.use(ToyNetwork(), ToyTokenizer(), 10)
    assert toy.cost("abc") == 13 and toy.cost("a" * 60) == CONTEXT


def test_prompt_is_encoded_once() -> None:
    toy = Toy()
    output(toy, {"prompt": "a", "max_tokens": 3})
    assert toy.tokenizer.encoded == 1


@pytest.mark.parametrize("has_template", [True, False])
def test_speaks_chat_if_its_tokenizer_does(has_template: bool) -> None:
    toy = Toy(tokenizer=ToyTokenizer(has_chat_template=has_template))
    loaded(toy)
    assert toy.speaks == (("completions", "chat") if has_template else ("completions",))


def test_numbers_that_are_none_fail_their_request_alone() -> None:
    toy = Toy()
    broken, other = (
        DryRun(loaded(toy)).execute(bodies("nan", {"prompt": "a", "max_tokens": 2}).encoded, JSON).results
    )
    assert broken.status == INTERNAL and "--param dtype=bfloat16 or float32" in str(broken.detail)
    assert other.status == OK
    assert toy.network.rows == []


# --- folders -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen2.5-0.5B-Instruct"),
        ("models/tiny/", "tiny"),
        ("a folder/ü-model", "model"),
        ("___", "model"),
    ],
)
def test_name_is_the_last_part(source: str, name: str) -> None:
    assert model_name(source) == name


def test_name_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path / "tiny")
    assert model_name(".") == "tiny"


def test_what_is_no_model_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file.bin").touch()
    for source, error in (
        (str(tmp_path), "has no config.json"),
        (str(tmp_path / "file.bin"), "it is a file"),
        (str(tmp_path / "missing"), r"there is no such folder, and it is no name on the Hugging Face Hub"),
        ("../missing", r"there is no such folder"),
    ):
        with pytest.raises(ValueError, match=error):
            check_source(source, "hf:")
    check_source("Qwen/Qwen2.5-0.5B-Instruct", "hf:")


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is installed")
@pytest.mark.parametrize(("location", "kind"), [("hf:{}", LanguageModel), ("st:{}", SentenceModel)])
def test_error_names_the_extra(location: str, kind: type, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    model = find_model(location.format(tmp_path))
    assert isinstance(model, kind) and isinstance(model, LanguageModel | SentenceModel)
    with pytest.raises(
        RuntimeError, match=r"needs PyTorch and transformers.*pip install 'PATH\[transformers\]'"
    ):
        model.load("cpu")
