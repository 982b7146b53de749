"""The text of an out-of-memory error, read: what its numbers mean, where it was raised, what to try.

The messages are those of torch 1.0 to 2.13 (c10/cuda/CUDACachingAllocator.cpp), in a log or not; other errors
that a lack of memory causes are rows of OTHERS. No GPU and no torch are needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from oomph.errors import place
from oomph.units import GiB, KiB, MiB, TiB, format_bytes

_UNITS = {"bytes": 1, "b": 1, "kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB}
_UNITS |= {"kb": KiB, "mb": MiB, "gb": GiB, "tb": TiB}  # of old messages, which mean the same
_SIZE = r"([\d.]+ ?(?:bytes|[KMGT]i?B|B))"
_NUMBERS = {
    "requested": rf"[Tt]ried to allocate {_SIZE}|Requested\s*: {_SIZE}",
    "capacity": rf"total capac\w* of {_SIZE}|{_SIZE} total capacity|Device limit\s*: {_SIZE}",
    "free": rf"of which {_SIZE} is free|{_SIZE} free|Free \(according to CUDA\)\s*: {_SIZE}",
    "allocated": (
        rf"{_SIZE} is allocated by PyTorch|{_SIZE} already allocated|Currently allocated\s*: {_SIZE}"
    ),
    "unused": rf"{_SIZE} is reserved by PyTorch but unallocated",
    "pools": rf"with {_SIZE} allocated in private pools",
    "in_use": rf"this process has {_SIZE} memory in use",
    "allowed": rf"{_SIZE} allowed",
}
_ROUNDED = 48 * MiB  # sums of sizes with two decimals are this inexact
_RESERVED = rf"{_SIZE} reserved in total|{_SIZE} cached"  # before torch 2.1
_OTHER = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_OUT_OF_MEMORY = re.compile(r"(?:CUDA|HIP|XPU) out of memory\b|Allocation on device \d* ?would exceed")
_RANK = re.compile(r"^\s*\[(?:rank|default)?(\d+)(?:,\d+)?\](?:<std\w+>)?:? ?", re.M)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_FRAMES = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>[^\n]+))?'
    r"|Cell In ?\[(?P<cell>\d+)\], line (?P<cell_line>\d+)"
    r"|(?:File |│ )(?P<file2>[^\s:]+):(?P<line2>\d+),? in (?P<function2>[\w<>.]+)"
)
_LIBRARY = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3|^<frozen|[/\\]torch[/\\](?:nn|optim|utils)"
)
# What the program was doing: the first row that matches a frame, from the innermost on.
_PHASES = (
    (r"/optim/(?!lr_scheduler)", "the optimizer step"),
    (r"clip_grad", "gradient clipping"),
    (r"utils/checkpoint\.py .*(?:unpack|recompute|backward)", "backward, where a checkpoint is recomputed"),
    (r"(?:autograd/(?:graph|__init__)\.py|torch/_tensor\.py) .*(?:backward|_engine)", "backward"),
    (r"nn/modules/module\.py (?:_apply|convert|to|cuda)$", "moving the model to the GPU"),
    (r"modeling_utils\.py .*(?:load|pretrained)|serialization\.py|load_state_dict", "loading the model"),
    (r"fsdp/|_fully_shard/", "gathering parameters of FSDP"),
    (r" \w*(?:evaluat|validat|eval_|prediction_step)\w*$", "evaluation"),
    (r" (?:generate|_sample)$", "generation"),
    (r" \w*(?:loss|cross_entropy)\w*$|/loss\w*\.py ", "the loss"),
    (r"nn/modules/module\.py (?:_call_impl|_wrapped_call_impl)$| forward$", "forward"),
)


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def is_own(self) -> bool:
        """Not of an installed library."""
        return _LIBRARY.search(self.file) is None

    @property
    def place(self) -> str:
        return place(PurePath(self.file).name, self.line)


@dataclass(frozen=True, slots=True)
class ErrorText:
    """Sizes in bytes; None where the text does not have them."""

    kind: str  # "cuda out of memory", or that of a row of OTHERS
    requested: int | None = None
    capacity: int | None = None
    free: int | None = None
    allocated: int | None = None  # by tensors
    unused: int | None = None  # reserved by PyTorch, and no tensor's
    pools: int | None = None  # of CUDA graphs, in `allocated`
    in_use: int | None = None  # by the process, outside of PyTorch as well
    allowed: int | None = None  # by a limit of the process
    others: tuple[tuple[int, int], ...] = ()  # process, bytes
    gpu: int | None = None
    rank: int | None = None
    messages: int = 1  # in the text: of several ranks, or one that was caught and retried
    frames: tuple[Frame, ...] = ()  # outermost first
    phase: str = ""
    advice: tuple[str, ...] = ()  # of a row of OTHERS

    @property
    def script(self) -> str | None:
        """The file that was started."""
        own = [frame.file.partition(" cell ")[0] for frame in self.frames if frame.is_own]
        return PurePath(own[0]).name if own else None

    @property
    def site(self) -> Frame | None:
        """The innermost line that is no library's."""
        return next((frame for frame in reversed(self.frames) if frame.is_own), None)

    @property
    def outside(self) -> int | None:
        """Of the process, beside PyTorch's allocator."""
        if self.in_use is None or self.allocated is None or self.unused is None:
            return None
        return max(0, self.in_use - self.allocated - self.unused)

    @property
    def elsewhere(self) -> int | None:
        """Of other processes, named or not."""
        if self.in_use is None or self.capacity is None or self.free is None:
            return sum(size for _, size in self.others) or None
        found = self.capacity - self.free - self.in_use
        return found if found > _ROUNDED else 0


