"""Runs the program that is predicted in a child process, which leaves nothing behind.

The child is forked, so that it has the caller's objects, and ends with the program. The caller's threads,
torch's modes and flags, patched names and random states stay as they are; a crash, `os._exit` or a signal
ends the child alone. Files that the program writes go to an overlay (overlay.py). Other programs are not
started and the network is not used, unless allowed (sandbox.py). A process between the two ends all that the
program started (keeper.py).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import importlib.util
import math
import multiprocessing.util
import os
import pickle
import platform
import random
import selectors
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing.synchronize import SemLock
from typing import Any, BinaryIO, NoReturn, TypeVar

import torch

from oomph.errors import OomphError, ProgramError, UserError, blame, safe_text
from oomph.prediction import keeper, redirection, sandbox, shared_memory
from oomph.prediction.builtin_functions import as_builtin
from oomph.prediction.commands import is_query
from oomph.prediction.compat import registry
from oomph.prediction.convolution import cudnn
from oomph.prediction.garbage import without_collection
from oomph.prediction.sandbox import Probe, end_with_parent, is_own_address, processes_below, state_of
from oomph.records import Progress
from oomph.torch_internals import FakeTensorMode, cuda_device_count
from oomph.units import MiB

T = TypeVar("T")
_FULL = ("No space left on device", "Not enough free space", "disk is full")  # of C libraries, NumPy, SQLite
_POLL_S = 0.5
_ENDING_S = 1.0  # of a program that has closed its pipe
_BAR = "{desc} |{bar:24}| {elapsed}"  # of tqdm
_STUCK_S = 20.0  # a child that has not used the CPU for so long is started again, once
ALLOWABLE = ("subprocesses", "network")
_inside = False  # this process is such a child
_keeper = 0  # its parent
_forbidden: tuple[str, ...] = ()  # of ALLOWABLE
_restarted = ""  # the short cut that failed in the first one for its program
_messages_to_parent: BinaryIO
_sending = threading.Lock()
_modules_of_parent: frozenset[str] = frozenset()
_unended: dict[Any, Callable[[str], int]] = {}  # streams whose last text ended within a line, and their write
_refusing = threading.local()  # .on: this thread runs a program in the caller's own process
trace_lock = threading.RLock()  # held while a trace changes torch in this process: no fork, no second trace


class _Stuck(Exception):
    """The child does not compute. It may wait for a lock that another thread held when it was forked."""


class TookTooLong(Exception):
    """The child has not ended within the time that the caller gave it."""


class ForkWaits(Exception):
    """A fork that continues the program does not compute: threads of the program are not there in it."""


class ContinueInFork(BaseException):
    """Raised in a fork of `run_forked`, to whoever lets the program continue there, with `change` applied."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self.change = change


class Refused(PermissionError):
    """The program did something that a prediction does not allow. Programs may catch it and continue."""


def run_isolated(
    function: Callable[[Progress], T],
    progress: Progress,
    allow: Collection[str] = (),
    until: float = math.inf,
) -> T:
    """`function(progress)` in a child process; its result, which must be picklable, or its OomphError.

    `allow` names what the program may do outside of its process, of ALLOWABLE. Where a child process is not
    possible, the function runs in this one, and what would have gone to the overlay is refused. A child that
    runs at time.monotonic() == `until` is ended: TookTooLong.
    """
    for name in allow:
        if name not in ALLOWABLE:
            raise UserError(f"{name!r} cannot be allowed; valid: {', '.join(ALLOWABLE)}")
    if _inside or getattr(_refusing, "on", False):
        return function(progress)
    with cudnn.asked_without_gpu():
        return _run_isolated(function, progress, allow, until)


