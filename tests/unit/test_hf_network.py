"""Networks of transformers, served together: every text is what `generate` writes for its prompt alone.

Tiny networks with random weights, whose tokens depend on all before them. Skipped without PyTorch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install '.[transformers]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[transformers]'")

from carpool.errors import INVALID_ARGUMENT, OK  # noqa: E402
from carpool.messages.requests import JSON  # noqa: E402
from carpool.wire.bodies import decode_body, encode_body  # noqa: E402
from carpool_cli.check import comparing  # noqa: E402
from carpool_cli.check.bodies import Bodies  # noqa: E402
from carpool_cli.check.resuming import resume_all  # noqa: E402
from carpool_worker.dry_run import DryRun  # noqa: E402
from carpool_worker.model_process.configuration import Configuration, Parameter  # noqa: E402
from carpool_worker.model_process.model import LoadedModel, SteppingModel, load_configured  # noqa: E402
from carpool_worker.models.hf.choosing import choose  # noqa: E402
from carpool_worker.models.hf.encoder import Encoder  # noqa: E402
from carpool_worker.models.hf.joined_cache import JoinedCache  # noqa: E402
from carpool_worker.models.hf.language_model import NOT_A_NUMBER, LanguageModel  # noqa: E402
from carpool_worker.models.hf.network import Network  # noqa: E402
from carpool_worker.models.hf.order import Draw, Sampling  # noqa: E402
from carpool_worker.models.hf.tokenizer import Tokenizer  # noqa: E402
from support.tiny_transformers import CHAT, CONTEXT, write_encoder, write_language_model  # noqa: E402

KINDS: Final = ("llama", "gpt2", "qwen2", "mistral", "gemma2", "bloom")
PROMPTS: Final = ("Once", "There was a house in the forest", "A", "€", "Once upon a time")
GREEDY: Final = Draw(Sampling())

torch.set_num_threads(1)  # threads wait for each other where others want the same processors


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with a network of each kind, written when it is needed."""
    written: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in written:
            written[kind] = write_language_model(tmp_path_factory.mktemp(kind) / "model", kind)
        return written[kind]

    return folder


def network(folder: Path, **options: Any) -> Network:
    return Network(str(folder), "cpu", **options)


