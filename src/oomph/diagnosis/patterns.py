"""The patterns: what each allocation that is alive at the peak is an instance of.

The first of PATTERNS that applies owns the allocation; `avoidable` is the share of its bytes not needed.
The cause of a peak is the pattern with the most avoidable bytes, because parameters, gradients and optimizer
state are large in every training step and still not why this one does not fit. What grows with every step
counts several times over, because it fills any GPU in the end.
"""

from __future__ import annotations

import linecache
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from oomph.records import Allocation, Holder, Prediction, Site

_ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}
_FORWARD = ("forward activations", "loss", "evaluation")
_HALF = ("bfloat16", "float16")
_ELEMENTWISE = frozenset(
    "add sub mul div pow abs exp log sqrt neg relu gelu silu sigmoid tanh where clone copy maximum minimum "
    "masked_fill clamp square cos sin _to_copy eq ne lt gt le ge rsub threshold_backward bitwise_and "
    "native_dropout native_dropout_backward".split()
)
_BROADCASTS = frozenset("add sub rsub mul div pow maximum minimum where eq ne lt gt le ge".split())
_COPIES = frozenset(("clone", "repeat", "copy", "_to_copy", "native_dropout"))
_REDUCTIONS = frozenset(
    "sum mean norm linalg_vector_norm amax amin max min logsumexp prod var all any".split()
)
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm"))
_FILLS = frozenset("zeros zeros_like new_zeros empty new_empty full new_full ones ones_like".split())
_KINDS_OF_MODEL = ("parameter", "buffer", "gradient", "optimizer state", "weight average")
_KEPT = ("activation", "temporary", "gradient")
_LEAST_BUFFER = 64 << 10  # bytes; running statistics of norms are below
_LEAST_CLASSES = 32
_LEAST_USED = 16  # rows; ids that are all zero stand for data
_MIN_LOOP_RESULTS = 6  # results of one line in one call that make it a loop
_MIN_OLD_CALLS = 2  # earlier calls whose results are alive


@dataclass(frozen=True)
class Pattern:
    """`applies` is asked of allocations that no pattern before owns."""

    name: str
    applies: Callable[[PeakAnalysis, Allocation], bool]
    avoidable: float
    fixes: tuple[str, ...]
    advice: str


def base_op(op: str) -> str:
    """ "aten.mul.Tensor" -> "mul" """
    return op.removeprefix("aten.").split(".")[0]


def elements(one: Allocation) -> int:
    return one.bytes // _ITEM_BYTES.get(one.dtype, 1)


def _is_square(one: Allocation) -> bool:
    return len(one.shape) >= 2 and one.shape[-1] == one.shape[-2]


