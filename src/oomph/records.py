"""Plain data that the packages exchange: frozen, without torch, sizes in bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

K = TypeVar("K")
Progress = Callable[[str, float | None], None]  # what is being done, and the fraction done if known

Stage = Literal[
    "parameters",
    "gradients",
    "optimizer state",
    "weight averages",
    "batch",
    "forward activations",
    "loss",
    "backward",
    "optimizer step",
    "workspace",
    "evaluation",
]
Kind = Literal[
    "parameter",
    "buffer",
    "gradient",
    "optimizer state",
    "weight average",
    "batch",
    "activation",
    "temporary",
    "workspace",
]
Verdict = Literal["fits", "does not fit", "too close to call"]
CUDNN_SEARCH = "cudnn search"  # the op of what torch.backends.cudnn.benchmark allocates to try algorithms
STAGES: tuple[Stage, ...] = Stage.__args__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Site:
    """A line of the user's own source, or of an installed library that it calls."""

    file: str
    line: int
    function: str
    # The nearest line of the user's own above one of a library.
    caller: Site | None = field(default=None, compare=False, kw_only=True)


class Allocation(NamedTuple):
    """One request to the allocator: a tensor's storage, or an operator's workspace."""

    id: int
    bytes: int  # as requested; the allocator may hand out a larger block
    shape: tuple[int, ...]
    dtype: str
    op: str  # "aten.mm", "optimizer", "cublas workspace", ...
    module: str  # "model.layers.3.mlp"; "" outside every module
    site: Site | None  # for backward allocations, the forward line that caused them
    stage: Stage
    kind: Kind
    step: int  # 0 before the first step, then 1, 2, 3
    saved: bool = False  # made in forward and still alive when backward began
    during: Stage | None = None  # what the program was doing when it was made; `stage` says what it became
    stream: int = 0  # 0 is the default stream; the program's own ones are numbered as they are first used
    parent: int | None = None  # the allocation of the op's largest operand on the GPU
    call: int = 0  # calls of outermost modules that had ended before
    differentiable: bool = False  # autograd recorded the op
    most: int | None = None  # bytes that it may have, where they are estimated; it may also have none


class Event(NamedTuple):
    """One allocation, free or mark, in program order. Edit a list of these and replay it.

    `alloc` and `free` carry the id of an Allocation. `mark` carries a label, and an id of -1:
    "step 2", "forward", "backward", "optimizer", "empty_cache", "synchronize", "enter layers.3", "exit
    layers.3"; "record_stream" carries the id of the Allocation that a second stream uses.
    """

    action: Literal["alloc", "free", "mark"]
    id: int
    label: str = ""


class Alive(NamedTuple):
    """An allocation alive at some moment, with the bytes its block really takes."""

    bytes: int
    allocation: Allocation


class Moment(NamedTuple):
    """The allocator's state after one event."""

    event: int
    allocated: int
    reserved: int


def alive_after(
    events: Sequence[Event], timeline: Sequence[Moment], indices: Sequence[int]
) -> list[dict[int, int]]:
    """For each index, {id of an Allocation: bytes of its block} of what is alive after that event."""
    found: dict[int, dict[int, int]] = {index: {} for index in indices}
    alive: dict[int, int] = {}
    moments, allocated = iter(timeline), 0
    for index in range(max(indices, default=-1) + 1):
        action, id, _ = events[index]
        if action != "mark":
            now = next(moments).allocated
            if action == "alloc":
                alive[id] = now - allocated
            else:
                del alive[id]
            allocated = now
        if index in found:
            found[index] = dict(alive)
    return [found[index] for index in indices]


@dataclass(frozen=True, slots=True)
class Peak:
    """The high-water mark: tensors / caching allocator / plus the CUDA context."""

    allocated: int
    reserved: int
    device: int
    step: int = 0
    stage: Stage | None = None  # what the program was doing at the peak
    site: Site | None = None


@dataclass(frozen=True, slots=True)
class StepPeak:
    """The high-water mark of one optimizer step, and what was left after it."""

    step: int
    allocated: int
    reserved: int
    end: int
    device: int = 0  # reserved, and the CUDA context


class BatchTensor(NamedTuple):
    """A tensor of the traced batch. What a prediction holds for follows from its shape."""

    name: str  # its key in a Workload's batch; "" where the program moved it to the GPU
    shape: tuple[int, ...]
    dtype: str


class EmbeddingUse(NamedTuple):
    """A table that the program looks rows up in, and how many of its first rows the known indices reach."""

    module: str
    rows: int
    used: int


