"""Protobuf's text format, such as Triton's `config.pbtxt`: fields by name, with the lines they are in. Pure.

A field is `name: value` or `name { fields }`; also `name: { fields }`, `name < fields >`, and a list
`name: [value, value]`, which is the field several times. Between fields may be `,` or `;`. `#` begins a
comment. Texts that follow each other are one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple, NoReturn

DEPTH_MAX: Final = 32

_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<number>-?(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?[fF]?|(?<=-)(?:inf(?:inity)?|nan)\b))
    |(?P<word>[A-Za-z_]\w*)
    |(?P<mark>[{}<>\[\]:,;])""",
    re.VERBOSE | re.ASCII,
)
_ESCAPE: Final = re.compile(
    r"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))"
)
_ESCAPED: Final = dict(zip("abfnrtv\\'\"?", "\a\b\f\n\r\t\v\\'\"?", strict=True))
_CLOSING: Final = {"{": "}", "<": ">"}


class Scalar(NamedTuple):
    """A value as it is written: a text without quotes, a number, or a word such as TYPE_FP32 or true."""

    kind: Literal["text", "number", "word"]
    text: str


class Field(NamedTuple):
    """A field: one value, or the fields of a message. `line`: where it is, from 1."""

    name: str
    value: Scalar | tuple[Field, ...]
    line: int


class _Token(NamedTuple):
    kind: str  # of a Scalar, `mark`, or empty at the end
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.text!r:.60}" if self.kind else "the end of the file"


def parse(text: str, where: str) -> tuple[Field, ...]:
    """The fields of a text. `where`: the file, for errors.

    Raises ValueError, which names the file and the line, and says what is expected there.
    """
    return _Parser(text, where).message("", 0)


class _Parser:
    def __init__(self, text: str, where: str) -> None:
        self._where = where
        self._tokens = _tokens(text, where)
        self._next = next(self._tokens)

    def message(self, closing: str, depth: int) -> tuple[Field, ...]:
        """The fields up to this mark, which is taken; empty for the end of the file."""
        if depth > DEPTH_MAX:
            self._fail(f"messages are nested in more than {DEPTH_MAX} levels")
        fields: list[Field] = []
        while not self._takes(closing):
            if self._next.kind != "word":
                self._fail(
                    f"expected the name of a field{f' or {closing!r}' if closing else ''}, found {self._next}"
                )
            name = self._take()
            fields += self._values(name.text, name.line, depth)
            _ = self._takes(",") or self._takes(";")
        return tuple(fields)

    def _values(self, name: str, line: int, depth: int) -> Iterator[Field]:
        """The values of a field, of which only the name was taken."""
        has_colon = self._takes(":")
        if not self._takes("["):
            yield Field(name, self._value(name, depth, has_colon=has_colon), line)
            return
        while not self._takes("]"):
            line = self._next.line
            yield Field(name, self._value(name, depth, has_colon=True), line)
            if not self._takes(",") and self._next.text != "]":
                self._fail(f"expected ',' or ']' in the list {name}, found {self._next}")

    def _value(self, name: str, depth: int, *, has_colon: bool) -> Scalar | tuple[Field, ...]:
        if self._next.kind == "mark" and self._next.text in _CLOSING:
            return self.message(_CLOSING[self._take().text], depth + 1)
        if not has_colon:
            self._fail(f"expected ':' or '{{' after {name}, found {self._next}")
        if self._next.kind in ("number", "word"):
            token = self._take()
            return Scalar("number" if token.kind == "number" else "word", token.text)
        if self._next.kind != "text":
            self._fail(f"expected a value for {name}, found {self._next}")
        parts = []
        while self._next.kind == "text":
            parts.append(self._unescaped(self._next))
            self._take()
        return Scalar("text", "".join(parts))

    def _unescaped(self, token: _Token) -> str:
        def character(match: re.Match[str]) -> str:
            octal, hexadecimal, short, long, other = match.groups()
            if other is None:
                code = int(octal, 8) if octal else int(hexadecimal or short or long, 16)
                if code <= 0x10FFFF:
                    return chr(code)
            elif other in _ESCAPED:
                return _ESCAPED[other]
            return self._fail(f"{match[0]!r} in a text is no escape; write \\\\ for a backslash")

        return _ESCAPE.sub(character, token.text[1:-1])

    def _takes(self, mark: str) -> bool:
        """Take this mark if it is the next token; an empty one is the end."""
        is_next = self._next.kind == ("mark" if mark else "") and self._next.text == mark
        if is_next and mark:
            self._take()
        return is_next

    def _take(self) -> _Token:
        token, self._next = self._next, next(self._tokens)
        return token

    def _fail(self, message: str) -> NoReturn:
        raise ValueError(f"{self._where}, line {self._next.line}: {message}")


def _tokens(text: str, where: str) -> Iterator[_Token]:
    line, at = 1, 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError(
                f"{where}, line {line}: {text[at : at + 20].splitlines()[0]!r} is not valid here"
            )
        if found.lastgroup != "space":
            yield _Token(str(found.lastgroup), found[0], line)
        line += found[0].count("\n")
        at = found.end()
    yield _Token("", "", line)
