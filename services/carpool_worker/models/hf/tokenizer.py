"""Texts and tokens, with the tokenizer of a folder of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from transformers import AutoTokenizer

from carpool.errors import InvalidArgumentError
from carpool_worker.models.hf.source import cannot_load

_ANY_LENGTH: Final = 10**9  # transformers has such a number for a tokenizer without a limit


class Tokenizer:
    """The tokenizer of a model. Raises RuntimeError if the folder has none that can be loaded."""

    def __init__(self, source: str, prefix: str, revision: str | None = None) -> None:
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(source, revision=revision)
        except Exception as error:  # it raises many kinds, for example for a file that is missing
            raise cannot_load(source, prefix, error) from error
        self.has_chat_template = bool(getattr(self._tokenizer, "chat_template", None))
        self._backend = getattr(self._tokenizer, "backend_tokenizer", None)

    @property
    def tokens_max(self) -> int | None:
        """How many tokens the model takes, if the tokenizer says that."""
        declared = self._tokenizer.model_max_length
        return int(declared) if declared and declared < _ANY_LENGTH else None

    def encode(self, text: str, *, adds_special: bool) -> list[int]:
        """The tokens of a text, with those that the model expects around it."""
        tokens: list[int] = self._tokenizer(text, add_special_tokens=adds_special, verbose=False)["input_ids"]
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones. Nothing is made more beautiful: a text is decoded in
        parts, which must be those of the whole."""
        if self._backend is not None:
            return str(self._backend.decode(tokens, skip_special_tokens=True))
        return str(
            self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for these messages. Raises InvalidArgumentError."""
        if not self.has_chat_template:
            raise InvalidArgumentError(
                "messages: the tokenizer of this model has no chat template; send a prompt instead"
            )
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
                )
            )
        except Exception as error:  # a template raises what it likes, for example about the order of roles
            raise InvalidArgumentError(
                f"messages: the chat template of the model refuses them: {error}"[:500]
            ) from error
