"""The documents: links resolve, lines are short, and nothing in them is true on one machine only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest

ROOT: Final = Path(__file__).parents[2]
FOLDERS: Final = ("docs", "ops", "services", "shared", "tests")
LINE_CHARS_MAX: Final = 119
LUA_CHARS_MAX: Final = 120
GENERATED: Final = "\nWritten by `"  # benchmarks write their reports, with tables of any width

FENCE: Final = re.compile(r"^(```+).*?^\1$", re.MULTILINE | re.DOTALL)
HEADING: Final = re.compile(r"^#+ (.+)$", re.MULTILINE)
LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
URL: Final = re.compile(r"\b(?:https?|rediss?)://[^\s\"'`)\\]+")

# Hosts that a document may name: this machine's loopback, names in a container network, and examples.
HOSTS: Final = {"127.0.0.1", "localhost", "gateway", "jaeger", "prometheus", "redis", "redis.example"}
# Home and working directories exist on the author's machine only.
PRIVATE_PATH: Final = re.compile(r"(?<![\w.}])/(?:home|root|Users|work|workspace|mnt)/")


def documents() -> list[Path]:
    return sorted(
        [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
    )


each_document = pytest.mark.parametrize(
    "document", documents(), ids=[path.relative_to(ROOT).as_posix() for path in documents()]
)


def anchors(document: Path) -> set[str]:
    """The anchors that Markdown renderers make of a document's headings."""
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    return {anchor(heading) for heading in HEADING.findall(text)}


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def broken_links(document: Path) -> Iterator[str]:
    """Relative links of a document whose file or heading does not exist."""
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    for link in LINK.findall(text):
        path, _, fragment = link.partition("#")
        if urlsplit(link).scheme:
            continue
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (fragment and fragment not in anchors(target)):
            yield link


def test_there_are_documents() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in documents()}
    assert {"README.md", "ARCHITECTURE.md", "shared/PROTOCOL.md", "docs/decisions/README.md"} <= names


@each_document
def test_relative_links_resolve(document: Path) -> None:
    assert list(broken_links(document)) == []


@pytest.mark.parametrize("script", sorted(ROOT.glob("shared/**/*.lua")), ids=lambda path: path.stem)
def test_lines_of_scripts_are_short(script: Path) -> None:
    """No linter checks them."""
    long = [at for at, line in enumerate(script.read_text().splitlines(), 1) if len(line) > LUA_CHARS_MAX]
    assert long == [], f"{script}: these lines have more than {LUA_CHARS_MAX} characters"


@each_document
def test_lines_are_short(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    if GENERATED in text:
        pytest.skip("written by a benchmark")
    long = [at for at, line in enumerate(text.splitlines(), 1) if len(line) > LINE_CHARS_MAX]
    assert long == [], f"{document}: these lines have more than {LINE_CHARS_MAX} characters"


@each_document
def test_nothing_names_a_private_path_or_host(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert PRIVATE_PATH.findall(text) == []
    hosts = {urlsplit(url).hostname for url in URL.findall(text)}
    assert hosts <= HOSTS


def decisions() -> list[Path]:
    return sorted((ROOT / "docs" / "decisions").glob("0*.md"))


def test_decisions_are_numbered_consecutively_and_each_is_in_the_index_once() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    assert {path for path in folder.iterdir() if path.name != "README.md"} == set(decisions())
    assert sorted(LINK.findall(index)) == [path.name for path in decisions()]
    for number, path in enumerate(decisions(), 1):
        title = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        assert title.startswith(f"{number:04}. ")
        assert f"- [{title}]({path.name})\n" in index
    for section in index.split("\n## ")[1:]:
        assert LINK.findall(section) == sorted(LINK.findall(section))


def amended_by(decision: str) -> list[str]:
    """The numbers of the later decisions that amended one, from the status below its title."""
    status = " ".join(decision.split("\n\n")[1].split())
    if status == "Status: current.":
        return []
    numbers: list[str] = []
    assert status.startswith("Status: amended by "), status
    for sentence in re.split(r"(?<=\.) (?=Amended by )", status.removeprefix("Status: ")):
        found = re.fullmatch(r"[Aa]mended by (.+?): (?:[^.:]|\.(?! ))+\.", sentence)
        links = re.findall(r"\[(\d{4})\]\(\1-[\w-]+\.md\)", found[1]) if found is not None else []
        assert links, sentence
        numbers += links
    return numbers


def test_each_decision_says_whether_a_later_one_amended_it() -> None:
    amended = 0
    for path in decisions():
        text = path.read_text(encoding="utf-8")
        numbers = amended_by(text)
        assert all(number > path.name[:4] for number in numbers), path.name
        assert "Amended" not in text.split("\n\n", 2)[2], f"{path.name}: only the status says so"
        amended += len(numbers)
    assert amended


def test_a_status_has_one_form() -> None:
    assert amended_by("# T\n\nStatus: current.\n\nText") == []
    assert amended_by(
        "# T\n\nStatus: amended by [0002](0002-b.md): this. Amended by [0003](0003-c.md): that."
    ) == [
        "0002",
        "0003",
    ]
    for status in (
        "current.",
        "Status: current",
        "Status: new.",
        "Status: amended by 0002: this.",
        "Status: amended by [0002](0003-c.md): this.",
        "Status: amended by [0002](0002-b.md).",
        "Status: amended by [0002](0002-b.md): this. And that.",
    ):
        with pytest.raises(AssertionError):
            amended_by(f"# T\n\n{status}\n\nText")


def test_each_decision_is_named_where_it_is_carried_out() -> None:
    """In a module, a script, a file that runs something, a test, or the document that it belongs to."""
    files = [
        *(ROOT / name for name in ("Makefile", "pyproject.toml", "docker-compose.yml", "CONTRIBUTING.md")),
        *(path for folder in ("services", "shared", "ops", "tests") for path in (ROOT / folder).rglob("*")),
    ]
    suffixes = {"", ".py", ".lua", ".toml", ".yml", ".conf", ".md"}
    named: set[str] = set()
    for path in files:
        if path.is_file() and path.suffix in suffixes and path != Path(__file__):
            named.update(
                re.findall(r"docs/decisions/(\d{4})", path.read_text(encoding="utf-8", errors="replace"))
            )
    assert named == {path.name[:4] for path in decisions()}


@each_document
def test_numbers_of_decisions_exist(document: Path) -> None:
    """In brackets, as the text of a link, and behind the word."""
    text = document.read_text(encoding="utf-8")
    numbers = set(re.findall(r"(?<=[\[( ])0\d{3}(?=[\]), .])", text))
    known = {path.name[:4] for path in decisions()}
    assert numbers <= known, f"there are no decisions {', '.join(sorted(numbers - known))}"
    for number, name in re.findall(r"\[(0\d{3})\]\((?:[\w./]*/)?(0\d{3})-", text):
        assert number == name, f"[{number}] links to {name}"


def test_checks_find_what_they_are_for(tmp_path: Path) -> None:
    target = tmp_path / "target.md"
    target.write_text("# One `heading`, and more\n")
    document = tmp_path / "document.md"
    document.write_text(
        "# Here\n[a](target.md) [b](target.md#one-heading-and-more) [c](#here) [d](redis://127.0.0.1)\n"
        "[e](missing.md) [f](target.md#missing) [g](#missing)\n```\n[h](in-a-program.md)\n```\n"
    )
    assert list(broken_links(document)) == ["missing.md", "target.md#missing", "#missing"]
    assert PRIVATE_PATH.search("in /mnt/disk/x") and not PRIVATE_PATH.search("${X}/mnt/ and docs/mnt/")
