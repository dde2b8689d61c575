"""What people see of what others sent: no control characters, and no texts of exceptions."""

from __future__ import annotations

import io
import json
import sys
import unicodedata

import pytest

from carpool.errors import UnavailableError
from carpool.shown import (
    CAUSES_MAX,
    complain,
    name_of,
    printable,
    printable_json,
    printable_lines,
    trace_of,
)
from carpool.store.connection import CommandError, LinkError
from carpool.store.link_errors import reason_of
from carpool_cli.infer import _ChunkPrinter
from carpool_cli.screen import Screen, build_table
from carpool_cli.top.page import _line

CARD = "4111 1111 1111 1111"
EVIL = "\x1b]52;c;cm0gLXJmIH4=\x07\x1b[2J\x9b31m\u202etxt\u2066\x7f\r\x08\ud800\u2028\u200b"


def is_harmless(text: str, *but: str) -> bool:
    kinds = {unicodedata.category(letter) for letter in text if letter not in but}
    return not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_every_character_that_a_terminal_obeys_is_escaped() -> None:
    for code in range(sys.maxunicode + 1):
        assert is_harmless(printable(chr(code))), hex(code)
    assert printable("\x1b[2J\n") == "\\x1b[2J\\n"
    assert printable(EVIL).startswith("\\x1b]52;c;")
    assert printable_lines("a\n\tb\r\x1b") == "a\n\tb\\r\\x1b"


@pytest.mark.parametrize("text", ["", "plain", "Größe 日本語 \u00a0\u3000 👍 é \\x1b {x} [red]"])
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert printable(text) == printable_lines(text) == text


def test_json_is_the_same_value_without_control_characters() -> None:
    written = printable_json({EVIL: [EVIL, 1]})
    assert is_harmless(written) and written.isascii()
    assert json.loads(written) == {EVIL: [EVIL, 1]}


def test_nothing_that_the_screen_writes_is_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.print(EVIL)
    screen.write(EVIL)
    screen.title(EVIL)
    screen.print_table(build_table([("a", EVIL), (EVIL, "a\nb")], has_prose=True))
    screen.console.print(_line(EVIL))
    complain(f"carpool x: {EVIL}")
    output = capsys.readouterr()
    assert is_harmless(output.out, "\n") and is_harmless(output.err, "\n")
    assert output.out.count("\\x1b]52") == 6 and "a\\nb" in output.out and "\\x1b]52" in output.err


def test_chunks_are_escaped_for_people_only() -> None:
    chunks = ["text \x1b[2J", "two\nlines ", {"a": "\x1b\x7f"}, b"\x1b[2J", b"\xff\x00"]
    written = []
    for is_read_by_people in (True, False):
        output = io.BytesIO()
        printer = _ChunkPrinter(output, is_read_by_people=is_read_by_people)
        for chunk in chunks:
            printer.print(chunk)
        printer.end_line()
        written.append(output.getvalue())
    shown, raw = written
    assert is_harmless(shown.decode(), "\n") and "two\nlines" in shown.decode()
    assert "(2 bytes; --raw, a pipe or a file gets them)" in shown.decode()
    assert raw.startswith(b"text \x1b[2Jtwo\nlines \n") and raw.endswith(b"\x1b[2J\xff\x00")


# --- exceptions --------------------------------------------------------------------------------------------


def caught(depth: int = 0) -> BaseException:
    """What a model or Carpool itself raises about a body; `depth` times during another one."""
    try:
        if depth:
            try:
                raise caught(depth - 1)
            except Exception as error:
                raise KeyError(CARD) from (error if depth % 2 else None)
        float(CARD)
    except Exception as error:
        return error
    raise AssertionError


def test_a_name_and_a_traceback_have_no_texts() -> None:
    error = caught()
    assert name_of(error).startswith("ValueError at test_shown.py:")
    trace = trace_of(error)
    assert CARD not in trace
    assert trace.startswith("Traceback (most recent call last):\n") and "float(CARD)" in trace
    assert trace.endswith("ValueError\n")


def test_nor_have_those_that_it_was_raised_from_or_during() -> None:
    try:
        try:
            float(CARD)
        except ValueError:
            raise RuntimeError(CARD)  # noqa: B904
    except RuntimeError as error:
        during = trace_of(error)
    from_another = trace_of(caught(1))
    assert "During handling" in during and "direct cause" in from_another
    for trace in (during, from_another, trace_of(caught(2))):
        assert CARD not in trace
    assert [during.index(kind) for kind in ("ValueError\n", "RuntimeError\n")] == sorted(
        [during.index("ValueError\n"), during.index("RuntimeError\n")]
    )


def test_a_traceback_is_bounded() -> None:
    error: BaseException = ValueError()
    error.__cause__ = error
    assert trace_of(error).count("ValueError") == CAUSES_MAX


def test_a_service_says_what_redis_said_and_of_other_errors_only_where() -> None:
    for error in (LinkError("Redis at x: refused"), UnavailableError("no"), OSError(28, "No space left")):
        assert reason_of(error, "worker") == str(error)
    unknown = "ERR unknown command 'XADD', with args beginning with: 'k' 'body' '4111'"
    assert reason_of(CommandError("ERR", unknown), "worker") == "ERR unknown command 'XADD'"
    for unforeseen in (caught(), KeyError(CARD), UnicodeDecodeError("utf-8", CARD.encode(), 0, 1, CARD)):
        reason = reason_of(unforeseen, "batcher")
        assert CARD not in reason and type(unforeseen).__name__ in reason
