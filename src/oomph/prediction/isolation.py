"""Runs the program that is predicted in a child process, which leaves nothing behind.

The child is forked, so that it has the caller's objects, and ends with the program. The caller's threads,
torch's modes and flags, patched names and random states stay as they are; a crash, `os._exit` or a signal
ends the child alone. Files that the program writes go to an overlay (files.py). Other programs are not
started and the network is not used, unless allowed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib.util
import math
import multiprocessing.util
import os
import pickle
import random
import re
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.machinery import ModuleSpec
from multiprocessing.synchronize import SemLock
from types import ModuleType, SimpleNamespace
from typing import Any, BinaryIO, NoReturn, TypeVar

import torch
from torch.utils import collect_env

from oomph.errors import OomphError, ProgramError, UserError, blame
from oomph.prediction import files
from oomph.records import Progress
from oomph.torch_internals import FakeTensorMode
from oomph.units import MiB

T = TypeVar("T")
_PARENT_DEATH_SIGNAL = 1  # of prctl
_LOCAL = ("127.", "::1", "localhost", "0.0.0.0")
_POLL_S = 0.5
_BAR = "{desc} |{bar:24}| {elapsed}"  # of tqdm
_STUCK_S = 20.0  # a child that has not used the CPU for so long is started again, once
ALLOWABLE = ("subprocesses", "network")
_inside = False  # this process is such a child
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
    if _inside:
        return function(progress)
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
    with contextlib.suppress(ImportError):
        import safetensors.torch  # noqa: F401
    files.find_users_of_safetensors()
    files.find_patched_references()
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
    read, write = os.pipe()
    child, ended = -1, 0
    with tempfile.TemporaryDirectory(prefix="oomph-", ignore_cleanup_errors=True) as scratch:
        try:
            child, interrupted = _fork()
            if child == 0:
                _run_child(function, scratch, read, write, allow)
            if interrupted:
                raise KeyboardInterrupt
            os.close(write)
            outcome = _receive(_Child(child, read, stuck_after, until), progress)
        finally:
            if child > 0:
                ended = _end(child)
            os.close(read)
    if outcome is None:
        raise ProgramError(_how_it_ended(ended))
    return outcome


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
        if event in _AUDITED and getattr(_refusing, "on", False):
            files.refuse_write(event, args, ())
            _refuse_effect(event, args, _refusing.allow)

    sys.addaudithook(hook)


def autograd_breaks_in_forks() -> bool:
    """Whether this process has run a backward pass beside a GPU: torch runs none in a child of it then."""
    return hasattr(os, "fork") and not _inside and not autograd_runs_in_forks()


def autograd_runs_in_forks() -> bool:
    child, _ = _fork()
    if child == 0:
        os._exit(0 if autograd_runs() else 1)
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
    _end_with_parent()
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
        _end_with_parent()
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


def _stat(pid: int | str) -> list[str]:
    """The state of a process, its parent, its group and so on, from /proc; empty if there is none."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()
    return []


def _sleeps_since(pid: int) -> tuple[str, ...] | None:
    """The CPU time after which the process sleeps; None where it waits for the CPU or a disk, or computes."""
    state = _stat(pid)
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
    defer = threading.current_thread() is threading.main_thread() and handler is signal.default_int_handler
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
    """Wait for the child; end it, and processes that it started, where it still runs."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    os.kill(child, signal.SIGKILL)  # it may not have its group yet
    return os.waitpid(child, 0)[1]


def _how_it_ended(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code < 0 and -code != signal.SIGKILL:
        return f"the program crashed the process ({signal.Signals(-code).name})"
    if code < 0:
        return "the process was killed (SIGKILL), often because the host ran out of memory"
    return f"the program ended the process (os._exit, status {code})"


# The child --------------------------------------------------------------------------------------------


def _run_child(
    function: Callable[[Progress], Any], scratch: str, read: int, write: int, allow: Collection[str]
) -> NoReturn:
    """Never returns: what the parent would do next, and at its exit, is not this process' to do."""
    global _messages_to_parent
    status = 70
    try:
        os.close(read)
        with os.fdopen(write, "wb") as messages:
            _messages_to_parent = messages
            try:
                _isolate(scratch, allow)
            except Exception as error:  # ours, not the program's
                outcome = "error", RuntimeError(f"{error!r}\n{traceback.format_exc()}")
            else:
                outcome = _outcome_in_fork(function, messages)
            with _sending:
                _send(_messages_to_parent, outcome)
        status = 0
    finally:
        os._exit(status)


