"""Sections of documents that benchmarks write."""

from __future__ import annotations

from pathlib import Path

import pytest
from sections import table, write_section


def test_section_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("# Page\n\nAbout.\n\n### Table\n\nold\n\n## Next\n\nMore.\n\n### Last\n\nold\n")
    write_section(document, "### Table", "new")
    write_section(document, "### Last", table(("name", "value"), [("a", "1")]))
    assert document.read_text() == (
        "# Page\n\nAbout.\n\n### Table\n\nnew\n\n## Next\n\nMore.\n\n### Last\n\n"
        "| name | value |\n|---|---:|\n| a | 1 |\n"
    )
    with pytest.raises(ValueError, match="has no heading '### Other'"):
        write_section(document, "### Other", "new")