@dataclass(frozen=True, slots=True)
class Other:
    """An error that a lack of memory causes, beside that of PyTorch's allocator."""

    kind: str
    error: str
    advice: tuple[str, ...]


_CUDA_ITSELF = (
    "CUDA itself had no memory left, beside PyTorch's allocator: for its context, a library or a kernel.",
    "`nvidia-smi` shows what other processes hold; where none does, PyTorch's allocator has taken the rest.",
    "Leave some for CUDA: torch.cuda.set_per_process_memory_fraction(0.95), or a smaller batch.",
    "`oomph predict train.py --gpu NAME` says what the program needs.",
)
_HOST = (
    "It is the memory of the host, not of the GPU.",
    "Data loaded whole, many DataLoader workers, pinned memory and weights that every rank loads take it.",
)
OTHERS = (
    Other(
        "triton: out of a kernel's resources",
        r"OutOfResources: out of resource|out of resource: (?:shared memory|tensor memory|threads)",
        (
            "A kernel of Triton asks for more shared memory or registers than one multiprocessor has; the "
            "GPU's memory is not full.",
            "Smaller blocks or fewer stages (num_stages) of that kernel make it fit; a smaller batch not.",
        ),
    ),
    Other(
        "NCCL: out of memory",
        r"(?i)nccl.{0,300}out of memory|ncclUnhandledCudaError",
        (
            "NCCL found no memory for its buffers, which are beside PyTorch's allocator.",
            "Leave some for it: torch.cuda.set_per_process_memory_fraction(0.95), or a smaller batch.",
            "`oomph predict train.py --ranks N` counts them.",
        ),
    ),
    Other("cuBLAS: no memory", r"CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)", _CUDA_ITSELF),
    Other(
        "cuDNN: no memory",
        r"CUDNN_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)|unable to find an engine",
        _CUDA_ITSELF,
    ),
    Other("CUDA error: out of memory", r"CUDA error: out of memory|cudaErrorMemoryAllocation", _CUDA_ITSELF),
    Other(
        "JAX or TensorFlow: out of memory",
        r"RESOURCE_EXHAUSTED|ResourceExhaustedError|OOM when allocating tensor|XlaRuntimeError",
        (
            "The error is of XLA or TensorFlow; oomph predicts PyTorch programs.",
            "Both reserve most of the GPU when they start: beside PyTorch in one process or on one GPU, set "
            "XLA_PYTHON_CLIENT_PREALLOCATE=false or TF_FORCE_GPU_ALLOW_GROWTH=true.",
        ),
    ),
    Other(
        "MPS: out of memory",
        r"MPS backend out of memory",
        ("The memory of an Apple GPU is the host's; oomph predicts CUDA, whose kernels take other sizes.",),
    ),
    Other(
        "shared memory of the host is full",
        r"[Bb]us error|insufficient shared memory|out of shared memory",
        (
            "DataLoader workers hand batches over in /dev/shm, which is full; the GPU's memory is not.",
            "In a container: docker run --shm-size=8g (or --ipc=host); else fewer workers.",
        ),
    ),
    Other("the host's memory is full", r"can't allocate memory|_ArrayMemoryError|^MemoryError", _HOST),
    Other(
        "the process was killed: the host's memory was full",
        r"oom[-_]kill|[Oo]ut of memory: Killed|\(SIGKILL\)|exitcode\s*:\s*-9\b|exit code 137|^\S*\s*Killed$",
        _HOST,
    ),
)


