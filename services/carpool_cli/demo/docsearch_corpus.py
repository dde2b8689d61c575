"""The passages that `docsearch` searches, and queries for it: both from Python source on this machine.

Source is parsed, never imported. Files are visited in sorted order, so one installation always gives the same
corpus.
"""

from __future__ import annotations

import ast
import os
import random
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import cycle, islice
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

PASSAGE_CHARS_MIN: Final = 20
"""A shorter passage is too short to be an answer."""
JOINED_CHARS_MAX: Final = 60
"""A shorter paragraph is joined with the one after it."""
PASSAGE_CHARS_MAX: Final = 600
"""A longer paragraph is split, at the end of a sentence if possible."""

SHOWN_QUERIES: Final = (
    "how do I read a zip file",
    "copy a directory tree",
    "parse command line arguments",
    "run a subprocess with a timeout",
    "compare two sequences and show the differences",
    "create a temporary directory",
    "wait for a coroutine with a timeout",
    "split a string like a shell would",
)

# Tests, bundled programs and character tables: their docstrings do not document the library.
_SKIPPED: Final = {
    "__pycache__",
    "site-packages",
    "dist-packages",
    "ensurepip",
    "distutils",
    "encodings",
    "pydoc_data",
} | {"test", "tests", "testing", "idlelib", "lib2to3", "turtledemo"}
# Pure-Python versions of modules in C, and the public names that their docstrings document.
_PUBLIC_NAMES: Final = {
    "_collections_abc": "collections.abc",
    "_pydatetime": "datetime",
    "_pydecimal": "decimal",
    "_pyio": "io",
}
_BLANK_LINES: Final = re.compile(r"\n\s*\n")
_RULES: Final = re.compile(r"([-=*~^#_+])\1{3,}")
_PIECE: Final = re.compile(
    rf"\S(?:.{{0,{PASSAGE_CHARS_MAX - 1}}}[.!?]|.{{0,{PASSAGE_CHARS_MAX - 1}}})(?=\s|$)"
)
_SENTENCE: Final = re.compile(r"[A-Z][a-z]+ [A-Za-z0-9 ,'()/-]+\.")

Definition: TypeAlias = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Passage(NamedTuple):
    """A paragraph of documentation, and the qualified name of what it documents."""

    name: str
    text: str


@lru_cache(maxsize=1)
def passages() -> tuple[Passage, ...]:
    """All passages about the standard library's public names and about the language, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = [*_library(root), *_language(root / "pydoc_data" / "topics.py")]
    found = (Passage(name, text) for name, document in documents for text in split(document))
    return tuple(dict.fromkeys(found))


def queries(count: int) -> list[str]:
    """`count` sentences from the documentation of the installed packages.

    Each is the first sentence of the docstring of a class or function, and is not itself a passage. Files are
    taken in a random order with a fixed seed until there are enough sentences. If there are fewer than
    `count` in all, they repeat. Raises RuntimeError if there are none.
    """
    known = {sentence for passage in passages() if (sentence := first_sentence(passage.text))}
    shuffle = random.Random(0).shuffle  # noqa: S311 - the order must be repeatable
    paths = sysconfig.get_paths()
    files = [file for root in sorted({paths["purelib"], paths["platlib"]}) for file in _files(Path(root))]
    shuffle(files)
    found: dict[str, None] = {}
    for file in files:
        if len(found) >= count:
            break
        sentences = (first_sentence(document) for _, document in _docstrings(file, ""))
        found.update((sentence, None) for sentence in sentences if sentence and sentence not in known)
    if count and not found:
        raise RuntimeError("no installed package has a docstring to use as a query")
    drawn = list(found)
    shuffle(drawn)
    return list(islice(cycle(drawn), count))


def split(document: str) -> list[str]:
    """The passages of one docstring in order, each on one line and of at most `PASSAGE_CHARS_MAX` characters.

    A short paragraph is joined with the next one, as is one that ends in a colon. An example (`>>>`) is
    joined with the paragraph before it.
    """
    joined = [""]
    for paragraph in _paragraphs(document):
        last = joined[-1]
        is_joined = len(last) < JOINED_CHARS_MAX or last.endswith(":") or paragraph.startswith(">>>")
        if is_joined and len(last) + len(paragraph) < PASSAGE_CHARS_MAX:
            joined[-1] = f"{last} {paragraph}".lstrip()
        else:
            joined.append(paragraph)
    return [passage for passage in joined if len(passage) >= PASSAGE_CHARS_MIN]


def first_sentence(document: str) -> str | None:
    """A docstring's first sentence without its full stop; None unless it is 4 to 20 plain words."""
    opening = " ".join(_BLANK_LINES.split(document.strip(), maxsplit=1)[0].split())
    sentence, _, _ = f"{opening} ".partition(". ")
    plain = _SENTENCE.fullmatch(f"{sentence.rstrip(' .')}.")
    return sentence.rstrip(" .") if plain and 4 <= len(sentence.split()) <= 20 else None


def _paragraphs(document: str) -> Iterator[str]:
    text = document.encode("utf-8", "replace").decode()  # a lone surrogate cannot be encoded and sent
    for block in _BLANK_LINES.split(text):
        paragraph = " ".join(_RULES.sub(" ", block).split())
        yield from [paragraph] if len(paragraph) <= PASSAGE_CHARS_MAX else _PIECE.findall(paragraph)


def _library(root: Path) -> Iterator[tuple[str, str]]:
    """Names and docstrings of the modules below `root`, and of their classes and functions."""
    for file in _files(root):
        *packages, last = file.relative_to(root).with_suffix("").parts
        parts = packages if last == "__init__" else [*packages, _PUBLIC_NAMES.get(last, last)]
        if not any(map(_is_private, parts)):
            yield from _docstrings(file, ".".join(parts))


def _language(file: Path) -> Iterator[tuple[str, str]]:
    """The topics of the language reference, which the interpreter's `help` shows."""
    for node in _parse(file).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for topic, document in sorted(ast.literal_eval(node.value).items()):
                yield f"help('{topic}')", document


def _files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _SKIPPED)
        yield from (Path(folder, file) for file in sorted(files) if file.endswith(".py"))


def _docstrings(file: Path, module: str) -> Iterator[tuple[str, str]]:
    """Qualified names and docstrings of `module`, unless it is empty, and of its classes and functions."""
    tree = _parse(file)
    if module and (document := ast.get_docstring(tree)):
        yield module, document
    for name, node in _definitions(tree.body, module):
        if document := ast.get_docstring(node):
            yield name, document


def _definitions(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, Definition]]:
    for node in body:
        if isinstance(node, Definition):
            if _is_private(node.name):
                continue
            name = f"{prefix}.{node.name}"
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node.body, name)
        elif isinstance(node, ast.If | ast.Try):  # one definition per platform, or a fallback
            yield from _definitions([*node.body, *node.orelse], prefix)


def _parse(file: Path) -> ast.Module:
    """The file's syntax tree; an empty one if it cannot be read or is not valid for this Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as invalid escapes in the parsed source
            return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")