def _isolate(scratch: str, allow: Collection[str]) -> None:
    global _inside
    _inside = True
    _forget_imports_of_other_threads()
    os.setpgid(0, 0)  # Ctrl-C reaches the parent, which ends this group
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _without_terminal()
    _end_with_parent()
    _use_one_thread()
    _watch_line_ends()
    refuse_other_writes = files.install(scratch)
    gc.freeze()  # the parent's objects: collecting them would copy its memory

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        if event in _AUDITED:
            refuse_other_writes(event, args)
            _refuse_effect(event, args, allow)

    sys.addaudithook(refuse)
    _keep_sockets_in(scratch)
    os.environ.update(_ENVIRONMENT)
    for name in ("joblib.parallel", "joblib._parallel_backends"):  # read the variable when imported
        if name in sys.modules:
            vars(sys.modules[name])["mp"] = None
    os.putenv("CUDA_VISIBLE_DEVICES", "")  # for the driver; the program sees what it was started with
    _prepare_subprocesses()
    warnings.filterwarnings("ignore", "CUDA initialization")  # a real GPU is out of reach here
    warnings.filterwarnings("ignore", module=r"oomph\.prediction")  # torch's, at lines of ours
    _replace_mpi()
    if "subprocesses" not in allow:
        multiprocessing.util.spawnv_passfds = _refuse_spawn  # it raises no audit event
        _fail_shell_commands()
        # It describes the machine by the output of a dozen programs, and takes any of them to fail.
        collect_env.run = lambda command: (127, "", "not started in a prediction")
        _make_locks_for_forks()
        files.forbid_writes_outside((scratch, "/dev", "/proc/self"))


def _keep_sockets_in(scratch: str) -> None:
    """Paths of sockets are not redirected. multiprocessing, and multiprocess of Hugging Face datasets, make a
    folder for theirs."""
    make = tempfile.mkdtemp

    @functools.wraps(make)
    def make_folder(suffix: Any = None, prefix: Any = None, dir: Any = None) -> Any:
        return make(suffix, prefix, scratch if prefix == "pymp-" else dir)

    tempfile.mkdtemp = make_folder
    vars(multiprocessing.current_process())["_config"].pop("tempdir", None)  # the caller's


def _replace_mpi() -> None:
    """MPI starts processes when it is imported. Its communicator of one process returns what it is given."""
    if "mpi4py" in sys.modules or importlib.util.find_spec("mpi4py") is None:
        return
    package, mpi = ModuleType("mpi4py"), ModuleType("mpi4py.MPI")
    for module in (package, mpi):
        module.__spec__ = ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
    returned = dict.fromkeys(("bcast", "reduce", "allreduce"), lambda value, *args, **kwargs: value)
    listed = dict.fromkeys(("gather", "allgather"), lambda value, *args, **kwargs: [value])
    waits = dict.fromkeys(("barrier", "Barrier", "Bcast"), lambda *args, **kwargs: None)
    world = SimpleNamespace(
        rank=0, size=1, Get_rank=lambda: 0, Get_size=lambda: 1, **returned, **listed, **waits
    )
    vars(package).update(MPI=mpi, rc=SimpleNamespace())
    vars(mpi).update(COMM_WORLD=world, SUM=None, MAX=None, MIN=None)


def _end_with_parent() -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


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


def _prepare_subprocesses() -> None:
    """Without `env`, they would get that of the driver. Where nvidia-smi is missing, it prints nothing: a
    machine with a GPU has it."""
    begin = subprocess.Popen.__init__
    missing = shutil.which("nvidia-smi") is None

    @functools.wraps(begin)
    def begin_prepared(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) <= 10 and kwargs.get("env") is None:
            kwargs["env"] = os.environ
        command = args[0] if args else kwargs.get("args")
        name = command[0] if isinstance(command, (list, tuple)) and command else command
        if name == "nvidia-smi" and missing and len(args) <= 2 and not kwargs.get("shell"):
            kwargs["executable"] = "true"
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

    os.system = fail


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
    runs = autograd_runs_in_forks() if torch.cuda.device_count() else autograd_runs()
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


def _sendable(raised: BaseException) -> Exception:
    """Without causes, which may not be picklable; of our base class where the parent lacks the program's."""
    error = blame(raised)
    if error is None:
        return RuntimeError("".join(traceback.format_exception(raised)))
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


