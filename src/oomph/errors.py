"""The errors and warnings that users see. Each error carries the exit status of the command line."""

import errno
import os
import sys
import sysconfig
import traceback
from enum import IntEnum
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

_OWN_FOLDERS: tuple[str, ...] = ()
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_HOST_MEMORY = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed")
# Packages that need a GPU to be built or to be imported, and some that only seem to: what to do.
_WITHOUT_GPU = {
    "apex": "it is built for CUDA: torch.optim.AdamW(fused=True), torch.nn.RMSNorm and torch.amp replace it",
    "transformer_engine": "it is built for CUDA: predict with torch.nn's layers in bf16, of the same shapes",
    "flash_attn_interface": "it is built for Hopper: predict with flash_attn, or with PyTorch's attention",
    **dict.fromkeys(
        ("deepspeed", "unsloth", "unsloth_zoo"),
        "it is Python, and runs on the fake GPU: install it here (DS_BUILD_OPS=0 builds no CUDA code)",
    ),
    **dict.fromkeys(
        ("liger_kernel", "fla"),
        "its kernels are written in Triton, and are not run: install it here with Triton (Linux)",
    ),
    **dict.fromkeys(
        ("vllm", "sglang", "tensorrt", "torch_tensorrt"),
        "it serves models and needs a GPU: predict the part of the program that trains",
    ),
    **dict.fromkeys(
        ("cupy", "pycuda", "cudf", "cuml", "nvidia", "kaolin"),
        "it needs a GPU, and its memory is not torch's: prepare data without it to predict the training",
    ),
    **dict.fromkeys(
        ("selective_scan_cuda", "flash_attn_2_cuda", "causal_conv1d_cuda", "dropout_layer_norm"),
        "it is the compiled part of a package that oomph stands in for: call the package's Python functions",
    ),
}
_NO_GPU = (
    *("Torch not compiled with CUDA enabled", "Found no NVIDIA driver", "No CUDA GPUs are available"),
    "Your setup doesn't support bf16/gpu",  # TrainingArguments of transformers
)


class ExitStatus(IntEnum):
    """The exit statuses of the command line."""

    FITS = 0  # also: verified, trained, listed
    DOES_NOT_FIT = 1  # also: not verified
    USER_ERROR = 2
    PROGRAM_ERROR = 3  # the traced program failed
    BUG = 70  # in oomph
    INTERRUPTED = 130  # as a shell reports Ctrl-C


class OomphError(Exception):
    """Base of all errors that oomph raises on purpose; the message is one line."""

    exit_status = ExitStatus.USER_ERROR

    def __reduce__(self) -> tuple[Any, ...]:
        # A prediction's error comes from another process. Arguments of a subclass may differ from `args`.
        return _restore_error, (type(self), self.args, self.__dict__)


def _restore_error(cls: type[OomphError], args: tuple[Any, ...], attributes: dict[str, Any]) -> OomphError:
    error = cls.__new__(cls, *args)  # sets args, which are the message
    error.__dict__.update(attributes)
    return error


class UserError(OomphError):
    """The user's mistake: the message says what was given and what is valid."""


class ArgumentError(UserError, ValueError):
    """An argument of one of our functions is not valid; also a ValueError."""


class UnknownOp(OomphError):
    """An op that a prediction cannot follow."""

    exit_status = ExitStatus.BUG

    def __init__(self, op: str, site: Any) -> None:
        where = f" at {place(site.file, site.line)}" if site is not None else ""
        super().__init__(
            f"{op}{where}: it has a kernel on CUDA alone, and oomph no rule for it; please report it"
        )


class ProgramError(OomphError):
    """The user's program itself failed: its own exception, line and traceback."""

    exit_status = ExitStatus.PROGRAM_ERROR
    assumed: tuple[str, ...] = ()  # conditions on unknown values that the program branched on before
    last_condition: tuple[str, int, int, bool] | None = None  # file, line, count and answer of the last
    forbidden: tuple[str, ...] = ()  # what it may not do in a prediction, as "network"
    lacked: frozenset[str] = frozenset()  # packages, for which there are stand-ins
    share: tuple[str, int, Fraction] | None = None  # of a mask that a line selects: it would not have failed

    def __init__(
        self, message: str, file: str | None = None, line: int | None = None, traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.file = file
        self.line = line
        self.traceback = traceback  # without our frames and torch's

    @classmethod
    def of(cls, error: BaseException) -> "ProgramError":
        """An exception of the program, with the innermost line that is the user's."""
        if isinstance(error, SystemExit):
            text = f"the program ends the process (SystemExit: {safe_text(error.code)})"
            text += missing_arguments(error)
        else:
            # The text of a SyntaxError repeats the file and line.
            text = safe_text(error.msg if isinstance(error, SyntaxError) else error).strip()
            name = type(error).__name__
            text = f"{name}: {text}" if text else name
            text += missing_package(error)
        return cls(text, *user_line(error), program_traceback(error))


def missing_package(error: BaseException) -> str:
    """What to do about a package that is not here because there is no GPU; of a stand-in, what it lacks."""
    if not isinstance(error, ImportError) or error.name is None:
        return ""
    package = error.name.partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None)
    if file is not None and file.startswith(_OWN_FOLDERS) and package != "oomph":
        return f"; oomph's stand-in for {package}, which is not installed here, lacks it: please report it"
    advice = _WITHOUT_GPU.get(package) if isinstance(error, ModuleNotFoundError) else None
    return f"; {advice}" if advice else ""