def read(text: str) -> ErrorText | None:
    """None for a text without such an error."""
    text = _ESCAPES.sub("", text)
    found = [match.start() for match in _OUT_OF_MEMORY.finditer(text)]
    if not found:
        for row in OTHERS:
            if match := re.search(row.error, text, re.M):
                frames = _frames(text[: match.start()])
                return ErrorText(row.kind, frames=frames, phase=_phase(frames), advice=row.advice)
        return None
    line = text[text.rfind("\n", 0, found[0]) + 1 : found[0]]
    rank = int(named[1]) if (named := _RANK.match(line)) else None
    if rank is not None:  # lines of the ranks are mixed
        own = (each for each in text.splitlines() if (match := _RANK.match(each)) and int(match[1]) == rank)
        text = "\n".join(_RANK.sub("", each) for each in own)
    begin = next(_OUT_OF_MEMORY.finditer(text)).start()
    return _of_torch(text[begin : begin + 3000], _frames(text[:begin]), rank, len(found))


def _of_torch(text: str, frames: tuple[Frame, ...], rank: int | None, messages: int) -> ErrorText:
    text = " ".join(text.split())
    if again := _OUT_OF_MEMORY.search(text, 10):
        text = text[: again.start()]
    sizes: dict[str, Any] = {name: _size(pattern, text) for name, pattern in _NUMBERS.items()}
    reserved = _size(_RESERVED, text)
    if sizes["unused"] is None and reserved is not None and sizes["allocated"] is not None:
        sizes["unused"] = max(0, reserved - sizes["allocated"])
    gpu = re.search(r"GPU (\d+)", text)
    others = tuple((int(process), _bytes(size)) for process, size in _OTHER.findall(text))
    reserved = (sizes["allocated"] or 0) + (sizes["unused"] or 0)
    if sizes["in_use"] is None and others and others[-1][1] >= reserved > others[-1][1] / 2:
        sizes["in_use"], others = others[-1][1], others[:-1]  # in a container, a process has another number
    return ErrorText(
        "cuda out of memory",
        **sizes,
        others=others,
        gpu=int(gpu[1]) if gpu else None,
        rank=rank,
        messages=messages,
        frames=frames,
        phase=_phase(frames),
    )


