"""Starting and stopping processes and threads: no child is orphaned, and no thread ends unnoticed.

Why: docs/decisions/0029 and docs/decisions/0036.
"""

from __future__ import annotations

import ctypes
import gc
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from types import FrameType
from typing import Final, NoReturn

from carpool.backoff import Backoff

_ON_LINUX: Final = sys.platform.startswith("linux")
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_EXIT_STATUS_ORPHANED: Final = 1

_M_TRIM_THRESHOLD: Final = -1  # malloc.h of glibc
_M_MMAP_THRESHOLD: Final = -3
# Where the adaptation of glibc itself ends: it raises both limits as larger blocks are freed.
_FREED_BYTES_KEPT_MAX: Final = 64 * 1024 * 1024
_HEAP_BLOCK_BYTES_MAX: Final = 32 * 1024 * 1024  # larger blocks are always returned; glibc accepts no more


# --- children that do not outlive their parent --------------------------------------------------------------


def die_with_parent(expected_parent_pid: int | None = None) -> None:
    """End the calling process when its parent ends. A child calls this first in its main.

    A parent killed by SIGKILL, or by the kernel for lack of memory, cannot stop its children, and an orphaned
    worker would go on fetching batches without supervision. Pass the parent's pid where it is known:
    otherwise the child does not notice a parent that ended before this call.

    On Linux the child ends with the *thread* that started it, so start children from a thread that lives as
    long as its process, in practice the main thread.
    """
    parent = os.getppid() if expected_parent_pid is None else expected_parent_pid
    if _ON_LINUX:
        _request_kill_on_parent_death()
    else:
        threading.Thread(target=_watch_parent, args=(parent,), name="parent-watch", daemon=True).start()
    if os.getppid() != parent:
        os._exit(_EXIT_STATUS_ORPHANED)


def _request_kill_on_parent_death() -> None:
    if _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(
            ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed: the process would outlive its parent"
        )


@cache  # a process that a program forks need not load it anew, which takes 0.5 ms there
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _watch_parent(parent: int) -> NoReturn:
    """For systems without PR_SET_PDEATHSIG: an orphan gets another parent, so `getppid` changes."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(_EXIT_STATUS_ORPHANED)


def command_that_dies_with_parent(argv: Sequence[str], *, reads_environment: bool = True) -> list[str]:
    """The command line that runs another program, `argv`, so that it ends when the calling process ends.

    The program cannot call `die_with_parent`, so a few lines of Python do the same and then exec the
    program: it keeps the pid, and the request to the kernel survives exec. Start it from a thread that lives
    as long as its process, for the reason given at `die_with_parent`.

    `reads_environment`: variables matter to the program. If not, a shell may do in 2 ms what takes Python
    20: it drops variables whose names it does not accept, such as those with a dot.
    """
    if not reads_environment and (ask_kernel := _setpriv()):
        return [*ask_kernel, "/bin/sh", "-c", _EXEC_IF_CHILD, str(os.getpid()), *argv]
    launcher = _LAUNCH_ON_LINUX if _ON_LINUX else _LAUNCH_ELSEWHERE
    return [sys.executable, "-I", "-S", "-c", launcher, str(os.getpid()), *argv]


# $0 is the first argument. The parent may have ended before the kernel was asked.
_EXEC_IF_CHILD: Final = f'[ "$PPID" = "$0" ] || exit {_EXIT_STATUS_ORPHANED}; exec "$@"'


@cache
def _setpriv() -> list[str]:
    """The beginning of a command that ends with its parent, by `setpriv` of util-linux 2.33 or later; empty
    without it. That of BusyBox has no such option."""
    found = shutil.which("setpriv") if _ON_LINUX else None
    command = [found, "--pdeathsig", "KILL"] if found else []
    works = (
        command and subprocess.run([*command, "true"], stderr=subprocess.DEVNULL, check=False).returncode == 0
    )
    return command if works else []


# Python ignores SIGPIPE, and ignored signals stay ignored across exec, so the default is restored.
# `_signal` is `signal` without its enumerations, whose import takes a third of the time until the program is
# there.
_EXEC_PROGRAM: Final = """
_signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)
os.execvp(program[0], program)
"""

_LAUNCH_ON_LINUX: Final = f"""
import _signal, ctypes, os, sys
parent, program = int(sys.argv[1]), sys.argv[2:]
if ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, _signal.SIGKILL, 0, 0, 0) != 0:
    sys.exit("prctl(PR_SET_PDEATHSIG) failed: " + program[0] + " would outlive its parent")
