"""Output for people: lines, tables, progress bars and full-screen pages, drawn by rich.

Programs read the output too. In a pipe, in a file and on a dumb terminal it is therefore plain text: no
escape codes, no trailing blanks, and nothing is wrapped or cut. NO_COLOR (no-color.org) turns off all styles.

Control characters in texts are escaped, here and there: a producer may have chosen them. Cells are one line
each; elsewhere `carpool.shown.printable` keeps a text of others on its line.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TextIO

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from carpool.shown import printable, printable_lines

_REDRAW_INTERVAL_S: Final = 0.1  # of a progress bar on a terminal
_LINE_INTERVAL_S: Final = 5.0  # between the progress lines written elsewhere
_BAR_COLUMNS: Final = 30
_PROSE_COLUMNS_MIN: Final = 20
_PLAIN_TEXT_COLUMNS: Final = 110  # where text that is laid out in lines wraps, if there is no terminal
_UNLIMITED_COLUMNS: Final = 100_000


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let the command end with the status of a closed pipe; rich would exit with 1."""
        raise BrokenPipeError


class Screen:
    """Standard output, or another stream. `live`: it is a terminal on which lines can be redrawn."""

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout
        self.live = stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        is_styled = self.live and not os.environ.get("NO_COLOR")
        self.console: Console = _Console(
            file=stream,
            force_terminal=self.live,
            force_interactive=self.live,
            color_system="standard" if is_styled else None,
            width=None if self.live else _UNLIMITED_COLUMNS,
            markup=False,
            emoji=False,
            highlight=False,
        )

    @property
    def columns(self) -> int:
        """The width for text that is laid out in lines."""
        return self.console.width if self.live else _PLAIN_TEXT_COLUMNS

    def print(self, text: str = "", *, style: str = "") -> None:
        """Write a line and flush it. It is not wrapped, so that commands in it can be copied."""
        self.console.print(printable_lines(text), style=style, soft_wrap=True)

    def write(self, text: str) -> None:
        """Write a part of a line and flush it."""
        self.console.print(printable_lines(text), end="", soft_wrap=True)

    def title(self, text: str) -> None:
        """Write the heading of a section."""
        self.print(f"\n{text}", style="bold")

    def print_table(self, table: Table) -> None:
        """Write a table. On a terminal that is too narrow for it, prose wraps; numbers are never cut."""
        if self.live:
            self.console.print(table, crop=False)
        else:
            for line in plain_lines(table):
                self.print(line)

    def fits(self, table: Table) -> bool:
        """Whether a table fits on the terminal with its prose wrapped. Elsewhere every table fits."""
        unlimited = self.console.options.update(width=_UNLIMITED_COLUMNS)
        return Measurement.get(self.console, unlimited, table).minimum <= self.console.width

    def mute(self) -> None:
        """Write nothing from now on."""
        self.console.quiet = True


class ProgressBar:
    """A progress bar, redrawn in place. For a terminal only (`Screen.live`)."""

    def __init__(self, screen: Screen, total: float) -> None:
        self._progress = RichProgress(
            TextColumn(" "),
            BarColumn(_BAR_COLUMNS),
            TextColumn("{task.description}", markup=False),
            console=screen.console,
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._console = screen.console
        self._task = self._progress.add_task("", total=total)

    def draw(self, done: float, text: str) -> None:
        """Draw the bar, with a text beside it."""
        if not self._progress.live.is_started:
            self._progress.start()
            self._console.show_cursor(
                True
            )  # rich hides it, and a command that is killed would not restore it
        self._progress.update(self._task, completed=done, description=text, refresh=True)

    def remove(self) -> None:
        """Remove the bar from the terminal, if it was drawn."""
        if self._progress.live.is_started:
            self._progress.stop()


class Progress:
    """The progress of `total` equal steps: a bar on a terminal, a line every few seconds elsewhere.

    `noun` says of what: requests, sizes, settings.
    """

    def __init__(self, screen: Screen, total: int, noun: str) -> None:
        self._screen = screen
        self._noun = noun
        self._bar = ProgressBar(screen, total)
        self._total = total
        self._done = 0
        self._started_s = time.monotonic()
        self._interval_s = _REDRAW_INTERVAL_S if screen.live else _LINE_INTERVAL_S
        self._due_s = self._started_s + self._interval_s

    def step(self, number: int = 1) -> None:
        """Count `number` steps as done. Cheap: it writes only when the next update is due."""
        self._done += number
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + self._interval_s
        text = (
            f"{self._done:,} of {self._total:,} {self._noun}, {self._done / (now_s - self._started_s):,.0f}/s"
        )
        if self._screen.live:
            self._bar.draw(self._done, text)
        else:
            self._screen.print(f"  {text}")

    def end(self) -> None:
        """Remove the bar, where there is one."""
        self._bar.remove()


@contextlib.contextmanager
def full_screen(screen: Screen) -> Iterator[Callable[[RenderableType], None]]:
    """Take over the whole terminal, and yield the function that draws a page on it.

    The terminal is restored however the block ends, on SIGTERM too.
    """
    live = Live(
        console=screen.console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    )

    def exit_on_sigterm(*_: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    previous: Any = signal.signal(signal.SIGTERM, exit_on_sigterm)
    try:
        live.start()
        yield lambda page: live.update(page, refresh=True)
    finally:
        live.stop()
        signal.signal(signal.SIGTERM, previous)


def build_table(rows: Sequence[Sequence[str]], *, has_prose: bool = False) -> Table:
    """A table whose first row is the heading: the first column to the left, numbers to the right.

    With `has_prose` the last column is text, which wraps on a narrow terminal. No other cell is ever cut.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    heading, *_ = rows
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for at, cells in enumerate(zip(*rows, strict=True)):
        if has_prose and at == len(heading) - 1:
            table.add_column(Text(cells[0]), min_width=_PROSE_COLUMNS_MIN, overflow="fold")
        else:
            table.add_column(
                Text(cells[0]),
                justify="right" if at else "left",
                min_width=max(map(cell_len, cells)),
                no_wrap=True,
            )
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    return table


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of such a table, as plain text."""
    return plain_lines(build_table(rows))


def plain_lines(content: RenderableType, columns: int = _UNLIMITED_COLUMNS) -> list[str]:
    """Anything that rich can draw, as lines without escape codes and trailing blanks."""
    stream = io.StringIO()
    console = Console(file=stream, width=columns, force_terminal=False, color_system=None, markup=False)
    console.print(content, crop=False)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def clip(text: str, columns: int) -> str:
    """`text`, cut to `columns` with an ellipsis if it is longer."""
    return text if len(text) <= columns else text[: max(0, columns - 1)] + "…"


def duration(seconds: float) -> str:
    """A time in the unit that suits it: 850 µs, 12.3 ms, 4.2 s, 3 min 20 s."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def size(number: int) -> str:
    """Bytes for people, such as 1.5 GiB."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= factor:
            return (
                f"{number / factor:,.3g} {unit}"
                if number < 1000 * factor
                else f"{number / factor:,.0f} {unit}"
            )
    return f"{number} B"


def count(number: int, singular: str, plural: str | None = None) -> str:
    """`1 process`, `2 processes`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
