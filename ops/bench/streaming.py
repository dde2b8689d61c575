"""Streams of stepping models: time to first token, gaps between tokens, tokens/s, and the cost of a token.

    .venv/bin/python ops/bench/streaming.py [--models sleeper,gpt2] [--workloads burst,80%] [--seconds 10]
                                            [--rounds 3] [--write]

Requests that want tokens, one at a time, arrive in a burst or at random, at the real system and at the same
loop in one process; beside both, a model of static batches. --write puts tables and plots into
docs/streaming.md, and needs all models and workloads. What is measured, and how: ops/bench/stepping.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Final

from grid import machine
from grid.__main__ import chosen
from grid.runner import progress_to_stderr
from stepping.document import DOCUMENT, document, plots
from stepping.runs import NETWORKS, measure
from stepping.workloads import WORKLOADS

# Threads of a matrix product wait for each other, and longer if other processes want the same cores. Numpy
# reads these when it is imported.
ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def main() -> None:
    """Measure, print, write."""
    if not ONE_THREAD.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ONE_THREAD})  # noqa: S606
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="*", help=f"of {', '.join(NETWORKS)} (default: all)")
    parser.add_argument(
        "--workloads", default="*", help=f"of {', '.join(WORKLOADS)} (default: all)".replace("%", "%%")
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of a run; three times as many with gpt2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write docs/streaming.md and its plots")
    options = parser.parse_args()
    networks = chosen("model", options.models, NETWORKS)
    workloads = chosen("workload", options.workloads, WORKLOADS)
    if options.write and (len(networks), len(workloads)) != (len(NETWORKS), len(WORKLOADS)):
        parser.error("--write needs all models and workloads")
    described = machine.sentences(machine.describe(Path(sys.executable)))
    started_s = time.monotonic()
    results = measure(networks, workloads, options.seconds, options.rounds, progress_to_stderr)
    text = document(results, options.seconds, options.rounds, described)
    print(text)
    print(f"after {time.monotonic() - started_s:.0f} s", file=sys.stderr)
    if options.write:
        DOCUMENT.write_text(text)
        for name, plot in plots(results).items():
            DOCUMENT.with_name(name).write_text(plot)


if __name__ == "__main__":
    main()