@dataclass(frozen=True, slots=True)
class Holder:
    """A line that keeps tensors of earlier steps or calls alive, such as `history.append(loss)`."""

    site: Site
    ids: frozenset[int]  # allocations that the container or variable holds itself
    graph: bool  # it holds results of autograd, and with them what their graph saved
    recurrent: bool = False  # it computes the next value from the last, as `state = cell(x, state)`
    loops: bool = True  # it is in a loop without a backward pass, so one step runs it several times


class DimensionNames:
    """What `--sizes` calls the dimensions of batch tensors, asked for in the order in which they are moved.

    Ids and masks are [B, T], and what is as long in a later tensor is T, too: [B, T, F], [B, 1, T, T].
    Images are [B, C, H, W], their masks [B, H, W]. Others have no name, "": floats may be [B, T, F] as well
    as audio [B, C, T]. With `guess`, T is their second dimension, or the third if the second is 1 or 2;
    beside ids of another length it is "T of floats".
    """

    def __init__(self, guess: bool = False) -> None:
        self._guess = guess
        self.guessed: tuple[int, ...] = ()  # shape of the last tensor whose T is a guess
        self.length: int | None = None  # T of the last tensor that has it
        self._image: tuple[int, ...] = ()  # H and W of the last image
        self._volume: tuple[int, ...] = ()  # the last three sizes of the last volume or video

    def of(self, shape: Sequence[int], dtype: str) -> list[str]:
        sizes, is_mask = tuple(shape[1:]), "float" not in dtype
        names, length = ["B", *[""] * len(sizes)][: len(shape)], self.length
        if len(sizes) > 3:
            self._volume = sizes[-3:]
        elif len(sizes) == 3:
            has_channels = not is_mask or "uint8" in dtype or sizes[0] == 1
            if sizes[2] == length and (sizes[0] == 1 or sizes[1] == length):
                names[2:] = ["T" if size == length else "" for size in sizes[1:]]
            elif has_channels and sizes[2] > 4 and sizes != self._volume:  # not [B, H, W, C]
                names[1:] = "C", "H", "W"
                self._image = self._image if is_mask and sizes[0] == 1 else sizes[1:]
        elif len(sizes) == 2 and (sizes == self._image or self._is_label_map(sizes, dtype)):
            names[1:] = "H", "W"
        elif sizes:
            is_ids = is_mask and len(sizes) == 1 and sizes[0] > 1
            guessed = length is None or bool(self.guessed)
            if length not in sizes and (self._guess or is_ids):
                length = sizes[-1] if sizes[0] <= 2 else sizes[0]
                if is_ids or guessed:
                    self.length, self.guessed = length, () if is_ids else tuple(shape)
            name = "T" if length == self.length else "T of floats"
            names[1:] = [name if size == length else "" for size in sizes]
            if len(sizes) == 2 and sizes[0] == length and not (is_mask and sizes[1] == length):
                names[2] = "F"
        return names

    def _is_label_map(self, sizes: tuple[int, ...], dtype: str) -> bool:
        """Whether [B, N, N] is the mask of images that come after it: class numbers, before anything else."""
        return not self._image and self.length is None and sizes[0] == sizes[1] and "int" in dtype


def named_shapes(batch: Sequence[BatchTensor]) -> list[str]:
    """`[B=8, T=512]` for each tensor."""
    names, texts = DimensionNames(), []
    for one in batch:  # images may come after their masks
        names.of(one.shape, one.dtype)
    for one in batch:
        named = zip(names.of(one.shape, one.dtype), one.shape, strict=True)
        texts.append(f"[{', '.join(f'{name}={size}' if name else str(size) for name, size in named)}]")
    return texts


