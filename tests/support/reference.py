"""The reference of the Python interface: a page for each module that users import from, made of docstrings.

cd tests && python -m support.reference ../build/docs      # what `make docs` does

pdoc renders the pages. Here is what they show, and how docstrings become Markdown: lines such as "`timeout`:
seconds ..." become the items of a list; what is meant for maintainers (the modules of a package, the numbers
of decisions) is left out.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Final

from jinja2 import ChoiceLoader, DictLoader
from pdoc import render
from pdoc.doc import Class, Doc, Module, Variable

from carpool.model_settings import ModelSettings

# What each page shows, in this order. Where users import a name, there it has its page.
PAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "carpool": (
        "Client",
        "AsyncClient",
        "Reply",
        "TensorSpec",
        "StateSpec",
        "RequestClient",
        "AsyncRequestClient",
        "StopTexts",
    ),
    "carpool.client": ("RequestOptions", "Stream", "AsyncStream", "BlockingSequence", "AsyncSequence"),
    "carpool.errors": (
        "CarpoolError",
        "InvalidArgumentError",
        "DeadlineExceededError",
        "NoResultError",
        "ResourceExhaustedError",
        "CancelledRequestError",
        "InternalError",
        "AbortedError",
        "PermissionDeniedError",
        "UnavailableError",
        "UnconfirmedError",
        "UnimplementedError",
        "NotFoundError",
        "UnknownOutcomeError",
        "Unhealthy",
        "error_for",
        "HTTP_STATUS",
        "GRPC_CODE",
    ),
    "carpool.model_settings": ("ModelSettings",),
    "carpool_worker.model_process.loaded": ("RequestInfo", "BoundSequence"),
    "carpool_worker.model_process.stepping.requests": ("StepRequest",),
    "carpool_worker.models.onnx": ("OnnxModel",),
    "carpool.metrics": ("counter", "gauge", "histogram"),
    "carpool.testing": ("LocalClient", "LocalAsyncClient"),
}
FOR_MAINTAINERS: Final = re.compile(r"^(?:Why: docs/decisions/.*|\w+ {2,}\S.*(?:\n +\S.*)*)\n?", re.MULTILINE)
_DEFINITION: Final = re.compile(r"(?:`[\w*]+`, )*`[\w*]+`: ")
# What users make themselves. All else they are given.
MADE_BY_USERS: Final = (
    *("Client", "AsyncClient", "LocalClient", "LocalAsyncClient"),
    *("TensorSpec", "StateSpec", "OnnxModel", "StopTexts"),
)
_OPTIONS: Final = re.compile(r"\*&lt;class &#x27;(.*?)&#x27;&gt;")  # how pdoc shows Unpack[...]
_FIELD: Final = re.compile(r"Alias for field number \d+")
# What an attribute of this name means in every class that has it and does not say.
COMMON: Final[Mapping[str, str]] = {
    "correlation_id": "That of the request, which no other one in flight has: text of 1 to 128 characters.",
    "lane": "The lane that the producer named; empty if it named none.",
    "content_type": "That of the body, such as `application/json`.",
    "sequence_id": "The name of the sequence.",
    "sequence_start": "Whether it is the first request of its sequence.",
    "sequence_end": "Whether it is the last request of its sequence.",
    "slot": "The place of the sequence in its model process, from 0 to `max_batch_size` - 1.",
    "emitted": "How many values were emitted, those in `chunks` included.",
    "is_too_large": "Whether it failed because its output has more than `max_result_bytes`.",
    "max_batch_size": "The setting: requests in a batch.",
    "path": "The ONNX file.",
    "name": "The name under which it is served.",
}
_INDEX: Final = """\
{% extends "frame.html.jinja2" %}
{% block title %}Carpool, the Python interface{% endblock %}
{% block nav %}<h2>Pages</h2><ul>{% for name in all_modules %}
<li><a href="{{ name.replace(".", "/") }}.html">{{ name }}</a></li>{% endfor %}</ul>{% endblock %}
{% block content %}<main class="pdoc"><section class="module-info">
<h1 class="modulename">Carpool, the Python interface</h1>
<dl>{% for name, module in all_modules.items() %}
<dt><a href="{{ name.replace(".", "/") }}.html">{{ name }}</a></dt>
<dd>{{ module.members | join(", ") }}</dd>{% endfor %}</dl>
</section></main>{% endblock %}
"""


def as_markdown(docstring: str) -> str:
    """A docstring as Markdown."""
    lines: list[str] = []
    in_definitions = False
    for line in FOR_MAINTAINERS.sub("", docstring).splitlines():
        if _DEFINITION.match(line):
            if lines and lines[-1] and not in_definitions:
                lines.append("")
            in_definitions = True
            lines += _definitions(line)
            continue
        in_definitions = in_definitions and bool(line)
        lines.append(line)
    return "\n".join(lines).strip()


def _definitions(line: str) -> Iterator[str]:
    """The items of a list for a line, which may define several: "`a`: this. `b`: that."."""
    for part in re.split(r"(?<=[.;]) (?=(?:`[\w*]+`, )*`[\w*]+`: )", line):
        yield f"- {part}"


def modules() -> dict[str, Module]:
    """The pages, by module."""
    return {name: _page(importlib.import_module(name), shown) for name, shown in PAGES.items()}


def _page(module: ModuleType, shown: tuple[str, ...]) -> Module:
    for name in shown:
        setattr(module, name, getattr(module, name))  # those that are imported on first use
    module.__dict__["__all__"] = list(shown)
    page = Module(module)
    for member in page.members.values():
        if isinstance(member, Class):
            _complete(member)
    return page


def _complete(page: Class) -> None:
    """Show what the class inherits from classes of Carpool that have no page; and no texts of the library."""
    inherited = [
        member
        for (module, _), members in page.inherited_members.items()
        if module.partition(".")[0].startswith("carpool") and module not in PAGES
        for member in members
    ]
    is_made = page.name in MADE_BY_USERS or issubclass(page.obj, Exception)
    own = [member for member in page.own_members if is_made or member.name != "__init__"]
    page.own_members = [*own, *inherited]
    meanings = _meanings(page.obj)
    if meanings:  # settings, which are declared and not called
        page.own_members = [member for member in page.own_members if member.name in meanings]
    for member in page.own_members:
        if meaning := meanings.get(member.name):
            member.docstring = meaning
        if _FIELD.fullmatch(member.docstring):
            member.docstring = ""
        if member.name == "__init__":  # the class has one
            member.docstring = ""
        elif not member.docstring and f"`{member.name}`" not in page.docstring:
            member.docstring = COMMON.get(member.name, "")


def _meanings(kind: type) -> dict[str, str]:
    """Of settings: what each means, and its default."""
    if kind is not ModelSettings:
        return {}
    defaults = ModelSettings().as_text()
    return {
        each.name: f"{each.metadata['meaning']}. By default `{defaults[each.name] or 'none'}`."
        for each in dataclasses.fields(ModelSettings)
    }


def public_members(page: Class) -> list[Doc[object]]:
    """What the page of a class shows, beside the constructor."""
    return [member for member in page.own_members if not member.name.startswith("_")]


def undocumented(pages: Mapping[str, Module]) -> Iterator[str]:
    """Names that are shown without a docstring. Fields may be described in that of their class, as `name`."""
    for page in pages.values():
        for member in page.members.values():
            if not member.docstring:
                yield member.fullname
            if not isinstance(member, Class):
                continue
            for inner in public_members(member):
                is_described = isinstance(inner, Variable) and f"`{inner.name}`" in member.docstring
                if not (inner.docstring or is_described):
                    yield inner.fullname


def write(folder: Path) -> None:
    """Write all pages, an index and what the search needs. Raises SystemExit if a name has no docstring."""
    render.configure(show_source=False, docformat="markdown")
    # pdoc has no types for this object.
    render.env.loader = ChoiceLoader([DictLoader({"index.html.jinja2": _INDEX}), render.env.loader])  # type: ignore[list-item]
    render.env.filters["to_markdown"] = as_markdown
    pages = modules()
    if missing := sorted(undocumented(pages)):
        raise SystemExit(f"these have no docstring: {', '.join(missing)}")
    for name, page in pages.items():
        file = folder / f"{name.replace('.', '/')}.html"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_OPTIONS.sub(r"\1", render.html_module(page, pages)), encoding="utf-8")
    (folder / "index.html").write_text(render.html_index(pages), encoding="utf-8")
    (folder / "search.js").write_text(render.search_index(pages), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
    print(f"{sys.argv[1]}/index.html")
