"""The pages for users of other tools: their programs run as printed, in the server that a page names."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import httpx
import pytest

from carpool import AsyncClient, errors
from carpool.errors import HTTP_STATUS
from carpool.keys import Keys
from conftest import SERVERS
from integration.test_first_model import Reader, blocks, commands
from support.stack import RESULT_S, Stack
from support.waiting import EVENTUALLY_S, wait_until

DOCS: Final = Path(__file__).parents[2] / "docs"
BIN: Final = Path(sys.executable).parent
FRAMEWORKS: Final = {"pytorch": "torch", "transformers": "transformers"}
PAGES: Final = ("fastapi", "flask", *FRAMEWORKS)
MODELS: Final = ("square", "stepping.py:countdown", "counting.py:Counting", "calling.py:Hold")


def programs(page: str) -> dict[str, str]:
    """The programs of a page by file. A block "# app.py, continued" is appended."""
    found: dict[str, str] = {}
    for block in blocks((DOCS / f"{page}.md").read_text(encoding="utf-8")):
        head = re.match(r"# (\w+\.py)(, continued)?\n", block)
        if head:
            code = re.split(r"^\$ ", block, maxsplit=1, flags=re.MULTILINE)[0]
            found[head[1]] = f"{found[head[1]]}\n\n{code}" if head[2] else code
    return found


@pytest.mark.parametrize("page", PAGES)
def test_programs_have_no_undefined_names(page: str) -> None:
    """Also where what they import is not installed."""
    for name, program in programs(page).items():
        compile(program, name, "exec")
        checked = subprocess.run(
            [BIN / "ruff", "check", "--isolated", "--select", "F,E9", "--stdin-filename", name, "-"],
            input=program,
            capture_output=True,
            text=True,
            check=False,
        )
        assert checked.returncode == 0, checked.stdout
    assert programs(page)


# --- web applications --------------------------------------------------------------------------------------


class Served(NamedTuple):
    """A page, and what its command needs beside what is printed: a free port, and a line for each request."""

    page: str
    flags: tuple[str, ...]
    listens: str  # the line of the log with the address


FASTAPI: Final = Served("fastapi", ("--port", "0"), r"running on (http://\S+)")
ACCESS_LOG: Final = ("--access-logfile", "-", "--access-logformat", "served by %(p)s")
FLASK: Final = Served("flask", ("--bind", "127.0.0.1:0", *ACCESS_LOG), r"Listening at: (http://\S+)")


class WebServer:
    """The application of a page, started by the command of the page."""

    def __init__(self, served: Served, folder: Path, redis_url: str) -> None:
        folder.mkdir()
        for name, program in programs(served.page).items():
            (folder / name).write_text(program, encoding="utf-8")
        self._log = folder / "log"
        text = (DOCS / f"{served.page}.md").read_text(encoding="utf-8")
        (line,) = re.findall(r"^    \$ ((?:uvicorn|gunicorn) .*)", text, re.MULTILINE)
        command, *arguments = line.split()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", command, *served.flags, *arguments],
                cwd=folder,
                env={**os.environ, "CARPOOL_REDIS_URL": redis_url},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_until(
            lambda: re.search(served.listens, self.log) or self._process.poll() is not None,
            description=f"{line} listens",
        )
        found = re.search(served.listens, self.log)
        assert found, self.log
        self.url = found[1]

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(EVENTUALLY_S)

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=EVENTUALLY_S)


@pytest.fixture(scope="module")
def stack(stacks: Callable[[Path], Stack]) -> Stack:
    """A stack shared by this module."""
    stack = stacks(SERVERS[0])
    stack.serve(*MODELS)
    return stack


@pytest.fixture(scope="module", params=[FASTAPI, FLASK], ids=lambda served: served.page)
def web(
    request: pytest.FixtureRequest, stack: Stack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, WebServer]]:
    """The name of the page, and its application."""
    served: Served = request.param
    with WebServer(served, tmp_path_factory.mktemp(served.page) / "app", stack.url) as server:
        yield served.page, server
    assert "Traceback" not in server.log and "Warning" not in server.log


def test_commands_of_the_page_print_what_it_says(web: tuple[str, WebServer]) -> None:
    page, server = web
    entered = 0
    for block in blocks((DOCS / f"{page}.md").read_text(encoding="utf-8")):
        for command in commands(block):
            if command.line.startswith("curl "):
                *_, body, address = shlex.split(command.line)
                answer = server.post(address.removeprefix("localhost:8000"), json.loads(body))
                assert answer.text.splitlines() == command.printed
                entered += 1
    assert entered


def test_table_of_errors_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", (DOCS / "fastapi.md").read_text(), re.MULTILINE)
    assert len(rows) >= 6
    assert all(HTTP_STATUS[getattr(errors, name).status] == int(code) for name, code in rows)


def test_errors_are_statuses_of_http(web: tuple[str, WebServer]) -> None:
    _, server = web
    for model, body, code, status in (
        ("nowhere", 1, 404, "NOT_FOUND"),
        ("Counting", "refuse", 400, "INVALID_ARGUMENT"),
        ("Counting", "raise", 500, "INTERNAL"),
    ):
        answer = server.post(f"/models/{model}", body)
        assert (answer.status_code, answer.json()["status"]) == (code, status)
        early = server.post(f"/streams/{model}", body)
        assert (early.status_code, early.json()["status"]) == (code, status)


async def test_timeout_is_a_504(web: tuple[str, WebServer], stack: Stack, gate: Path, tmp_path: Path) -> None:
    """Given a busy model, expect 504, and that it never executes the late request."""
    _, server = web
    log = tmp_path / "log"
    async with AsyncClient(stack.url, timeout=RESULT_S) as client:
        busy = await occupied(stack, client, log, gate)
        late = await asyncio.to_thread(server.post, "/models/Hold", ["late", str(log), str(gate)])
        assert (late.status_code, late.json()["status"]) == (504, "DEADLINE_EXCEEDED")
        gate.touch()
        await busy
    stack.wait_until_idle("Hold")
    assert log.read_text().split() == ["first", "second"]


def test_stream_whose_reader_has_gone_is_withdrawn(web: tuple[str, WebServer], stack: Stack) -> None:
    """Given a stream without end, expect that its slot is free once the connection is closed."""
    _, server = web
    url = f"{server.url}/streams/countdown"
    with httpx.stream("POST", url, json=10**12, timeout=EVENTUALLY_S) as answer:
        assert next(answer.iter_lines()) == str(10**12)
    stack.wait_until_idle("countdown")


@pytest.mark.parametrize("web", [FASTAPI], ids=["fastapi"], indirect=True)
async def test_request_whose_client_has_gone_is_withdrawn(
    web: tuple[str, WebServer], stack: Stack, gate: Path, tmp_path: Path
) -> None:
    """Given a busy model, and a client that closes its connection, expect that nothing is executed."""
    _, server = web
    log, waiting = tmp_path / "log", Keys("Hold").requests
    async with AsyncClient(stack.url, timeout=RESULT_S) as client, httpx.AsyncClient() as browser:
        busy = await occupied(stack, client, log, gate)
        url, body = f"{server.url}/models/Hold?timeout=100", ["unwanted", str(log), str(gate)]
        call = asyncio.create_task(browser.post(url, json=body, timeout=EVENTUALLY_S))
        await eventually(lambda: stack.redis.xlen(waiting), "the request waits")
        call.cancel()
        await eventually(lambda: not stack.redis.xlen(waiting), "it does not wait any more")
        gate.touch()
        await busy
    stack.wait_until_idle("Hold")
    assert log.read_text().split() == ["first", "second"]


@pytest.mark.parametrize("web", [FLASK], ids=["flask"], indirect=True)
def test_each_process_that_was_forked_has_a_client(web: tuple[str, WebServer]) -> None:
    _, server = web

    def pids() -> set[str]:
        assert server.post("/models/square", 3).json() == 9
        return set(re.findall(r"served by <(\d+)>", server.log))

    wait_until(lambda: len(pids()) == 2, description="both processes have served a request")


async def occupied(stack: Stack, client: AsyncClient, log: Path, gate: Path) -> asyncio.Future[list[Any]]:
    """Occupy the process of `Hold` with two requests, one of which is dispatched ahead: others wait."""
    busy = [client.submit("Hold", [name, str(log), str(gate)]) for name in ("first", "second")]
    await eventually(lambda: stack.redis.xlen(Keys("Hold").batches) == 2, "two batches are in flight")
    return asyncio.gather(*busy)


async def eventually(predicate: Callable[[], object], description: str) -> None:
    await asyncio.to_thread(wait_until, predicate, description=description)


# --- a notebook --------------------------------------------------------------------------------------------


class Notebook:
    """Executes cells as IPython does: in one namespace, and with `await` at the top."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._url = url
        self._names: dict[str, Any] = {"__name__": "__main__"}

    async def run(self, cell: str) -> Any:
        """The value of the last line, if it is an expression."""
        first, _, rest = cell.partition("\n")
        if first.startswith("%%writefile "):
            (self._folder / first.split()[1]).write_text(rest, encoding="utf-8")
            return None
        if first.startswith("!"):
            tools = f"{BIN}{os.pathsep}{os.environ['PATH']}"
            subprocess.run(
                ["/bin/sh", "-c", first[1:]], cwd=self._folder, env={**os.environ, "PATH": tools}, check=True
            )
            return None
        tree = ast.parse(cell.replace("redis://127.0.0.1:6379/0", self._url))
        last = tree.body[-1]
        if isinstance(last, ast.Expr):
            target = ast.Assign([ast.Name("_", ast.Store())], last.value)
            tree.body[-1] = ast.fix_missing_locations(ast.copy_location(target, last))
        self._names["_"] = None
        code = compile(tree, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        done = eval(code, self._names)  # noqa: S307 (how a cell with `await` is executed)
        if inspect.iscoroutine(done):
            await done
        return self._names["_"]


async def test_cells_of_the_notebook_run(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CARPOOL_REDIS_URL", stack.url)
    notebook, shown = Notebook(tmp_path, stack.url), 0
    for block in blocks((DOCS / "jupyter.md").read_text(encoding="utf-8")):
        for cell in block.strip().split("\n\n"):
            value = await notebook.run(cell)
            comment = re.search(r"^# (.*)\Z", cell, re.MULTILINE)
            if comment:
                assert repr(value) == comment[1], cell
                shown += 1
    assert shown >= 5


# --- frameworks that are not installed for the tests -------------------------------------------------------


@pytest.mark.parametrize("page", FRAMEWORKS)
def test_page_of_a_framework_is_true(page: str, tmp_path: Path) -> None:
    pytest.importorskip(FRAMEWORKS[page], reason=f"{FRAMEWORKS[page]} is not installed: pip install it")
    with Stack(tmp_path / "stack") as stack:
        stack.batcher()
        reader, entered = Reader(stack, tmp_path), 0
        for name, program in programs(page).items():
            (tmp_path / name).write_text(program)
        for block in blocks((DOCS / f"{page}.md").read_text(encoding="utf-8")):
            if re.match(r"# \w+\.py\n", block):
                reader.write(block.partition("\n$ ")[0].rstrip() + "\n")
            for command in commands(block):
                if command.line.startswith("carpool up "):
                    _, _, spec, *flags = command.line.replace("weights=", f"weights={tmp_path}/").split()
                    stack.worker(re.sub("^(hf:)?", rf"\1{tmp_path}/", spec), *flags)
                    stack.wait_for_model(spec.rpartition(":")[2])
                else:
                    reader.enter(command)
                entered += 1
        assert entered >= 4