def _run_isolated(
    function: Callable[[Progress], T], progress: Progress, allow: Collection[str], until: float
) -> T:
    kind, value = "no fork", None
    if hasattr(os, "fork"):  # Windows has none
        _prepare()
        try:
            # What is allowed to have effects must not have them twice.
            stuck_after = math.inf if allow else _STUCK_S
            kind, value = _run_in_child(function, progress, allow, until, stuck_after)
        except _Stuck:
            progress = again(progress, f"after {_STUCK_S:.0f} s in which it did not compute")
            kind, value = _run_in_child(function, progress, allow, until)
    if kind == "restart":
        progress = again(progress, f"without {value}")
        kind, value = _run_in_child(functools.partial(_again, function, value), progress, allow, until)
    if kind == "no fork":
        return _run_here(function, progress, allow)
    if isinstance(value, ProgramError) and value.lacked:
        registry.provide(value.lacked)
        shown = again(progress, f"with a stand-in for {' and '.join(sorted(value.lacked))}")
        return _run_isolated(function, shown, allow, until)
    if isinstance(value, BaseException):
        raise value
    return value  # type: ignore[return-value]


def again(progress: Progress, why: str) -> Progress:
    """For a program that runs once more: its steps begin with the first again."""
    return lambda text, fraction: progress(f"again, {why}: {text}", fraction)


@contextlib.contextmanager
def show_progress(progress: Progress | None, delay: float = 2.0) -> Iterator[Progress]:
    """`progress`; without one, a bar of tqdm in a notebook, after so many seconds, and nothing elsewhere."""
    in_notebook = "ipykernel" in sys.modules and not _inside
    if progress is not None or not in_notebook or importlib.util.find_spec("tqdm") is None:
        yield progress or (lambda text, fraction: None)
        return
    with warnings.catch_warnings(action="ignore"):  # without ipywidgets, it is a line that is overwritten
        from tqdm.auto import tqdm

    class Bar(tqdm):  # type: ignore[type-arg, misc]
        monitor_interval = 0  # no thread: the next prediction forks this process

    bar: Any = None

    def report(text: str, fraction: float | None) -> None:
        nonlocal bar
        if bar is None:  # after the child was forked, in which bars of the program come below it
            bar = Bar(desc=text, total=1.0, delay=delay, miniters=0, leave=False, bar_format=_BAR)
        bar.set_description_str(text, refresh=False)
        bar.update((fraction or 0.0) - bar.n)

    try:
        yield report
    finally:
        if bar is not None:
            bar.close()


def _prepare() -> None:
    """Once in this process, and not again in every child."""
    global _modules_of_parent
    FakeTensorMode()  # imports what every trace needs
    registry.before_fork()
    redirection.find_patched_references()
    _modules_of_parent = frozenset(sys.modules)


def _run_in_child(
    function: Callable[[Progress], Any],
    progress: Progress,
    allow: Collection[str],
    until: float,
    stuck_after: float = math.inf,
) -> tuple[str, Any]:
    sys.stdout.flush()
    sys.stderr.flush()
    _remove_left_folders()
    read, write = os.pipe()
    caller, child, ended, wait_s = os.getpid(), -1, 0, 0.0
    scratch = keeper.Scratch()
    try:
        child, interrupted = _fork()
        if child == 0:
            run = functools.partial(_run_child, function, scratch.path, read, write, allow)
            keeper.keep(scratch, caller, _fork_with_random_state, run, write)
        os.close(write)
        if interrupted:
            signal.raise_signal(signal.SIGINT)
        outcome = _receive(_Child(child, read, stuck_after, until), progress)
        wait_s = _ENDING_S if outcome is None else 0.0
    finally:
        os.close(scratch.lock)
        if child > 0:
            ended = _end_kept(child, wait_s)
        os.close(read)
        keeper.remove(scratch.path)  # where the keeper was killed
    if outcome is None:
        raise ProgramError(_how_it_ended(ended))
    return outcome


@functools.cache
def _remove_left_folders() -> None:
    """Once per process."""
    keeper.remove_left_folders()


