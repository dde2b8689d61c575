"""The map of all modules: for each, what the first sentence of its docstring says.

cd tests && python -m support.module_map      # writes docs/modules.md
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
DOCUMENT: Final = ROOT / "docs" / "modules.md"
SOURCES: Final = ("shared/carpool", "services")
WIDTH: Final = 119
HEAD: Final = """\
# Modules

Every module, and the first sentence of its docstring. [ARCHITECTURE.md](../ARCHITECTURE.md) says how they
work together. Written by `python -m support.module_map` in `tests/`.
"""
_DOCSTRING: Final = re.compile(r'\s*(r?"""(?:[^"\\]|\\.|"(?!""))*""")', re.DOTALL)


def document() -> str:
    """The text of docs/modules.md."""
    return HEAD + "".join(map(_section, _packages()))


def _packages() -> Iterator[Path]:
    for source in SOURCES:
        yield from sorted(path.parent for path in (ROOT / source).rglob("__init__.py"))


def _section(package: Path) -> str:
    name = package.relative_to(ROOT).as_posix()
    modules = sorted(path for path in package.glob("*.py") if path.stem != "__init__")
    rows = "".join(_wrapped(f"- `{path.name}`: {_sentence(path)}", indent="  ") for path in modules)
    return f"\n## {name}\n\n{_wrapped(_sentence(package / '__init__.py'))}" + (f"\n{rows}" if rows else "")


def _wrapped(text: str, indent: str = "") -> str:
    lines = textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines) + "\n"


def _sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    found = _DOCSTRING.match(path.read_text())  # to parse the whole module takes 100 times as long
    docstring = ast.literal_eval(found[1]) if found else ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    sentence, dot, _ = paragraph.partition(". ")
    if not sentence:
        raise ValueError(f"{path} has no docstring: say in its first sentence what it is for")
    return (sentence + dot).strip()


if __name__ == "__main__":
    DOCUMENT.write_text(document())
