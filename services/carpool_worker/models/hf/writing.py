"""A text that is generated: from its tokens to the pieces that a reader gets. Pure.

Each token is a piece, so that another process can go on from the pieces that were sent: the same tokens give
the same pieces again. The text of a piece may be empty: a character may have several tokens, and what a stop
text may begin with is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from carpool.errors import AbortedError
from carpool.stop_texts import StopTexts

REPLACEMENT: Final = "\ufffd"
CONTEXT_TOKENS: Final = 6  # of the prompt, which may decide how the first token reads
HELD_TOKENS_MAX: Final = 8  # a character that is not complete then will never be

Decode = Callable[[Sequence[int]], str]  # bytes that are no UTF-8 become REPLACEMENT
Piece = dict[str, Any]


class TextDecoder:
    """The text of tokens, as they come.

    How a token reads may depend on those before it: in some vocabularies a word has its space only if another
    one precedes it. So tokens are read together with those of the last text that was returned. A token may
    also end within a character; that is returned once it is complete.
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        """`before`: tokens that precede the text."""
        self._decode = decode
        context = list(before[-CONTEXT_TOKENS:])
        text = decode(context) if context else ""
        if text.endswith(REPLACEMENT):
            context, text = [], ""
        self._tokens = context  # what is read together
        self._context = len(context)  # how many of these have been returned
        self._returned = len(text)  # characters of their text

    def add(self, token: int) -> str:
        """The text that is complete with this token; empty if none is."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith(REPLACEMENT):
            if len(self._tokens) - self._context <= HELD_TOKENS_MAX:
                return ""
            return self._take(text[:-1])
        new = self._take(text)
        if new:
            self._tokens = self._tokens[self._context :]
            self._context = len(self._tokens)
            self._returned = len(self._decode(self._tokens))
        return new

    def rest(self) -> str:
        """What was held back, at the end of the text."""
        return self._take(self._decode(self._tokens))

    def _take(self, text: str) -> str:
        new = text[self._returned :]
        self._returned = max(self._returned, len(text))
        return new


class Writing:
    """One text: its tokens, and what became of them.

    `finish_reason`: empty until it has ended; "stop" at an end token or stop text, "length" at `max_tokens`.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        decode: Decode,
        max_tokens: int,
        ends: Collection[int] = (),
        stop: Sequence[str] = (),
    ) -> None:
        """`ends`: the tokens that end a text."""
        self.prompt = prompt
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason = ""
        self._decoder = TextDecoder(decode, prompt)
        self._stops = StopTexts(stop)
        self._max_tokens = max_tokens
        self._ends = ends

    def add(self, token: int) -> Piece:
        """The piece of this token."""
        self.tokens.append(token)
        is_end = token in self._ends
        text = "" if is_end else self._stops.add(self._decoder.add(token))
        if is_end or self._stops.has_stopped:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self._max_tokens:
            self.finish_reason = "length"
        if self.finish_reason and not self._stops.has_stopped:
            text += self._stops.add(self._decoder.rest()) + self._stops.rest()
        self.text += text
        piece: Piece = {"text": text, "token": token}
        return piece | self._ending if self.finish_reason else piece

    def resume(self, pieces: Iterable[Any]) -> None:
        """Go on from pieces that were sent. Raises AbortedError if they are not of this model."""
        sent = ""
        for piece in pieces:
            if not isinstance(piece, Mapping) or not {"text", "token"} <= piece.keys():
                raise AbortedError("what was sent of this text is of another model: send the request again")
            sent += piece["text"]
            self.add(piece["token"])
        if self.text != sent:
            raise AbortedError(
                "what was sent of this text was read with another tokenizer: send the request again"
            )

    @property
    def result(self) -> Piece:
        """The whole text as one piece."""
        return {"text": self.text, **self._ending}

    @property
    def _ending(self) -> Piece:
        return {
            "finish_reason": self.finish_reason,
            "prompt_tokens": len(self.prompt),
            "completion_tokens": len(self.tokens),
        }