@dataclass(frozen=True, slots=True)
class Note:
    """Something the trace could not know, or that the reader should."""

    text: str
    site: Site | None = None


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """What one part of a step asks of the GPU. Flops are by the rate at which they run."""

    half_flops: float = 0.0  # 16-bit products, on tensor cores
    tf32_flops: float = 0.0  # 32-bit products that may be rounded to TF32: convolutions, by default
    single_flops: float = 0.0  # 32-bit products that may not
    double_flops: float = 0.0
    bytes: int = 0  # read and written by kernels
    launches: int = 0
    to_host: int = 0  # bytes copied
    to_device: int = 0
    sent: int = 0  # bytes to other ranks
    seconds: float = 0.0  # the GPU is busy, copies apart; 0 where the card's rates are unknown

    @property
    def flops(self) -> float:
        return self.half_flops + self.tf32_flops + self.single_flops + self.double_flops


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one step by its parts. What a checkpoint recomputes falls into the backward pass."""

    forward: PhaseWork = PhaseWork()
    backward: PhaseWork = PhaseWork()
    optimizer: PhaseWork = PhaseWork()
    host_seconds: float = 0.0  # that an eager program takes to start all of it

    @property
    def phases(self) -> tuple[PhaseWork, ...]:
        return self.forward, self.backward, self.optimizer

    @property
    def flops(self) -> float:
        return sum(phase.flops for phase in self.phases)

    @property
    def bytes(self) -> int:
        return sum(phase.bytes for phase in self.phases)

    @property
    def launches(self) -> int:
        return sum(phase.launches for phase in self.phases)

    @property
    def sent(self) -> int:
        return sum(phase.sent for phase in self.phases)

    @property
    def gpu_seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)


@dataclass(frozen=True, slots=True)
class Growth:
    """What every step leaves behind, and the line that made most of it. Or what every call of a model does,
    and its line: past the limit the program was stopped."""

    bytes: int
    site: Site | None
    calls: int = 0  # each of which left as much behind; 0: steps do


SIZES_DEPEND_ON_VALUES = "sizes depend on values"
WORKSPACES_ESTIMATED = "the workspaces of convolutions, which cuDNN chooses, are estimated"


@dataclass(frozen=True, slots=True)
class Interval:
    """What may be needed, where sizes depend on values, steps differ, workspaces are estimated
    or a compiled program is traced as eager (prediction/intervals.py)."""

    low: Peak
    high: Peak
    reason: str = SIZES_DEPEND_ON_VALUES


@dataclass(frozen=True)
class AllocatorSettings:
    """The settings of PYTORCH_CUDA_ALLOC_CONF that the simulated allocator models."""

    expandable_segments: bool = False
    max_split: int | None = None  # bytes: a block of this size or more is never split; None: no such size

    def __str__(self) -> str:
        """As PYTORCH_CUDA_ALLOC_CONF takes them; empty for the defaults."""
        parts = ["expandable_segments:True"] if self.expandable_segments else []
        parts += [f"max_split_size_mb:{self.max_split >> 20}"] if self.max_split is not None else []
        return ",".join(parts)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The memory of a training step over time, and every tensor alive at its peak."""

    gpu: str | None  # catalogue name, or the size that was given
    gpu_title: str
    capacity: int | None  # what the card has, as torch reports it; None when no GPU was named
    limit: int | None  # what the allocator may reserve: capacity less context, or --max
    verdict: Verdict | None  # None when there is no limit
    refused: Allocation | None  # the request that the limited allocator could not serve
    peak: Peak
    steps: tuple[StepPeak, ...]
    at_peak: tuple[Alive, ...]  # largest first; the bytes add up to peak.allocated
    timeline: tuple[Moment, ...]
    events: tuple[Event, ...]
    allocations: tuple[Allocation, ...]  # by id
    allocator: AllocatorSettings = AllocatorSettings()  # with which the events were replayed
    freed_at_last: tuple[tuple[int, int], ...] = ()  # buckets of DDP, with the event before which each is
    notes: tuple[Note, ...] = ()
    seconds: float = 0.0  # that the prediction took
    compile_seconds: float = 0.0  # of these, to load and run Dynamo, AOTAutograd and Inductor
    step_seconds: float | None = None  # of the last step on that GPU, by a roofline; None: rates unknown
    release_seconds: float = 0.0  # of these, to release cached memory in every step
    work: Work = Work()
    growth: Growth | None = None  # None: later steps leave no more behind than those before
    assumptions: tuple[Note, ...] = ()  # guesses that change what was traced: a loop cut, no backward pass
    interval: Interval | None = None  # None: nothing that decides the peak is unknown
    fixes: tuple[str, ...] | None = None  # that apply to the model of a script, where they were asked for
    without_search: Peak | None = None  # where it is not the peak: see `needed`
    margin: int = 0  # bytes by which the needed memory may be off, either way
    batch: tuple[BatchTensor, ...] = ()  # distinct ones, in the order of the program; () where unknown
    sizes: tuple[tuple[str, int], ...] = ()  # of the Workload
    dimensions: tuple[tuple[str, int], ...] = ()  # of the model's config: ("V", 50257), ("d", 768)
    embeddings: tuple[EmbeddingUse, ...] = ()
    holders: tuple[Holder, ...] = ()  # those that hold most come first
    ranks: int = 1  # of the step; the figures are those of the first
    pinned: int = 0  # bytes of host memory, the most that the program has pinned at once
    nccl: int = 0  # bytes of NCCL's buffers, estimated; in peak.device, beside the allocator
    recorded: str = ""  # the memory snapshot of a real run that it was read from, instead of predicted

    @property
    def needed(self) -> Peak:
        """What the step cannot do without: the peak, but for what cuDNN's search takes while it is free."""
        return self.without_search or self.peak

    @property
    def fits(self) -> bool | None:
        """Whether the step fits with its margin; None when there is no limit."""
        return None if self.verdict is None else self.verdict == "fits"

    def __repr__(self) -> str:
        """One line: `Prediction(fits: needs 8.36 GiB of 23.56 GiB on RTX 3090, 3 steps, 12,345 events)`."""
        if self.recorded:
            ended = "ran out of memory" if self.refused is not None else "peaked"
            return (
                f"Prediction(recorded in {self.recorded}: {ended} at {self.peak.allocated / 2**30:.2f} GiB)"
            )
        needs = f"needs {self.needed.device / 2**30:.2f} GiB"
        if self.capacity is not None:
            needs += f" of {self.capacity / 2**30:.2f} GiB on {self.gpu_title}"
        elif self.limit is not None:
            needs += f", limit {self.limit / 2**30:.2f} GiB"
        verdict = f"{self.verdict}: " if self.verdict else ""
        return f"Prediction({verdict}{needs}, {len(self.steps)} steps, {len(self.events):,} events)"

    def __reduce__(self) -> tuple[Any, ...]:
        """By columns: to pickle as many named tuples one by one takes five times as long."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return _from_columns, ({**values, **{name: tuple(zip(*values[name])) for name in _ROWS}},)  # noqa: B905

    def by_stage(self) -> list[tuple[Stage, int]]:
        """Bytes at the peak per stage, in the order of STAGES."""
        totals = _sum((alive.allocation.stage, alive.bytes) for alive in self.at_peak)
        return [(stage, totals[stage]) for stage in STAGES if stage in totals]

    def by_module(self) -> list[tuple[str, int]]:
        """Bytes at the peak per module path, largest first."""
        return _sum((alive.allocation.module, alive.bytes) for alive in self.at_peak).most_common()

    def by_line(self) -> list[tuple[Site, int]]:
        """Bytes at the peak per source line, largest first; with the caller of most of them."""
        return bytes_by_line((alive.allocation.site, alive.bytes) for alive in self.at_peak).most_common()


_ROWS: dict[str, Any] = {"timeline": Moment, "events": Event, "allocations": Allocation}


def _from_columns(values: dict[str, Any]) -> Prediction:
    # A named tuple's own constructor is a function in Python.
    rows = {
        name: tuple(map(partial(tuple.__new__, row), zip(*values[name], strict=True)))
        for name, row in _ROWS.items()
    }
    return Prediction(**{**values, **rows})


@dataclass(frozen=True, slots=True)
class Finding:
    """A pattern that owns bytes at the peak."""

    pattern: str  # "logits", "attention matrices", "optimizer state"
    bytes: int
    formula: str  # "3 x B*T*V float32 (B=8, T=1024, V=50257)"
    growth: str  # "x4 when T doubles"
    sites: tuple[Site, ...]  # the first is the line to change; then those with the most bytes
    fixes: tuple[str, ...]  # names of fixes, the most effective first
    advice: str  # what causes it, and what to do, in one sentence


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the peak consists of, the cause first."""

    prediction: Prediction
    findings: tuple[Finding, ...]
    notes: tuple[Note, ...] = ()

    def __repr__(self) -> str:
        rows = (f"{one.pattern} {one.bytes / 2**20:.1f} MiB" for one in self.findings[:3])
        return f"Diagnosis({', '.join(rows)}{', ...' if len(self.findings) > 3 else ''})"


