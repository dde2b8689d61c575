"""The model for `hf:FOLDER`: any causal language model of Hugging Face transformers, several texts at a time.

A text is generated from a prompt or from the messages of a chat, as OpenAI's API has them. Texts begin and
end between any two steps. What a text is does not depend on those beside it, but for rounding.

Why: docs/decisions/0109.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, Protocol

import structlog
from pydantic import Field

from carpool.errors import InvalidArgumentError
from carpool_worker.models.hf.order import Draw, Order, Sampling, checked_tokens, random_number
from carpool_worker.models.hf.source import check_source, missing_framework, model_name
from carpool_worker.models.hf.writing import Writing

PREFIX: Final = "hf:"
PROMPTS_KEPT: Final = 64  # whose tokens are kept: `validate`, `cost` and `begin` each need those of a request
NOT_A_NUMBER: Final = -1  # in place of a token
_BROKEN: Final = (
    "the network computed numbers that are not finite. In float16 they may be too large: try --param "
    "dtype=bfloat16 or float32"
)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class TextTokenizer(Protocol):
    """What the model needs of a tokenizer."""

    has_chat_template: bool

    def encode(self, text: str, *, adds_special: bool) -> list[int]:
        """The tokens of a text, with those that the model expects around it."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for these messages. Raises InvalidArgumentError."""


class TextNetwork(Protocol):
    """What the model needs of a network. A row is what it keeps of one text."""

    context: int
    vocabulary: int
    usual: Sampling

    @property
    def ends(self) -> Collection[int]:
        """The tokens that end a text."""

    def prefill(self, texts: Sequence[Sequence[int]], draws: Sequence[Draw]) -> list[tuple[Any, int]]:
        """For each text a new row, and its next token, or NOT_A_NUMBER."""

    def step(self, rows: Sequence[Any], tokens: Sequence[int], draws: Sequence[Draw]) -> list[int]:
        """The tokens after these, which are the next ones of the rows."""

    def release(self, row: Any) -> None:
        """The row is not needed any more."""


class TextRequest(Protocol):
    """What the model needs of a request: see `stepping.requests.StepRequest`."""

    body: Any
    correlation_id: str
    state: Any

    @property
    def chunks(self) -> list[Any]: ...
    def emit(self, value: Any) -> None: ...
    def finish(self, output: Any) -> None: ...
    def fail(self, error: BaseException | str) -> None: ...


class _Slot:
    """A text that has a slot, and its row."""

    def __init__(self, writing: Writing, sampling: Sampling, key: bytes) -> None:
        self.writing = writing
        self.row: Any = None
        self._sampling = sampling
        self._key = key

    def draw(self) -> Draw:
        """How its next token is drawn."""
        if not self._sampling.temperature:
            return Draw(self._sampling)
        return Draw(self._sampling, random_number(self._key, len(self.writing.tokens)))