def _run_here(function: Callable[[Progress], T], progress: Progress, allow: Collection[str]) -> T:
    """Torch cannot run a backward pass in a child of a process that has run one beside a GPU."""
    reason = (
        "torch cannot run backward passes in a child of it" if hasattr(os, "fork") else "there is no fork"
    )
    warnings.warn(
        f"predicted in this process, because {reason}: files that the program would write are refused",
        stacklevel=4,
    )
    _refuse_effects_here()
    before = vars(_refusing).copy()
    _refusing.on, _refusing.allow = True, allow
    try:
        return function(progress)
    finally:
        _refusing.on, _refusing.allow = before.get("on", False), before.get("allow", ())


@functools.cache
def _refuse_effects_here() -> None:
    """Once per process: audit hooks stay. This one is for threads that run a program now."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in (*_AUDITED, *_NAMES) and getattr(_refusing, "on", False):
            redirection.refuse_write(event, args, ())
            _refuse_effect(event, args, _refusing.allow)

    sys.addaudithook(hook)


def cuda_sees_gpu() -> bool:
    """Whether CUDA has a GPU in this process. The first answer starts CUDA's driver and stays for good, in
    forks too: before, a process can still hide its GPUs."""
    return cuda_device_count() > 0


def cuda_has_started() -> bool:
    """Whether forks of this process cannot be what a process without a GPU is: CUDA has counted its GPUs."""
    return hasattr(os, "fork") and not _inside and not _holds_in_fork(_runs_without_gpu)


def autograd_runs_in_forks() -> bool:
    return _holds_in_fork(autograd_runs)


def _runs_without_gpu() -> bool:
    _hide_gpus()
    return not cuda_sees_gpu() and autograd_runs()


def _holds_in_fork(function: Callable[[], bool]) -> bool:
    child, _ = _fork()
    if child == 0:
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def run_in_new_interpreter(function: Callable[..., T], progress: Progress, *args: Any, **kwargs: Any) -> T:
    """`function(*args, progress=progress, **kwargs)`, all of it picklable, in another process of Python."""
    read, write = os.pipe()
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import _answer; _answer({write})"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, pass_fds=(write,)) as process:
        try:
            os.close(write)
            assert process.stdin is not None
            with process.stdin as request, contextlib.suppress(BrokenPipeError):
                pickle.dump((function, args, kwargs), request)
            outcome = _receive(_Child(process.pid, read), progress)
        except BaseException:
            process.kill()
            raise
        finally:
            os.close(read)
    if outcome is None:
        raise ProgramError(f"a new process of {sys.executable} ended with status {process.returncode}")
    if isinstance(outcome[1], BaseException):
        raise outcome[1]
    return outcome[1]  # type: ignore[no-any-return]


def _answer(write: int) -> None:
    """The new process of `run_in_new_interpreter`."""
    global _messages_to_parent
    end_with_parent(signal.SIGKILL)
    with os.fdopen(write, "wb") as messages:
        _messages_to_parent = messages
        function, args, kwargs = pickle.load(sys.stdin.buffer)
        _send(messages, _outcome(lambda progress: function(*args, progress=progress, **kwargs), messages))


def run_forked(
    functions: Sequence[Callable[..., T]], jobs: int, continues: bool = False
) -> Iterator[tuple[int, T | OomphError | RuntimeError]]:
    """In an isolated process: (position, result or error) of each function, in the order in which they end.

    Each runs in a fork of this process, which has all that was imported and built before; `jobs` at a time.
    `continues`: the function is not called, but raised in the fork as ContinueInFork. Raises ForkWaits where
    such a fork sleeps for long.
    """
    waiting, running = list(enumerate(functions)), dict[int, tuple[int, int]]()
    sleeping: set[Any] = set()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                position, function = waiting.pop(0)
                read, write = os.pipe()
                sys.stdout.flush()
                sys.stderr.flush()
                child = _fork_with_random_state()
                if child == 0:
                    running.clear()  # which are the parent's to end
                    _run_fork(function, read, write, continues)
                os.close(write)
                running[read] = position, child
            with selectors.DefaultSelector() as selector:
                for pipe in running:
                    selector.register(pipe, selectors.EVENT_READ)
                ready = [key.fd for key, _ in selector.select(_STUCK_S if continues else None)]
            if not ready:
                asleep = {(child, _sleeps_since(child)) for _, child in running.values()}
                if any(since is not None for _, since in asleep & sleeping):
                    raise ForkWaits
                sleeping = asleep
            for pipe in ready:
                position, child = running[pipe]
                received = _receive(_Child(child, pipe), lambda text, fraction: None)
                kind, value = received or ("", None)
                ended = _end(child)
                os.close(pipe)
                del running[pipe]
                if kind == "restart":
                    waiting.append((position, functools.partial(_again, functions[position], value)))
                    continue
                if kind == "no fork":  # beside a GPU, this process has run a backward pass
                    value = _result_of(functions[position])
                result: Any = value if kind else ProgramError(_how_it_ended(ended))
                yield position, result
    finally:
        for pipe, (_, child) in running.items():
            _end(child)
            os.close(pipe)


def in_fork(function: Callable[[], T]) -> T:
    """The result of a function that runs in a fork of this process, or its error."""
    ((_, found),) = run_forked([function], 1)
    if isinstance(found, Exception):
        raise found
    return found


def _again(function: Callable[..., T], failed: Any, *args: Any) -> T:
    """After `restart`, in the new process."""
    global _restarted
    _restarted = failed
    return function(*args)


def _result_of(function: Callable[[], T]) -> T | OomphError:
    try:
        return function()
    except OomphError as error:
        return error


def _run_fork(function: Callable[..., Any], read: int, write: int, continues: bool) -> NoReturn:
    global _messages_to_parent
    try:
        end_with_parent(signal.SIGKILL)
        _unended.clear()  # the parent ends its own lines
        os.close(read)
        messages = _messages_to_parent = os.fdopen(write, "wb")
        if not continues:
            outcome = _outcome_in_fork(lambda progress: function(), messages)
            _send(_messages_to_parent, outcome)  # of a fork of this one, if that continued the function
    finally:
        if not continues:
            os._exit(0)
    raise ContinueInFork(function)  # what the program's end sends goes to the process that was forked


def _sleeps_since(pid: int) -> tuple[str, ...] | None:
    """The CPU time after which the process sleeps; None where it waits for the CPU or a disk, or computes."""
    state = state_of(pid)
    return tuple(state[11:13]) if state[:1] == ["S"] else None


def discard_output() -> None:
    """What this process prints from now on."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)


