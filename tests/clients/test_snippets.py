"""The programs in README.md, docs/languages.md and PROTOCOL.md are run as printed, except for the port."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from textwrap import dedent
from typing import Final, NamedTuple

import pytest

from clients.conftest import Build, output
from clients.languages import HERE, LANGUAGES, Language
from support.stack import Stack

ROOT: Final = HERE.parents[1]
FENCES: Final = {"bash": "shell", "js": "node"}  # Markdown's names of languages that differ from ours
REQUESTS: Final = 100


class Section(NamedTuple):
    """A section of a document that has one program for each language."""

    file: str
    title: str
    lines_max: int


ONE_REQUEST: Final = Section("docs/languages.md", "One request", lines_max=24)
MANY_REQUESTS: Final = Section("shared/PROTOCOL.md", "In your language", lines_max=44)


def snippets(section: Section) -> dict[str, str]:
    """The programs of a section, by language."""
    text = (ROOT / section.file).read_text(encoding="utf-8")
    _, _, rest = text.partition(f"\n## {section.title}\n")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", rest.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    return {FENCES.get(fence, fence): code for fence, code in blocks}


def run(section: Section, language: Language, build: Build, live: Stack, folder: Path) -> str:
    """What the program prints when Redis's usual port is replaced by that of the live stack."""
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


@pytest.mark.parametrize("section", [ONE_REQUEST, MANY_REQUESTS], ids=["one request", "many requests"])
def test_section_has_a_short_program_for_each_language(section: Section) -> None:
    shown = snippets(section)
    assert list(shown) == list(LANGUAGES)
    assert max(len(code.splitlines()) for code in shown.values()) <= section.lines_max


def test_program_for_one_request_prints_the_result(
    language: Language, build: Build, live: Stack, tmp_path: Path
) -> None:
    """A program prints the number, or the envelope that contains it."""
    printed = json.loads(run(ONE_REQUEST, language, build, live, tmp_path))
    assert (printed["body"] if isinstance(printed, dict) else printed) == 49


def test_program_for_many_requests_prints_every_result(
    language: Language, build: Build, live: Stack, tmp_path: Path
) -> None:
    """A correlation ID ends with the number whose square is printed: in columns, or in msgpack-c's format."""
    printed = run(MANY_REQUESTS, language, build, live, tmp_path)
    answers = re.findall(r':(\d+)(?:\t| OK |".*?"body"=>")(\d+)', printed)
    assert sorted((int(number), int(body)) for number, body in answers) == [
        (n, n * n) for n in range(REQUESTS)
    ]


def test_python_program_in_the_readme_runs(live: Stack, tmp_path: Path) -> None:
    """It is run with fewer requests than printed, and prints the one result."""
    _, _, rest = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## A producer\n")
    (code,) = re.findall(r"^    import asyncio\n(?:(?:    .*)?\n)+", rest, re.MULTILINE)
    program = dedent(code)
    for printed, run_with in (("127.0.0.1:6379", f"127.0.0.1:{live.server.port}"), ("100_000", "100")):
        assert program.count(printed) == 1
        program = program.replace(printed, run_with)
    source = tmp_path / "producer.py"
    source.write_text(program, encoding="utf-8")
    assert output([sys.executable, str(source)]) == "49\n"
