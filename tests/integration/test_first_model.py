"""docs/first_model.md: its programs and its commands are executed as printed, in the order of the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Final, NamedTuple

import pytest

from support.stack import Service, Stack

PAGE: Final = Path(__file__).parents[2] / "docs" / "first_model.md"
_NUMBER: Final = re.compile(r"[\d,.]+( (µs|ms|s)\b)?")
_TIMES: Final = ("loaded on", "passed in")  # what precedes a time; all else is the same in each run


class Command(NamedTuple):
    line: str
    printed: list[str]


def blocks(text: str) -> Iterator[str]:
    """What is indented by four spaces: programs and commands."""
    for block in re.findall(r"(?:^    .*\n|^\n(?=\n*    ))+", text, re.MULTILINE):
        yield dedent(block).strip("\n") + "\n"


def commands(block: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        line, *printed = part.splitlines()
        yield Command(line, [text for text in printed if text])


def without_times(line: str) -> str:
    """A line, without what differs from run to run: times, and how wide a table is with them."""
    if line.startswith("batch "):
        return " ".join(line.split())
    if re.match(r"\d", line) and line.endswith("-"):
        return f"{line.split(maxsplit=1)[0]} ..."
    return _NUMBER.sub("#", line) if any(text in line for text in _TIMES) else line


class Reader:
    """Someone who types what the page says."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._defined: dict[str, str] = {}  # the newest file that defines a model
        self._served: dict[str, tuple[str, Service]] = {}

    def write(self, program: str) -> None:
        name = program.partition("\n")[0].removeprefix("# ")
        (self._folder / name).write_text(program)
        for model in re.findall(r"^(?:class|def) (\w+)", program, re.MULTILINE):
            self._defined[model] = name

    def enter(self, command: Command) -> None:
        verb, *rest = command.line.split()
        if verb == "cat":
            (self._folder / rest[0]).write_text("\n".join(command.printed))
        elif command.line.startswith("carpool up "):
            path, _, name = rest[1].partition(":")
            assert self._defined[name] == path  # `carpool infer` starts it
        else:
            if command.line.startswith("carpool infer "):
                self._serve(rest[1])
            self._run(command)

    def _serve(self, model: str) -> None:
        file = self._defined[model]
        served = self._served.get(model)
        if served is not None and served[0] != file:
            assert served[1].terminate() == 0
        if served is None or served[0] != file:
            self._served[model] = file, self._stack.worker(f"{self._folder / file}:{model}")
            self._served[model][1].wait_for("worker ready")
            self._stack.wait_for_model(model)

    def _run(self, command: Command) -> None:
        ours = {name: value for name, value in os.environ.items() if not name.startswith("CARPOOL_")}
        tools = f"{Path(sys.executable).parent}{os.pathsep}{ours['PATH']}"
        done = subprocess.run(
            ["/bin/sh", "-c", f"{command.line} 2>&1"],
            cwd=self._folder,
            env={**ours, "CARPOOL_REDIS_URL": self._stack.url, "PATH": tools},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        lines = [line.replace(f"{self._folder}/", "") for line in done.stdout.splitlines() if line]
        shown = list(map(without_times, lines))[-len(command.printed) :] if command.printed else []
        assert shown == list(map(without_times, command.printed)), f"$ {command.line}\n{done.stdout}"


def test_the_page_is_true(stack: Stack, tmp_path: Path) -> None:
    stack.batcher()
    reader, entered = Reader(stack, tmp_path), 0
    for block in blocks(PAGE.read_text(encoding="utf-8")):
        if block.startswith("# "):
            reader.write(block.partition("\n$ ")[0].rstrip() + "\n")
        for command in commands(block):
            reader.enter(command)
            entered += 1
    assert entered >= 14


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("a: loaded on cpu in 0.8 ms; x", "a: loaded on cpu in 1.25 s; x", True),
        ("32     9 µs          0 µs   3,555,556      -", "32     1 ms       31 µs      32,000      -", True),
        ("32     9 µs          0 µs   3,555,556      -", "16     1 ms       31 µs      32,000      -", False),
        ('body 1: "bright"', 'body 1: "dark"', False),
        ("2 of 4 bodies failed.", "1 of 4 bodies failed.", False),
    ],
)
def test_only_times_may_differ(one: str, other: str, same: bool) -> None:
    assert (without_times(one) == without_times(other)) == same
