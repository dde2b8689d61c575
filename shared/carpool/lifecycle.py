"""How Carpool's processes start, stop and die: never an orphan, never a thread that ended unnoticed."""

from __future__ import annotations

import ctypes
import gc
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final, NoReturn

_ON_LINUX: Final = sys.platform.startswith("linux")
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_ORPHANED: Final = 1  # the exit status; whoever would have read it is gone


# --- Children that do not outlive their parent


def die_with_parent(expected_parent_pid: int | None = None) -> None:
    """Ties the calling process to its parent's life; a child calls it first thing in its main.

    A parent killed by SIGKILL, or by the kernel for memory, has no chance to stop its children, and a worker
    left behind would go on taking requests that nobody supervises. So the child sees to it. Give the parent's
    pid where it is known: only with it does a child notice that the parent died before this call.

    The kernel's signal follows the *thread* that started the child: children must be started by a thread
    that lives as long as its process, in practice the main thread.
    """
    parent = os.getppid() if expected_parent_pid is None else expected_parent_pid
    if _ON_LINUX:
        _ask_kernel_to_kill_us_when_the_parent_dies()
    else:
        threading.Thread(target=_watch_parent, args=(parent,), name="parent-watch", daemon=True).start()
    if os.getppid() != parent:
        os._exit(_ORPHANED)


def _ask_kernel_to_kill_us_when_the_parent_dies() -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed: we would outlive our parent")


def _watch_parent(parent: int) -> NoReturn:
    """Systems without PR_SET_PDEATHSIG: an orphan is adopted, so its parent's pid changes."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(_ORPHANED)


def command_that_dies_with_parent(argv: Sequence[str]) -> list[str]:
    """The command line that runs a foreign program, `argv`, tied to the life of the process calling this.

    The program is not ours to call `die_with_parent`, so a few lines of Python do and then become the
    program: the pid is the program's, and what was asked of the kernel survives exec. The child must be
    started by a thread that lives as long as its process, for the reason `die_with_parent` gives.
    """
    launcher = _LAUNCH_ON_LINUX if _ON_LINUX else _LAUNCH_ELSEWHERE
    return [sys.executable, "-I", "-S", "-c", launcher, str(os.getpid()), *argv]


# Python ignores SIGPIPE, and what is ignored stays ignored across exec: the program gets the default back.
_BECOME_THE_PROGRAM: Final = """
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
os.execvp(program[0], program)
"""

_LAUNCH_ON_LINUX: Final = f"""
import ctypes, os, signal, sys
parent, program = int(sys.argv[1]), sys.argv[2:]
if ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGKILL, 0, 0, 0) != 0:
    sys.exit("prctl(PR_SET_PDEATHSIG) failed: " + program[0] + " would outlive its parent")
if os.getppid() != parent:
    sys.exit({_ORPHANED})
{_BECOME_THE_PROGRAM}"""

# Elsewhere a grandchild, which init adopts, watches both and ends the program when the parent has gone.
_LAUNCH_ELSEWHERE: Final = f"""
import os, signal, sys, time
parent, program = int(sys.argv[1]), sys.argv[2:]
def watch(us):
    def exists(pid):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    os.setsid()
    os.closerange(0, 256)
    while exists(parent):
        if not exists(us):
            return
        time.sleep(0.5)
    os.kill(us, signal.SIGKILL)
us, child = os.getpid(), os.fork()
if child == 0:
    if os.fork() == 0:
        try:
            watch(us)
        except ProcessLookupError:
            pass
    os._exit(0)
os.waitpid(child, 0)
{_BECOME_THE_PROGRAM}"""


def collect_garbage_rarely() -> None:
    """For services, once they are set up: what they handle has no cycles, and looking for some in every 700
    objects takes a fifth of a worker's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


# --- Being asked to stop


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM and SIGINT set; to be called from the main thread, once.

    Ctrl-C when a stop was already asked for exits at once, with 130: a person is waiting. A further SIGTERM
    does not: Ctrl-C reaches every process of the terminal, and the supervisor's SIGTERM follows it to those
    it started, which must still be left the time to finish.
    """
    stopping = False
    stop = threading.Event()
    asked: queue.SimpleQueue[None] = queue.SimpleQueue()

    def relay() -> None:
        # The handler may interrupt the main thread inside `stop.wait()`, which holds the lock that
        # `stop.set()` takes. `SimpleQueue.put` is reentrant, so another thread does the setting.
        asked.get()
        stop.set()

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        if stopping and number == signal.SIGINT:
            os._exit(128 + signal.SIGINT)
        stopping = True
        asked.put(None)

    threading.Thread(target=relay, name="stop-signals", daemon=True).start()
    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    return stop


# --- Threads that go on


class Loop:
    """A thread that calls `run_once` again and again until it is asked to stop.

    What `run_once` raises goes to `on_error` and the loop goes on: a thread that ends unnoticed leaves a
    process that looks alive and does nothing. While errors follow each other the calls are spaced out, from
    50 ms to 2 s, so that a Redis that is away is neither hammered nor the log flooded. `failing` is what the
    last call raised, None once one went well.
    """

    _FIRST_PAUSE_S: Final = 0.05
    _LONGEST_PAUSE_S: Final = 2.0

    def __init__(
        self, name: str, run_once: Callable[[], None], on_error: Callable[[Exception], None]
    ) -> None:
        self._run_once = run_once
        self._on_error = on_error
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._turned_s = time.monotonic()
        self.name = name
        self.failing: str | None = None

    def start(self) -> None:
        """Starts the thread, once. After `stop` it ends without having called `run_once`."""
        self._thread.start()

    def stop(self) -> None:
        """Asks the loop to end after the call under way; at any time, any number of times."""
        self._stop.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for the thread to end, and says whether it has. One that never started has."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self.alive

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def silent_s(self) -> float:
        """How long ago a call of `run_once` ended, well or not; or the loop was made, if none has."""
        return time.monotonic() - self._turned_s

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stop.wait(pause_s):
            try:
                self._run_once()
                pause_s, self.failing = 0.0, None
            except (Exception, SystemExit) as error:
                pause_s = min(max(2 * pause_s, self._FIRST_PAUSE_S), self._LONGEST_PAUSE_S)
                self.failing = str(error) or type(error).__name__
                self._report(error)
            self._turned_s = time.monotonic()

    def _report(self, error: Exception | SystemExit) -> None:
        if isinstance(error, SystemExit):  # which would end this thread, and only this thread, in silence
            error = RuntimeError(f"sys.exit({error.code!r}) was called in the thread {self._thread.name}")
        try:
            self._on_error(error)
        except Exception as worse:  # on_error's own failure ends nothing either; Python prints it
            threading.excepthook(
                threading.ExceptHookArgs((type(worse), worse, worse.__traceback__, self._thread))
            )