class PeakAnalysis:
    """What the patterns ask about a prediction, each computed once."""

    def __init__(self, prediction: Prediction) -> None:
        self.prediction = prediction
        self.all = prediction.allocations
        self.alive = [alive.allocation for alive in prediction.at_peak]
        self.failed: dict[str, str] = {}  # patterns whose rules failed, and how

    def parent(self, one: Allocation) -> Allocation | None:
        return None if one.parent is None else self.all[one.parent]

    # -- sizes ----------------------------------------------------------------------------------------

    @cached_property
    def batch_shape(self) -> tuple[int, ...]:
        """[B, T] of ids, the shape of other data, or [B] where the other dimensions are features."""
        named = [(one.shape, one.dtype) for one in self.prediction.batch if one.shape]
        made = [
            (one.shape, one.dtype)
            for one in self.all
            if one.parent is None and not one.module and one.kind in ("batch", "activation") and one.shape
        ]
        found = [each for each in named or made if each[0][0] == self.rows] or named or made
        ids = [each for each in found if each[1] == "int64" and len(each[0]) == 2]
        shape = max((shape for shape, _ in ids or found), key=math.prod, default=())
        return shape if ids or len(shape) > 2 else shape[:1]

    @cached_property
    def rows(self) -> int:
        """The batch size: what most activations have as their first dimension."""
        sizes = dict(self.prediction.sizes)
        if "B" in sizes:
            return sizes["B"]
        evaluates = self.prediction.peak.stage == "evaluation"
        computed = [
            one for one in self.all if (one.during == "evaluation" if evaluates else one.differentiable)
        ]
        given = {one.shape[0] for one in self.prediction.batch if one.shape}
        of_batch = [one for one in computed if one.shape and one.shape[0] in given]
        computed = [one for one in computed if one.module] or computed  # the model may be a single layer
        for likely in (of_batch, computed):
            for least in (3, 2):
                counts = Counter(one.shape[0] for one in likely if len(one.shape) >= least)
                if counts:
                    return counts.most_common(1)[0][0]
        return 1

    @cached_property
    def second(self) -> int | None:
        """What most activations [B, *, *] have as their second dimension."""
        shapes = [one.shape for one in self.all if one.differentiable and len(one.shape) == 3]
        counts = Counter(shape[1] for shape in shapes if shape[0] == self.rows)
        return counts.most_common(1)[0][0] if counts else None

    @cached_property
    def tokens(self) -> frozenset[int]:
        """Lengths of sequences."""
        sizes = dict(self.prediction.sizes)
        found = {sizes[name] for name in ("T", "S", "N", "L") if name in sizes}
        if not found and len(self.batch_shape) in (2, 3):
            found.add(self.batch_shape[1])
        if not found and self.second is not None:
            found.add(self.second)
        return frozenset(found | {size - 1 for size in found} | {self.rows * size for size in found}) - {0, 1}

    @cached_property
    def parameters(self) -> list[Allocation]:
        return [one for one in self.all if one.kind == "parameter"]

    @cached_property
    def weights(self) -> frozenset[tuple[int, int]]:
        """Shapes of matrices that are multiplied with, both ways round; not of tables."""
        tables = {one.module for one in self.prediction.embeddings}
        shapes = {one.shape for one in self.parameters if len(one.shape) == 2 and one.module not in tables}
        return frozenset(each for a, b in shapes if min(a, b) >= 16 for each in ((a, b), (b, a)))

    @cached_property
    def log_softmaxes(self) -> list[Allocation]:
        return [one for one in self.all if base_op(one.op) == "_log_softmax"]

    @cached_property
    def normalised(self) -> list[Allocation]:
        """What losses normalise over the last dimension; not attention matrices [B, ..., N, N]."""
        found = [one for one in self.log_softmaxes if len(one.shape) == 2]
        sums = (self.parent(one) for one in self.all if base_op(one.op) == "logsumexp")
        scores = [source for source in sums if source is not None and len(source.shape) >= 2]
        return found + [one for one in scores if len(one.shape) == 2 or not _is_square(one)]

    @cached_property
    def pairs(self) -> frozenset[int]:
        """Sizes of square scores of all samples for all, as contrastive losses normalise; not of a layer."""
        of_layers = {size for one in self.parameters for size in one.shape}
        square = {one.shape[-1] for one in self.normalised if _is_square(one)}
        return frozenset(size for size in square - of_layers if size % self.rows == 0)

    @cached_property
    def classes(self) -> frozenset[int]:
        """Sizes of vocabularies: what losses normalise over; and rows of tables that results have as well."""
        tables = {one.rows for one in self.prediction.embeddings} - self.tokens
        made = {one.shape[-1] for one in self.all if one.shape and base_op(one.op) in _PRODUCTS}
        found = {one.shape[-1] for one in self.normalised} | (tables & made)
        return frozenset(size for size in found - self.pairs if size >= _LEAST_CLASSES)

    @cached_property
    def targets(self) -> int:
        """The most positions that a step has a loss of."""
        losses = [one.shape[0] for one in self.log_softmaxes if len(one.shape) == 2]
        return max(losses, default=self.rows * max(self.tokens, default=1))

    @cached_property
    def class_maps(self) -> frozenset[tuple[int, ...]]:
        """Shapes of logits with classes in the second dimension, as in segmentation."""
        return frozenset(one.shape for one in self.log_softmaxes if len(one.shape) > 2)

    @cached_property
    def unused_classes(self) -> frozenset[int]:
        """Sizes of vocabularies of which the data reach less than a quarter."""
        if self.prediction.sizes:  # the batch of a Workload stands for data
            return frozenset()
        reached: dict[int, int] = {}
        for one in self.prediction.embeddings:
            reached[one.rows] = max(one.used, reached.get(one.rows, 0))
        return frozenset(rows for rows, used in reached.items() if _LEAST_USED <= used < rows // 4)

    @cached_property
    def attention_sizes(self) -> frozenset[tuple[str, int, int]]:
        """Module, elements and last dimension of attention matrices: results of softmax over positions."""
        found = set()
        for one in self.all:
            if len(one.shape) < 2 or one.shape[-1] in self.classes:
                continue
            if base_op(one.op) == "_softmax":
                matrix = self._is_product(one) or (_is_square(one) and one.shape[-1] in self.tokens)
            else:  # scores that something else than softmax normalises
                matrix = base_op(one.op) == "bmm" and _is_square(one) and one.shape[-1] in self.tokens
            if matrix:
                found.add((one.module, elements(one), one.shape[-1]))
        return frozenset(found)

    def is_attention_matrix(self, one: Allocation) -> bool:
        if len(one.shape) < 2:
            return False
        return any((one.module, elements(one), size) in self.attention_sizes for size in one.shape[-2:])

    @cached_property
    def of_attention_matrices(self) -> frozenset[int]:
        return self._family(lambda one, op, ratio: self.is_attention_matrix(one))

    def _is_product(self, one: Allocation) -> bool:
        """Whether the scores come from a batched product; those of a router come from a linear layer."""
        source = self.parent(one)
        while source is not None and base_op(source.op) in _ELEMENTWISE and elements(source) == elements(one):
            source = self.parent(source)
        return source is not None and base_op(source.op) in ("bmm", "baddbmm")

    @cached_property
    def transition_sizes(self) -> frozenset[tuple[str, int]]:
        """Module and dk of [.., T, .., dk, dk] tensors; images and volumes are square, too."""
        images = {one.shape[-2:] for one in self.all if base_op(one.op).startswith("convolution")}
        return frozenset(
            (one.module, one.shape[-1])
            for one in self.all
            if _is_square(one)
            and one.shape[-1] > 1
            and (len(one.shape) > 4 or (len(one.shape) == 4 and self.tokens & set(one.shape[:-2])))
            and one.shape[-1] not in self.classes
            and one.shape[-2:] not in images
        )

    def _family(self, begins: Callable[[Allocation, str, float], bool]) -> frozenset[int]:
        """Results of ops that `begins` accepts, and what elementwise ops make of them. It is asked with the
        ratio of the result's elements to those of its largest operand."""
        found: set[int] = set()
        for one in self.all:
            source, op = self.parent(one), base_op(one.op)
            if source is None or len(one.shape) < 2 or one.kind in _KINDS_OF_MODEL:
                continue
            ratio = elements(one) / max(1, elements(source))
            follows = source.id in found and op in _ELEMENTWISE and ratio >= 0.99
            if follows or begins(one, op, ratio):
                found.add(one.id)
        return frozenset(found)

    @cached_property
    def broadcasts(self) -> frozenset[int]:
        expanded: set[tuple[Site | None, int]] = set()  # lines, and elements of what they expand

        def begins(one: Allocation, op: str, ratio: float) -> bool:
            if not (ratio >= 8 if op in _BROADCASTS else op in _COPIES and ratio >= 16):
                return False
            if one.during == "backward":  # the gradient of every sum is expanded, too
                return (one.site, elements(one)) in expanded
            expanded.add((one.site, elements(one)))
            return True

        return self._family(begins)

    @cached_property
    def matrices_of_factors(self) -> frozenset[int]:
        """Products of narrow matrices that are much larger than both."""
        return self._family(
            lambda one, op, ratio: op in ("bmm", "baddbmm") and ratio >= 16 and len(one.shape) >= 3
        )

    @cached_property
    def reduced_broadcasts(self) -> frozenset[int]:
        """Those that are summed right away: a matrix product would not need them."""
        found = set()
        for one in self.all:
            source = self.parent(one)
            if source is None or base_op(one.op) not in _REDUCTIONS or elements(one) * 2 > elements(source):
                continue
            for each in (source, self.parent(source)):
                if each is not None and each.id in self.broadcasts:
                    found.add(each.id)
        family = set(found)
        for one in self.all:  # and what backward makes of them
            if one.parent in family and base_op(one.op) in _ELEMENTWISE and one.id in self.broadcasts:
                family.add(one.id)
        return frozenset(family)

    @cached_property
    def one_hots(self) -> frozenset[int]:
        """Identity matrices, rows of them, and comparisons of ids with all classes."""
        found: set[int] = set()
        for one in self.all:
            source, op = self.parent(one), base_op(one.op)
            wide = len(one.shape) >= 2 and one.shape[-1] >= _LEAST_CLASSES
            if not wide or one.kind in _KINDS_OF_MODEL:
                continue
            counts = one.dtype == "int64" and (op in _FILLS or op in ("one_hot", "scatter", "zeros"))
            compared = op == "eq" and one.dtype == "bool" and one.id in self.broadcasts
            # In backward, `gather` fills the gradient of what it selects from.
            filled = op in _FILLS and one.shape[-1] in self.classes and one.during != "backward"
            if (
                op in ("eye", "one_hot")
                or (counts and one.shape[-1] != self.rows)
                or compared
                or filled
                or (
                    source is not None
                    and source.id in found
                    and op in (*_COPIES, "index", "embedding", "scatter")
                )
            ):
                found.add(one.id)
        return frozenset(found)

    @cached_property
    def trains(self) -> bool:
        return any(one.stage == "backward" for one in self.prediction.allocations)

    # -- lifetimes ------------------------------------------------------------------------------------

    @cached_property
    def backward_passes(self) -> dict[int, int]:
        """Id of an allocation that is alive at the peak -> backward passes and updates while it is alive."""
        wanted = {one.id for one in self.alive}
        passes, begun, found = 0, {}, {}
        for event in self.prediction.events:
            if event.action == "mark":
                passes += event.label in ("backward", "optimizer")
            elif event.id in wanted:
                if event.action == "alloc":
                    begun[event.id] = passes
                else:
                    found[event.id] = passes - begun[event.id]
        return {id: found.get(id, passes - start) for id, start in begun.items()}

    @cached_property
    def is_evaluated(self) -> bool:
        """Whether what autograd keeps at the peak is freed without a backward pass: another call of a model
        comes before the next one, or the end."""
        newest = max((one.call for one in self.alive if one.module), default=0)
        kept = [one for one in self.alive if one.differentiable and one.call == newest]
        unused = [one for one in kept if not self.backward_passes.get(one.id)]
        if len(unused) < 2 or len(unused) < 0.9 * len(kept):
            return False
        peak = max(self.prediction.timeline, key=lambda moment: moment.allocated, default=None)
        for event in self.prediction.events[peak.event if peak is not None else 0 :]:
            if event.label == "backward":
                return False
            if event.action == "alloc" and self.all[event.id].module and self.all[event.id].call > newest:
                return True
        return True

    def outlives_pass(self, one: Allocation) -> bool:
        """Alive for more than one pass: a temporary of one step is not."""
        return self.backward_passes.get(one.id, 0) >= 3 or (one.step == 0 and one.kind == "batch")

    def _key(self, one: Allocation) -> tuple[object, ...]:
        return one.site, one.op, one.module, one.shape, one.dtype

    @cached_property
    def calls_alive(self) -> dict[tuple[object, ...], int]:
        """What one line makes -> calls or steps before the newest whose result is alive at the peak."""
        seen = defaultdict(set)
        for one in self.alive:
            if one.kind in _KEPT:
                seen[self._key(one)].add((one.step, one.call))
        newest = max(((one.step, one.call) for one in self.alive), default=(0, 0))
        return {key: len(when - {newest}) for key, when in seen.items()}

    @cached_property
    def counts(self) -> Counter[tuple[object, ...]]:
        return Counter((*self._key(one), one.step, one.call) for one in self.alive)

    def is_repeated(self, one: Allocation) -> bool:
        return self.counts[(*self._key(one), one.step, one.call)] >= _MIN_LOOP_RESULTS

    @cached_property
    def held(self) -> dict[tuple[Site | None, str], Holder]:
        """Line and op of what containers hold themselves -> the container, where it grows."""
        found: dict[tuple[Site | None, str], Holder] = {}
        # A variable with the newest of them may be there beside the list.
        for holder in sorted(self.prediction.holders, key=lambda one: one.recurrent):
            for id in holder.ids:
                found.setdefault((self.all[id].site, self.all[id].op), holder)
        return {key: holder for key, holder in found.items() if self._grows(*key)}

    def _grows(self, site: Site | None, op: str) -> bool:
        """Several calls' results are alive at once, or each result is larger than the one before."""
        alike = [one for one in self.alive if one.site == site and one.op == op]
        if not any(one.kind in _KEPT for one in alike):  # inputs and parameters
            return len({one.step for one in alike}) > _MIN_OLD_CALLS
        if any(self.calls_alive.get(self._key(one), 0) >= _MIN_OLD_CALLS for one in alike):
            return True
        sizes = [one.bytes for one in self.all if one.site == site and one.op == op]
        return len(sizes) >= 3 and all(a < b for a, b in pairwise(sizes))

    def is_kept(self, one: Allocation) -> bool:
        """Results of several earlier calls are alive: of two where a line is known that keeps them, else of
        as many as make a loop, since a loss may be a sum over several inputs."""
        if one.kind not in ("activation", "temporary"):
            return False
        outlives = self.backward_passes.get(one.id, 0) > 1
        known = any(outlives or holder.loops for holder in self.graph_holders)
        least = _MIN_OLD_CALLS if known else _MIN_LOOP_RESULTS - 1
        return self.calls_alive.get(self._key(one), 0) >= least

    def is_retained(self, one: Allocation) -> bool:
        """Kept from step to step, or summed up over iterations; a recurrence is a loop."""
        summed = any(holder.loops and not holder.recurrent for holder in self.graph_holders)
        return self.is_kept(one) and (summed or self.backward_passes.get(one.id, 0) > 1)

    @cached_property
    def graph_holders(self) -> list[Holder]:
        return [holder for holder in self.prediction.holders if holder.graph]

    # -- copies of the model --------------------------------------------------------------------------

    @cached_property
    def trained_modules(self) -> frozenset[str]:
        return frozenset(one.module for one in self.all if one.kind in ("gradient", "optimizer state"))

    @cached_property
    def copies_of_model(self) -> frozenset[int]:
        """Parameters that are not trained and stand beside trained ones of the same name in another model."""
        trained = {
            (_inner(one.module), one.shape) for one in self.parameters if one.module in self.trained_modules
        }
        whole = {(one.module, one.shape) for one in self.parameters if one.module in self.trained_modules}
        return frozenset(
            one.id
            for one in self.parameters
            if one.module not in self.trained_modules
            and one.module
            and {(_inner(one.module), one.shape), (one.module, one.shape)} & (trained | whole)
        )

    @cached_property
    def shaped_like_parameters(self) -> frozenset[int]:
        """Tensors of one line that outlast a step, or are copies of gradients, and have the shapes of half
        the parameters or more."""
        known = [one for one in self.parameters if one.id not in self.copies_of_model]
        named = [one for one in known if one.module] or known
        shapes = {one.shape for one in named}
        total = sum(map(elements, named))
        lines = defaultdict(list)
        for one in self.alive:
            if one.module and _is_weight_cast(self, one):  # by autocast, which keeps it for later passes
                continue
            unnamed = one.kind == "parameter" and not one.module and named is not known
            if one.shape in shapes and (
                unnamed
                or (
                    one.kind not in _KINDS_OF_MODEL
                    and (self.outlives_pass(one) or (base_op(one.op) in _COPIES and self.is_of_gradient(one)))
                )
            ):
                lines[one.site].append(one)
        return frozenset(
            one.id for alike in lines.values() if sum(map(elements, alike)) * 2 >= total > 0 for one in alike
        )

    def is_like_parameter(self, one: Allocation) -> bool:
        return one.id in self.shaped_like_parameters

    def is_of_gradient(self, one: Allocation) -> bool:
        source = self.parent(one)
        return source is not None and source.kind == "gradient"

    def holds_gradients(self, one: Allocation) -> bool:
        text = linecache.getline(one.site.file, one.site.line) if one.site else ""
        return (
            base_op(one.op) in _FILLS
            or self.is_of_gradient(one)
            or (".grad" in text and "requires_grad" not in text)
        )

    # -- buffers --------------------------------------------------------------------------------------

    @cached_property
    def buffer_counts(self) -> Counter[tuple[object, ...]]:
        return Counter(map(self._buffer_key, self.alive))

    def _buffer_key(self, one: Allocation) -> tuple[object, ...]:
        return one.kind == "buffer", one.site if one.kind != "buffer" else None, one.shape, one.dtype

    def is_duplicate(self, one: Allocation) -> bool:
        constructor = one.site is not None and one.site.function.endswith("__init__")
        if one.kind != "buffer" and (
            one.kind not in ("batch", "activation")
            or one.differentiable
            or not (constructor or one.module)
            or not self.outlives_pass(one)
        ):
            return False
        stored_mask = _is_square(one) and one.bytes >= 1 << 20
        return one.bytes >= _LEAST_BUFFER and (self.buffer_counts[self._buffer_key(one)] > 1 or stored_mask)

    def is_data(self, one: Allocation) -> bool:
        """Outlasts steps, outside the model, and is many times a batch."""
        if (
            one.kind not in ("batch", "activation")
            or one.differentiable
            or not self.outlives_pass(one)
            or one.module
        ):
            return False
        parts = self.buffer_counts[self._buffer_key(one)]
        return bool(one.shape) and (one.shape[0] >= 4 * self.rows or parts >= 4)


def _inner(module: str) -> str:
    """Without the name of the model: "teacher.layers.0" -> "layers.0" """
    return module.partition(".")[2]


def _kind(*kinds: str) -> Callable[[PeakAnalysis, Allocation], bool]:
    return lambda facts, one: one.kind in kinds


def _is_in(family: str) -> Callable[[PeakAnalysis, Allocation], bool]:
    return lambda facts, one: one.id in getattr(facts, family)


def _is_in_growing_list(facts: PeakAnalysis, one: Allocation) -> bool:
    return one.kind in (*_KEPT, "batch", "parameter") and (one.site, one.op) in facts.held


def _is_copy_of_weight(facts: PeakAnalysis, one: Allocation) -> bool:
    if one.kind == "weight average" or one.id in facts.copies_of_model:
        return True
    return facts.is_like_parameter(one) and not facts.holds_gradients(one)


def _is_of_update(facts: PeakAnalysis, one: Allocation) -> bool:
    return one.during == "optimizer step" and one.kind == "temporary" and not facts.outlives_pass(one)


def _is_in_loop(facts: PeakAnalysis, one: Allocation) -> bool:
    return one.differentiable and (facts.is_repeated(one) or facts.is_kept(one))


def _oversized(facts: PeakAnalysis, one: Allocation) -> bool:
    return bool(facts.unused_classes & set(one.shape)) and one.id not in facts.one_hots


def _is_logits(facts: PeakAnalysis, one: Allocation) -> bool:
    if len(one.shape) < 2 or one.shape in facts.weights:
        return False
    return one.shape in facts.class_maps or any(
        size in facts.classes and elements(one) <= size * (facts.targets + facts.rows)
        for size in one.shape[1:]
    )


def _is_of_pairs(facts: PeakAnalysis, one: Allocation) -> bool:
    return _is_square(one) and one.shape[-1] in facts.pairs


def _is_attention(facts: PeakAnalysis, one: Allocation) -> bool:
    """Also what dropout, a module of its own, makes of them."""
    return facts.is_attention_matrix(one) or one.id in facts.of_attention_matrices


def _is_transition(facts: PeakAnalysis, one: Allocation) -> bool:
    return len(one.shape) >= 3 and _is_square(one) and (one.module, one.shape[-1]) in facts.transition_sizes


def _is_weight_delta(facts: PeakAnalysis, one: Allocation) -> bool:
    """[B, S, d, f], [B*S, d, f], [B, S*d, f] or [B, d, f], where [d, f] is a weight's shape."""
    if len(one.shape) < 3 or one.id in facts.matrices_of_factors:
        return len(one.shape) >= 3
    rows, columns = one.shape[-2:]
    plain = len(one.shape) == 3 and one.shape[0] not in facts.tokens and {rows, columns} & facts.tokens
    if (rows, columns) in facts.weights and not plain:
        return elements(one) > rows * columns
    return base_op(one.op) == "bmm" and any(
        columns == f and rows > d and rows % d == 0 and rows not in facts.tokens for d, f in facts.weights
    )


def _is_upcast(facts: PeakAnalysis, one: Allocation) -> bool:
    source = facts.parent(one)
    return (
        base_op(one.op) == "_to_copy"
        and one.dtype == "float32"
        and source is not None
        and source.dtype in _HALF
    )


def _is_host_copy(facts: PeakAnalysis, one: Allocation) -> bool:
    """Made on the host and copied in the forward pass; or a table that no step needs whole."""
    in_forward = bool(one.module) or (one.site is not None and one.site.function.endswith(".forward"))
    if base_op(one.op) in ("_to_copy", "copy") and one.parent is None and in_forward:
        return one.during in _FORWARD
    return base_op(one.op) in _FILLS and facts.is_data(one)


def _is_weight_cast(facts: PeakAnalysis, one: Allocation) -> bool:
    source = facts.parent(one)
    return base_op(one.op) == "_to_copy" and source is not None and source.kind == "parameter"


def _is_of_layer(facts: PeakAnalysis, one: Allocation) -> bool:
    return facts.trains and bool(one.module) and one.during in _FORWARD


def _is_of_evaluation(facts: PeakAnalysis, one: Allocation) -> bool:
    return one.during == "evaluation" and one.kind in _KEPT


def _is_unused_graph(facts: PeakAnalysis, one: Allocation) -> bool:
    kept = one.differentiable or facts.is_kept(one)
    return facts.is_evaluated and one.kind == "activation" and kept


_LEAK = 10.0  # `avoidable` of what grows with every step


def _pattern(
    name: str, applies: Callable[[PeakAnalysis, Allocation], bool], avoidable: float, fixes: str = ""
) -> Pattern:
    return Pattern(name, applies, avoidable, tuple(fixes.split()), _ADVICE[name])


_ADVICE = {
    "oversized vocabulary": "the data use less than a quarter of the vocabulary's rows: size it for the data",
    "optimizer state": "the optimizer keeps moments of every parameter: store them in 8 bits or on the host",
    "growing list": "tensors of every step are kept on the GPU: keep .item(), or .detach().cpu()",
    "gradients": "every parameter's gradient is kept until the update: update each one during backward",
    "second copy of the weights": "a copy of the weights (an average, a reference model, a snapshot) is "
    "on the GPU: keep it on the host, in bfloat16, or compute what it is needed for once",
    "second gradient buffer": "gradients are copied or accumulated in other tensors: use .grad itself, and "
    "call backward() several times before the update",
    "duplicate buffers": "layers store equal caches or masks: share one, or compute it where it is used",
    "parameters": "the model itself",
    "foreach optimizer temporaries": "the optimizer's foreach implementation makes temporaries for all "
    "parameters at once: fused=True",
    "wrong device": "a tensor is on the wrong device: register it as a buffer, or keep it on the host",
    "data set on the GPU": "more than a batch of data stays on the GPU: keep it on the host, move each batch",
    "evaluation without no_grad": "autograd saves activations that no backward pass uses: run it under "
    "torch.no_grad()",
    "retained graph": "results of earlier steps or iterations keep their autograd graph alive: detach() what "
    "is kept, or call backward() in each iteration",
    "one-hot": "one-hot vectors are stored: use indices, with gather, an embedding or cross_entropy",
    "attention matrices": "attention stores N x N matrices: the flash and memory-efficient kernels of "
    "scaled_dot_product_attention store none, its math kernel does",
    "logits": "logits, their copies, casts and gradients are stored: compute the loss in parts of the tokens",
    "scores of all pairs": "the loss compares every sample of the batch with every other: compute and "
    "checkpoint it for some rows at a time",
    "broadcast product": "an elementwise op is expanded to all pairs: use a matrix product, einsum or cdist",
    "state transitions": "every token stores a dk x dk matrix: use the chunkwise form of the recurrence",
    "loop kept by autograd": "autograd keeps every iteration of a loop: vectorise it, or checkpoint its body",
    "per-token weight deltas": "a matrix of a weight's size is made for every token or sample: apply its "
    "factors one by one",
    "batch": "the batch itself",
    "workspace": "memory that cuBLAS, cuDNN and kernels work in",
    "casts of the weights": "autocast keeps a cast of every weight for the forward pass",
    "fp32 upcasts": "half-precision activations are kept in float32, too: cast inside the op, or not at all",
    "evaluation": "without gradients, only the layer that runs keeps activations: use a smaller batch in the "
    "evaluation",
    "activations across layers": "every layer saves activations for backward: checkpoint or offload them, or "
    "use smaller batches",
    "other activations": "temporaries of forward and backward",
    "fragmentation": "the caching allocator reserves blocks that no request fits: expandable_segments:True",
}
PATTERNS: tuple[Pattern, ...] = (
    _pattern("oversized vocabulary", _oversized, 1.0, "smaller_vocabulary fused_linear_cross_entropy"),
    _pattern("optimizer state", _kind("optimizer state"), 0.3, "optimizer_8bit optimizer_cpu_offload fsdp2"),
    _pattern("growing list", _is_in_growing_list, _LEAK),
    _pattern("gradients", _kind("gradient"), 0.25, "optimizer_in_backward set_to_none fsdp2"),
    _pattern("second copy of the weights", _is_copy_of_weight, 1.0, "bf16_parameters"),
    _pattern(
        "second gradient buffer",
        PeakAnalysis.is_like_parameter,
        1.0,
        "gradient_accumulation_fusion micro_batches",
    ),
    _pattern("duplicate buffers", PeakAnalysis.is_duplicate, 1.0, "fused_attention"),
    _pattern("parameters", _kind("parameter", "buffer"), 0.1, "bf16_parameters fsdp2"),
    _pattern(
        "foreach optimizer temporaries",
        _is_of_update,
        0.5,
        "fused_optimizer no_foreach optimizer_in_backward",
    ),
    _pattern("wrong device", _is_host_copy, 1.0),
    _pattern("data set on the GPU", PeakAnalysis.is_data, 1.0),
    _pattern("evaluation without no_grad", _is_unused_graph, 1.0),
    _pattern("retained graph", PeakAnalysis.is_retained, _LEAK),
    _pattern("one-hot", _is_in("one_hots"), 1.0, "fused_linear_cross_entropy"),
    _pattern("attention matrices", _is_attention, 1.0, "fused_attention attn_implementation micro_batches"),
    _pattern("logits", _is_logits, 1.0, "fused_linear_cross_entropy micro_batches smaller_vocabulary"),
    _pattern("scores of all pairs", _is_of_pairs, 1.0),
    _pattern("broadcast product", _is_in("reduced_broadcasts"), 1.0, "fused_attention micro_batches"),
    _pattern("state transitions", _is_transition, 1.0, "micro_batches shorter_sequence"),
    _pattern("loop kept by autograd", _is_in_loop, 1.0, "activation_checkpointing micro_batches"),
    _pattern("per-token weight deltas", _is_weight_delta, 1.0, "micro_batches"),
    _pattern("broadcast product", _is_in("broadcasts"), 1.0, "fused_attention micro_batches"),
    _pattern("batch", lambda facts, one: one.stage == "batch", 0.1, "micro_batches smaller_batch"),
    _pattern("workspace", _kind("workspace"), 0.1),
    _pattern("casts of the weights", _is_weight_cast, 0.3, "bf16_parameters"),
    _pattern("fp32 upcasts", _is_upcast, 0.6, "bf16_parameters activation_checkpointing"),
    _pattern("evaluation", _is_of_evaluation, 0.4),
    _pattern(
        "activations across layers",
        _is_of_layer,
        0.4,
        "activation_checkpointing activation_offloading micro_batches tiled_mlp autocast",
    ),
    _pattern("other activations", lambda facts, one: True, 0.2, "micro_batches smaller_batch"),
)
FRAGMENTATION = _pattern("fragmentation", lambda facts, one: False, 0.3, "allocator")


def classify(facts: PeakAnalysis) -> dict[Pattern, list[Allocation]]:
    """Every allocation that is alive at the peak, by its pattern."""
    found: dict[str, tuple[Pattern, list[Allocation]]] = {}
    workspaces: list[Allocation] = []
    at_site: dict[Site | None, Counter[str]] = defaultdict(Counter)
    for one in facts.alive:
        pattern = _first(facts, one)
        if pattern.name == "workspace" and not one.op.startswith("cublas"):
            workspaces.append(one)
            continue
        found.setdefault(pattern.name, (pattern, []))[1].append(one)
        if pattern.avoidable <= 1:  # a list that grows makes no workspace
            at_site[one.site][pattern.name] += one.bytes
    for one in workspaces:  # of an op: it belongs to what else its line makes
        pattern = _first(facts, one)
        name = at_site[one.site].most_common(1)[0][0] if at_site[one.site] else pattern.name
        found.setdefault(name, (pattern, []))[1].append(one)
    return dict(found.values())


def _first(facts: PeakAnalysis, one: Allocation) -> Pattern:
    """A rule that fails does not apply, and leaves a note; the last one always applies."""
    for pattern in PATTERNS:
        try:
            if pattern.applies(facts, one):
                return pattern
        except Exception as error:
            facts.failed.setdefault(pattern.name, repr(error))
    return PATTERNS[-1]
