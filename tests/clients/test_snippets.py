"""The programs in README.md, docs/languages.md and PROTOCOL.md are run as printed, except for the port."""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import dedent, indent
from typing import Any, Final, NamedTuple

import msgpack
import pytest
from redis import Redis

from carpool.keys import Keys
from carpool.messages.requests import JSON, RAW
from carpool.rows import StoredBody
from carpool_cli.local.embedded import EmbeddedRedis
from clients.conftest import STATEFUL, Build, output
from clients.languages import HERE, LANGUAGES, Language
from support.models.polyglot import STORY
from support.stack import Stack
from support.streaming import Storyteller
from support.waiting import wait_until
from support.wire import Single, decode_read

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
A_STREAM: Final = Section("docs/languages.md", "A stream", lines_max=19)
A_SEQUENCE: Final = Section("docs/languages.md", "A sequence", lines_max=28)
STREAMING: Final = ("shell", "node", "go")  # the languages of these sections


def snippets(section: Section) -> dict[str, str]:
    """The programs of a section, by language."""
    text = (ROOT / section.file).read_text(encoding="utf-8")
    _, _, rest = text.partition(f"\n## {section.title}\n")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", rest.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    return {FENCES.get(fence, fence): code for fence, code in blocks}


def run(section: Section, language: Language, build: Build, port: int, folder: Path) -> str:
    """What the program prints when Redis's usual port is replaced by another."""
    code = snippets(section)[language.name]
    if language.name == "shell":
        code = f'redis-cli() {{ command redis-cli -p {port} "$@"; }}\n{code}'
    else:
        code, found = re.subn(r"\b6379\b", str(port), code)
        assert found == 1
    source = folder / language.source
    source.write_text(code, encoding="utf-8")
    return output(build(language, source))


@pytest.mark.parametrize(
    ("section", "languages"),
    [
        (ONE_REQUEST, LANGUAGES),
        (MANY_REQUESTS, LANGUAGES),
        (A_STREAM, STREAMING),
        (A_SEQUENCE, STREAMING),
    ],
    ids=["one request", "many requests", "a stream", "a sequence"],
)
def test_section_has_a_short_program_for_each_language(section: Section, languages: Iterable[str]) -> None:
    shown = snippets(section)
    assert list(shown) == list(languages)
    assert max(len(code.splitlines()) for code in shown.values()) <= section.lines_max


def test_program_for_one_request_prints_the_result(
    language: Language, build: Build, live: Stack, tmp_path: Path
) -> None:
    """A program prints the number, or the envelope that contains it."""
    printed = json.loads(run(ONE_REQUEST, language, build, live.server.port, tmp_path))
    assert (printed["body"] if isinstance(printed, dict) else printed) == 49


def test_program_for_many_requests_prints_every_result(
    language: Language, build: Build, live: Stack, tmp_path: Path
) -> None:
    """A correlation ID ends with the number whose square is printed: in columns, or in msgpack-c's format."""
    printed = run(MANY_REQUESTS, language, build, live.server.port, tmp_path)
    answers = re.findall(r':(\d+)(?:\t| OK |".*?"body"=>")(\d+)', printed)
    assert sorted((int(number), int(body)) for number, body in answers) == [
        (n, n * n) for n in range(REQUESTS)
    ]


streaming = pytest.mark.parametrize(
    "language", [LANGUAGES[name] for name in STREAMING], ids=STREAMING, indirect=True
)


@streaming
def test_program_for_a_stream_prints_its_chunks(
    language: Language, build: Build, live: Stack, tmp_path: Path
) -> None:
    """A program prints the text of the chunks and then the status, or the envelopes."""
    printed = run(A_STREAM, language, build, live.server.port, tmp_path)
    assert as_text(language, printed) == f"{''.join(STORY)}\nOK\n"
    if language.name == "shell":
        assert json.loads(printed.splitlines()[-1])["body"] == "".join(STORY)