# wandb's offline mode starts a server, and joblib processes that would not see the fake GPU.
_ENVIRONMENT = {"GIT_OPTIONAL_LOCKS": "0", "WANDB_MODE": "disabled", "JOBLIB_MULTIPROCESSING": "0"}
_COMMANDS = {"subprocess.Popen": 1, "os.system": 0, "os.exec": 1, "os.posix_spawn": 1}
# Hooks are called for all events, also for every id() of a trace: one hook, and the others cost it little.
_AUDITED = files.AUDITED_WRITES | {"socket.connect", *_COMMANDS}
# With more words, some of them write.
_WHOLE_QUERIES = (("git", "symbolic-ref", "--short", "HEAD"), ("hostname",), ("lspci",), ("stty", "size"))
_QUERIES = (  # what programs ask before they train; with these words, none of them writes
    *(("git", each) for each in "rev-parse rev-list describe log show status diff ls-files".split()),
    *(("git", "config", "--get"), ("git", "branch", "--show-current"), ("git", "remote", "get-url")),
    *(("nvidia-smi",), ("uname",), ("lscpu",), ("ldconfig", "-p"), ("/sbin/ldconfig", "-p")),
    *_WHOLE_QUERIES,
)
# Asked by LightningCLI, of stubs for the types of arguments.
_PATH_QUERY = (sys.executable, "-c", "import sys, json; print(json.dumps(sys.path))")
_NVIDIA_SMI_QUERIES = ("-L", "-q", "--query", "--format", "-i", "--id")


def _is_query(words: tuple[str, ...]) -> bool:
    if words[:2] == ("git", "-C"):  # in another folder
        words = "git", *words[3:]
    known = next((each for each in _QUERIES if words[: len(each)] == each), None)
    if known is None:
        return words == _PATH_QUERY
    rest = words[len(known) :]
    if known in _WHOLE_QUERIES:
        return not rest
    if known == ("nvidia-smi",):
        return all(word.startswith(_NVIDIA_SMI_QUERIES) or word.isdigit() for word in rest)
    return not any(word.startswith("--output") for word in rest)


def _is_shell_query(command: str) -> bool:
    """Also of several, one after the other, as in `git describe 2>/dev/null || git rev-parse HEAD`."""
    silent = re.sub(r"\s2>(/dev/null|&1)(?=[\s;&|]|$)", "", command)
    commands = re.split(r"\|\||&&|;", silent)
    plain = silent.isprintable() and not set("".join(commands)) & set("|&<>`$")
    return plain and all(_is_query(tuple(each.split())) for each in commands)


def _refuse_effect(event: str, args: tuple[Any, ...], allow: Collection[str]) -> None:
    """Other programs and the network, by Python's audit events."""
    if event in _COMMANDS and "subprocesses" not in allow:
        given = args[_COMMANDS[event]]
        words = tuple(map(os.fsdecode, given)) if isinstance(given, (list, tuple)) else ()
        if words and words[:2] != ("/bin/sh", "-c"):
            # A program that is not installed starts nothing: FileNotFoundError, as in the real run.
            is_query = _is_query(words) or shutil.which(words[0]) is None
            command = " ".join(words)
        else:  # os.system; os.popen and shell=True
            command = " ".join(words[2:]) if words else os.fsdecode(given)
            is_query = _is_shell_query(command)
        if not is_query:
            raise Refused(
                "a predicted program cannot start other programs (--allow-subprocesses permits it): "
                f"{command[:200]}"
            )
    if event == "socket.connect" and "network" not in allow:
        address = args[1]
        host = str(address[0]) if isinstance(address, tuple) else ""
        if host and not host.startswith(_LOCAL):
            raise Refused(f"a predicted program cannot use the network (--allow-network permits it): {host}")


# Messages ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Many new objects would start collections of all objects of the process, and none of them is garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
        processes = {pid: _stat(pid) for pid in os.listdir("/proc") if pid.isdigit()}
        group = [str(self.pid)]
        return [(pid, *state[11:13]) for pid, state in processes.items() if state[2:3] == group]


def _receive(child: _Child, progress: Progress) -> tuple[str, Any] | None:
    """Pass progress on until the outcome comes; None where the child ended without one."""
    while (header := child.read(8)) is not None:
        data = child.read(struct.unpack("<Q", header)[0])
        if data is None:  # it was killed while it sent
            return None
        with without_collection():
            kind, value = pickle.loads(data)
        if kind != "progress":
            return kind, value
        progress(*value)
    return None
