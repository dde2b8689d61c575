"""What a command says to a person: lines, tables, a progress bar. Readable in a pipe and in a file too."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, Final, Self, TextIO

_REDRAW_S: Final = 0.1  # on a terminal
_REPEAT_S: Final = 5.0  # in a pipe: a line now and then
_BAR_COLUMNS: Final = 30


class Screen:
    """Standard output. Bold and dim on a terminal that wants it (see no-color.org), plain anywhere else."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self.live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._styled = self.live and not os.environ.get("NO_COLOR")
        self._hushed = False
        self._blocks = "█░" if "utf" in (self._stream.encoding or "").lower() else "#."

    @property
    def columns(self) -> int:
        """How long a line may be. Who reads a file can scroll."""
        return shutil.get_terminal_size((110, 24)).columns if self.live else 110

    def say(self, text: str = "") -> None:
        """A line, at once: whoever waits for it at the other end of a pipe is to see it."""
        self._write(f"{text}\n")

    def title(self, text: str) -> None:
        """A line that begins something new."""
        self.say(f"\n{self.bold(text)}")

    def bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self._styled else text

    def dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self._styled else text

    def draw(self, done: int, total: int, text: str) -> None:
        """A bar in place of the one before; only where `live`."""
        filled = _BAR_COLUMNS * done // max(total, 1)
        bar = self._blocks[0] * filled + self._blocks[1] * (_BAR_COLUMNS - filled)
        self._write(f"\r  {bar}  {text}\x1b[K")

    def wipe(self) -> None:
        """Take the bar away; only where `live`."""
        self._write("\r\x1b[K")

    def hush(self) -> None:
        """Say nothing from now on."""
        self._hushed = True

    def _write(self, text: str) -> None:
        if not self._hushed:
            self._stream.write(text)
            self._stream.flush()


class Window:
    """The whole terminal, drawn over in place. It is given back as it was, however the block ends."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._sigterm: Any = None

    def __enter__(self) -> Self:
        self._sigterm = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        self._screen._write("\x1b[?1049h\x1b[?25l")  # another screen, no cursor
        return self

    def __exit__(self, *_: object) -> None:
        self._screen._write("\x1b[?25h\x1b[?1049l")
        signal.signal(signal.SIGTERM, self._sigterm)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows, as they are now."""
        return shutil.get_terminal_size()

    def draw(self, lines: Sequence[str], head: int) -> None:
        """These lines and nothing else, that at `head` in bold; no more and no longer than there is room."""
        shown = [self._screen.bold(line) if at == head else line for at, line in enumerate(lines)]
        shown += [""] * (self.size[1] - len(shown))
        # Each is wiped before it is written: after one that fills the row, some terminals would wipe its end.
        self._screen._write("\x1b[H" + "\n".join(f"\x1b[K{line}" for line in shown))


class Progress:
    """How far something is that is done `total` times."""

    def __init__(self, screen: Screen, total: int) -> None:
        self._screen = screen
        self._total = total
        self._done = 0
        self._started_s = time.monotonic()
        self._every_s = _REDRAW_S if screen.live else _REPEAT_S
        self._due_s = self._started_s + self._every_s

    def step(self, number: int = 1) -> None:
        """So many more."""
        self._done += number
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + self._every_s
            text = f"{self._done:,} of {self._total:,}, {self._done / (now_s - self._started_s):,.0f}/s"
            if self._screen.live:
                self._screen.draw(self._done, self._total, text)
            else:
                self._screen.say(f"  {text}")

    def end(self) -> None:
        """Make room for what came of it."""
        if self._screen.live:
            self._screen.wipe()


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, the first column to the left, the others, which are numbers, to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        ).rstrip()
        for row in rows
    ]


def clip(text: str, columns: int) -> str:
    """`text` in so many columns, with a sign where it was cut."""
    return text if len(text) <= columns else text[: max(0, columns - 1)] + "…"


def duration(seconds: float) -> str:
    """A time for a person: 850 µs, 12.3 ms, 4.2 s, 3 min 20 s."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def count(number: int, one: str, many: str | None = None) -> str:
    """`1 process`, `2 processes`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