def generated(net: Network, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers' own loop writes for the prompt alone, end tokens included."""
    given = torch.tensor([[*prompt]])
    with torch.inference_mode():
        written = net._net.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    return list(written[0, len(prompt) :].tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_come_and_go_are_what_generate_writes(kind: str, folders: Any) -> None:
    """Given texts that begin and end at any step, and steps that only some take, expect the tokens of each to
    be those that it has alone. Planted: positions, masks or columns that are wrong by one."""
    net = network(folders(kind))
    chance = random.Random(kind)
    prompts = [[chance.randrange(1, 256) for _ in range(chance.randint(1, 40))] for _ in range(14)]
    waiting = list(range(len(prompts)))
    running: dict[int, Any] = {}
    written: dict[int, list[int]] = {}
    while waiting or running:
        if waiting and (not running or chance.random() < 0.4):
            new = [waiting.pop() for _ in range(min(len(waiting), chance.randint(1, 4)))]
            prefilled = net.prefill([prompts[index] for index in new], [GREEDY] * len(new))
            for index, (row, token) in zip(new, prefilled, strict=True):
                running[index], written[index] = row, [token]
        stepping = [index for index in running if chance.random() < 0.9]
        if stepping:
            last = [written[index][-1] for index in stepping]
            tokens = net.step([running[index] for index in stepping], last, [GREEDY] * len(stepping))
            for index, token in zip(stepping, tokens, strict=True):
                written[index].append(token)
        for index in list(running):
            if len(written[index]) > 30 or chance.random() < 0.03:
                net.release(running.pop(index))
    assert sum(map(len, written.values())) > 150
    for index, tokens in written.items():
        expected = generated(net, prompts[index], len(tokens))
        assert tokens[: len(expected)] == expected, f"text {index} of {len(prompts[index])} tokens"


@pytest.mark.parametrize("wrong", ["positions", "mask"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_wrong_positions_and_masks_are_found_when_a_model_is_loaded(
    kind: str, wrong: str, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a network that ignores padding, expect that it is refused; and served without batches."""
    right = Network._forward

    def forward(self: Network, tokens: Any, mask: Any, positions: Any, cache: Any) -> Any:
        if wrong == "mask":
            return right(self, tokens, None, positions, cache)
        is_step = tokens.shape[1] == 1
        return right(
            self, tokens, mask, positions.amax().expand_as(positions) if is_step else positions, cache
        )

    network(folders(kind)).check_padding()
    monkeypatch.setattr(Network, "_forward", forward)
    with pytest.raises(
        ValueError, match=r"for a text that is padded .* serve it with --set max_batch_size=1"
    ):
        LanguageModel(str(folders(kind))).load("cpu")
    alone = LanguageModel(str(folders(kind)))
    alone.max_batch_size = 1
    alone.load("cpu")


def test_step_copies_nothing_while_the_texts_are_the_same(folders: Any) -> None:
    net = network(folders("llama"))
    rows = [row for row, _ in net.prefill([[1, 2], [1, 2, 3, 4, 5, 6]], [GREEDY] * 2)]
    net.step(rows, [1, 1], [GREEDY] * 2)

    def places() -> list[int]:
        return [layer.keys.data_ptr() for layer in net._joined.cache.layers]

    before = places()
    for _ in range(40):
        net.step(rows, [1, 1], [GREEDY] * 2)
    net.release(rows[1])
    net.step(rows[:1], [1], [GREEDY])
    assert places() == before


def test_long_text_joins_short_ones(folders: Any) -> None:
    """Given a free row, expect that the arrays grow for a text that is longer than all others."""
    net = network(folders("llama"))
    prompts = [[1, 2], [3], [*range(1, 61)]]
    (first, token), (second, _) = net.prefill(prompts[:2], [GREEDY] * 2)
    written = [token, *net.step([first, second], [token, 1], [GREEDY] * 2)[:1]]
    net.release(second)
    ((long, read),) = net.prefill(prompts[2:], [GREEDY])
    both = net.step([long, first], [read, written[-1]], [GREEDY] * 2)
    assert [read, both[0]] == generated(net, prompts[2], 2)
    assert [*written, both[1]] == generated(net, prompts[0], 3)


def test_network_whose_states_are_no_keys_and_values_is_refused(folders: Any) -> None:
    with pytest.raises(ValueError, match="other states than keys and values"):
        network(folders("mamba"))


# --- choosing ----------------------------------------------------------------------------------------------

LOGITS: Final = np.array([0.5, 2.0, -1.0, 2.0, 1.0, -3.0], np.float32)


def expected_token(sampling: Sampling, number: float) -> int:
    """The same in the plainest way, for one text, in double precision."""
    probabilities = np.exp(LOGITS.astype(float) / sampling.temperature)
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities)
    if sampling.top_k:
        probabilities[probabilities < probabilities[order[sampling.top_k - 1]]] = 0
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities[order]) - probabilities[order]
    last = probabilities[order][before < sampling.top_p].min()
    probabilities[probabilities < last] = 0
    sums = np.cumsum(probabilities)
    return int(np.searchsorted(sums, number * sums[-1], side="right"))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0), Sampling(0.3), Sampling(2.0, 0.5), Sampling(1.0, 0.9), Sampling(1.0, 1.0, 2),
        Sampling(1.0, 1.0, 3), Sampling(0.7, 0.8, 4), Sampling(1.0, 0.01),
    ],
)  # fmt: skip
def test_token_is_drawn_with_its_number(sampling: Sampling) -> None:
    """Expect the token that the plainest computation gives, beside texts that are drawn in another way."""
    numbers = [(index + 0.5) / 200 for index in range(200)]
    draws = [Draw(sampling, number) for number in numbers]
    others = [GREEDY, Draw(Sampling(1.0, 0.2), 0.99), Draw(Sampling(1.0, 1.0, 1), 0.4)]
    logits = torch.tensor(np.stack([LOGITS] * (len(draws) + len(others))))
    *tokens, greedy, nucleus, likeliest = choose(logits, [*draws, *others])
    assert tokens == [expected_token(sampling, number) for number in numbers]
    assert (greedy, nucleus, likeliest) == (1, 3, 1)


def test_low_temperature_is_the_likeliest_token_and_what_is_no_number_is_none() -> None:
    logits = torch.tensor(np.stack([LOGITS * 1000 + np.arange(6), LOGITS, LOGITS]))
    logits[1, 2] = float("nan")
    assert choose(logits, [Draw(Sampling(1e-4), 0.7), GREEDY, GREEDY]) == [3, NOT_A_NUMBER, 1]


# --- the whole model ---------------------------------------------------------------------------------------


def loaded(location: str, **parameters: str) -> Any:
    given = {name: Parameter(value, "--param", ".") for name, value in parameters.items()}
    return load_configured(location, "cpu", Configuration(parameters=given))


def outputs(model: Any, *bodies: Any) -> list[Any]:
    tried = DryRun(model).execute([encode_body(JSON, body) for body in bodies], JSON)
    assert {result.status for result in tried.results} == {OK}, tried.results
    return [decode_body(JSON, result.body or b"") for result in tried.results]


def test_model_answers_alike_in_batches_and_after_a_crash(folders: Any) -> None:
    """Given greedy and seeded requests, expect texts that do not depend on batches or cuts, and are what
    `generate` writes."""
    model = loaded(f"hf:{folders('llama')}")
    assert isinstance(model, SteppingModel)
    bodies = [{"prompt": prompt, "max_tokens": 9 + index} for index, prompt in enumerate(PROMPTS)]
    bodies += [
        {"prompt": "A", "temperature": 1.0, "top_p": 0.9, "seed": seed, "max_tokens": 20} for seed in (1, 2)
    ]
    encoded = [encode_body(JSON, body) for body in bodies]
    dry_run = DryRun(model)
    alone = [dry_run.execute([body], JSON).results[0] for body in encoded]
    assert [result.body for result in dry_run.execute(encoded, JSON).results] == [one.body for one in alone]
    resuming = resume_all(dry_run, Bodies(encoded, [""] * len(encoded), JSON, {}), comparing.are_same)
    assert resuming.cuts > 20 and not resuming.wrong and not resuming.random
    net, tokenizer = network(folders("llama")), Tokenizer(str(folders("llama")), "hf:")
    for prompt, body, result in zip(PROMPTS, bodies, alone, strict=False):
        found = decode_body(JSON, result.body or b"")
        tokens = generated(net, tokenizer.encode(prompt, adds_special=True), 9 + bodies.index(body))
        assert found["completion_tokens"] == len(tokens)
        assert found["prompt_tokens"] == len(prompt.encode())
        assert found["text"] == tokenizer.decode(tokens)
    sampled = [decode_body(JSON, result.body or b"")["text"] for result in alone[-2:]]
    assert sampled[0] != sampled[1]


def test_too_little_memory_changes_no_text(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given arrays that cannot be made larger now and then, expect that all texts are begun again, and the
    same."""
    model = loaded(f"hf:{folders('llama')}")
    bodies = [{"prompt": prompt, "max_tokens": 12 + index} for index, prompt in enumerate(PROMPTS)]
    expected = outputs(model, *bodies)
    move, calls = JoinedCache._move, 0

    def failing(self: JoinedCache, rows: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 1:
            raise MemoryError
        move(self, rows)

    monkeypatch.setattr(JoinedCache, "_move", failing)
    assert outputs(model, *bodies) == expected
    assert calls > 3


def test_chat_is_what_the_template_makes_of_it(tmp_path: Path) -> None:
    folder = write_language_model(tmp_path / "chat", chat_template=CHAT)
    model = loaded(f"hf:{folder}")
    messages = [{"role": "user", "content": "Hello"}]
    chat, prompt = outputs(
        model,
        {"messages": messages, "max_tokens": 7},
        {"prompt": "[user] Hello\n[assistant] ", "max_tokens": 7},
    )
    assert chat == prompt
    language_model = LanguageModel(str(folder))
    language_model.load("cpu")
    assert language_model.speaks == ("completions", "chat")


def test_model_without_a_template_refuses_messages(folders: Any) -> None:
    model = loaded(f"hf:{folders('llama')}")
    body = encode_body(JSON, {"messages": [{"role": "user", "content": "Hello"}]})
    (result,) = DryRun(model).execute([body], JSON).results
    assert result.status == INVALID_ARGUMENT and "has no chat template; send a prompt" in str(result.detail)


def test_generation_config_says_how_a_text_is_sampled_and_what_ends_it(folders: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GenerationConfig

    folder = write_language_model(tmp_path / "sampling")
    net = AutoModelForCausalLM.from_pretrained(folder)
    net.generation_config = GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.8, top_k=20, eos_token_id=[0, 7], pad_token_id=0
    )
    net.save_pretrained(folder)
    written = network(folder)
    assert written.usual == Sampling(0.6, 0.8, 20) and written.ends == {0, 7}
    assert network(folders("llama")).usual == Sampling() and network(folders("llama")).ends == {0}


def test_parameters(folders: Any) -> None:
    folder = folders("llama")
    of_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, their width, bytes
    assert network(folder, slots=3).memory == {
        "cache_bytes_per_token": of_token,
        "cache_bytes_max": of_token * 3 * (CONTEXT + 64),
    }
    assert network(folder).context == CONTEXT and network(folder, context=9).context == 9
    assert network(folder, dtype="bfloat16")._net.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="context is 129, and the model takes 128"):
        network(folder, context=129)
    model = loaded(f"hf:{folder}", context="20", max_tokens="3", dtype="bfloat16")
    assert model.parameters["context"] == "20"
    assert outputs(model, "A")[0]["completion_tokens"] <= 3


def test_folder_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(RuntimeError, match=f"^hf:{tmp_path} cannot be loaded: "):
        LanguageModel(str(tmp_path)).load("cpu")


# --- embeddings --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder") / "model")


def test_encoder_is_no_language_model(encoder_folder: Path) -> None:
    """Given a network for another purpose, expect that nothing is served with weights that are made up."""
    with pytest.raises(ValueError, match=r"its files lack the weights .*, which would be random"):
        network(encoder_folder)


def test_vectors_do_not_depend_on_the_batch(encoder_folder: Path) -> None:
    model = loaded(f"st:{encoder_folder}")
    assert isinstance(model, LoadedModel)
    texts = ["a", "a much longer text than the others", "abc", "€"]
    together = outputs(model, *texts)
    for text, vector in zip(texts, together, strict=True):
        (alone,) = outputs(model, text)
        np.testing.assert_allclose(alone, vector, atol=1e-5)
        assert (vector.shape, vector.dtype) == ((16,), np.float32)
    (named,) = outputs(model, {"input": "abc"})
    assert named["prompt_tokens"] == 3


@pytest.mark.parametrize("mode", ["mean", "cls", "max", "lasttoken"])
def test_vectors_are_pooled_as_the_folder_says(mode: str, encoder_folder: Path) -> None:
    """Compared with the vectors of the tokens of one text, without padding."""
    encoder = Encoder(str(encoder_folder), "st:", "cpu")
    assert encoder.tokens_max == 40
    encoder.pooling = encoder.pooling._replace(mode=mode, normalizes=True)
    text, other = encoder.tokens("abcde"), encoder.tokens("ab")
    with torch.inference_mode():
        hidden = encoder._net(input_ids=torch.tensor([text])).last_hidden_state[0].numpy()
    expected = {"mean": hidden.mean(0), "cls": hidden[0], "max": hidden.max(0), "lasttoken": hidden[-1]}[mode]
    vectors = encoder.encode([other, text, [*text, *text]])
    np.testing.assert_allclose(vectors[1], expected / np.linalg.norm(expected), atol=1e-5)