if os.getppid() != parent:
    sys.exit({_EXIT_STATUS_ORPHANED})
{_EXEC_PROGRAM}"""

# Elsewhere a grandchild, which init adopts, watches both, and kills the program when the parent has ended.
_LAUNCH_ELSEWHERE: Final = f"""
import _signal, os, sys, time
parent, program = int(sys.argv[1]), sys.argv[2:]
def watch(program_pid):
    def exists(pid):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    os.setsid()
    os.closerange(0, 256)
    while exists(parent):
        if not exists(program_pid):
            return
        time.sleep(0.5)
    os.kill(program_pid, _signal.SIGKILL)
program_pid, child = os.getpid(), os.fork()
if child == 0:
    if os.fork() == 0:
        try:
            watch(program_pid)
        except ProcessLookupError:
            pass
    os._exit(0)
os.waitpid(child, 0)
{_EXEC_PROGRAM}"""


def collect_garbage_rarely() -> None:
    """Run the garbage collector rarely from now on; for services, after their set-up.

    What they handle has no reference cycles, and the default, a collection every 700 objects, takes a fifth
    of a worker's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def keep_freed_memory() -> None:
    """Let malloc keep up to 64 MB of freed memory for its next use; for services, before their set-up.

    Bodies, batches and frames are allocated and freed many times a second. By default glibc returns such
    memory to the kernel each time, and each page costs a fault when it is used again. Other C libraries have
    no such setting, and `MALLOC_*` in the environment takes precedence.
    """
    if not _ON_LINUX or {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys():
        return
    libc = _libc()
    if hasattr(libc, "gnu_get_libc_version"):  # musl has no mallopt
        libc.mallopt(_M_MMAP_THRESHOLD, _HEAP_BLOCK_BYTES_MAX)
        libc.mallopt(_M_TRIM_THRESHOLD, _FREED_BYTES_KEPT_MAX)


# --- signals that stop a service --------------------------------------------------------------------------


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM, SIGINT and SIGHUP set. Call it once, from the main thread.

    A terminal that is closed sends SIGHUP. It is ignored by what was started with `nohup`.

    SIGINT (Ctrl-C) while the process is stopping ends it at once with status 130, because a person is
    waiting. A further SIGTERM does not: Ctrl-C reaches all processes of the terminal, and the supervisor then
    sends SIGTERM to those it started, which still need time to finish.
    """
    stopping = False
    stop = threading.Event()
    signals: queue.SimpleQueue[None] = queue.SimpleQueue()

    def relay() -> None:
        # The handler may interrupt the main thread inside `stop.wait()`, which holds the lock that
        # `stop.set()` needs. `SimpleQueue.put` is reentrant, so the handler lets this thread set the event.
        signals.get()
        stop.set()

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        if stopping and number == signal.SIGINT:
            os._exit(128 + signal.SIGINT)
        stopping = True
        signals.put(None)

    threading.Thread(target=relay, name="stop-signals", daemon=True).start()
    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, handle)
    return stop


# --- threads that survive errors ----------------------------------------------------------------------------


class Loop:
    """A thread that calls `run_once` repeatedly until `stop` is called.

    An exception of `run_once` goes to `on_error`, and the loop continues: if its thread ended, the process
    would look alive and do nothing. It pauses after an error (`Backoff`). `failing` is the error of the last
    call, without its traceback; None if it succeeded.
    """

    def __init__(
        self, name: str, run_once: Callable[[], None], on_error: Callable[[Exception], None]
    ) -> None:
        self._run_once = run_once
        self._on_error = on_error
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._last_call_s = time.monotonic()
        self.name = name
        self.failing: BaseException | None = None

    def start(self) -> None:
        """Start the thread; may be called once. After `stop`, it ends without a call of `run_once`."""
        self._thread.start()

    def stop(self) -> None:
        """End the loop after the current call. May be called at any time and repeatedly."""
        self._stop.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread to end. Whether it has; true if it was never started."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self.alive

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def silent_s(self) -> float:
        """Time since the last call of `run_once` ended, or since construction if none has."""
        return time.monotonic() - self._last_call_s

    def _run(self) -> None:
        pause_s, backoff = 0.0, Backoff()
        while not (self._stop.wait(pause_s) if pause_s else self._stop.is_set()):
            try:
                self._run_once()
                backoff.reset()
                pause_s, self.failing = 0.0, None
            except (Exception, SystemExit) as error:
                pause_s = backoff.next_s()
                self._report(error)
                self.failing = error.with_traceback(None)  # whose frames would be kept
            self._last_call_s = time.monotonic()

    def _report(self, error: Exception | SystemExit) -> None:
        if isinstance(error, SystemExit):  # it would end only this thread, and without a message
            error = RuntimeError(f"sys.exit({error.code!r}) was called in the thread {self._thread.name}")
        try:
            self._on_error(error)
        except Exception as second:  # an error of on_error itself is printed, and the loop continues
            threading.excepthook(
                threading.ExceptHookArgs((type(second), second, second.__traceback__, self._thread))
            )
