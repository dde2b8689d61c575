"""The reference (`make docs`): what users import is there, with its docstring, and all links resolve."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest
from pdoc.doc import Module

import carpool.client
from carpool import errors
from support.reference import as_markdown, undocumented

TESTS: Final = Path(__file__).parents[1]


class Page(HTMLParser):
    """The links of a page, its anchors, and the anchors below which a docstring is shown."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.documented: set[str] = set()
        self._inside: list[str] = []  # anchors of the elements around
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if (anchor := values.get("id")) is not None:
            self.anchors.add(anchor)
        if tag == "a" and (link := values.get("href")) is not None:
            self.links.append(link)
        if tag in ("section", "div"):
            self._inside.append(values.get("id") or "")
            if values.get("class") == "docstring":
                self.documented.add(next(filter(None, reversed(self._inside)), ""))

    def handle_endtag(self, tag: str) -> None:
        if tag in ("section", "div"):
            self._inside.pop()

    def broken_links(self, pages: dict[Path, Page]) -> Iterator[str]:
        for link in self.links:
            if link.startswith("https://"):
                continue
            path, _, anchor = link.partition("#")
            target = pages.get((self.path.parent / path).resolve() if path else self.path)
            if target is None or (anchor and anchor not in target.anchors):
                yield f"{self.path.name}: {link}"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """The pages, as `make docs` writes them. A warning of pdoc is an error."""
    folder = tmp_path_factory.mktemp("reference").resolve()
    subprocess.run([sys.executable, "-W", "error", "-m", "support.reference", folder], cwd=TESTS, check=True)
    return {path: Page(path) for path in folder.rglob("*.html")}


def test_links_between_pages_resolve(pages: dict[Path, Page]) -> None:
    assert [link for page in pages.values() for link in page.broken_links(pages)] == []
    (index,) = [page for page in pages.values() if page.path.name == "index.html"]
    assert {page.path for page in pages.values()} - {index.path} <= {
        (index.path.parent / link).resolve() for link in index.links
    }


def test_what_users_import_has_a_docstring(pages: dict[Path, Page]) -> None:
    exceptions = {name for name, value in vars(errors).items() if isinstance(value, type)}
    public = {*carpool.__all__, *carpool.client.__all__, *exceptions} - {"errors", "Mapping"}
    shown = set().union(*(page.documented for page in pages.values()))
    assert public | {"RequestInfo", "StepRequest", "OnnxModel", "ModelSettings.max_batch_size"} <= shown
    assert {"Client.stream", "AsyncClient.infer_many", "AsyncSequence.submit", "StepRequest.emit"} <= shown


def test_page_with_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#x"></a><a href="#y"></a><a href="c.html"></a>')
    (tmp_path / "b.html").write_text('<section id="x"><div class="docstring"></div></section>')
    found = {path: Page(path) for path in (tmp_path / "a.html", tmp_path / "b.html")}
    assert [*found[tmp_path / "a.html"].broken_links(found)] == ["a.html: #y", "a.html: c.html"]
    assert found[tmp_path / "b.html"].documented == {"x"}


def test_names_without_a_docstring_are_found() -> None:
    """Given a function and a field that nothing describes, expect these and no others."""
    module = ModuleType("planted")
    source = '''
class Described:
    """A field, `first`."""
    first: int = 1
    second: int = 2
def plain(): pass
__all__ = ["Described", "plain"]
'''
    exec(source, module.__dict__)  # noqa: S102 (a module without a file)
    for name in ("Described", "plain"):
        module.__dict__[name].__module__ = "planted"
    assert sorted(undocumented({"planted": Module(module)})) == ["planted.Described.second", "planted.plain"]


def test_definitions_become_a_list() -> None:
    docstring = "What it is.\n\n`a`: one\n    and more. `b`, `c`: two.\n\nWhy: docs/decisions/0001."
    assert as_markdown(docstring) == "What it is.\n\n- `a`: one\n    and more. `b`, `c`: two."
    assert as_markdown("Words, and `a` in them.") == "Words, and `a` in them."
    assert as_markdown("`a`: one. `b`: two.") == "- `a`: one.\n- `b`: two."
    assert as_markdown("All.\n\nfirst   this\nsecond  that\n        and that\n") == "All."
