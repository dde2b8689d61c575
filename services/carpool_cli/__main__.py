"""The `carpool` command: finds the command that is meant and runs it. Each is imported only when it runs."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Final

from carpool.errors import UnavailableError

# Each command, and the module that has its `main(argv)`.
_COMMANDS: Final = {
    "up": "carpool_cli.local.up",
    "infer": "carpool_cli.infer",
    "models": "carpool_cli.models",
    "top": "carpool_cli.top.command",
    "config": "carpool_cli.config",
    "dead": "carpool_cli.dead",
    "forget": "carpool_cli.forget",
    "simulate": "carpool_cli.tuning.simulate",
    "tune": "carpool_cli.tuning.tune",
    "check": "carpool_cli.check",
    "health": "carpool_cli.health",
    "demo": "carpool_cli.demo.command",
    "acl": "carpool_cli.acl",
    "worker": "carpool_worker.__main__",
    "batcher": "carpool_batcher.__main__",
}
_BUILT_IN: Final = ("version", "help")

_HELP: Final = """\
Carpool: dynamic batching for models over Redis streams.

  carpool up MODEL...          start Redis, a batcher and workers on this machine
  carpool infer MODEL BODY     send one request and print its result
  carpool check MODEL BODY     try a model out here, alone and in batches, without Redis
  carpool models               list the registered models and their queues
  carpool top                  show load, latency and dispatch reasons of each model, live
  carpool config MODEL         show a model's settings; KEY=VALUE changes one while the model is served
  carpool dead list            list requests that were given up; dead show, replay and drop for single ones
  carpool forget MODEL         remove a model that is no longer served
  carpool simulate             predict the effect of settings, with --model for a live model
  carpool tune MODEL BODY      measure a model and find the best settings for a latency (--latency-ms)
  carpool demo                 serve a documentation search here, send it 5,000 requests, check the results

  carpool worker MODEL         start one worker, on any machine that reaches Redis
  carpool batcher              start one batcher, for all models
  carpool health               check whether a batcher or worker with --http-port is ready
  carpool acl                  write Redis's ACL file and a password for each role
  carpool version              print the version
  carpool help COMMAND         list a command's flags; CARPOOL_* variables or lines in .env set them too

For up, worker and check, MODEL is module:Name, path/file.py:Name, onnx:FILE, square, docsearch, writer or
voice-activity; for the other commands it is a name that `carpool models` lists. To get started:

  carpool up square
  carpool infer square 7
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["help"]
    if command in ("help", "-h", "--help"):
        if not rest:
            print(_HELP, end="")
            return 0
        command, rest = rest[0], ["--help"]
    if command in ("version", "--version", "-V"):
        return _print_version()
    if command not in _COMMANDS:
        return _report_unknown(command)
    try:
        status: int = importlib.import_module(_COMMANDS[command]).main(rest)
    except KeyboardInterrupt:
        return 130
    except UnavailableError as error:
        print(f"carpool {command}: {error.detail}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader closed the pipe; keep Python from reporting that again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status


def _print_version() -> int:
    from importlib.metadata import version  # noqa: PLC0415 (20 ms that only this command needs)

    print(f"carpool {version('carpool')}")
    return 0


def _report_unknown(command: str) -> int:
    known = [*_COMMANDS, *_BUILT_IN]
    similar = difflib.get_close_matches(command, known, n=1)
    hint = f"did you mean {similar[0]}?" if similar else f"commands: {', '.join(known)}"
    print(f"carpool: no command {command!r:.80}; {hint}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