def missing_arguments(error: SystemExit) -> str:
    """A hint where argparse may have ended the process."""
    hint = "; arguments of a script come after --: `oomph predict train.py -- --lr 1e-3`"
    return hint if error.code == 2 else ""


def blame(error: BaseException) -> OomphError | None:
    """The error that the user sees where the program runs beside our code: what is no OomphError is the
    machine's or the program's; None for a bug in oomph."""
    if isinstance(error, OomphError):
        return error
    if is_out_of_host_memory(error):
        return environment_error(error)
    if isinstance(error, SystemExit) or _comes_from_program(error):
        return ProgramError.of(error)
    return environment_error(error)


def environment_error(error: BaseException) -> UserError | None:
    """What the machine refuses: a path, a full disk, memory. None for other exceptions."""
    if is_out_of_host_memory(error):
        return UserError("the host's memory is not enough; give smaller sizes")
    if not isinstance(error, OSError):
        return None
    if error.errno == errno.ENOENT and error.filename is None:
        return UserError("the current directory does not exist any more; change to another")
    reason = error.strerror or safe_text(error)
    return UserError(reason if error.filename is None else f"{reason}: {os.fsdecode(error.filename)!r}")


def is_out_of_host_memory(error: BaseException) -> bool:
    """Torch raises a RuntimeError with one of these texts."""
    if isinstance(error, RuntimeError):
        return any(text in safe_text(error) for text in _HOST_MEMORY)
    return isinstance(error, MemoryError)


def is_missing_gpu(error: BaseException) -> bool:
    """Whether torch or a trainer raised it because a program uses CUDA on a machine without a GPU."""
    kinds = (AssertionError, RuntimeError, ValueError)
    return isinstance(error, kinds) and safe_text(error).startswith(_NO_GPU)


def add_own_package(file: str) -> None:
    """`file`: the __init__.py of a package whose code is ours, not that of the program that calls it."""
    global _OWN_FOLDERS
    _OWN_FOLDERS = (*_OWN_FOLDERS, str(Path(file).resolve().parent) + os.sep)


add_own_package(__file__)


def _comes_from_program(error: BaseException) -> bool:
    """Whether the innermost frame, beside those of torch and of Python's own library, is not ours."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    own = [file for file in frames if not _is_torch(file) and not _is_standard_library(file)]
    return bool(own) and not own[-1].startswith(_OWN_FOLDERS)


def place(file: str, line: int) -> str:
    """`train.py:7`; `exp.ipynb cell 3, line 2` in a cell of a notebook."""
    return f"{file}, line {line}" if ".ipynb cell " in file else f"{file}:{line}"


def user_line(error: BaseException) -> tuple[str | None, int | None]:
    """File and line of the user's code in which `error` was raised."""
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not _is_internal(frame.filename) and not _is_standard_library(frame.filename)
    ]
    return (frames[-1].filename, frames[-1].lineno) if frames else (None, None)


def program_traceback(error: BaseException) -> str:
    """The traceback as the program's author wants it: without our frames and torch's."""
    try:
        summary = traceback.TracebackException.from_exception(error)
        _remove_internal_frames(summary)
        return "".join(summary.format())
    except Exception:  # an exception whose __str__ fails
        return ""


def _remove_internal_frames(summary: traceback.TracebackException) -> None:
    """In the whole chain of causes; those without a frame of the program are left out."""
    kept = [frame for frame in summary.stack if not _is_internal(frame.filename)]
    summary.stack = traceback.StackSummary.from_list(kept)
    for link in ("__cause__", "__context__"):
        chained = getattr(summary, link)
        if chained is not None:
            _remove_internal_frames(chained)
            if not chained.stack:
                setattr(summary, link, None)


def _is_internal(file: str) -> bool:
    return _is_torch(file) or file.startswith(("<frozen ", "<string>", *_OWN_FOLDERS))


def _is_torch(file: str) -> bool:
    return any(
        parent in ("site-packages", "dist-packages") and child in ("torch", "torchgen")
        for parent, child in pairwise(Path(file).parts)
    )


def _is_standard_library(file: str) -> bool:
    return file.startswith(_STANDARD_LIBRARY) and "-packages" + os.sep not in file


def safe_text(value: object) -> str:
    """`str(value)`; the program's own `__str__` may fail."""
    try:
        return str(value)
    except Exception:
        return f"(its text cannot be shown: {type(value).__name__}.__str__ fails)"


class FixWarning(UserWarning):
    """A fix leaves a part of the program as it is. The command line prints the message as one line."""