@dataclass(frozen=True, slots=True)
class Measurement:
    """The same figures, read from a real GPU."""

    gpu_title: str
    torch: str
    peak: Peak
    steps: tuple[StepPeak, ...]
    before: int  # allocated before the first step: model and batch
    seconds_per_step: float = 0.0
    extra: dict[str, str] = field(default_factory=dict)


class OpRow(NamedTuple):
    """One op, in program order, with the allocator's bytes around it.

    Memory freed between two ops shows as the difference between one row's `after` and the next
    row's `before`.
    """

    op: str  # "aten.mm"
    outputs: str  # "f32[8,512,768]"
    before: int  # allocated bytes when the op began
    after: int  # when it had returned
    high: int  # the highest in between
    phase: str = ""  # "step 1 forward"
    n_allocs: int = 0
    requested: int = 0  # bytes asked for, before the allocator's rounding


@dataclass(frozen=True, slots=True)
class OpDifference:
    """An op whose bytes differ. `bytes` is measured less predicted."""

    op: str
    aspect: str
    times: int
    bytes: int


FixKind = Literal["exact", "precision", "training", "compile"]
COMPILED_STEP_TIMES = "step times under torch.compile have not been compared with measured ones"
FIX_KINDS: tuple[FixKind, ...] = FixKind.__args__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class FixUse:
    """A fix and its options: all that is needed to apply it. Can be stored as JSON."""

    fix: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    model_id: str = field(default="", compare=False)  # of the only model that it is for; "": any


