"""Sections of documents that benchmarks write."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


def write_section(document: Path, heading: str, text: str) -> None:
    """Replace what is below a heading, up to the next one of any level. Raises ValueError without it."""
    before, found, rest = document.read_text(encoding="utf-8").partition(f"\n{heading}\n")
    if not found:
        raise ValueError(f"{document} has no heading {heading!r}")
    following = re.search(r"^#+ ", rest, re.MULTILINE)
    after = rest[following.start() :] if following else ""
    document.write_text(f"{before}\n{heading}\n\n{text.strip()}\n\n{after}".rstrip() + "\n", encoding="utf-8")


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, with numbers to the right."""
    marks = ["---", *["---:"] * (len(heading) - 1)]
    lines = (heading, marks, *rows)
    return (
        "\n".join(f"| {' | '.join(line)} |" for line in lines)
        .replace("| --- |", "|---|")
        .replace(" ---: |", "---:|")
    )