class LanguageModel:
    """Generates texts with a causal language model of transformers.

    A body is a prompt, or a map with any of the fields of `order.Order`. A piece of a text has `text` and
    `token`, the last one also `finish_reason`, `prompt_tokens` and `completion_tokens`. The output is one
    piece with the whole text.
    """

    max_batch_size = 8
    understands = ("top_k",)

    def __init__(self, source: str) -> None:
        """`source`: a folder that `save_pretrained` wrote, or a name on the Hub."""
        self.name = model_name(source)
        self.speaks: tuple[str, ...] = ("completions",)
        self._source = source
        self._network: TextNetwork
        self._tokenizer: TextTokenizer
        self._tokens_default: int | None = None

    def load(
        self,
        device: str,
        *,
        dtype: Dtype = "auto",
        context: Annotated[int, Field(ge=2)] | None = None,
        max_tokens: Annotated[int, Field(ge=1)] | None = None,
        attention: str | None = None,
        revision: str | None = None,
    ) -> None:
        """Load the network and its tokenizer.

        `dtype`: of the weights; auto is float32 on the CPU, and on a GPU that of the files. `context`: tokens
        of a prompt and its text together, if fewer than the model's. `max_tokens`: of a text whose request
        does not say; None is what is left of the context. `attention`: an implementation of transformers;
        None is sdpa, where the network has it. `revision`: of a model on the Hub; None is the newest.

        Raises ValueError and RuntimeError, which say what to do.
        """
        check_source(self._source, PREFIX)
        try:
            from carpool_worker.models.hf.network import Network  # noqa: PLC0415 (an optional extra)
            from carpool_worker.models.hf.tokenizer import Tokenizer  # noqa: PLC0415
        except ImportError as error:
            raise missing_framework(f"{PREFIX}{self._source}", error) from error
        tokenizer = Tokenizer(self._source, PREFIX, revision)
        network = Network(
            self._source,
            device,
            dtype=dtype,
            context=context,
            attention=attention,
            revision=revision,
            slots=self.max_batch_size,
        )
        if self.max_batch_size > 1:
            network.check_padding()
        structlog.get_logger().info(
            "language model loaded", folder=self._source, context=network.context, **network.memory
        )
        self.use(network, tokenizer, max_tokens)

    def use(self, network: TextNetwork, tokenizer: TextTokenizer, tokens_default: int | None = None) -> None:
        """Generate with these."""
        self._network, self._tokenizer, self._tokens_default = network, tokenizer, tokens_default
        self._encode = lru_cache(PROMPTS_KEPT)(self._encoded)
        if tokenizer.has_chat_template:
            self.speaks = ("completions", "chat")

    def validate(self, body: object) -> None:
        """Raise InvalidArgumentError, which names the field, unless a text can be generated for this body."""
        order = Order.read(body)
        self._tokens_max(order, self._prompt(order))

    def cost(self, body: object) -> int:
        """The tokens of the prompt and of the longest text: what is kept for the request at most."""
        try:
            order = Order.read(body)
            prompt = self._prompt(order)
            return len(prompt) + self._tokens_max(order, prompt)
        except InvalidArgumentError:  # which `validate` tells
            return 1

    def begin(self, requests: Sequence[TextRequest]) -> None:
        """Read prompts, and what was already generated, and generate the next token of each."""
        begun = []
        for request in requests:
            try:
                slot = request.state = self._slot(request)
            except Exception as error:
                request.fail(error)
                continue
            if slot.writing.finish_reason:
                request.finish(slot.writing.result)
            else:
                begun.append(request)
        if not begun:
            return
        slots = [request.state for request in begun]
        texts = [[*slot.writing.prompt, *slot.writing.tokens] for slot in slots]
        prefilled = self._network.prefill(texts, [slot.draw() for slot in slots])
        for request, slot, (row, token) in zip(begun, slots, prefilled, strict=True):
            slot.row = row
            self._add(request, slot.writing, token)

    def step(self, requests: Sequence[TextRequest]) -> None:
        """Generate one token more of each text."""
        slots = [request.state for request in requests]
        last = [slot.writing.tokens[-1] for slot in slots]
        tokens = self._network.step([slot.row for slot in slots], last, [slot.draw() for slot in slots])
        for request, slot, token in zip(requests, slots, tokens, strict=True):
            self._add(request, slot.writing, token)

    def end(self, request: TextRequest) -> None:
        """Free what is kept of the text."""
        if request.state is not None and request.state.row is not None:
            self._network.release(request.state.row)

    def _add(self, request: TextRequest, writing: Writing, token: int) -> None:
        if token == NOT_A_NUMBER:
            request.fail(_BROKEN)
            return
        request.emit(writing.add(token))
        if writing.finish_reason:
            request.finish(writing.result)

    def _slot(self, request: TextRequest) -> _Slot:
        order = Order.read(request.body)
        prompt = self._prompt(order)
        writing = Writing(
            prompt, self._tokenizer.decode, self._tokens_max(order, prompt), self._network.ends, order.stop
        )
        writing.resume(request.chunks)
        return _Slot(writing, order.sampling(self._network.usual), order.key(request.correlation_id))

    def _prompt(self, order: Order) -> Sequence[int]:
        """The tokens of the prompt. Raises InvalidArgumentError."""
        if order.messages:
            return self._encode(self._tokenizer.chat(order.messages), adds_special=False)
        if not isinstance(order.prompt, str):
            return checked_tokens("prompt", order.prompt or (), self._network.vocabulary)
        tokens = self._encode(order.prompt, adds_special=True)
        if not tokens:
            raise InvalidArgumentError("prompt: has no tokens, and the model has none that begins a text")
        return tokens

    def _encoded(self, text: str, *, adds_special: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, adds_special=adds_special))

    def _tokens_max(self, order: Order, prompt: Sequence[int]) -> int:
        """How many tokens the text may have. Raises InvalidArgumentError if they do not fit."""
        field, context = "messages" if order.messages else "prompt", self._network.context
        left = context - len(prompt)
        if left < 1:
            raise InvalidArgumentError(
                f"{field}: has {len(prompt):,} tokens, and the model takes {context - 1:,} at most: its "
                f"context of {context:,} has the text, too"
            )
        if order.max_tokens is None:
            return left if self._tokens_default is None else min(left, self._tokens_default)
        if order.max_tokens > left:
            raise InvalidArgumentError(
                f"max_tokens: {order.max_tokens:,} and the {len(prompt):,} tokens of {field} are more than "
                f"the context of {context:,}; {left:,} are left"
            )
        return order.max_tokens
