"""The process between the caller and the predicted program: however either of them ends, nothing is left.

It starts the program in a child, and adopts what that starts and leaves. When the program or the caller has
ended, it ends all processes below it and removes the scratch folder. It is not restricted itself, and answers
the questions of the sandbox (sandbox.py) meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import selectors
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NoReturn

from oomph.prediction.sandbox import Supervisor, can_read_memory, end_with_parent, processes_below

_ADOPT_ORPHANS = 36  # of prctl
_LOOK_S = 5.0  # for the caller's end, where the system does not tell it
_LEAVE_S = 10.0  # for processes that do not end
_JUST_MADE_S = 10.0  # not locked yet
_PREFIX = "oomph-scratch-"


class Scratch:
    """A folder that the keeper removes; where that was killed, a later prediction."""

    def __init__(self) -> None:
        self.path = os.path.realpath(tempfile.mkdtemp(prefix=_PREFIX))
        self.lock = os.open(self.path, os.O_RDONLY)
        _lock(self.lock)


def _lock(folder: int) -> bool:
    """For this process and its forks, until all of them close the folder. False: others have it."""
    import fcntl  # not on Windows

    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def remove_left_folders() -> None:
    """Scratch folders of this user whose keepers were killed."""
    for entry in os.scandir(tempfile.gettempdir()):
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            is_ours = re.fullmatch(_PREFIX + r"\w{8}", entry.name) and status.st_uid == os.getuid()
            if is_ours and stat.S_ISDIR(status.st_mode) and time.time() - status.st_mtime > _JUST_MADE_S:
                folder = os.open(entry.path, os.O_RDONLY)
                try:
                    if _lock(folder):
                        remove(entry.path)
                finally:
                    os.close(folder)


def remove(folder: str) -> None:
    """With all below it, also where the program took rights away. Follows no link."""
    for path, folders, _ in os.walk(folder):
        for name in folders:
            if not os.path.islink(each := os.path.join(path, name)):
                os.chmod(each, stat.S_IRWXU)
    shutil.rmtree(folder, ignore_errors=True)


def keep(
    scratch: Scratch,
    caller: int,
    fork: Callable[[], int],
    program: Callable[[socket.socket], NoReturn],
    end: int,
) -> NoReturn:
    """In a fork of the caller: run `program` in a fork of this process, and end as it ends.

    `end`: a descriptor that is the program's alone.
    """
    status, child, collected = 70 << 8, 0, gc.isenabled()
    gc.disable()  # what the caller has left may delete files when it is collected
    try:
        os.setpgid(0, 0)  # Ctrl-C reaches the caller
        if sys.platform.startswith("linux"):
            ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)
        ours, theirs = socket.socketpair()
        child = fork()
        if child == 0:
            ours.close()
            os.close(scratch.lock)
            if collected:
                gc.enable()
            program(theirs)
        theirs.close()
        os.close(end)
        status = _wait(child, caller, ours, scratch.path)
    finally:
        try:
            _end_all(child)
            remove(scratch.path)
        finally:
            _end_as(status)


def _wait(child: int, caller: int, channel: socket.socket, scratch: str) -> int:
    """For the program's end, or the caller's, or a signal."""
    arrived: list[int] = []
    woken, wake = os.pipe()
    for pipe in (woken, wake):
        os.set_blocking(pipe, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    for name in ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT"):
        signal.signal(getattr(signal, name), lambda number, frame: arrived.append(number))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    end_with_parent(signal.SIGTERM)
    with selectors.DefaultSelector() as selector:
        selector.register(woken, selectors.EVENT_READ)
        selector.register(channel, selectors.EVENT_READ)
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if arrived or os.getppid() != caller:
                return signal.SIGKILL
            for key, _ in selector.select(_LOOK_S):
                if key.fileobj is channel:
                    _hear(child, channel, scratch, selector)
                elif isinstance(key.fileobj, Supervisor):
                    key.fileobj.answer()
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(woken, 4096)
    return ended[1]


def _hear(child: int, channel: socket.socket, scratch: str, selector: selectors.BaseSelector) -> None:
    """The sandbox asks whether this process can supervise, then sends the listener of its filter."""
    data, listeners, _, _ = socket.recv_fds(channel, 1, 1)
    if listeners:
        selector.register(Supervisor(listeners[0], scratch), selectors.EVENT_READ)
    elif data:
        channel.sendall(b"y" if can_read_memory(child) else b"n")
    else:
        selector.unregister(channel)


def _end_all(child: int) -> None:
    """All processes below this one; where the system does not tell them, those of the child's group."""
    if child and not os.path.isdir("/proc/self"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
    until = time.monotonic() + _LEAVE_S
    while time.monotonic() < until:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in processes_below(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def _end_as(status: int) -> NoReturn:
    """As a process with this status of waitpid."""
    with contextlib.suppress(OSError, ValueError):
        if os.WIFSIGNALED(status):
            import resource  # not on Windows

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if os.WTERMSIG(status) != signal.SIGKILL:
                signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
            os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