@streaming
def test_program_for_a_stream_prints_how_it_was_broken_off(
    language: Language, build: Build, redis: Redis, tmp_path: Path
) -> None:
    port = redis.get_connection_kwargs()["port"]
    error = ("ABORTED", "it cannot go on")
    with Storyteller(f"redis://127.0.0.1:{port}", "writer", STORY[:2], error=error):
        printed = run(A_STREAM, language, build, port, tmp_path)
    assert as_text(language, printed) == f"{''.join(STORY[:2])}\nABORTED\n"


@streaming
def test_program_for_a_sequence_prints_the_sums(
    language: Language, build: Build, live: Stack, tmp_path: Path
) -> None:
    """A program prints the numbers, some with the status, or the envelopes."""
    lines = run(A_SEQUENCE, language, build, live.server.port, tmp_path).splitlines()
    if language.name == "shell":
        assert [json.loads(line)["body"] for line in lines] == [5, 8, 12]
    else:
        assert [float(line.removesuffix(" OK")) for line in lines] == [5, 8, 12]
    assert live.redis.keys(Keys("total").sequence(f"{language.name}-*")) == [], "no state is kept"


def as_text(language: Language, printed: str) -> str:
    """What the program in another language prints for the envelopes that the one in shell prints."""
    if language.name != "shell":
        return printed
    *chunks, final = map(json.loads, printed.splitlines())
    assert [(each["index"], each["final"]) for each in chunks] == [(at, False) for at in range(len(chunks))]
    return f"{''.join(each['body'] for each in chunks)}\n{final['status']}\n"


