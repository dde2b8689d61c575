"""The model for `st:FOLDER`: embeddings of texts, with an encoder of transformers.

A folder of the library sentence-transformers says itself how its vectors are pooled; any other encoder has
the mean of the vectors of its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from carpool.errors import InvalidArgumentError
from carpool.wire.tensors import Array
from carpool_worker.models.hf.language_model import Dtype
from carpool_worker.models.hf.source import check_source, missing_framework, model_name

PREFIX: Final = "st:"
TEXTS_KEPT: Final = (
    512  # whose tokens are kept: `validate`, `cost` and `predict` each need those of a request
)


class TextEncoder(Protocol):
    """What the model needs of an encoder."""

    tokens_max: int
    width: int

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text."""

    def encode(self, texts: Sequence[Sequence[int]]) -> Array:
        """The vectors of texts, given as tokens: FP32 (texts, width)."""


class _Wanted(NamedTuple):
    """What a request asks for. `is_plain`: its body is the text alone, and its result the vector alone."""

    text: str
    dimensions: int | None = None
    is_plain: bool = False


class SentenceModel:
    """Embeddings of texts.

    A body is a text, and its result a vector, FP32 (width). Or it is a map: {"input": TEXT}, perhaps with
    `dimensions`; the result is {"embedding": VECTOR, "prompt_tokens": NUMBER}.
    """

    max_batch_size = 64
    speaks = ("embeddings",)

    def __init__(self, source: str) -> None:
        """`source`: a folder, or a name on the Hub."""
        self.name = model_name(source)
        self._source = source
        self._encoder: TextEncoder
        self._truncates = self._shortens = False

    def load(
        self,
        device: str,
        *,
        dtype: Dtype = "auto",
        truncate: bool = False,
        matryoshka: bool = False,
        revision: str | None = None,
    ) -> None:
        """Load the encoder and its tokenizer.

        `truncate`: a text that is too long is cut, in place of an error. `matryoshka`: the first numbers of a
        vector are a vector, as some models are trained, so that a request may ask for fewer `dimensions`.

        Raises ValueError and RuntimeError, which say what to do.
        """
        check_source(self._source, PREFIX)
        try:
            from carpool_worker.models.hf.encoder import Encoder  # noqa: PLC0415 (an optional extra)
        except ImportError as error:
            raise missing_framework(f"{PREFIX}{self._source}", error) from error
        encoder = Encoder(self._source, PREFIX, device, dtype=dtype, revision=revision)
        self.use(encoder, truncate=truncate, matryoshka=matryoshka)

    def use(self, encoder: TextEncoder, *, truncate: bool = False, matryoshka: bool = False) -> None:
        """Embed with this encoder."""
        self._encoder, self._truncates, self._shortens = encoder, truncate, matryoshka
        self._tokens = lru_cache(TEXTS_KEPT)(encoder.tokens)

    def validate(self, body: object) -> None:
        """Raise InvalidArgumentError, which names the field, unless the body can be embedded."""
        wanted = self._wanted(body)
        self._fitting(wanted.text)

    def cost(self, body: object) -> int:
        """The tokens of the text."""
        return len(self._fitting(self._wanted(body).text))

    def predict(self, bodies: Sequence[object]) -> list[Any]:
        """A result for each body."""
        wanted = [self._wanted(body) for body in bodies]
        texts = [self._fitting(one.text) for one in wanted]
        vectors = self._encoder.encode(texts)
        return [
            self._result(one, vector, len(text))
            for one, vector, text in zip(wanted, vectors, texts, strict=True)
        ]

    def _result(self, wanted: _Wanted, vector: Array, tokens: int) -> Any:
        if wanted.dimensions is not None and wanted.dimensions < len(vector):
            vector = vector[: wanted.dimensions]
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return vector if wanted.is_plain else {"embedding": vector, "prompt_tokens": tokens}

    def _fitting(self, text: str) -> Sequence[int]:
        """The tokens of a text. Raises InvalidArgumentError if they are too many."""
        tokens, most = self._tokens(text), self._encoder.tokens_max
        if len(tokens) <= most:
            return tokens
        if self._truncates:
            return [*tokens[: most - 1], tokens[-1]]  # the last one is that which ends a text
        raise InvalidArgumentError(
            f"input: has {len(tokens):,} tokens, and the model takes {most:,}; divide it, or serve the model "
            "with --param truncate=true"
        )

    def _wanted(self, body: object) -> _Wanted:
        """What a body asks for. Raises InvalidArgumentError."""
        if isinstance(body, str):
            return _Wanted(_text("body", body), None, True)
        if not isinstance(body, Mapping) or "input" not in body:
            raise InvalidArgumentError('body: must be a text, or a map such as {"input": "a text"}')
        unknown = body.keys() - {"input", "dimensions"}
        if unknown:
            raise InvalidArgumentError(
                f"{min(map(str, unknown)):.60}: unknown; known are input and dimensions"
            )
        return _Wanted(_text("input", body["input"]), self._dimensions(body.get("dimensions")))

    def _dimensions(self, value: Any) -> int | None:
        if value is None:
            return None
        width = self._encoder.width
        if type(value) is not int or not 1 <= value <= width:
            raise InvalidArgumentError(
                f"dimensions: must be a whole number from 1 to {width:,}, not {value!r:.40}"
            )
        if value < width and not self._shortens:
            raise InvalidArgumentError(
                f"dimensions: the vectors have {width:,} numbers, and nothing says that fewer of them are a "
                "vector; if the model was trained so, serve it with --param matryoshka=true"
            )
        return value


def _text(field: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        raise InvalidArgumentError(
            f"{field}: must be a text; tokens are refused, because they may be those of another vocabulary"
        )
    raise InvalidArgumentError(f"{field}: must be a text, not {type(value).__name__}")
