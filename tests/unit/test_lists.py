"""Lists that are kept by hand, in documents and docstrings: each has all that the code has, and nothing else.

Where one differs, the message says in what; and what to write, where the code has that.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final, get_args

import pytest

from carpool import errors
from carpool.keys import Keys, NodesKeys, models_key
from carpool.messages.batches import DispatchReason
from carpool.model_settings import ModelSettings
from carpool.wire.report import BatcherReport, SequencesReport, SteppingReport
from carpool.wire.request_fields import COLUMN_FIELDS, PASSED_ON_FIELDS, PRODUCER_FIELDS, STORED_BODY_FIELDS
from carpool.wire.tensors import DATATYPES
from carpool_cli.__main__ import main
from carpool_cli.commands import COMMANDS, Command, help_text, listed
from carpool_cli.roles import ROLES
from support import module_map
from support.chaos.faults import FAULTS
from support.chaos.gateway_faults import GATEWAY_FAULTS
from support.front_ends import FRONT_ENDS

ROOT: Final = Path(__file__).parents[2]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def section(path: str, heading: str) -> str:
    """A section of a document, with its subsections."""
    _, found, rest = read(path).partition(f"\n{heading}\n")
    assert found, f"{path} has no section {heading!r}"
    level = len(heading.partition(" ")[0])
    return re.split(rf"^#{{1,{level}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def first_cells(text: str) -> Iterator[str]:
    """The first cell of each row of all tables, without their heads."""
    lines = [*text.splitlines(), ""]
    for line, following in pairwise(lines):
        if line.startswith("|") and not line.startswith("|---") and not following.startswith("|---"):
            yield line.split("|")[1].strip()


def quoted(text: str) -> list[str]:
    """What is between backticks."""
    return re.findall(r"`([^`]+)`", text)


def compare(where: str, found: Iterable[str], expected: Iterable[str]) -> None:
    """Fail unless all that is expected was found, once each, and nothing else."""
    counts, wanted = Counter(iter(found)), set(expected)
    problems = {
        "lacks": wanted - set(counts),
        "has what the code has not:": set(counts) - wanted,
        "has more than once": {name for name in counts if counts[name] > 1},
    }
    told = [f"it {problem} {', '.join(sorted(names))}" for problem, names in problems.items() if names]
    assert not told, f"{where}: {'; '.join(told)}"


# --- commands ----------------------------------------------------------------------------------------------


def test_commands_in_operating_are_those_of_the_table() -> None:
    lines = section("docs/operating.md", "## Commands").partition("\n\n### ")[0].strip("\n").splitlines()
    expected = listed(indent=4)
    assert lines == expected.splitlines(), (
        f"docs/operating.md, Commands: these lines belong there\n{expected}"
    )


def test_commands_in_the_readme_are_lines_of_the_table() -> None:
    block = re.search(r"(^    carpool .*\n)+", section("README.md", "## Running it"), re.MULTILINE)
    assert block is not None
    lines = block[0].splitlines()
    named = {line.split()[1] for line in lines}
    expected = [f"    {command.line}" for command in COMMANDS.values() if command.name in named]
    assert lines == expected, "README.md, Running it: these lines belong there\n" + "\n".join(expected)


def test_help_has_each_command() -> None:
    compare(
        "carpool help",
        re.findall(r"^  carpool (\w+).*  \S", help_text().partition("\n\nAny")[0], re.M),
        COMMANDS,
    )


@pytest.mark.parametrize("command", [command for command in COMMANDS.values() if command.module])
def test_each_command_is_a_module_with_main(command: Command) -> None:
    assert list(inspect.signature(importlib.import_module(command.module).main).parameters) == ["argv"]


@cache
def flags_of(command: str) -> frozenset[str]:
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
        main(["help", command])
    return frozenset(re.findall(r"--[a-z][a-z-]*", printed.getvalue()))


def manuals() -> list[Path]:
    """The documents that are for users of the commands."""
    return [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "ops").glob("*/README.md")]


@pytest.mark.parametrize("document", manuals(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_flags_in_the_documents_exist(document: Path) -> None:
    """Flags behind a command are those of the command, and such between backticks of any command."""
    commands = [name for name, command in COMMANDS.items() if command.module]
    text = document.read_text(encoding="utf-8").replace("\\\n", " ")
    for call in re.finditer(rf"\bcarpool ({'|'.join(commands)})\b([^`\n|#]*)", text):
        unknown = set(re.findall(r"--[a-z][a-z-]*", call[2])) - flags_of(call[1])
        assert not unknown, f"`carpool {call[1]}` has no {', '.join(unknown)}: {call[0]}"
    if document.parent.name != "redis":  # whose flags are redis-server's
        unknown = set(re.findall(r"`(--[a-z][a-z-]*)", text)).difference(*map(flags_of, commands))
        assert not unknown, f"no command has {', '.join(unknown)}"


def test_variables_in_the_documents_exist() -> None:
    """Each is that of a flag, or one of the Compose stack or of the tests."""
    flags = {flag for name, command in COMMANDS.items() if command.module for flag in flags_of(name)}
    known = {f"CARPOOL_{flag.removeprefix('--').replace('-', '_').upper()}" for flag in flags}
    others = [ROOT / "docker-compose.yml", *(ROOT / "tests").rglob("*.py")]
    known.update(*(re.findall(r"CARPOOL_[A-Z_]+", path.read_text(encoding="utf-8")) for path in others))
    for document in (*manuals(), ROOT / "CONTRIBUTING.md"):
        named = set(re.findall(r"\bCARPOOL_[A-Z_]*[A-Z]\b", document.read_text(encoding="utf-8")))
        assert named <= known, f"{document}: nothing reads {', '.join(named - known)}"


def test_ready_made_models_are_those_of_pyproject() -> None:
    models = tomllib.loads(read("pyproject.toml"))["project"]["entry-points"]["carpool.models"]
    texts = {
        "carpool_cli/commands.py": help_text(),
        "carpool_cli/local/up.py": read("services/carpool_cli/local/up.py"),
        "carpool/settings.py": read("shared/carpool/settings.py"),
    }
    for where, text in texts.items():
        (named,) = re.findall(r"onnx:FILE, ([\w, \n\"-]+?)(?:;|\"\n +\"NAME=)", text)
        compare(where, re.findall(r"[a-z][a-z-]+", named.replace(" or", ",")), models)


# --- modules -----------------------------------------------------------------------------------------------

SOURCES: Final = ("shared", "services", "ops/bench", "tests/support")
DESCRIBED: Final = ("shared", "services")  # in ARCHITECTURE.md
IN_A_LIST: Final = re.compile(r"^ {0,4}(\w+)/? {2,}\S", re.MULTILINE)  # a line of a docstring about a module
LAYOUT_COLUMN: Final = 20  # the second column of the layout is to the right of it


def packages(*roots: str) -> list[str]:
    found = [path.parent for root in roots for path in (ROOT / root).rglob("__init__.py")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def modules(package: str) -> set[str]:
    return {path.stem for path in (ROOT / package).glob("*.py") if not path.stem.startswith("__")}


def in_docstring(package: str) -> list[str]:
    """The modules and packages that the docstring of a package lists. Fewer than two are no list."""
    named = IN_A_LIST.findall(ast.get_docstring(ast.parse(read(f"{package}/__init__.py"))) or "")
    return named if len(named) > 1 else []


@pytest.mark.parametrize("package", packages(*SOURCES))
def test_docstring_of_a_package_lists_all_of_its_modules_or_none(package: str) -> None:
    assert ast.get_docstring(ast.parse(read(f"{package}/__init__.py"))) is not None, (
        f"{package}/__init__.py has no docstring: say what the package holds, or list its modules"
    )
    if named := in_docstring(package):
        inner = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")} | {"lua"}
        compare(f"the docstring of {package}/__init__.py", named, modules(package) | inner & set(named))


def layout() -> dict[str, list[str]]:
    """The folders in the layout of ARCHITECTURE.md, and the description of each, in parts."""
    entries: dict[str, list[str]] = {}
    parents: dict[int, str] = {}  # by indentation
    for line in re.findall(r"^    (.*)", section("ARCHITECTURE.md", "## Layout"), re.MULTILINE):
        indent, words = len(line) - len(line.lstrip()), re.split(r" {2,}|: ", line.strip())
        folders = [word for word in words if word.endswith("/")]
        of = "".join(folder for at, folder in sorted(parents.items()) if at < indent)
        if folders:
            parents = {at: folder for at, folder in parents.items() if at < indent} | {indent: folders[0]}
            entries.update({of + folder: words for folder in folders})
        elif indent > LAYOUT_COLUMN:  # continues the line above
            last = entries[[*entries][-1]]
            last[-1] += f" {words[0]}"
            last.extend(words[1:])
        elif of:
            entries[of].extend(words)
    return entries


def test_layout_has_each_package() -> None:
    of_packages = [folder[:-1] for folder in layout() if folder.startswith(DESCRIBED) and "lua" not in folder]
    compare("ARCHITECTURE.md, Layout", of_packages, packages(*DESCRIBED))


def test_map_of_modules_is_what_their_docstrings_say() -> None:
    assert module_map.document() == read("docs/modules.md"), "cd tests && python -m support.module_map"


@pytest.mark.parametrize("folder", ["ops", "tests"])
def test_layout_has_the_folders_of(folder: str) -> None:
    named = re.findall(r"\w+", layout()[f"{folder}/"][-1])
    compare(f"ARCHITECTURE.md, Layout, {folder}/", named, folders(folder))


def test_contributing_has_the_folders_of_tests() -> None:
    named = re.findall(r"^    tests/(\w+)  ", section("CONTRIBUTING.md", "## Where things are"), re.MULTILINE)
    compare("CONTRIBUTING.md, Where things are", named, folders("tests"))


def folders(folder: str) -> set[str]:
    """The folders in it, but for caches."""
    return {path.name for path in (ROOT / folder).glob("[a-z]*/")}


@cache
def files() -> str:
    """The paths of all files of the sources, each after a slash."""
    folders = [ROOT / name for name in ("shared", "services", "ops", "tests")]
    return "\n".join(
        f"/{path.relative_to(ROOT).as_posix()}" for root in folders for path in root.rglob("*.*")
    )


@pytest.mark.parametrize(
    "document",
    [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs" / "decisions").glob("*.md")],
    ids=lambda path: path.name,
)
def test_programs_that_a_document_names_exist(document: Path) -> None:
    for text in quoted(document.read_text(encoding="utf-8").replace("\n", " ")):
        for name in re.findall(r"(?:^| )([\w/.-]+\.(?:py|lua))\b", text):
            is_there = re.search(rf"/{re.escape(name.removeprefix('./'))}$", files(), re.MULTILINE)
            assert is_there, f"{document.name} names {name}, which does not exist"


def test_moves_are_the_scripts() -> None:
    folder = ROOT / "shared/carpool/store/lua"
    scripts = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.lua")
        if re.search(r"^-- KEYS ", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    moves = section("ARCHITECTURE.md", "## Moves: what is atomic")
    reading = {"missing.lua", "dead_page.lua"}
    assert "`missing.lua` and `dead_page.lua`, which only read" in moves
    named = [
        name
        for line in moves.splitlines()
        if line.startswith("|")
        for name in re.findall(r"`(\S+\.lua)`", line)
    ]
    compare("ARCHITECTURE.md, Moves", named, scripts - reading)


# --- what producers and operators read ---------------------------------------------------------------------


def test_settings_in_the_document_are_those_of_a_model() -> None:
    """With their defaults. That of several is empty, for which the document says `none`."""
    table = section("docs/settings.md", "## All settings")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", table, re.MULTILINE)
    compare("docs/settings.md, All settings", [name for name, _ in rows], ModelSettings.names())
    documented = {name: re.sub("[`,]", "", default).replace("days", "d") for name, default in rows}
    defaults = ModelSettings().as_text()
    nothing = {name for name, default in defaults.items() if default in ("none", "", "{}")}
    said_to_be_nothing = {name for name, default in documented.items() if default in ("none", "all 1")}
    values = {name: default for name, default in documented.items() if name not in said_to_be_nothing}
    differing = (
        ModelSettings().changes_to(ModelSettings.from_mapping(values)).keys() | nothing ^ said_to_be_nothing
    )
    right = ", ".join(f"{name} {defaults[name] or 'none'}" for name in sorted(differing))
    assert not differing, f"docs/settings.md, All settings: the code has these defaults: {right}"


def test_statuses_in_the_protocol_are_those_of_errors() -> None:
    named = [
        name for cell in first_cells(section("shared/PROTOCOL.md", "### Statuses")) for name in quoted(cell)
    ]
    known = {value for name, value in vars(errors).items() if name.isupper() and isinstance(value, str)}
    compare("shared/PROTOCOL.md, Statuses", named, known)


TYPE_OF_KEY: Final = re.compile(r"([a-z ]+?)(?:, trimmed| with the consumer group .*?)?( that expires)?:")


def test_keys_in_the_protocol_are_those_of_the_code() -> None:
    """With their types, and whether they expire: the docstrings in `Keys` begin with that."""
    keys, expected = Keys("square"), {f"{models_key()} | set"}
    for name, member in vars(Keys).items():
        if name.startswith("_") or name in ("model", "prefix", "of_model"):
            continue
        key = getattr(keys, name) if isinstance(member, property) else getattr(keys, name)("ID")
        said = TYPE_OF_KEY.match((member.__doc__ or "").lower())
        assert said is not None, f"the docstring of Keys.{name} does not begin with the type of the key"
        expected.add(f"{key} | {said[1]}{', expires' if said[2] else ''}")
    for name, member in vars(NodesKeys).items():
        if isinstance(member, property):
            kind, _, _ = (member.__doc__ or "").partition(":")
            expected.add(f"{getattr(NodesKeys(), name)} | {kind.lower()}")
    found = re.findall(
        r"^\| `(carpool:.*?)(?:ID|NAME)?` \| (.*?)(?:, group `workers`)? \|", read("shared/PROTOCOL.md"), re.M
    )
    written = [f"{key}{'ID' if key.endswith(':') else ''} | {kind}" for key, kind in found]
    compare("shared/PROTOCOL.md, Keys and Internal keys (IDs and NAMEs are IDs here)", written, expected)


def test_fields_of_requests_in_the_protocol_are_those_that_are_read() -> None:
    """In the tables of fields; three that entries of their own have are in the text."""
    text = section("shared/PROTOCOL.md", "## A request")
    sequences = section("shared/PROTOCOL.md", "## Sequences").partition("| `status` |")[0]
    named = [name for cell in first_cells(text + sequences) for name in quoted(cell)]
    in_text = {name for name in ("requests", "withdraw", "end_sequences", "bodies") if f"`{name}`" in text}
    fields = PRODUCER_FIELDS | COLUMN_FIELDS | STORED_BODY_FIELDS | PASSED_ON_FIELDS
    compare("shared/PROTOCOL.md, A request and Sequences", [*named, *in_text], fields)


def test_datatypes_in_the_protocol_are_those_of_tensors() -> None:
    sentence = re.search(r"^`datatype` is (.*?)\.$", read("shared/PROTOCOL.md"), re.MULTILINE | re.DOTALL)
    assert sentence is not None
    compare("shared/PROTOCOL.md, Tensors, `datatype` is", quoted(sentence[1]), DATATYPES)


def test_fields_of_internal_entries_are_in_the_protocol() -> None:
    """Those of batches, settled entries, dead letters and inboxes; and those of a report, in JSON."""
    text = section("shared/PROTOCOL.md", "## Internal keys")
    report = text.partition("**A report** has")[2].partition("**A settled entry**")[0]
    of_models = re.findall(r"^- `(?:sequences|stepping)`(?:.|\n  )*", report, re.MULTILINE)
    wire = "".join(read(f"shared/carpool/wire/{name}.py") for name in ("batches", "inbox"))
    expected = (
        (text, set(re.findall(r'b"([a-z_]+)"', wire))),
        (report, set(BatcherReport.__dataclass_fields__)),
        (of_models[0], set(SequencesReport._fields)),
        (of_models[1], set(SteppingReport._fields)),
    )
    for described, fields in expected:
        missing = fields - set(quoted(described))
        assert not missing, f"shared/PROTOCOL.md, Internal keys: it lacks {', '.join(sorted(missing))}"


def test_reasons_of_batches_are_in_the_protocol() -> None:
    line = re.search(
        r"`reason`, why it was dispatched: (.*);", section("shared/PROTOCOL.md", "## Internal keys")
    )
    assert line is not None
    compare("shared/PROTOCOL.md, A batch, `reason`", quoted(line[1]), get_args(DispatchReason))


def test_roles_in_the_document_are_those_of_the_command() -> None:
    for table in section("ops/redis/README.md", "## Roles").split("| role | ")[1:]:
        compare(
            "ops/redis/README.md, Roles",
            (name for cell in first_cells(table) for name in quoted(cell)),
            ROLES,
        )
    sentence = re.search(r"a password for each role \(([^)]*)\)", read("docs/operating.md"))
    assert sentence is not None
    compare("docs/operating.md, Access control and TLS", sentence[1].split(", "), ROLES)


def test_faults_in_the_document_are_those_that_are_inflicted() -> None:
    """`make chaos CHAOS=--write` writes all tables. What the promise does not cover is in brackets."""
    inflicted = [name if fault.is_covered else f"({name})" for name, fault in FAULTS.items()]
    rows = [*inflicted, *GATEWAY_FAULTS, *FRONT_ENDS]
    compare("docs/reliability.md", first_cells(read("docs/reliability.md")), rows)
    quoted_rows = [*first_cells(section("README.md", "## What Carpool promises"))]
    compare(
        "README.md, What Carpool promises", quoted_rows, [name for name in inflicted if name in quoted_rows]
    )


def test_golden_vectors_are_described() -> None:
    folder = "tests/contract/vectors"
    named = re.findall(
        r"\w+\.json", "".join(re.findall(r"^## .*", read(f"{folder}/README.md"), re.MULTILINE))
    )
    compare(f"{folder}/README.md", named, (path.name for path in (ROOT / folder).glob("*.json")))


def test_documents_for_users_are_in_the_readme() -> None:
    """Or one that is there links to them."""
    named = set(re.findall(r"^\| \[(docs/\w+\.md)\]", read("README.md"), re.MULTILINE))
    linked = {f"docs/{name}" for path in named for name in re.findall(r"\]\((\w+\.md)", read(path))}
    missing = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} - named - linked
    assert not missing, f"README.md, Where to read on: it lacks {', '.join(missing)}"


def test_index_of_the_documents_has_each_page_once() -> None:
    named = re.findall(r"\]\((\w+\.md)\)", read("docs/README.md"))
    compare("docs/README.md", named, {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"})


def test_all_extras_but_the_largest_are_locked_and_documented() -> None:
    extras = {*tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]}
    locked = re.search(r"^EXTRAS = (.*)", read("Makefile"), re.MULTILINE)
    assert locked is not None
    compare("Makefile, EXTRAS", locked[1].split(), extras - {"tools", "transformers"})
    rows = [
        name for cell in first_cells(section("docs/operating.md", "### Installing")) for name in quoted(cell)
    ]
    compare("docs/operating.md, Installing", rows, extras - {"dev", "docs", "pages", "tools"})


def test_targets_in_the_documents_exist() -> None:
    makefile = read("Makefile")
    targets = re.findall(r"^([a-z]+):", makefile, re.MULTILINE)
    phony = re.search(r"^\.PHONY: (.*)", makefile, re.MULTILINE)
    assert phony is not None
    compare("Makefile, .PHONY", phony[1].split(), targets)
    for document in (*manuals(), ROOT / "CONTRIBUTING.md"):
        text = document.read_text(encoding="utf-8").replace("\n", "\n ")
        unknown = set(re.findall(r"(?:`|\n {5})make\s+([a-z]+)", text)) - {*targets}
        assert not unknown, f"{document}: the Makefile has no {', '.join(unknown)}"