def commands(title: str, level: str = "###") -> list[str]:
    """The commands for a shell in a subsection of PROTOCOL.md, each block for itself."""
    text = (ROOT / MANY_REQUESTS.file).read_text(encoding="utf-8")
    _, _, rest = text.partition(f"\n{level} {title}\n")
    part = re.split(r"\n##+ ", rest, maxsplit=1)[0]
    return re.findall(r"^```bash\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)


def run_commands(code: str, port: int) -> None:
    """Run them without what they print: results are msgpack, which is no text."""
    output(["bash", "-c", f'redis-cli() {{ command redis-cli -p {port} "$@"; }}\nexec > /dev/null\n{code}'])


@pytest.fixture
def redis() -> Iterator[Redis]:
    """A Redis of which nobody reads the streams."""
    server = EmbeddedRedis(append_only=False)
    with Redis(port=server.port) as connection:
        yield connection
    server.stop()


def sent(redis: Redis, model: str) -> list[tuple[str, Any, str, str | None]]:
    """ID, body, content type and reply stream of each request that was added."""
    return [
        (item.correlation_id, item.body, item.content_type, item.reply_to)
        for item in decode_read(redis.xrange(Keys(model).requests))
        if isinstance(item, Single)
    ]


def test_columns_are_sent_as_documented(redis: Redis) -> None:
    """The second block sends float32: compared as numbers."""
    numbers, vectors = commands("Columns")
    run_commands(numbers.replace("BLOCK 5000 ", ""), redis.get_connection_kwargs()["port"])
    assert sent(redis, "square") == [
        (name, body, JSON, "rows-1") for name, body in (("x", b"12"), ("y", b"13"), ("z", b"14"))
    ]
    run_commands(vectors, redis.get_connection_kwargs()["port"])
    assert [
        (name, list(struct.unpack("<2f", body)), content_type, reply_to)
        for name, body, content_type, reply_to in sent(redis, "vectors")
    ] == [("x", [1, 2], RAW, "rows-2"), ("y", [3, 4], RAW, "rows-2"), ("z", [5, 6], RAW, "rows-2")]


def test_large_body_is_sent_as_documented(redis: Redis) -> None:
    (code,) = commands("Large bodies")
    run_commands(code, redis.get_connection_kwargs()["port"])
    assert sent(redis, "square") == [("big-17", StoredBody("b-17", 2), JSON, None)]
    assert redis.get(Keys("square").body("b-17")) == b"12"
    assert 50_000 < redis.pttl(Keys("square").body("b-17")) <= 60_000


def test_sequences_are_answered_as_documented(live: Stack) -> None:
    """A sequence, one that is ended by force, and one whose requests arrive in another order."""
    for code in (
        *commands("Sequences", level="##"),
        *commands("Ending sequences by force"),
        *commands("Sending again"),
    ):
        run_commands(code, live.server.port)
    sums = {name: live.result("total", name) for name in ("a", "b", "e0", "e1", "e2")}
    assert {name: result.get("body") for name, result in sums.items()} == {
        "a": 5,
        "b": 8,
        "e0": 2,
        "e1": 6,
        "e2": 14,
    }
    assert live.result("total", "d")["status"] in ("OK", "CANCELLED"), "it may be in flight already"
    live.redis.xadd(Keys("total").requests, {"correlation_id": "d2", "sequence_id": "mic8", "body": "2"})
    late = live.result("total", "d2")
    assert (late["status"], "end_sequences" in late["detail"]) == ("ABORTED", True)


def test_columns_are_answered_as_documented(live: Stack) -> None:
    numbers, _ = commands("Columns")
    run_commands(numbers, live.server.port)
    wait_until(lambda: len(live.replies("square", "rows-1")) == 3, description="each row is answered")
    answers = {reply["correlation_id"]: reply["body"] for reply in live.replies("square", "rows-1")}
    assert answers == {"x": b"144", "y": b"169", "z": b"196"}


def test_large_body_is_answered_as_documented(live: Stack) -> None:
    (code,) = commands("Large bodies")
    run_commands(code, live.server.port)
    assert live.result("square", "big-17")["body"] == 144
    wait_until(lambda: not live.redis.exists(Keys("square").body("b-17")), description="the body is deleted")


def test_result_is_read_by_id_as_documented(live: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: the second time it is not added again. In a checkout, as the text says."""
    monkeypatch.chdir(ROOT)
    (code,) = commands("By ID, from any process")
    for _ in range(2):
        run_commands(code, live.server.port)
    (entry,) = live.redis.xrange(Keys("square").replies("job-17"))
    (envelope,) = msgpack.unpackb(entry[1][b"results"])
    assert (envelope["status"], envelope["body"]) == ("OK", b"144")
    assert live.redis.get(Keys("square").kept("job-17")) == b"the-square-of-12 done 600000"
    assert 500_000 < live.redis.pttl(Keys("square").replies("job-17")) <= 600_000


def test_model_that_keeps_a_state_is_served_as_documented(live: Stack, tmp_path: Path) -> None:
    """The class in docs/models.md is the model `total`; this is the program below it."""
    program = f"""
from carpool import Client
with Client("redis://127.0.0.1:{live.server.port}/0") as client:
{indent(STATEFUL.program.replace('"Total"', '"total"'), "    ")}
"""
    source = tmp_path / "prices.py"
    source.write_text(program, encoding="utf-8")
    assert output([sys.executable, str(source)]) == "5.0 8.0\n"


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
    assert output([sys.executable, str(source)]) == "49\n5.0 8.0\n"


@pytest.mark.parametrize(
    ("document", "begins_with", "prints"),
    [
        ("clients", "from carpool import Client", r"49\n64\n"),
        ("clients", "from carpool import Client, CarpoolError", r"square/order-17\n81\ndone\n"),
        ("celery", "from carpool import Client", r"square/[0-9a-f]{32}\n49\ndone\nTrue 64\n"),
    ],
    ids=["a client", "results by ID", "for users of Celery"],
)
def test_python_programs_in_the_documents_run(
    live: Stack, tmp_path: Path, document: str, begins_with: str, prints: str
) -> None:
    text = (ROOT / f"docs/{document}.md").read_text(encoding="utf-8")
    code = re.search(rf"^    {begins_with}\n(?:(?:    .*)?\n)+", text, re.MULTILINE)
    assert code is not None
    program = dedent(code[0]).replace("127.0.0.1:6379", f"127.0.0.1:{live.server.port}")
    source = tmp_path / "producer.py"
    source.write_text(program, encoding="utf-8")
    printed = output([sys.executable, str(source)])
    assert re.fullmatch(prints, printed), printed