@dataclass(frozen=True)
class Proposal:
    """A fix that would lower the peak of a workload: where, by how much, and what it costs."""

    fix: str
    kind: FixKind
    changes: str  # what it changes, in one sentence
    where: tuple[str, ...]  # modules; or "loss", "optimizer", "batch", "allocator"
    options: Mapping[str, Any]
    note: str = ""  # conditions the user should read first
    peak: Peak | None = None  # predicted, with the fix
    saving: int | None = None  # bytes that the allocator reserves less, at the peak
    slowdown: float | None = None  # a step's time with the fix over that without, by a roofline
    verdict: Verdict | None = None  # with the fix, on the prediction's card; None: no card, or not predicted
    condition: str = ""  # that the user must check for the fix to be exact; "" where there is none

    @property
    def fits(self) -> bool | None:
        return None if self.verdict is None else self.verdict == "fits"

    @property
    def use(self) -> FixUse:
        return FixUse(self.fix, self.options)


@dataclass(frozen=True)
class PredictedFixes:
    """A set of fixes, with what was predicted for a step that has them."""

    fixes: tuple[FixUse, ...]
    peak: Peak
    fits: bool
    step_seconds: float
    slowdown: float  # a step's time over that without fixes, by a roofline
    host_bytes: int = 0  # pinned host memory that it needs
    estimated: bool = False  # from predictions of each fix by itself, not of all together
    margin: int = 0  # bytes by which the peak may be off; `fits` allows for them
    too_close: bool = False  # to call


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest batch or the longest sequence that fits."""

    size: int  # 0: not even 1
    exact: bool  # False: more may fit; the search was ended
    fails: bool = False  # the program cannot run with more


@dataclass(frozen=True)
class FailedFixes:
    """Fixes that were tried, and why there is no prediction with them."""

    fixes: tuple[FixUse, ...]
    reason: str


@dataclass(frozen=True)
class Plan:
    """The cheapest set of fixes that was found for a card, or the one that comes closest."""

    fixes: tuple[FixUse, ...]
    fits: bool
    gpu: str  # catalogue name, or the size that was given
    gpu_title: str
    limit: int  # what the allocator may reserve
    before: PredictedFixes  # the step as it was given
    after: PredictedFixes
    allowed: tuple[FixKind, ...]  # kinds of fixes that were tried
    model: str = ""  # class and number of parameters of the model: "GPT2LMHeadModel, 124,439,808 parameters"
    front: tuple[PredictedFixes, ...] = ()  # what was predicted and is best for its time, fastest first
    conditions: tuple[str, ...] = ()  # that the user must check for its fixes to be exact
    remarks: tuple[str, ...] = ()  # what its fixes assume and change: "micro_batches: dropout draws ..."
    needs: tuple[FixKind, ...] = ()  # kinds that would have to be allowed to fit; () where none is enough
    predictions: int = 0  # that the search took
    seconds: float = 0.0
    model_id: str = ""  # class, number of parameters, and a hash of their names and shapes
    reason: str = ""  # why no fix can be applied; or what takes the `least` bytes
    is_budget: bool = False  # `limit` is less than the card has
    is_max: bool = False  # `limit` was given for the allocator alone, without the CUDA context
    growth: int = 0  # bytes that every step leaves behind, with any fix
    notes: tuple[Note, ...] = ()  # on the prediction without fixes
    least: int = 0  # bytes that no fix of the allowed kinds saves, where they exceed `limit`
    failed: tuple[FailedFixes, ...] = ()  # what could not be predicted: it may be enough
    rows: int = 0  # of the batch; known where `rows_that_fit` is
    rows_that_fit: int | None = None  # with these fixes, where the plan does not fit: a part of `rows`
    no_rows: str = ""  # why that is not known
    # By "batch" or "sequence", if asked for; each "without" fixes and "with" these.
    largest: Mapping[str, Mapping[str, Largest]] = field(default_factory=dict)

    def __repr__(self) -> str:
        names = ", ".join(use.fix for use in self.fixes) or "no fixes"
        sizes = f"{self.before.peak.device / 2**30:.2f} -> {self.after.peak.device / 2**30:.2f} GiB"
        verdict = "fits" if self.fits else "does not fit"
        return f"Plan({verdict} {self.gpu_title}: {names}; {sizes}, time x{self.after.slowdown:.2f})"


@dataclass(frozen=True)
class CardCost:
    """One card on which a step fits, without fixes. Estimated: the step's time is that of a roofline."""

    gpu: str
    title: str
    tokens_per_second: float | None  # None: the card's rates are not known
    per_million_tokens: float | None = None  # in the money of the price table


