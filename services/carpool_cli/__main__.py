"""The `carpool` command: which command is meant, and nothing else. Each is imported only when it is."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Final

from carpool.errors import UnavailableError

# Command -> the module whose `main(argv)` it is.
_COMMANDS: Final = {
    "up": "carpool_cli.local.up",
    "infer": "carpool_cli.infer",
    "models": "carpool_cli.models",
    "top": "carpool_cli.top",
    "config": "carpool_cli.config",
    "simulate": "carpool_cli.tuning.simulate",
    "tune": "carpool_cli.tuning.tune",
    "health": "carpool_cli.health",
    "demo": "carpool_cli.demo.command",
    "acl": "carpool_cli.acl",
    "worker": "carpool_worker.__main__",
    "batcher": "carpool_batcher.__main__",
}
_HERE: Final = ("version", "help")

_HELP: Final = """\
Carpool: requests that come one by one share the ride to the accelerator.

  carpool up MODEL...          Redis, a batcher and workers on this machine, under one supervisor
  carpool infer MODEL BODY     send one request, print its result
  carpool models               what is served, what waits and for how long
  carpool top                  how each model fares and why its batches leave, live
  carpool config MODEL         its settings, and who said so; KEY=VALUE changes one while it runs
  carpool simulate             what settings would come to, in virtual time; --model takes a live one's speed
  carpool tune MODEL BODY      measure it, and find the settings that serve the most within --latency-ms
  carpool demo                 search this machine's documentation, 5,000 requests, measured and checked

  carpool worker MODEL         a worker alone, anywhere that reaches Redis
  carpool batcher              a batcher alone, for every model
  carpool health               whether the service with this --http-port is ready; for health checks
  carpool acl                  passwords and Redis's ACL file: each role may do what it does, and no more
  carpool version              which Carpool this is
  carpool help COMMAND         its flags; each is also CARPOOL_* in the environment or in .env

MODEL is module:Name, path/file.py:Name, onnx:FILE, square or docsearch. To begin with:

  carpool up square
  carpool infer square 7
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit status."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["help"]
    if command in ("help", "-h", "--help"):
        if not rest:
            print(_HELP, end="")
            return 0
        command, rest = rest[0], ["--help"]
    if command in ("version", "--version", "-V"):
        return _version()
    if command not in _COMMANDS:
        return _unknown(command)
    try:
        status: int = importlib.import_module(_COMMANDS[command]).main(rest)
    except KeyboardInterrupt:
        return 130
    except UnavailableError as error:
        print(f"carpool {command}: {error.detail}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read us has read enough; Python is not to complain of it while it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status


def _version() -> int:
    from importlib.metadata import version  # noqa: PLC0415 (20 ms that only this command needs)

    print(f"carpool {version('carpool')}")
    return 0


def _unknown(command: str) -> int:
    known = [*_COMMANDS, *_HERE]
    meant = difflib.get_close_matches(command, known, n=1)
    says = f"did you mean {meant[0]}?" if meant else f"there are {', '.join(known)}"
    print(f"carpool: no command {command!r:.80}; {says}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
