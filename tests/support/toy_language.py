"""The ready-made language model without PyTorch: its network is a rule, to test all that is around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from carpool.errors import InvalidArgumentError
from carpool_worker.models.hf.language_model import NOT_A_NUMBER, LanguageModel
from carpool_worker.models.hf.order import Draw, Sampling

END: Final = 256
BROKEN: Final = b"nan"  # a prompt for which the network computes nothing that is a number
CONTEXT: Final = 64
TEXT: Final = "Grüße, 世界! "


class ToyTokenizer:
    """A token for each byte, and one that ends a text."""

    def __init__(self, *, has_chat_template: bool = True) -> None:
        self.has_chat_template = has_chat_template
        self.encoded = 0  # texts

    def encode(self, text: str, *, adds_special: bool) -> list[int]:
        self.encoded += 1
        return [*text.encode()] if adds_special or text else [END]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token != END).decode("utf-8", "replace")

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        if messages[0]["role"] != "user":
            raise InvalidArgumentError("messages: the chat template of the model refuses them: user first")
        return "".join(f"[{message['role']}] {message['content']}\n" for message in messages)


class ToyNetwork:
    """Writes TEXT again and again, from a place that depends on the prompt, and ends at an exclamation mark
    if the prompt has one. With a temperature, the number of the draw is the token.

    A row is the list of all tokens that the network was given.
    """

    context, vocabulary, ends = CONTEXT, END + 1, frozenset({END})

    def __init__(self, usual: Sampling | None = None) -> None:
        self.usual = usual or Sampling()
        self.rows: list[list[int]] = []
        self.prefilled: list[int] = []  # how many texts each time

    def prefill(self, texts: Sequence[Sequence[int]], draws: Sequence[Draw]) -> list[tuple[Any, int]]:
        self.prefilled.append(len(texts))
        rows = [[*text] for text in texts]
        self.rows += rows
        return [(row, _next(row, draw)) for row, draw in zip(rows, draws, strict=True)]

    def step(self, rows: Sequence[Any], tokens: Sequence[int], draws: Sequence[Draw]) -> list[int]:
        for row, token in zip(rows, tokens, strict=True):
            assert any(row is known for known in self.rows)
            row.append(token)
        return [_next(row, draw) for row, draw in zip(rows, draws, strict=True)]

    def release(self, row: Any) -> None:
        self.rows = [known for known in self.rows if known is not row]


def _next(row: Sequence[int], draw: Draw) -> int:
    if bytes(token for token in row if token != END).startswith(BROKEN):
        return NOT_A_NUMBER
    if draw.sampling.temperature:
        return ord("a") + int(draw.number * 26)
    if row[-1] == ord("!") and ord("!") in row[:-1]:
        return END
    text = TEXT.encode()
    return text[len(row) % len(text)]


class Toy(LanguageModel):
    """The ready-made model with these."""

    max_batch_size = 4

    def __init__(self, network: ToyNetwork | None = None, tokenizer: ToyTokenizer | None = None) -> None:
        super().__init__("toy")
        self.network = network or ToyNetwork()
        self.tokenizer = tokenizer or ToyTokenizer()

    def load(self, device: str) -> None:  # type: ignore[override]  # without parameters
        self.use(self.network, self.tokenizer)