def refuse_in_thread() -> Callable[[], None]:
    """For a thread that a program starts: called in it, what is refused to the program is refused there."""
    refused = vars(_refusing).copy()
    return lambda: vars(_refusing).update(refused)


def finish(result: Any) -> NoReturn:
    """From inside the program: send the result of `run_isolated` or `run_in_new_interpreter`, or the error
    that these raise, and end the process, without returning to it."""
    _sending.acquire()  # for good: another thread of the program may come to its end now
    _end_output()  # the parent ends this process when it has the result
    try:
        _send(_messages_to_parent, ("result", _sendable(result) if isinstance(result, Exception) else result))
    finally:
        os._exit(0)


def restart(failed: str = "repeated blocks") -> NoReturn:
    """From inside the program: end the process, and run `function` again without what failed."""
    if not can_restart():
        raise RuntimeError("a program that runs in the caller's process cannot be run again")
    _sending.acquire()
    _send(_messages_to_parent, ("restart", failed))
    os._exit(0)


def can_restart() -> bool:
    """Whether short cuts may be tried that `restart` takes back."""
    return _inside and not _restarted and "_messages_to_parent" in globals()


def restarted_without(short_cut: str) -> bool:
    """Whether the program runs again because the short cut failed."""
    return _restarted == short_cut


def is_isolated() -> bool:
    """Whether this process runs a predicted program and ends with it."""
    return _inside


