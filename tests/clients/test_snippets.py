"""The programs in README.md and PROTOCOL.md, run unchanged except for the port."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

import pytest

from clients.conftest import Build, output
from clients.languages import HERE, LANGUAGES, Language
from support.stack import Stack

ROOT: Final = HERE.parents[1]
README: Final = ("README.md", "From any language", 25)
PROTOCOL: Final = ("shared/PROTOCOL.md", "In your language", 45)
FENCES: Final = {"bash": "shell", "js": "node"}  # other languages have the same name in Markdown
REQUESTS: Final = 100

Section = tuple[str, str, int]


def snippets(section: Section) -> dict[str, str]:
    """The programs of a section, by language."""
    file, title, _ = section
    _, _, rest = (ROOT / file).read_text(encoding="utf-8").partition(f"\n## {title}\n")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", rest.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    return {FENCES.get(fence, fence): code for fence, code in blocks}


def run(section: Section, language: Language, build: Build, live: Stack, folder: Path) -> str:
    """Run the program with the port of the live stack, and return its output."""
    code = snippets(section)[language.name]
    port = str(live.server.port)
    if language.name == "shell":
        code = f'redis-cli() {{ command redis-cli -p {port} "$@"; }}\n{code}'
    else:
        code, found = re.subn(r"\b6379\b", port, code)
        assert found == 1
    source = folder / language.source
    source.write_text(code, encoding="utf-8")
    return output(build(language, source))


@pytest.mark.parametrize("section", [README, PROTOCOL], ids=["README", "PROTOCOL"])
def test_section_has_a_short_program_in_each_language(section: Section) -> None:
    shown = snippets(section)
    assert list(shown) == list(LANGUAGES)
    assert max(len(code.splitlines()) for code in shown.values()) < section[2]


def test_readme_program_gets_its_result(
    language: Language, build: Build, live: Stack, tmp_path: Path
) -> None:
    """It prints the number, or the envelope with it."""
    printed = json.loads(run(README, language, build, live, tmp_path))
    assert (printed["body"] if isinstance(printed, dict) else printed) == 49


def test_protocol_program_gets_all_results(
    language: Language, build: Build, live: Stack, tmp_path: Path
) -> None:
    """Each number, which ends the correlation ID, has its square beside it; msgpack-c prints another form."""
    printed = run(PROTOCOL, language, build, live, tmp_path)
    answers = re.findall(r':(\d+)(?:\t| OK |".*?"body"=>")(\d+)', printed)
    assert sorted((int(number), int(body)) for number, body in answers) == [
        (n, n * n) for n in range(REQUESTS)
    ]