@dataclass(frozen=True)
class Rung:
    """A model with one method on a card, without fixes and with the cheapest that fit."""

    method: str
    failed: str = ""  # why there is no prediction; then nothing below is known
    peak: Peak | None = None  # without fixes
    verdict: Verdict | None = None  # None: no card was given
    plan: Plan | None = None
    batch: Largest | None = None  # that fits at the length that was asked for, with the plan; None: none does
    length: Largest | None = None  # likewise, at the batch that was asked for
    cards: tuple[CardCost, ...] = ()  # the smallest first; with prices, the cheapest
    ranks: int = 0  # cards of this kind that are enough with FSDP2; 0: not known, or none
    rank_peak: Peak | None = None  # of one of the last number of ranks that was tried
    no_ranks: str = ""
    reason: str = ""  # why there is no plan, or no largest batch or length, where a search failed

    @property
    def fits(self) -> bool:
        """With the fixes of the plan."""
        return self.plan is not None and self.plan.fits


@dataclass(frozen=True)
class Ladder:
    """What of a model fits on a card: one rung for each method."""

    model: str
    gpu: str | None  # catalogue name, or the size that was given
    gpu_title: str
    limit: int | None  # what the allocator may reserve
    context: int  # bytes beside the allocator
    batch: int
    tokens: int  # of a row
    rungs: tuple[Rung, ...]
    seconds: float

    @property
    def fits(self) -> bool:
        return any(rung.fits for rung in self.rungs)


@dataclass(frozen=True)
class Difference:
    """The largest difference of a tensor with and without fixes, relative to its largest entry without."""

    name: str  # "loss of step 1", "gradient of blocks.0.mlp.fc.weight", "head.weight after 2 steps"
    error: float


@dataclass(frozen=True)
class Verification:
    """A comparison of a Workload with and without fixes."""

    fixes: tuple[str, ...]
    kind: FixKind  # the least exact of the fixes'
    differences: tuple[Difference, ...]  # largest first
    tolerance: float | None  # None: the fixes change the numbers by design
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether all differences are finite and, for exact fixes, within the tolerance."""
        most = float("inf") if self.tolerance is None else self.tolerance
        return all(each.error <= most and each.error < float("inf") for each in self.differences)

    def __repr__(self) -> str:
        largest = f", largest {self.differences[0].error:.1e}" if self.differences else ""
        verdict = "holds" if self.holds else "does not hold"
        return (
            f"Verification({', '.join(self.fixes)}: {verdict}, {len(self.differences)} differences{largest})"
        )


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that a fix changed in a model."""

    fix: str
    where: str  # the module's path, or what else it belongs to
    what: str


def bytes_by_line(pairs: Iterable[tuple[Site | None, int]]) -> Counter[Site]:
    """Each line with the caller of most of its bytes."""
    known = [(site, size) for site, size in pairs if site is not None]
    of_callers = _sum(((site, site.caller), size) for site, size in known if site.caller is not None)
    callers = {site: caller for (site, caller), _ in reversed(of_callers.most_common())}
    totals = _sum(known)
    return Counter({replace(site, caller=callers.get(site)): size for site, size in totals.items()})


def _sum(pairs: Iterable[tuple[K, int]]) -> Counter[K]:
    totals: Counter[K] = Counter()
    for key, size in pairs:
        totals[key] += size
    return totals
