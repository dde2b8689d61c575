"""The language model `writer`: batches with a cache give what its network computes without a cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carpool.errors import InvalidArgumentError
from carpool_cli.demo import writer_network
from carpool_cli.demo.writer import LENGTH_DEFAULT, PROMPT_CHARS_MAX, WEIGHTS_FILE, Order, Writer
from carpool_cli.demo.writer_gradient import forward, loss_and_gradient
from carpool_cli.demo.writer_network import (
    ALPHABET,
    END,
    Cache,
    Floats,
    Network,
    Symbols,
    Weights,
    symbols_of,
)
from carpool_cli.demo.writer_training import (
    SHAPE,
    Shape,
    bits_per_character,
    initial,
    train,
)
from carpool_worker.model_process.model import SteppingModel, load_model
from carpool_worker.model_process.stepping.requests import StepRequest

TINY = Shape(recent=3, symbols=7, width=8, layers=2, heads=2, window=5)
LOGIT_TOLERANCE = 1e-3
WEIGHTS_BYTES_MAX = 500_000

PROMPT = (
    "Return the value of the named attribute of object. The name must be a string. If the string is the "
    "name of one of the object's attributes, the result is the value of that attribute. "
)


class Request(StepRequest):
    """A request that keeps what was emitted. `sent` is what another process emitted before."""

    def __init__(self, body: Any, correlation_id: str = "a", sent: Sequence[str] = ()) -> None:
        super().__init__(correlation_id, "", {}, body)
        self.sent, self.characters = list(sent), list(sent)
        self.output: str | None = None

    @property
    def chunks(self) -> list[str]:
        return self.sent

    @property
    def text(self) -> str:
        return "".join([chunk for chunk in self.characters if isinstance(chunk, str)])

    def emit(self, value: Any) -> None:
        assert self.output is None
        self.characters.append(value)

    def finish(self, output: str | None = None) -> None:
        assert self.output is None
        self.output = self.text if output is None else output


@pytest.fixture(scope="module")
def network() -> Network:
    return Network.load(WEIGHTS_FILE)


@pytest.fixture
def model() -> Writer:
    loaded = Writer()
    loaded.load("cpu")
    return loaded


def generate(model: Writer, requests: Sequence[Request]) -> list[str]:
    """Generate all requests together. Each leaves the batch when it has ended."""
    model.begin(requests)
    running = list(requests)
    while running:
        model.step(running)
        for request in running:
            if request.output is not None:
                model.end(request)
        running = [request for request in running if request.output is None]
    return [request.output or "" for request in requests]


def reference_logits(network: Network, symbols: Symbols) -> Floats:
    """The logits after each symbol of one text, computed at once: symbols x symbols of the alphabet."""
    before = np.zeros(network.recent - 1, np.intp)
    logits: Floats = forward(network, np.concatenate([before, symbols])[None]).logits[0]
    return logits


def random_network(shape: Shape, seed: int = 0) -> Network:
    """A network without zeros, in double precision."""
    rng = np.random.default_rng(seed)
    network = initial(rng, shape)
    weights: list[Any] = [array + 0.3 * rng.standard_normal(array.shape) for array in network.weights]
    return network._replace(weights=Weights(*weights))


def test_each_generated_character_is_the_likeliest_one_of_the_network_without_a_cache(
    model: Writer, network: Network
) -> None:
    prompts = [PROMPT[start : start + 7 * count] for count, start in enumerate(range(0, 128, 4))]
    requests = [
        Request({"prompt": prompt, "length": 3 + 5 * count, "temperature": 0})
        for count, prompt in enumerate(prompts)
    ]
    assert len(requests) == model.max_batch_size
    for prompt, request, written in zip(prompts, requests, generate(model, requests), strict=True):
        is_cut = len(written) == request.body["length"]
        chosen = symbols_of(written if is_cut else written + END)
        logits = reference_logits(network, symbols_of(END + prompt + written))[len(prompt) :][: len(chosen)]
        missed = logits.max(axis=1) - logits[np.arange(len(chosen)), chosen]
        assert missed.max() < LOGIT_TOLERANCE
    assert sum(len(request.characters) for request in requests) > 1000


def test_logits_with_a_cache_are_those_without_far_beyond_the_window(network: Network) -> None:
    symbols = symbols_of(END + (PROMPT * 5)[:700])
    expected = reference_logits(network, symbols)
    cache = Cache(network)
    first, second = cache.add(), cache.add()
    writer_network.read(network, cache, [(second, symbols[:600]), (first, symbols[:40])])
    for ahead in range(100):
        both = symbols[[40 + ahead, 600 + ahead]]
        logits = writer_network.step(network, cache, [first, second], both)
        np.testing.assert_allclose(logits, expected[[40 + ahead, 600 + ahead]], atol=LOGIT_TOLERANCE)


def test_text_moves_to_the_row_of_one_that_ended(network: Network) -> None:
    texts = [symbols_of(END + PROMPT[start : start + 60]) for start in range(4)]
    cache = Cache(network)
    rows = [cache.add() for _ in texts]
    writer_network.read(network, cache, [(row, text[:20]) for row, text in zip(rows, texts, strict=True)])
    cache.remove(rows[0])
    cache.remove(rows[2])
    left = [3, 1]
    assert sorted(rows[index].index for index in left) == [0, 1]
    for position in range(20, 30):
        read = np.array([texts[index][position] for index in left])
        logits = writer_network.step(network, cache, [rows[index] for index in left], read)
        for index, row in zip(left, logits, strict=True):
            expected = reference_logits(network, texts[index])[position]
            np.testing.assert_allclose(row, expected, atol=LOGIT_TOLERANCE)


@pytest.mark.parametrize("written", [0, 1, 150, 299, 300])
def test_continued_text_is_the_one_that_was_not_interrupted(model: Writer, written: int) -> None:
    body = {"prompt": "The ", "length": 300, "temperature": 0.9, "seed": 11}
    (whole,) = generate(model, [request := Request(body)])
    sent = request.characters[:written]
    assert generate(model, [Request(body, "another", sent=sent)]) == [whole]


def tells(model: Writer, body: Any, sent: Sequence[Any] = ()) -> list[Any]:
    """All chunks, behind those that were sent."""
    request = Request(body, sent=sent)
    generate(model, [request])
    chunks: list[Any] = request.characters
    return chunks


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"max_tokens": 30}, "length"),
        ({"max_tokens": 5000}, "stop"),
        ({"max_tokens": 60, "stop": ["e "]}, "stop"),
    ],
)
def test_a_completion_tells_how_it_ended(model: Writer, more: dict[str, Any], reason: str) -> None:
    """Also if it is continued behind any of its chunks."""
    body = {"prompt": "Return the", "seed": 1, **more}
    chunks = tells(model, body)
    *characters, end = chunks
    assert end["finish_reason"] == reason
    assert end["prompt_tokens"] == len("Return the")
    assert end["completion_tokens"] >= len("".join(characters))
    if "stop" in more:
        assert "e " not in "".join(characters)
        (whole,) = generate(model, [Request({"prompt": "Return the", "seed": 1, "length": 60})])
        assert whole.startswith("".join(characters) + "e ")
    for cut in {0, 1, len(chunks) // 2, len(chunks) - 1, len(chunks)}:
        assert tells(model, body, chunks[:cut]) == chunks


def test_with_a_small_top_p_the_likeliest_character_is_chosen(model: Writer) -> None:
    likeliest, chosen = generate(
        model,
        [
            Request({"prompt": PROMPT, "length": 40, "temperature": 0}),
            Request({"prompt": PROMPT, "length": 40, "temperature": 2, "top_p": 0.001, "seed": 5}),
        ],
    )
    assert likeliest == chosen


def test_same_seed_gives_the_same_text_alone_and_among_others(model: Writer) -> None:
    bodies = [{"prompt": PROMPT[: 3 * seed], "length": 60, "seed": seed} for seed in range(6)]
    together = generate(model, [Request(body, str(index)) for index, body in enumerate(bodies)])
    assert together == [generate(model, [Request(body)])[0] for body in bodies]


def test_without_a_seed_the_correlation_id_is_one(model: Writer) -> None:
    first, second, again = generate(model, [Request("Return ", name) for name in ("a", "b", "a")])
    assert first == again != second


def test_higher_temperature_gives_less_likely_text(model: Writer, network: Network) -> None:
    def bits(temperature: float) -> float:
        requests = [
            Request({"prompt": PROMPT, "length": 50, "seed": seed, "temperature": temperature})
            for seed in range(8)
        ]
        text = symbols_of("".join(generate(model, requests)))
        return bits_per_character(network, text)

    assert bits(0.2) + 0.3 < bits(0.8) < bits(2.0) - 0.3


def test_text_ends_where_the_network_ends_it_and_at_its_length(model: Writer) -> None:
    requests = [Request({"prompt": PROMPT, "length": 300, "seed": seed}, str(seed)) for seed in range(8)]
    lengths = [len(text) for text in generate(model, requests)]
    assert min(lengths) < max(lengths) == 300
    assert all(END not in request.text for request in requests)
    assert generate(model, [Request({"prompt": "Re", "length": 1, "temperature": 0})]) == ["t"]


def test_text_that_ends_at_once_is_an_empty_string(model: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = np.full((1, len(ALPHABET)), -9, np.float32)
    ended[:, ALPHABET.index(END)] = 9
    monkeypatch.setattr(writer_network, "step", lambda *_: ended)
    assert generate(model, [Request({"temperature": 0})]) == [""]


def test_request_whose_beginning_failed_is_ended(model: Writer) -> None:
    model.end(Request("never begun"))


def test_model_steps_and_continues() -> None:
    loaded = load_model(Writer, "cpu")
    assert isinstance(loaded, SteppingModel)
    assert loaded.continues
    assert loaded.settings.max_batch_size == Writer.max_batch_size
    assert not loaded.misspelt


def test_body_is_a_prompt_or_a_map_of_any_fields() -> None:
    assert Order.read("Return") == Order("Return", LENGTH_DEFAULT)
    assert Order.read({}) == Order()
    assert Order.read({"seed": 3, "temperature": 1}) == Order(temperature=1, seed=3)
    Writer().validate({"prompt": "x" * PROMPT_CHARS_MAX, "length": 1000, "temperature": 2.0, "seed": -1})


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (7, "body: must be a string or a map, not int"),
        ("a\nb", r"body: must be printable ASCII on one line; it has '\n'"),
        ("caf\u00e9", r"body: must be printable ASCII on one line; it has '\xe9'"),
        ("x" * 1001, "body: must have at most 1,000 characters, not 1,001"),
        ({"prompt": 3}, "body.prompt: must be a string, not int"),
        (
            {"promt": "a"},
            "body.promt: unknown; known are prompt, length, temperature, seed, max_tokens, stop, top_p",
        ),
        ({"length": 0}, "body.length: must be an integer of 1 to 1,000, not 0"),
        ({"length": True}, "body.length: must be an integer of 1 to 1,000, not True"),
        ({"temperature": math.nan}, "body.temperature: must be a number of 0 to 2, not nan"),
        ({"temperature": "hot"}, "body.temperature: must be a number of 0 to 2, not 'hot'"),
        ({"seed": 1.5}, "body.seed: must be an integer, not 1.5"),
        ({"seed": None}, "body.seed: must be an integer, not None"),
        ({"max_tokens": 0}, "body.max_tokens: must be an integer, 1 or more, not 0"),
        ({"stop": [""]}, "body.stop: must be a list of texts, not ['']"),
        ({"top_p": 0}, "body.top_p: must be a number of more than 0 to 1, not 0"),
        ({"prompt": [1, 2]}, "body.prompt: must be a string, not list"),
    ],
)
def test_wrong_body_is_rejected_by_field(body: object, error: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        Writer().validate(body)
    assert raised.value.detail == error


def test_weights_are_small_plain_arrays_of_the_shape_that_is_trained(network: Network) -> None:
    assert WEIGHTS_FILE.stat().st_size <= WEIGHTS_BYTES_MAX
    with np.load(WEIGHTS_FILE, allow_pickle=False) as arrays:
        assert {str(arrays[name].dtype) for name in arrays.files} <= {"int8", "int64", "float32"}
    untrained = initial(np.random.default_rng(0), SHAPE)
    assert [array.shape for array in network.weights] == [array.shape for array in untrained.weights]
    assert {array.dtype for array in network.weights} == {np.dtype(np.float32)}


def test_committed_network_has_learned_english(network: Network) -> None:
    text = symbols_of(
        END
        + "This function takes a string and returns a list of the words in it. If the file does not exist, "
        "an error is raised. The second argument is the number of bytes that were read from the socket." + END
    )
    uniform = math.log2(len(ALPHABET))
    assert bits_per_character(network, text) < uniform / 2.5


def test_saved_weights_are_exact_to_half_a_level(tmp_path: Path) -> None:
    network = random_network(TINY)
    network.save(tmp_path / "weights.npz")
    loaded = Network.load(tmp_path / "weights.npz")
    assert (loaded.heads, loaded.window) == (TINY.heads, TINY.window)
    for saved, read in zip(network.weights, loaded.weights, strict=True):
        level = np.abs(saved).max(axis=-2, keepdims=True) / writer_network.LEVELS
        assert np.all(np.abs(saved - read) <= 0.501 * level)


def test_derivatives_are_those_of_finite_differences() -> None:
    network = random_network(TINY)
    rng = np.random.default_rng(1)
    symbols = rng.integers(TINY.symbols, size=(2, 12))  # longer than the window
    _, gradient = loss_and_gradient(network, symbols)
    for weights, derivatives in zip(network.weights, gradient, strict=True):
        for cell in [tuple(rng.integers(size) for size in weights.shape) for _ in range(12)]:
            middle, losses = weights[cell], []
            for change in (1e-5, -1e-5):
                weights[cell] = middle + change
                losses.append(loss_and_gradient(network, symbols)[0])
            weights[cell] = middle
            assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(derivatives[cell], rel=1e-5, abs=1e-9)


def test_training_lowers_the_loss_and_is_repeatable() -> None:
    text = np.tile(np.arange(TINY.symbols), 40)
    networks = [initial(np.random.default_rng(2), TINY) for _ in range(2)]
    losses = [list(train(network, text, np.random.default_rng(3), steps=200)) for network in networks]
    assert losses[0] == losses[1]
    assert losses[0][0] == pytest.approx(math.log(TINY.symbols), abs=1e-6)  # nothing is known at first
    assert losses[0][-1] < 0.1 * losses[0][0]
