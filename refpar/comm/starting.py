"""How a process is started that is to become a rank.

The program around it may be anything: a script without a guard, a thread, a daemon whose standard streams are closed;
it may have few file descriptors left, and Ctrl-C may come at any moment. Each function here takes care of one of these.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FILES_PER_RANK, MORE_FILES = 3, 16  # descriptors: held, and needed besides while ranks start
PROCESS_NAME = "refpar rank"

_starting = threading.Lock()


def check_descriptors(ranks: int) -> None:
    """Raise OSError where there are too few file descriptors, before anything is started that would have to end."""
    taken: list[int] = []
    try:
        for _ in range(FILES_PER_RANK * ranks + MORE_FILES):
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        text = f"{error.strerror}: {ranks} ranks need {FILES_PER_RANK * ranks + MORE_FILES} more, {len(taken)} are free"
        raise OSError(error.errno, f"{text}; raise the limit (ulimit -n)") from None
    finally:
        for fd in taken:
            os.close(fd)


@contextmanager
def standard_streams() -> Iterator[None]:
    """Fill descriptors 0 to 2 where they are closed: what is opened in their place would be printed to."""
    with contextlib.ExitStack() as stack:
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(fd, True)
            stack.callback(os.close, fd)
        os.close(fd)
        yield


def start_deaf(process: Any) -> None:
    """Start a process, and the fork server with it, that Ctrl-C does not reach until they ignore it themselves."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # is inherited
    try:
        process.start()
    except EOFError:
        raise RuntimeError("the process that ranks are forked from has ended; its standard error says why") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def without_ctrl_c() -> Iterator[None]:
    """Put Ctrl-C off to the end of the block, so that no process is started that nobody knows of.

    Blocking the signal is not enough: the kernel then gives it to another thread, and Python to this one.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pressed = []
    signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def main_stays_here() -> Iterator[None]:
    """Keep new processes from importing the caller's main module again.

    They would run a script a second time that does not guard its main part, and have no use for
    it: functions defined there are sent by value.
    """
    from multiprocess import spawn

    with _starting:
        original = spawn.get_preparation_data

        def without_main(name: str) -> dict[str, Any]:
            data: dict[str, Any] = original(name)
            if name.startswith(PROCESS_NAME):
                data.pop("init_main_from_name", None)
                data.pop("init_main_from_path", None)
            return data

        spawn.get_preparation_data = without_main
        try:
            yield
        finally:
            spawn.get_preparation_data = original


@contextmanager
def path_as_here() -> Iterator[None]:
    """Keep a new process from importing what happens to lie in the current folder, unless this one does so too.

    It is started by ``python -c``, which looks there first: a ``fractions.py`` of somebody else would end it.
    """
    name = "PYTHONSAFEPATH"
    if name in os.environ or {"", os.getcwd()} & set(sys.path):
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