def _fork() -> tuple[int, list[int]]:
    """The child, and interrupts that came meanwhile: what runs after a fork must not be cut short."""
    arrived: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    defer = threading.current_thread() is threading.main_thread() and callable(handler)
    if defer:
        signal.signal(signal.SIGINT, lambda number, frame: arrived.append(number))
    try:
        with trace_lock, warnings.catch_warnings():
            # It warns of threads in the caller; the child uses none.
            warnings.simplefilter("ignore", DeprecationWarning)
            return _fork_with_random_state(), arrived
    finally:
        if defer:
            signal.signal(signal.SIGINT, handler)


def _fork_with_random_state() -> int:
    """`random` seeds itself anew in a fork, where a program would draw other batches in each prediction."""
    state = random.getstate()
    child = os.fork()
    if child == 0:
        random.setstate(state)
    return child


def _end(child: int) -> int:
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _end_kept(pid: int, wait_s: float) -> int:
    """The program, processes that it started, and their keeper. `wait_s`: for the program's own end."""
    pause, ends, until = 0.0005, time.monotonic() + wait_s, time.monotonic() + wait_s + _STUCK_S
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() >= ends:
            os.kill(pid, signal.SIGTERM)
            ends = math.inf
        elif time.monotonic() > until:  # it waits for a lock that another thread held when it was forked
            return _end(pid)
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    return ended[1]


