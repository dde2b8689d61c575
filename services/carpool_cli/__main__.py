"""The `carpool` command: finds the command that is meant and runs it. Each is imported only when it runs."""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
from collections.abc import Sequence

from carpool.errors import UnavailableError
from carpool.shown import complain
from carpool_cli.commands import COMMANDS, help_text


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    _allow_all_texts()
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["help"]
    if command in ("help", "-h", "--help"):
        if not rest or rest[0] == "help":
            print(help_text(), end="")
            return 0
        command, rest = rest[0], ["--help"]
    if command in ("version", "--version", "-V"):
        return _print_version()
    if command not in COMMANDS:
        return _report_unknown(command)
    if command == "check":
        _set_threads()
    try:
        status: int = importlib.import_module(COMMANDS[command].module).main(rest)
    except KeyboardInterrupt:
        return 130
    except UnavailableError as error:
        complain(f"carpool {command}: {error.detail}")
        return 1
    except UnicodeEncodeError as error:  # its object may have a body or a password
        complain(f"carpool {command}: an argument or a variable is not UTF-8 text: {error.reason}")
        return 2
    except BrokenPipeError:  # the reader closed the pipe; keep Python from reporting that again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status


def _allow_all_texts() -> None:
    """Names and bodies may have any characters: what standard output cannot encode is escaped there, as on
    standard error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _set_threads() -> None:
    """For a model that is executed in this process, as a worker does for its model process. Before numpy is
    imported: its libraries read the variables then."""
    from carpool_worker.devices import with_threads  # noqa: PLC0415 (not for the other commands)

    os.environ |= with_threads(os.environ, 1)


def _print_version() -> int:
    from importlib.metadata import version  # noqa: PLC0415 (20 ms that only this command needs)

    print(f"carpool {version('carpool')}")
    return 0


def _report_unknown(command: str) -> int:
    similar = difflib.get_close_matches(command, COMMANDS, n=1)
    hint = f"did you mean {similar[0]}?" if similar else f"commands: {', '.join(COMMANDS)}"
    print(f"carpool: no command {command!r:.80}; {hint}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