def _size(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return _bytes(next(filter(None, match.groups()))) if match else None


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([\d.]+) ?(\w+)", text)
    assert match is not None
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _frames(text: str) -> tuple[Frame, ...]:
    """Of the last traceback."""
    text = text[max(0, text.rfind("Traceback (most recent call last)")) :]
    frames = []
    for match in _FRAMES.finditer(text):
        file, line, function = (
            match["file"] or match["file2"],
            match["line"] or match["line2"],
            match["function"],
        )
        if match["cell"]:
            file, line = f"notebook.ipynb cell {match['cell']}", match["cell_line"]
        called = (function or match["function2"] or "<module>").strip()
        frames.append(Frame(file, int(line), called if called[0] == "<" else called.split(".")[-1]))
    return tuple(frames)


def _phase(frames: Sequence[Frame]) -> str:
    for frame in reversed(frames):
        text = f"{frame.file} {frame.function}"
        for pattern, phase in _PHASES:
            if re.search(pattern, text):
                return phase
    return ""


# --------------------------------------------------------------------------------------------- explanation

_NOTICED = 256 * MiB  # of other processes, or outside of the allocator: less is always there
_MUCH_OUTSIDE = 1.5 * GiB
_WHOLE = 0.99  # a limit above this share of the card is none
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def causes(error: ErrorText) -> list[tuple[str, str]]:
    """(name, sentence), the one that decides first."""
    if error.kind != "cuda out of memory":
        return [(error.kind, " ".join(error.advice))]
    return [*_decisive(error), *_beside(error)] or [_too_large(error)]


def _decisive(error: ErrorText) -> Iterator[tuple[str, str]]:
    asked, free, unused = error.requested, error.free or 0, error.unused or 0
    if asked is None:
        return
    if error.capacity is not None and asked > error.capacity:
        yield (
            "one tensor is larger than the GPU",
            f"The request alone, {format_bytes(asked)}, is more than the GPU has: look at the shapes of that "
            "line (all pairs, a table of the vocabulary, a wrong broadcast).",
        )
        return
    limit, reserved = error.allowed, (error.allocated or 0) + unused
    if limit is not None and limit < _WHOLE * (error.capacity or limit + 1) and reserved + asked > limit:
        yield (
            "a limit of the process",
            f"The process may reserve {format_bytes(limit)}, not the whole GPU: "
            "set_per_process_memory_fraction, or an option that calls it.",
        )
        return
    elsewhere = error.elsewhere or 0
    if elsewhere > _NOTICED and asked <= free + elsewhere:
        yield (
            "other processes",
            f"Other processes hold {format_bytes(elsewhere)} of the GPU{_named(error)}: without them the "
            "request would have been served.",
        )
    elif elsewhere > _NOTICED:
        yield "other processes", f"Other processes hold {format_bytes(elsewhere)} of the GPU{_named(error)}."
    if unused and asked <= free + unused:
        whole = f"{format_bytes(unused)} are reserved by PyTorch and not in use"
        where = "in blocks that are too small" if asked <= unused else f"and {format_bytes(free)} are free"
        yield (
            "fragmentation",
            f"{whole}, {where}: enough for {format_bytes(asked)}, were it in one piece. With {EXPANDABLE} "
            "free blocks grow together.",
        )
    elif asked > free + elsewhere:
        yield _too_large(error)


def _beside(error: ErrorText) -> Iterator[tuple[str, str]]:
    if (error.outside or 0) > _MUCH_OUTSIDE:
        yield (
            "memory outside of PyTorch",
            f"{format_bytes(error.outside or 0)} of the process are not PyTorch's: the CUDA context, NCCL, "
            "other libraries (TensorFlow and JAX reserve most of a GPU).",
        )
    if error.pools:
        yield (
            "CUDA graphs",
            f"{format_bytes(error.pools)} are in the private pools of CUDA graphs, which keep their memory.",
        )


def _too_large(error: ErrorText) -> tuple[str, str]:
    asked, free, unused = error.requested, error.free, error.unused
    if asked is None or free is None:
        return "too large", "The text has no sizes: a prediction of the program has them."
    if unused:
        room = f"free {format_bytes(free)} and reserved but unused {format_bytes(unused)}"
        text = (
            f"Without any fragmentation it would not fit either: {room} are together "
            f"about {format_bytes(asked - free - unused)} less than the {format_bytes(asked)} asked for."
        )
    else:
        text = f"{format_bytes(asked)} were asked for, and {format_bytes(free)} were free."
    if error.allocated is not None:
        text += f" Tensors hold {format_bytes(error.allocated)}: fewer or smaller ones are what helps."
    return "too large", text


def _named(error: ErrorText) -> str:
    if not error.others:
        return ""
    return f" ({', '.join(f'process {process}: {format_bytes(size)}' for process, size in error.others)})"


def numbers(error: ErrorText) -> list[tuple[int, str]]:
    """What the sizes of the message are."""
    rows = [
        (error.requested, "asked for"),
        (error.capacity, f"GPU {error.gpu} has" if error.gpu is not None else "the GPU has"),
        (error.allowed, "the process may reserve"),
        (error.allocated, "tensors of this process hold"),
        (error.unused, "PyTorch has reserved besides, in blocks that no tensor uses"),
        (error.outside, "this process holds outside of PyTorch: the CUDA context, libraries"),
        (error.elsewhere or None, f"other processes hold{_named(error)}"),
        (error.free, "is free"),
    ]
    return [(size, what) for size, what in rows if size is not None]


def summary(error: ErrorText) -> str:
    if error.kind != "cuda out of memory":
        return error.kind
    text = "out of GPU memory"
    if error.requested is not None:
        text += f": {format_bytes(error.requested)} were asked for"
    if error.site is not None:
        text += f" at {error.site.place}"
    if error.phase:
        text += f", in {error.phase}"
    if error.rank is not None:
        text += f"; on rank {error.rank}"
    if error.messages > 1:
        text += f"; the first of {error.messages} such messages"
    return text


def to_json(error: ErrorText) -> dict[str, Any]:
    found = asdict(error)
    found["others"] = [{"process": process, "bytes": size} for process, size in error.others]
    found["frames"] = [{"file": one.file, "line": one.line, "function": one.function} for one in error.frames]
    found["causes"] = [{"cause": name, "text": text} for name, text in causes(error)]
    found["advice"] = list(error.advice)
    return {"schema": 1, **found}