def _how_it_ended(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code < 0 and -code != signal.SIGKILL:
        return f"the program crashed the process ({signal.Signals(-code).name})"
    if code < 0:
        return "the process was killed (SIGKILL), often because the host ran out of memory"
    return f"the program ended the process (os._exit, status {code})"


# The child --------------------------------------------------------------------------------------------


def _run_child(
    function: Callable[[Progress], Any],
    scratch: str,
    read: int,
    write: int,
    allow: Collection[str],
    channel: socket.socket,
) -> NoReturn:
    """Never returns: what the parent would do next, and at its exit, is not this process' to do."""
    global _messages_to_parent
    status = 70
    try:
        os.close(read)
        with os.fdopen(write, "wb") as messages:
            _messages_to_parent = messages
            try:
                if unprotected := sandbox.describe_missing(_isolate(scratch, allow, channel)):
                    _send(messages, ("unprotected", unprotected))
            except Exception as error:  # ours, not the program's
                ours = RuntimeError(f"{error!r}\n{traceback.format_exc()}")
                outcome = "error", _full_disk(error) or ours
            else:
                outcome = _outcome_in_fork(function, messages)
            with _sending:
                _send(_messages_to_parent, outcome)
        status = 0
    finally:
        os._exit(status)


def _isolate(scratch: str, allow: Collection[str], channel: socket.socket) -> tuple[str, ...]:
    """Returns what the kernel cannot forbid, as sandbox.apply."""
    global _inside, _keeper, _forbidden
    _inside, _keeper = True, os.getppid()
    _forbidden = tuple(name for name in ALLOWABLE if name not in allow)
    _forget_imports_of_other_threads()
    os.setpgid(0, 0)  # Ctrl-C reaches the parent, which ends this group
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _without_terminal()
    end_with_parent(signal.SIGKILL)
    _use_one_thread()
    _watch_line_ends()
    shared_memory.make_private()
    view = redirection.install(scratch)
    gc.freeze()  # the parent's objects: collecting them would copy its memory

    audited = set(_AUDITED)

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        if event in audited:
            redirection.refuse_other_writes(view, event, args)
            _refuse_effect(event, args, allow)

    sys.addaudithook(refuse)
    if "network" not in allow:
        _close_connections()
    _hide_gpus()
    _pass_environment_on()
    registry.in_process(allow)
    warnings.filterwarnings("ignore", "CUDA initialization")  # a real GPU is out of reach here
    warnings.filterwarnings("ignore", module=r"oomph\.prediction")  # torch's, at lines of ours
    if "subprocesses" not in allow:
        multiprocessing.util.spawnv_passfds = _refuse_spawn  # it raises no audit event
        _fail_shell_commands()
        _make_locks_for_forks()
    missing = sandbox.apply(scratch, allow, channel)
    channel.close()
    if "seccomp" in missing:
        audited.update(_NAMES)
    return missing


def _hide_gpus() -> None:
    """From the driver; the program sees what it was started with."""
    os.putenv("CUDA_VISIBLE_DEVICES", "")


def _close_connections() -> None:
    """Of the caller to other machines: what the program writes to one would be sent."""
    for fd in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError, ValueError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as known:
                    inet = known.family in (socket.AF_INET, socket.AF_INET6)
                    if inet and not is_own_address(*known.getpeername()[:4:3]):
                        with socket.socket(known.family, known.type) as unconnected:
                            os.dup2(unconnected.fileno(), fd, os.get_inheritable(fd))


def _make_locks_for_forks() -> None:
    """Locks for spawned processes start one that removes them in the end."""
    make, fork = SemLock.__init__, multiprocessing.get_context("fork")

    def make_for_forks(self: SemLock, *args: Any, ctx: Any) -> None:
        make(self, *args, ctx=fork)

    SemLock.__init__ = make_for_forks  # type: ignore[method-assign, assignment]


def _refuse_spawn(path: Any, args: Any, passfds: Any) -> NoReturn:
    raise Refused(
        "a predicted program cannot spawn Python processes (--allow-subprocesses permits it); "
        "use the fork start method of multiprocessing"
    )


def _pass_environment_on() -> None:
    """Without `env`, programs that this one starts would get what `_hide_gpus` has set for the driver."""
    begin = subprocess.Popen.__init__

    @functools.wraps(begin)
    def begin_prepared(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) <= 10 and kwargs.get("env") is None:
            kwargs["env"] = os.environ
        begin(self, *args, **kwargs)

    subprocess.Popen.__init__ = begin_prepared  # type: ignore[method-assign]


def _fail_shell_commands() -> None:
    """os.system raises nothing where a command fails: programs that copy their sources with it go on."""
    system = os.system

    def fail(command: Any) -> int:
        try:
            return system(command)
        except Refused as error:
            print(f"oomph: {error}", file=sys.stderr)
            return 127 << 8  # as a shell that does not find the command

    os.system = as_builtin(fail, system)


def _use_one_thread() -> None:
    """OpenMP would wait forever for the threads of the parent's pool, also where the program sets it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def set_num_threads(number: int) -> None:
        nonlocal threads
        threads = number

    torch.set_num_threads = set_num_threads  # type: ignore[assignment]
    torch.get_num_threads = lambda: threads


def autograd_runs() -> bool:
    """False in a child that was forked after the first backward pass of a process with a GPU."""
    try:
        with torch.inference_mode(False):
            torch.zeros((), device="cpu", requires_grad=True).backward()
    except RuntimeError as error:
        return "fork" not in str(error)
    return True


def _outcome_in_fork(function: Callable[[Progress], Any], messages: BinaryIO) -> tuple[str, Any]:
    # A backward pass starts a thread for each GPU, after which forks of this process could run none.
    runs = autograd_runs_in_forks() if cuda_sees_gpu() else autograd_runs()
    return _outcome(function, messages) if runs else ("no fork", None)


def _outcome(function: Callable[[Progress], Any], messages: BinaryIO) -> tuple[str, Any]:
    try:
        return "result", function(lambda text, fraction: _send_progress(messages, text, fraction))
    except KeyboardInterrupt:
        return "error", KeyboardInterrupt()
    except BaseException as error:
        return "error", _sendable(error)
    finally:
        _end_output()


def _watch_line_ends() -> None:
    """Programs are stopped while a progress bar of theirs is on its line; the report begins on the next."""
    for stream in {id(each): each for each in (sys.stdout, sys.stderr)}.values():

        def write(text: str, stream: Any = stream, write: Callable[[str], int] = stream.write) -> int:
            if text.endswith("\n"):
                _unended.pop(stream, None)
            elif text:  # print(end="") also writes ""
                _unended[stream] = write
            return write(text)

        with contextlib.suppress(AttributeError):
            stream.write = write  # type: ignore[method-assign]


def _end_output() -> None:
    with contextlib.suppress(Exception):
        while _unended:
            _unended.popitem()[1]("\n")
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


def _send_progress(messages: BinaryIO, text: str, fraction: float | None) -> None:
    with _sending:
        _send(messages, ("progress", (text, fraction)))


def _full_disk(error: BaseException | None) -> UserError | None:
    """The program itself writes to our folders: it is they that have no space."""
    while error is not None:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or any(text in safe_text(error) for text in _FULL):
            return UserError(
                f"no space is left for what the program writes, in {tempfile.gettempdir()}; set TMPDIR to "
                "a folder with more space"
            )
        error = error.__cause__ or error.__context__
    return None


def _sendable(raised: BaseException) -> Exception:
    """Without causes, which may not be picklable; of our base class where the parent lacks the program's."""
    error = _full_disk(raised) or blame(raised)
    if error is None:
        return RuntimeError("".join(traceback.format_exception(raised)))
    if isinstance(error, ProgramError):
        error.forbidden, error.lacked = _forbidden, registry.lacked(raised)
    error.__cause__ = error.__context__ = None
    cls = type(error)
    own = next(base for base in cls.__mro__ if base.__module__.partition(".")[0] == "oomph")
    if cls is own or cls.__module__ in _modules_of_parent:
        return error
    found = own.__new__(own, *error.args)
    found.__dict__.update(error.__dict__)
    return found


def _without_terminal() -> None:
    """A terminal stops processes of a background group that read from it: they find one at its end instead,
    of the same size, for programs that ask `stty size`."""
    signal.signal(signal.SIGTTIN, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    if os.isatty(0):
        import termios  # not on Windows

        _, terminal = os.openpty()  # the other end is open for as long as this process
        termios.tcsetwinsize(terminal, termios.tcgetwinsize(0))
        mode = termios.tcgetattr(terminal)
        mode[3] &= ~termios.ICANON
        mode[6][termios.VMIN] = mode[6][termios.VTIME] = 0  # a read returns at once
        termios.tcsetattr(terminal, termios.TCSANOW, mode)
        os.dup2(terminal, 0)
        os.close(terminal)


def _forget_imports_of_other_threads() -> None:
    """A thread of the parent that was importing a module holds its lock here for good: import it again."""
    bootstrap: Any = sys.modules["_frozen_importlib"]
    for name, reference in list(bootstrap._module_locks.items()):
        lock = reference()
        if lock is not None and lock.owner not in (None, threading.get_ident()):
            del bootstrap._module_locks[name]
            sys.modules.pop(name, None)


_COMMANDS = {"subprocess.Popen": 1, "os.system": 0, "os.exec": 1, "os.posix_spawn": 1}
_ADDRESSES = {"socket.connect": 1, "socket.sendto": 1, "socket.sendmsg": 1}
_NAMES = {"socket.getaddrinfo": 0, "socket.gethostbyname": 0}
_SIGNALS = ("os.kill", "os.killpg")
# Hooks are called for all events, also for every id() of a trace: one hook, and the others cost it little.
_AUDITED = redirection.AUDITED_WRITES | {*_COMMANDS, *_ADDRESSES, *_SIGNALS}


def _refuse_effect(event: str, args: tuple[Any, ...], allow: Collection[str]) -> None:
    """Other programs, signals and the network, by Python's audit events: says how they can be allowed, and is
    all where the kernel does not refuse them (sandbox.py)."""
    if event in _COMMANDS and "subprocesses" not in allow:
        given = args[_COMMANDS[event]]
        words = tuple(map(os.fsdecode, given)) if isinstance(given, (list, tuple)) else ()
        words = words or ("sh", "-c", os.fsdecode(given))
        # A program that is not installed starts nothing: FileNotFoundError, as in the real run.
        if not is_query(words) and shutil.which(words[0]) is not None:
            command = " ".join(words[2:] if words[0] in ("sh", "/bin/sh") else words)
            raise Refused(
                "a predicted program cannot start other programs (--allow-subprocesses permits it): "
                f"{command[:200]}"
            )
    if event in _SIGNALS and "subprocesses" not in allow:
        pid = -args[0] if event == "os.killpg" else args[0]
        if args[1] != 0 and pid != os.getpid() and not sandbox.is_own(pid, _keeper or os.getpid()):
            raise Refused(errno.EPERM, "a predicted program cannot send signals to other processes")
    if event in (*_ADDRESSES, *_NAMES) and "network" not in allow and not isinstance(args[0], Probe):
        host = args[(_ADDRESSES | _NAMES)[event]]
        host = host[0] if isinstance(host, tuple) else host if event in _NAMES else ""
        text = os.fsdecode(host) if isinstance(host, (str, bytes)) else ""
        if text and not text.startswith("localhost") and text != platform.node() and not is_own_address(text):
            reason = "a predicted program cannot use the network (--allow-network permits it)"
            if event in _NAMES:
                raise socket.gaierror(socket.EAI_AGAIN, f"{reason}: {text}")
            raise Refused(errno.ENETUNREACH, reason, text)


# Messages ---------------------------------------------------------------------------------------------


def _send(messages: BinaryIO, message: tuple[str, Any]) -> None:
    try:
        with without_collection():
            data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        data = pickle.dumps(("error", RuntimeError(f"the result cannot be sent: {error!r}")))
    messages.write(struct.pack("<Q", len(data)))
    messages.write(data)
    messages.flush()


class _Child:
    """The parent's end of the pipe. That the child has ended is asked of the system: processes which the
    program forked may hold the pipe open."""

    def __init__(self, pid: int, pipe: int, stuck_after: float = math.inf, until: float = math.inf) -> None:
        self.pid, self.pipe, self.stuck_after, self.until = pid, pipe, stuck_after, until

    def read(self, size: int) -> bytes | None:
        """None where the child ended before it had sent so many bytes."""
        data = bytearray()
        waiting, cpu_time = time.monotonic(), None
        while len(data) < size:
            if time.monotonic() > self.until:
                raise TookTooLong
            if not self._has_data(_POLL_S):
                if self._has_ended() and not self._has_data(0):
                    return None
                if (used := self._cpu_time()) != cpu_time:  # also at the first time
                    waiting, cpu_time = time.monotonic(), used
                elif time.monotonic() - waiting > self.stuck_after:
                    raise _Stuck
                continue
            received = os.read(self.pipe, min(size - len(data), MiB))
            if not received:
                return None
            data += received
        return bytes(data)

    def _has_data(self, seconds: float) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self.pipe, selectors.EVENT_READ)
            return bool(selector.select(seconds))

    def _has_ended(self) -> bool:
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return False
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _cpu_time(self) -> object:
        """Anything that changes while the child, or a process that it started, computes."""
        if not os.path.isdir("/proc/self"):  # not Linux
            return time.monotonic()
        states = {self.pid: state_of(self.pid), **processes_below(self.pid)}
        return [(pid, *state[11:13]) for pid, state in states.items()]


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=2)


def _receive(child: _Child, progress: Progress) -> tuple[str, Any] | None:
    """Pass progress on until the outcome comes; None where the child ended without one."""
    while (header := child.read(8)) is not None:
        data = child.read(struct.unpack("<Q", header)[0])
        if data is None:  # it was killed while it sent
            return None
        with without_collection():
            kind, value = pickle.loads(data)
        if kind == "unprotected":
            _warn_once(value)
        elif kind == "progress":
            progress(*value)
        else:
            return kind, value
    return None
