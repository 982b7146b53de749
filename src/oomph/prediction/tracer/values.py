"""Values of tensors in a trace: known where the host can compute them, else representative.

A trace has no data, but programs branch on values and size tensors by them. Every tensor therefore has values
that stand for its own:

- Where every input of an op is known (made by arange, ones, zeros, drawn at random, or moved from real data),
  its result is computed on the host beside the fake.
- An unknown float is 1.0, and finite. Unknown positions (argmax, topk, multinomial) spread evenly over their
  range, as the choices of a balanced router do; what is filled with -inf is left out. What follows from them
  is computed likewise, as a guess.
- Of a large tensor a sample stands for all of it; a single number where all elements are alike.

What the program reads (`.item()`, `if tensor:`) and the sizes of nonzero, unique and their like follow from
these values. Guesses are noted with their line.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import itertools
import linecache
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from oomph.prediction.ops.registry import entered
from oomph.prediction.ops.rules import BoundArguments, Fake, aten_ops, bind, op_name
from oomph.prediction.tracer.work import tensors_in
from oomph.records import Note, Site
from oomph.torch_internals import FakeTensor, OpOverload, tree_leaves

aten = torch.ops.aten
_MOST_ELEMENTS = 1 << 20  # beyond it a value costs more than it is worth
_MOST_FLOATS = 1 << 17  # elements up to which floats are computed too: masks made of ones, positions
_SEVERAL = 8  # elements of a row
_SAMPLE = 1024  # elements that stand for a large random tensor
_MOST_COMPUTED = 1 << 12  # results of ops on samples that are kept

_VIEWS = set(entered("is_view"))
_FACTORIES = set(entered("makes_known"))
_FACTORIES_LIKE = set(entered("ignores_values"))
_UNINITIALIZED = set(entered("leaves_unset"))  # whole numbers that are written into it stay known
_CONSTANTS: dict[OpOverload, int] = entered("constant")
_FILLS: dict[OpOverload, int] = entered("filled_with")
_KEEPS_VALUES = _VIEWS | set(entered("keeps_values"))
# Large floats are followed through these alone, where they are known: they make masks of masks.
_MAKES_MASKS = _VIEWS | aten_ops("""
    where.self masked_fill.Scalar masked_fill.Tensor _to_copy.default index.Tensor
""")
_JOINS = aten_ops("cat.default stack.default")
_PRODUCTS = aten_ops("mm.default bmm.default _cdist_forward.default _euclidean_dist.default")
# Large results that these and pointwise ops make of known values are computed once the program asks for them.
_MAY_WAIT = (
    _KEEPS_VALUES
    | _PRODUCTS
    | aten_ops("""
    nonzero.default linalg_vector_norm.default norm.ScalarOpt_dim sum.default sum.dim_IntList cumsum.default
    amax.default amin.default max.default min.default any.default any.dim all.default all.dim
    copy.default fill.Scalar fill.Tensor
    _softmax.default _log_softmax.default logsumexp.default scatter.value
""")
)
_MOST_WAITING = 1 << 24  # elements, without those that an expanded dimension repeats
_MOST_MULTIPLICATIONS = 1 << 28  # of a product: tens of milliseconds
_COPY = aten.copy_.default
_REPLACES = aten_ops("copy.default fill.Scalar fill.Tensor")  # all values of their first tensor
_ADDITIONS = aten_ops("add.Tensor add_.Tensor")
_DIFFERENCES = aten_ops("sub.Tensor sub_.Tensor")
_BOUNDS = aten_ops("lt.Scalar le.Scalar gt.Scalar ge.Scalar")
_ORDERS = aten_ops("lt.Tensor le.Tensor gt.Tensor ge.Tensor") | _BOUNDS
_ZEROS = {op for op, number in _CONSTANTS.items() if number == 0 and not op._schema.is_mutable}
# Ops that write a value at some positions of their first tensor.
_SCATTERS = aten_ops("scatter.value scatter_.value index_put.default index_put_.default")
# So do these. What is filled with -inf is not chosen among unknown numbers.
_MASKED_FILLS = _SCATTERS | aten_ops("""
    masked_fill.Scalar masked_fill.Tensor masked_fill_.Scalar masked_fill_.Tensor where.self
""")
_IN_PLACE_FILLS = aten_ops("masked_fill_.Scalar masked_fill_.Tensor index_put_.default")
_REDUCTIONS: dict[OpOverload, Callable[[torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys(aten_ops("all.default all.dim all.dims"), torch.all),
    **dict.fromkeys(aten_ops("any.default any.dim any.dims"), torch.any),
    **dict.fromkeys(aten_ops("max.default max.dim amax.default"), torch.max),
    **dict.fromkeys(aten_ops("min.default min.dim amin.default"), torch.min),
}
_SUMS = aten_ops("sum.default sum.dim_IntList count_nonzero.default count_nonzero.dim_IntList")
_RANDOM_INTEGERS: dict[OpOverload, tuple[int | None, int]] = entered("random_between")
_RANDOM = entered("random")
_NORMAL = {op for op, kind in _RANDOM.items() if kind == "normal"}
_RANDOM_FLOATS = {op for op, kind in _RANDOM.items() if kind in ("normal", "uniform")}
_RANDOM_FLAGS = {op for op, kind in _RANDOM.items() if kind == "flags"}
_PERMUTATIONS = {op for op, kind in _RANDOM.items() if kind == "permutation"}
# Ops that return positions along a dimension: which of their results.
_POSITIONS: dict[OpOverload, int] = entered("chooses")
_NEVER_CHOSEN = -1e4  # what masks add, or less
_OF_SMALLEST = aten_ops("argmin.default min.dim")
_ASKS_FINITE = aten_ops("isnan.default isinf.default isposinf.default isneginf.default")
_COMPARISONS = aten_ops("eq.Tensor ne.Tensor eq.Scalar ne.Scalar") | _BOUNDS
_FACTORIZATIONS = set(entered("factorizes"))

# Ops whose results do not only follow from the values of their inputs.
_WITH_RULES: tuple[Collection[OpOverload], ...] = (
    *(_UNINITIALIZED, _RANDOM, _ORDERS, _SCATTERS, _ZEROS, _POSITIONS, _FACTORIES, _FACTORIES_LIKE),
    *(_CONSTANTS, _FILLS, _FACTORIZATIONS),
)
_FOLLOWED = "_oomph_followed"  # the attribute of a tensor whose values may be known or guessed


Line = tuple[str, int]  # file, number
# File, line, how often the line has asked (0: a loop that was prolonged), and the answer.
Condition = tuple[str, int, int, bool]


@dataclass(frozen=True, slots=True)
class Assumptions:
    """`failed`: conditions that get the other answer from then on, whatever is guessed. `sizes`: how many
    elements ops select whose result depends on values; `most`: times the typical number, at most. `shares`:
    the part of a mask's elements that a line selects."""

    failed: frozenset[Condition] = frozenset()
    shares: Mapping[Line, Fraction] = field(default_factory=dict)
    sizes: Literal["fewest", "typical", "most"] = "typical"
    most: float = 3.0

    def size(self, typical: int, most: int, fewest: int = 1) -> int:
        most = min(most, math.ceil(self.most * typical))
        return {"fewest": min(fewest, typical), "typical": typical, "most": most}[self.sizes]


_NO_ASSUMPTIONS = Assumptions()
_assumptions: ContextVar[Assumptions] = ContextVar("assumptions", default=_NO_ASSUMPTIONS)


@contextlib.contextmanager
def assuming(assumptions: Assumptions) -> Iterator[None]:
    """For traces that begin inside, also in child processes."""
    token = _assumptions.set(assumptions)
    try:
        yield
    finally:
        _assumptions.reset(token)


class OpCall(NamedTuple):
    func: OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def run(self, real: Callable[[Any], torch.Tensor]) -> Any:
        """The op on the host, on the values that `real` gives for its tensors."""
        call = self.replaced(real)
        return self.func(*call.args, **call.kwargs)

    def replaced(self, real: Callable[[Any], Any]) -> OpCall:
        options = {name: arg for name, arg in self.kwargs.items() if name not in ("device", "pin_memory")}
        given = {name: _real(arg, real) for name, arg in options.items()}
        return OpCall(self.func, [_real(arg, real) for arg in self.args], given)


class Representative(NamedTuple):
    """Values, on the host, that stand for a tensor's: of its shape (`whole`), or a sample of its elements."""

    values: torch.Tensor
    whole: bool
    known: bool
    stamp: int = 0  # writes into the storage that it includes


class _StorageAttribute:
    """Storage -> value, in an attribute of the storage: WeakIdKeyDictionary takes many times as long."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self._name = f"_oomph_{next(self._numbers)}"

    def get(self, storage: torch.UntypedStorage, default: Any = None) -> Any:
        return storage.__dict__.get(self._name, default)

    def __setitem__(self, storage: torch.UntypedStorage, value: Any) -> None:
        storage.__dict__[self._name] = value


class _Waiting:
    """Values that are computed once the program asks for them. No fake tensor is held: it would live on.

    `writes`: of storages, see Values.
    """

    def __init__(
        self,
        writes: _StorageAttribute,
        call: OpCall | None,
        values: torch.Tensor | None,
        known: bool,
        result: int = 0,
        layout: torch.Tensor | None = None,
    ) -> None:
        self._writes, self._call, self._values, self.known, self._result = writes, call, values, known, result
        self._version = None if values is None else self._version_of(values)
        self._layout = layout

    def compute(self) -> torch.Tensor | None:
        """None where an input has been overwritten since."""
        if self._values is None and self._call is not None:
            call, self._call = self._call, None
            with contextlib.suppress(Exception):
                computed = _run_without_repeats(call.replaced(_Waiting._input))
                values = computed[self._result] if isinstance(computed, (list, tuple)) else computed
                self._values, self._version = values, self._version_of(values)
        if self._values is None or self._version_of(self._values) != self._version:
            return None
        return self._values

    def as_guess(self) -> _Waiting:
        guess = copy.copy(self)
        guess.known = False
        return guess

    def layout(self) -> torch.Tensor:
        """A tensor without data that has the shape of the values, and a stride of 0 where they repeat."""
        if self._layout is None and self._values is not None:
            values = self._values
            self._layout = torch.empty_strided(
                values.shape, values.stride(), dtype=values.dtype, device="meta"
            )
        elif self._layout is None:
            assert self._call is not None
            made = _run_without_repeats(self._call.replaced(_Waiting.layout))
            self._layout = made[self._result] if isinstance(made, (list, tuple)) else made
        return self._layout

    def _version_of(self, values: torch.Tensor) -> tuple[int, int]:
        """Writes by the program, of data on the host, and by the trace, which torch does not count."""
        return values._version, self._writes.get(values.untyped_storage(), 0)

    def _input(self) -> torch.Tensor:
        values = self.compute()
        if values is None:
            raise ValueError("overwritten")
        return values


class Values:
    """Fake tensor -> its Representative. "most" sizes send 7 of 8 tokens to the same experts."""

    def __init__(self) -> None:
        self._assumptions = _assumptions.get()
        self._entries = WeakIdKeyDictionary()
        self._guessed = _StorageAttribute()  # storages -> whether a guess was written into them
        self._overwritten = _StorageAttribute()  # storages -> the stamp of their last unknown write
        self._compared = WeakIdKeyDictionary()  # results of comparisons of two numbers -> op, weak arguments
        self._sums = _StorageAttribute()  # of a choice and an unknown term -> the choice, the term, if added
        self._terms = _StorageAttribute()  # their storages -> something of their own
        self._zeros = WeakIdKeyDictionary()  # large float tensors that were made of zeros
        self._waiting = WeakIdKeyDictionary()  # tensors -> how their values are computed, the stamp then
        self._writes = _StorageAttribute()  # storages of values -> how often an op was run that wrote there
        # Ops on samples, by key -> the result, and what the ids in the key are those of.
        self._computed: dict[Any, tuple[torch.Tensor | None, Any]] = {}
        self._plain_ops: dict[OpOverload, bool] = {}  # whether no rule is for the op
        self._stamp = 0
        self.draws = 0
        self.positions_guessed = False

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return _FOLLOWED in tensor.__dict__ and (tensor in self._entries or tensor in self._waiting)

    def of(self, tensor: torch.Tensor) -> Representative:
        if not isinstance(tensor, FakeTensor):
            if tensor.device.type == "cpu":
                return Representative(tensor, True, True)
            return _default(tensor.dtype)
        if not tensor.numel():
            return _without_elements(tensor.dtype)
        entry = self._entries.get(tensor) if _FOLLOWED in tensor.__dict__ else None
        if entry is None:
            return _default(tensor.dtype)
        storage = tensor.untyped_storage()
        if entry.stamp < self._overwritten.get(storage, 0):
            return _default(tensor.dtype)
        return entry._replace(known=False) if self._guessed.get(storage) else entry

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """All values of the tensor, where they are known."""
        found = self.of(tensor)
        return found.values if found.known and found.whole else None

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Values of the tensor's shape, known or not."""
        found = self.of(tensor)
        if found.whole or found.values.dim() == 0:
            if found.values.shape == tensor.shape:  # to expand it takes long
                return found.values
            return found.values.expand(tensor.shape) if tensor.numel() else found.values.view(tensor.shape)
        repeats = math.ceil(tensor.numel() / len(found.values))
        return found.values.repeat(repeats)[: tensor.numel()].view(tensor.shape)

    def compute(self, call: OpCall) -> tuple[torch.Tensor, ...] | None:
        """The op's results on the host, where all values of its tensors are known or guessed."""
        for tensor in tensors_in(call.args, call.kwargs):
            entry = self.of(tensor)
            if not entry.whole and not (entry.known and not entry.values.dim() and is_small(tensor)):
                return None
        real = call.run(self.whole)
        return tuple(real) if isinstance(real, (list, tuple)) else (real,)

    def set(self, tensor: torch.Tensor, values: torch.Tensor, whole: bool = True, known: bool = True) -> None:
        """State the values of a tensor, whatever was written into it before."""
        storage = tensor.untyped_storage()
        if known and not whole and values.dim() and bool((values == values[0]).all()):
            values = values[0]
        if known:
            self._guessed[storage] = False
        tensor.__dict__[_FOLLOWED] = True
        self._entries[tensor] = Representative(values, whole, known, self._overwritten.get(storage, 0))

    def propagate(self, call: OpCall, given: Sequence[torch.Tensor], out: Any, follow_floats: bool) -> None:
        """After an op: the values of its results, from those of its inputs. Guessed floats are followed only
        where the program may read them."""
        func, args, kwargs = call
        made = out if isinstance(out, (list, tuple)) else (out,)
        results = [item for item in made if isinstance(item, FakeTensor)]
        if not results:
            return self.invalidate(call)
        if (func in _ADDITIONS or func in _DIFFERENCES) and self._takes_back(call, results[0]):
            return None
        if self._is_unknown(func, given, results[0], follow_floats):
            return None
        if "out" in kwargs:
            return self._propagate_out(call, given, results)
        if func in _UNINITIALIZED:
            if _is_whole_number(results[0].dtype) and is_small(results[0]):
                self.set(results[0], torch.zeros(results[0].shape, dtype=results[0].dtype))
            return None
        if func in _RANDOM:
            self.invalidate(call)
            return self._draw(func, args, results[0])
        if func in _ORDERS and not results[0].dim():
            self._compared[results[0]] = (
                func,
                [weakref.ref(arg) if isinstance(arg, FakeTensor) else arg for arg in args],
            )
        is_float, small = results[0].dtype.is_floating_point, is_small(results[0])
        if is_float and func._schema.is_mutable:
            waits = not is_small(_whole(results[0])) or any(each in self._waiting for each in given)
            one_hot = func in _SCATTERS and self._made_zeros(results[0])
            if waits and not one_hot and self.put_off(call, given, results):
                return None
        if func in _SCATTERS and not small:
            if not is_float and func is not aten.scatter_.value:
                self.put_off(call, given, results)
            return self._propagate_scatter(call, results[0])
        if not small or any(tensor in self._waiting for tensor in given):
            self.put_off(call, given, results)
        large_floats = is_float and not small and func not in _FACTORIZATIONS
        if large_floats and func in _ZEROS:
            self._zeros[results[0]] = True
            return None
        if large_floats and func not in _POSITIONS and func not in _MAKES_MASKS:
            return self.invalidate(call)
        if torch.Tag.nondeterministic_seeded in func.tags and func not in _POSITIONS:
            return self.invalidate(call)
        if not given and func not in _FACTORIES:
            return None
        if func in _POSITIONS:
            waiting = self._waiting_for(given[0]) if given[0] in self._waiting else None
            if waiting is not None and not waiting.known:
                self.resolve(given[0])
        inputs = {id(tensor): self.of(tensor) for tensor in given}
        known = func in _FACTORIES_LIKE or all(entry.known for entry in inputs.values())
        known = known or _asks_whether_finite(func, args)
        if large_floats and not known and func not in _POSITIONS:
            return self.invalidate(call)
        if known and (large_floats or all(map(is_small, results))):
            whole = func in _FACTORIES_LIKE or all(entry.whole for entry in inputs.values())
            if whole and self._store_computed(call, results, known=True):
                return None
        if func in _CONSTANTS or func in _FILLS:
            number = _CONSTANTS[func] if func in _CONSTANTS else args[_FILLS[func]]
            if isinstance(number, (bool, int, float)):
                return self._store_written(call, results[:1], torch.tensor(number), True)
        if func in _FACTORIZATIONS:
            return self.set(results[-1], torch.zeros((), dtype=torch.int32), whole=False, known=False)
        return self._propagate_guess(call, given, inputs, results, known, follow_floats)

    def update(self, call: OpCall, given: Sequence[torch.Tensor], out: Any) -> None:
        """After an op of an optimizer's step: parameters stay near to the values that they had."""
        parameters = [each for each in given if isinstance(each, torch.nn.Parameter) and each in self]
        before = [(each, self.of(each), self._waiting_for(each)) for each in parameters]
        self.propagate(call, given, out, follow_floats=False)
        for each, entry, waiting in before if call.func._schema.is_mutable else ():
            if waiting is None and entry.whole:
                waiting = _Waiting(self._writes, None, entry.values, known=False)
            if waiting is not None:
                self._wait(each, waiting.as_guess())
            elif not entry.known:
                self.set(each, entry.values, whole=False, known=False)

    def _takes_back(self, call: OpCall, result: torch.Tensor) -> bool:
        """Whether an unknown term is taken back, as where gradients go straight through a choice:
        `choice + x - x.detach()`, `x + (choice - x).detach()`, `choice + (x - x.detach())`."""
        adds, pair = call.func in _ADDITIONS, call.args[:2]
        if call.kwargs or not is_small(result) or not result.dtype.is_floating_point:
            return False
        if not all(isinstance(each, FakeTensor) and each.shape == result.shape for each in pair):
            return False
        storages = [each.untyped_storage() for each in pair]
        first, second = ((each.storage_offset(), each.stride()) for each in pair)
        if not adds and storages[0] is storages[1] and first == second:
            self.set(result, torch.zeros(result.shape, dtype=result.dtype))
            return True
        for mine, other in ((0, 1), (1, 0))[: 1 + adds]:
            choice, term, added = self._sums.get(storages[mine], (None, None, None))
            if choice is not None and added is not adds and term is self._terms.get(storages[other]):
                self.set(result, choice.values.to(result.dtype), choice.whole, choice.known)
                return True
            if _FOLLOWED in pair[mine].__dict__ and _FOLLOWED not in pair[other].__dict__:
                term = self._terms.get(storages[other]) or object()
                self._terms[storages[other]] = term
                self._sums[result.untyped_storage()] = self.of(pair[mine]), term, adds
        return False

    def _is_unknown(
        self, func: OpOverload, given: Sequence[torch.Tensor], result: torch.Tensor, follow_floats: bool
    ) -> bool:
        """Whether the op makes unknown floats of unknown tensors, as most ops of a model do: what follows for
        them from the rules of `propagate`, without asking each."""
        if not given or not result.dtype.is_floating_point:
            return False
        plain = self._plain_ops.get(func)
        if plain is None:
            plain = not func._schema.is_mutable and not any(func in ops for ops in _WITH_RULES)
            self._plain_ops[func] = plain
        if not plain:
            return False
        for tensor in given:
            if not isinstance(tensor, FakeTensor) or _FOLLOWED in tensor.__dict__:
                return False
        if not is_small(result):
            return True
        several = any(tensor is not given[0] for tensor in given)
        return (several or not follow_floats) and any(tensor.dim() for tensor in given)

    def _propagate_guess(
        self,
        call: OpCall,
        given: Sequence[torch.Tensor],
        inputs: Mapping[int, Representative],
        results: Sequence[torch.Tensor],
        known: bool,
        follow_floats: bool,
    ) -> None:
        func, first, result = call.func, given[0] if given else None, results[0]
        if (
            func in _POSITIONS
            and first is not None
            and (first.is_floating_point() or not inputs[id(first)].whole)
        ):
            return self._spread_positions(call, first, results)
        small = all(map(is_small, results)) and all(map(is_small, given))
        whole = all(entry.whole or (entry.known and not entry.values.dim()) for entry in inputs.values())
        floating = result.dtype.is_floating_point or result.dtype.is_complex
        if floating and not known:
            # What two unknown numbers give is unknown: again 1.0, so that guesses stay finite and small. But
            # times and steps add up.
            unknown = {key for key, entry in inputs.items() if not entry.known}
            if func in _MASKED_FILLS:
                unknown = {id(tensor) for tensor in given if tensor.dtype != torch.bool} & unknown
            scalars = not any(tensor.dim() for tensor in given)
            adds = func in _ADDITIONS and (scalars or any(map(_is_mask_to_add, inputs.values())))
            if not (follow_floats or scalars) or (len(unknown) > 1 and not (whole or adds)):
                return self.invalidate(call)
        pointwise = torch.Tag.pointwise in func.tags
        if pointwise or func in _KEEPS_VALUES or func is _COPY:
            sources = given[1:2] if func is _COPY else given if pointwise else given[:1]
            if func in _JOINS and not (small and any(map(_is_whole, inputs.values()))):
                sources = [max(given, key=torch.Tensor.numel)]
            elif func in _JOINS:
                sources = given
            of_whole = [source for source in sources if _is_whole(inputs[id(source)])]
            if not of_whole or not small:
                samples = {id(source): _sample(inputs[id(source)]) for source in sources}
            if not of_whole or (not small and sum(samples[id(each)].dim() for each in of_whole) <= 1):
                if func in _BOUNDS and inputs[id(given[0])] is _default(given[0].dtype):
                    samples = {id(given[0]): _spread(given[0].dtype, call.args[1])}
                made = any(inputs[id(source)].whole for source in sources)  # samples of whole values
                run = _run_on_samples if made else self._run_once_on_samples
                values = run(call, samples) if pointwise else samples.popitem()[1]
                if values is not None:
                    return self._store_written(call, results, values, known)
        elif first is not None and not inputs[id(first)].whole and func in _REDUCTIONS:
            values = _REDUCTIONS[func](inputs[id(first)].values)
            return self.set(result, values.to(result.dtype), whole=False, known=known)
        elif first is not None and func in _SUMS and not inputs[id(first)].whole and not floating:
            entry, count = inputs[id(first)], first.numel() // max(result.numel(), 1)
            mean = _fraction(entry) if "count" in func.name() else _mean(entry)
            return self.set(result, torch.tensor(round(mean * count)), whole=False, known=known)
        follow = whole or pointwise or not floating or func in _MASKED_FILLS or func in _JOINS
        follow = follow and small
        if not follow or not self._store_computed(call, results, known=known):
            self.invalidate(call)
        elif result.dtype == torch.bool and any(tensor.dtype.is_floating_point for tensor in given):
            entry = self._entries[result]
            if result.numel() >= _SEVERAL and _is_unsure(entry):  # as unknown floats are
                self.set(result, entry.values.flatten(), whole=False, known=False)

    def put_off(self, call: OpCall, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> bool:
        """Distances between known positions, masks of known lengths, unknown numbers that are masked."""
        func = _out_of_place(call.func)
        may_wait = func is not None and (
            torch.Tag.pointwise in func.tags or func in _MAY_WAIT or call.func in _IN_PLACE_FILLS
        )
        if func is None or not may_wait or not given:
            return False
        if call.func in _PRODUCTS and results[0].numel() * given[0].shape[-1] > _MOST_MULTIPLICATIONS:
            return False
        inputs: dict[int, _Waiting] = {}
        followed = any(self._waiting_for(tensor) is not None for tensor in given)
        for tensor in given:
            waiting = self._waiting_for(tensor)
            if waiting is None and (self._made_zeros(tensor) or (func in _REPLACES and tensor is results[0])):
                waiting = self._zeros_like(tensor)
            elif waiting is None:
                entry = self.of(tensor)
                guess = not entry.known and (not entry.whole or tensor.dtype.is_floating_point)
                if guess and tensor.dtype.is_floating_point:
                    default = entry is _default(tensor.dtype)
                    fills = call.func in _MASKED_FILLS or call.func in _ADDITIONS
                    guess = not (fills if default else followed)
                if guess or not (entry.whole or not entry.values.dim()):
                    return False
                waiting = _Waiting(self._writes, None, self.whole(tensor), entry.known)
            inputs[id(tensor)] = waiting
        known = all(waiting.known for waiting in inputs.values())
        replaced = call.replaced(lambda tensor: inputs[id(tensor)])._replace(func=func)
        waiting_results = [
            _Waiting(self._writes, replaced, None, known, index) for index in range(len(results))
        ]
        if results[0].numel() > _MOST_WAITING and _elements(waiting_results[0]) > _MOST_WAITING:
            return False
        whole = _whole(results[0])
        if call.func._schema.is_mutable and whole is not results[0]:
            written = self._written(whole, results[0], waiting_results[0])
            self.invalidate(call)
            if written is not None:
                self._wait(whole, written)
        else:
            self.invalidate(call)
        for result, waiting in zip(results, waiting_results, strict=True):
            self._wait(result, waiting)
        return True

    def _wait(self, tensor: torch.Tensor, waiting: _Waiting) -> None:
        tensor.__dict__[_FOLLOWED] = True
        self._waiting[tensor] = waiting, self._overwritten.get(tensor.untyped_storage(), 0)

    def _written(self, whole: torch.Tensor, part: torch.Tensor, values: _Waiting) -> _Waiting | None:
        """The values of a tensor of which a view is written."""
        before, entry = self._waiting_for(whole), self.of(whole)
        if before is None and self._made_zeros(whole):
            before = self._zeros_like(whole)
        elif before is None and entry.whole:
            before = _Waiting(self._writes, None, entry.values, entry.known)
        if before is None or not whole.is_contiguous() or whole.storage_offset():
            return None
        place = part.shape, part.stride(), part.storage_offset()
        write: Any = _with_part
        call = OpCall(write, [before, values, *place], {})
        return _Waiting(self._writes, call, None, before.known and values.known)

    def _made_zeros(self, tensor: torch.Tensor) -> bool:
        return tensor in self._zeros and not self._overwritten.get(tensor.untyped_storage())

    def _zeros_like(self, tensor: torch.Tensor) -> _Waiting:
        zeros = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        return _Waiting(self._writes, None, zeros, known=True)

    def _waiting_for(self, tensor: torch.Tensor) -> _Waiting | None:
        waiting, stamp = self._waiting.get(tensor, (None, 0))
        return None if stamp < self._overwritten.get(tensor.untyped_storage(), 0) else waiting

    def resolve(self, tensor: Any) -> None:
        """The program asks for values: compute them if they have been put off."""
        waiting = self._waiting_for(tensor) if tensor in self._waiting else None
        values = waiting.compute() if waiting is not None else None
        if waiting is None or values is None or values.shape != tensor.shape:
            return
        if waiting.known or _is_finite(values) or (values.dim() and not bool(values.isnan().any())):
            self.set(tensor, values.to(tensor.dtype), known=waiting.known)

    def _propagate_out(
        self, call: OpCall, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> None:
        """torch.cumsum(x, dim=0, out=part_of_another)"""
        out = call.kwargs["out"]
        inputs = [self.of(tensor) for tensor in given if tensor is not out]
        follows = isinstance(out, FakeTensor) and self.of(out).whole and all(map(is_small, given))
        follows = follows and all(entry.whole for entry in inputs)
        known = all(entry.known for entry in inputs)
        if not follows or not self._store_computed(call, results, known=known):
            self.invalidate(call)

    def _propagate_scatter(self, call: OpCall, result: torch.Tensor) -> None:
        """A number is written at some positions of a tensor of equal elements, as one-hot masks are made."""
        args = bind(*call)
        target, value = args["self"], args.get("value")
        before = self.of(target)
        if self._made_zeros(target):
            before = Representative(torch.zeros((), dtype=target.dtype), whole=False, known=True)
        if value is None:
            found = self.of(args["values"])
            value = found.values.reshape(-1)[0] if found.known and found.values.numel() == 1 else None
        self.invalidate(call)
        written = _elements_written(args)
        if value is None or written is None or not before.known or before.values.numel() != 1:
            return
        elements = result.numel()
        shared = math.gcd(written, elements)
        if elements // shared <= _MOST_FLOATS:
            sample = before.values.reshape(1).repeat(elements // shared)
            sample[: written // shared] = value
            self.set(result, sample, whole=False, known=False)

    def _store_written(
        self, call: OpCall, results: Sequence[torch.Tensor], values: torch.Tensor, known: bool
    ) -> None:
        """Store a sample. What was written in place is no longer what other views of the storage have."""
        self.invalidate(call)
        for one in results:
            values = values if values.dtype == one.dtype else values.to(one.dtype)
            if known or _is_finite(values):
                self.set(one, values, whole=False, known=known)

    def _run_once_on_samples(self, call: OpCall, samples: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
        """None where the samples do not fit together. The same ops on unknown numbers come again and again:
        each is computed once."""
        func, args, kwargs = call
        parts = (
            id(samples[id(arg)]) if isinstance(arg, torch.Tensor) else (type(arg), arg)
            for arg in (*args, *kwargs.values())
        )
        key = id(func), tuple(kwargs), *parts
        try:
            found = self._computed.get(key)
        except TypeError:  # a list among the arguments
            return _run_on_samples(call, samples)
        if found is None:
            if len(self._computed) >= _MOST_COMPUTED:
                self._computed.clear()
            found = self._computed[key] = _run_on_samples(call, samples), (func, samples)
        return found[0]

    def _store_computed(self, call: OpCall, results: Sequence[torch.Tensor], known: bool) -> bool:
        """Run the op on the host; whether that worked. Values that it writes into change in all views."""
        target: Any = call.kwargs.get("out", call.args[0] if call.args else None)
        written = call.func._schema.is_mutable and isinstance(target, FakeTensor)
        follows = written and self.of(target).whole

        def real(tensor: torch.Tensor) -> torch.Tensor:
            if call.func in _FACTORIES_LIKE and not written:  # its values are not asked for
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            values, entry = self.whole(tensor), self.of(tensor)
            if entry.whole:
                return values
            if call.func in _SCATTERS and tensor.dim() and _is_unsure(entry):  # as nonzero selects
                typical = _typical_rows(tensor, entry)
                rows = self._assumptions.size(typical, min(tensor.numel(), 2 * typical))
                return _spread_mask(tensor.shape, rows)
            return values.clone(memory_format=torch.contiguous_format)  # one number, expanded

        try:
            computed = call.run(real)
        except Exception:  # without a value, an estimate decides
            return False
        values = tensors_in(computed if isinstance(computed, (list, tuple)) else (computed,), {})
        if follows:
            storage = self.of(target).values.untyped_storage()
            self._writes[storage] = self._writes.get(storage, 0) + 1
        elif written:
            self.invalidate(call)
        for fake, value in zip(results, values, strict=False):
            if fake.shape == value.shape and (known or _is_finite(value) or self._is_filled(call, value)):
                self.set(fake, value, known=known)
        if written and not known:
            self._guessed[target.untyped_storage()] = True
        return True

    def _is_filled(self, call: OpCall, values: torch.Tensor) -> bool:
        """Whether infinite elements are those that the program has filled."""
        if not values.dim() or bool(values.isnan().any()):
            return False
        inputs = map(self.of, tensors_in(call.args, call.kwargs))
        return call.func in _MASKED_FILLS or any(not _is_finite(entry.values) for entry in inputs)

    def set_to_match(self, condition: torch.Tensor, answer: bool, rounds: int) -> None:
        """Give the guess that was compared a value that has this answer. With more rounds of a loop it comes
        closer to the number that it is compared with, as the time of an ODE solver does."""
        func, args = self._compared.get(condition, (None, ()))
        args = [arg() if isinstance(arg, weakref.ref) else arg for arg in args]
        if any(arg is None for arg in args):  # freed since
            return None
        numbers = [float(self.whole(arg)) if isinstance(arg, torch.Tensor) else arg for arg in args]
        for tensor, number in zip(args, reversed(numbers), strict=True):
            if isinstance(tensor, FakeTensor) and not self.of(tensor).known:
                for difference in (0.5**rounds, -(0.5**rounds)):
                    value = torch.tensor(number + difference * max(abs(number), 1), dtype=tensor.dtype)
                    other = torch.tensor(number) if isinstance(args[1], torch.Tensor) else number
                    given = (value, other) if tensor is args[0] else (torch.tensor(number), value)
                    if bool(func(*given)) == answer:
                        return self.set(tensor, value, whole=False, known=False)
        return None

    def invalidate(self, call: OpCall) -> None:
        """Whatever the op wrote into, views of it included, is no longer known."""
        func, args, kwargs = call
        if not func._schema.is_mutable:
            return
        for position, parameter in enumerate(func._schema.arguments):
            if parameter.alias_info is not None and parameter.alias_info.is_write:
                given = args[position] if position < len(args) else kwargs.get(parameter.name)
                for tensor in given if isinstance(given, (list, tuple)) else (given,):
                    if isinstance(tensor, FakeTensor):
                        self.forget(tensor)

    def take(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """`tensor.data = data`"""
        tensor.__dict__[_FOLLOWED] = True
        self.release(tensor)
        for followed in (self._entries, self._waiting, self._zeros):
            if data in followed:
                followed[tensor] = followed[data]

    def release(self, tensor: torch.Tensor) -> None:
        """Keep no weak reference to it, and so no value."""
        for followed in (self._entries, self._waiting, self._zeros):
            followed.pop(tensor, None)

    def forget(self, tensor: torch.Tensor) -> None:
        """Something unknown was written into its storage."""
        self._stamp += 1
        self._overwritten[tensor.untyped_storage()] = self._stamp

    # -- draws ----------------------------------------------------------------------------------------

    def _draw(self, func: OpOverload, args: Sequence[Any], out: torch.Tensor) -> None:
        """A random op: draws are as good as those of a real run. The sample of a large result is even."""
        if func in _RANDOM_FLOATS and isinstance(out, torch.nn.Parameter):
            return  # no mask is made of initial weights
        if func in _NORMAL and is_small(out):
            return
        generator = torch.Generator().manual_seed(self.draws)
        self.draws += 1
        whole = is_small(out) if func in _RANDOM_FLOATS else out.numel() <= _MOST_ELEMENTS
        if not whole and func in _RANDOM_FLOATS and out.numel() <= _MOST_WAITING:
            layout = torch.empty(out.shape, device="meta")
            draw: Any = partial(_drawn, func, _bounds(func, args), tuple(out.shape), generator)
            # Normal numbers stand for data: a condition on them may have either answer, shares are certain.
            known = func not in _NORMAL
            self._wait(out, _Waiting(self._writes, OpCall(draw, (), {}), None, known, layout=layout))
            if not known:
                return
        shape = tuple(out.shape) if whole else (_SAMPLE,)
        if whole:
            fractions = torch.rand(out.numel(), generator=generator)
        else:
            fractions = torch.linspace(0, 1 - 1e-9, _SAMPLE, dtype=torch.float64)
            fractions = fractions[torch.randperm(_SAMPLE, generator=generator)]
        values = fractions
        if func in _RANDOM_FLOATS:
            values = _from_fractions(func, _bounds(func, args), fractions)
        elif func in _RANDOM_INTEGERS:
            first, last = _RANDOM_INTEGERS[func]
            low = 0 if first is None else args[first]
            values = fractions.mul(args[last] - low).add_(low).floor_()
        elif func in _PERMUTATIONS:
            values = torch.argsort(fractions) if whole else fractions.mul(out.numel()).floor_()
        elif func in _RANDOM_FLAGS:
            values = fractions.view(shape) < self._probability(func, args, whole)
        self.set(out, values.to(out.dtype).view(shape), whole=whole)

    def _probability(self, func: OpOverload, args: Sequence[Any], whole: bool) -> Any:
        given = args[0] if func is aten.bernoulli.default else (*args, 0.5)[1]
        if not isinstance(given, torch.Tensor):
            return given
        found = self.of(given)
        if not found.known:
            return 0.5
        return found.values if whole == found.whole or found.values.numel() == 1 else 0.5

    def _spread_positions(self, call: OpCall, source: torch.Tensor, results: Sequence[torch.Tensor]) -> None:
        """Positions in an unknown tensor: in turn every one; in the largest case 7 of 8 are the same.

        They begin in the middle: the first ids of a vocabulary are special. If there are few, the program may
        compute sizes by them: other cases have the first (not 0, by which it may divide) and the last.
        Elements that are known to be less than others, as those filled with -inf, come after the others.
        """
        out = results[_POSITIONS[call.func]]
        arguments, entry = bind(*call), self.of(source)
        dim: int | None = arguments.get("dim", -1)
        follows = _is_whole(entry) and is_small(out)
        if call.func is not aten.multinomial.default and source.numel() and len(results) > 1 and not follows:
            self.set(results[0], _sample(entry), whole=False, known=False)
        if source.dim() == 0 or not out.numel():
            return self.set(out, torch.zeros((), dtype=out.dtype), whole=False, known=False)
        bound = source.numel() if dim is None else source.size(dim)
        chosen = out.size(dim) if dim is not None and out.dim() == source.dim() else 1
        small = is_small(out)
        if small:
            values = torch.arange(out.numel())
        else:
            step = math.ceil(chosen / _SAMPLE)
            values = torch.arange(0, min(_SAMPLE // chosen + 1, bound) * chosen, step)
        if self._assumptions.sizes == "most":
            row, choice = values // chosen, values % chosen
            values = torch.where(row % 8 == 0, row // 8, 0) * chosen + choice
        begin = bound // 2
        if out.numel() < _SEVERAL * chosen and self._assumptions.sizes != "typical":
            begin = bound - chosen if self._assumptions.sizes == "most" else min(1, bound - chosen)
        values = (values + begin) % bound
        self.positions_guessed = True
        if follows:
            rows = entry.values.movedim(-1 if dim is None else dim, -1).reshape(-1, bound)
            first = values[::chosen] if chosen < bound else torch.arange(len(rows))
            in_turn = (first[:, None] + torch.arange(bound)) % bound
            largest = bool(
                arguments.get("largest", arguments.get("descending", call.func not in _OF_SMALLEST))
            )
            numbers = rows.gather(1, in_turn)
            if chosen == 1:  # faster; of equals, the first
                order = numbers.argmax(1, True) if largest else numbers.argmin(1, True)
            else:
                order = numbers.argsort(dim=1, descending=largest, stable=True)
            values = in_turn.gather(1, order[:, :chosen])
            if len(results) > 1:
                self.set(results[0], _from_rows(rows.gather(1, values), out.shape, chosen, dim), known=False)
        if small:
            values = _from_rows(values, out.shape, chosen, dim)
        return self.set(out, values, whole=small, known=False)


def _bounds(func: OpOverload, args: Sequence[Any]) -> tuple[float, float]:
    """Of uniform numbers; of normal ones, mean and deviation. No tensor is kept alive by them."""
    first, second = (*args[1:3], *(0, 1)[len(args[1:3]) :]) if func._schema.is_mutable else (0, 1)
    return first, second


def _from_fractions(func: OpOverload, bounds: tuple[float, float], fractions: torch.Tensor) -> torch.Tensor:
    """Random numbers, uniform or normal, from their ranks between 0 and 1."""
    first, second = bounds
    if func not in _NORMAL:
        return fractions.mul(second - first).add_(first)
    return fractions.clamp(1e-7, 1 - 1e-7).mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2) * second).add_(first)


def _drawn(
    func: OpOverload, bounds: tuple[float, float], shape: Sequence[int], generator: torch.Generator
) -> torch.Tensor:
    return _from_fractions(func, bounds, torch.rand(shape, generator=generator))


def _with_part(
    whole: torch.Tensor, part: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    written = whole.clone(memory_format=torch.contiguous_format)
    written.as_strided(size, stride, offset).copy_(part)
    return written


@functools.cache
def _out_of_place(func: OpOverload) -> OpOverload | None:
    """add for add_; the op itself where it writes into nothing; None where it has no such form."""
    if not func._schema.is_mutable:
        return func
    name = func._schema.name.removeprefix("aten::").removesuffix("_")
    return getattr(getattr(aten, name, None), func._overloadname, None)


def _elements(waiting: _Waiting) -> float:
    """How many different elements the values have at most."""
    try:
        layout = waiting.layout()
    except Exception:
        return math.inf
    sizes = zip(layout.shape, layout.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride)


def _run_without_repeats(call: OpCall) -> Any:
    """An elementwise op of expanded tensors runs on one of the elements that are alike."""
    tensors = list(tensors_in(call.args, call.kwargs))
    if call.func is not aten._to_copy.default and torch.Tag.pointwise not in getattr(call.func, "tags", ()):
        return call.func(*call.args, **call.kwargs)
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))

    def one_of_repeated(tensor: torch.Tensor) -> torch.Tensor:
        for dim in repeated:
            if dim + tensor.dim() >= 0:
                tensor = tensor.narrow(dim, 0, 1)
        return tensor

    def repeats(tensor: torch.Tensor, dim: int) -> bool:
        return dim + tensor.dim() < 0 or tensor.size(dim) == 1 or tensor.stride(dim) == 0

    repeated = [
        dim
        for dim in range(-len(shape), 0)
        if shape[dim] > 1 and all(repeats(tensor, dim) for tensor in tensors)
    ]
    return call.run(one_of_repeated).expand(shape)


def _from_rows(values: torch.Tensor, shape: Sequence[int], chosen: int, dim: int | None) -> torch.Tensor:
    """What was chosen along a dimension, of a tensor whose last dimension that is."""
    if chosen == 1 or dim is None:
        return values.reshape(shape)
    sizes = list(shape)
    sizes.append(sizes.pop(dim))
    return values.reshape(sizes).movedim(-1, dim)


def _elements_written(args: BoundArguments) -> int | None:
    """By an op of _SCATTERS, where no position comes twice; None: masks select them, or values are added."""
    if "index" in args:
        return int(args["index"].numel())
    indices = args["indices"]
    if args["accumulate"] or any(index is not None and index.dtype == torch.bool for index in indices):
        return None
    shape = torch.broadcast_shapes(*(index.shape for index in indices if index is not None))
    rest = [size for size, index in itertools.zip_longest(args["self"].shape, indices) if index is None]
    return min(math.prod((*shape, *rest)), args["self"].numel())


def _run_on_samples(call: OpCall, samples: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """None where the samples do not fit together."""

    def sample(tensor: torch.Tensor) -> torch.Tensor:
        return samples[id(tensor)].clone() if call.func._schema.is_mutable else samples[id(tensor)]

    try:
        return call.run(sample)  # type: ignore[no-any-return]
    except Exception:
        return None


def _real(arg: Any, real: Callable[[Any], Any]) -> Any:
    if isinstance(arg, (torch.Tensor, _Waiting)):
        return real(arg)
    return [_real(item, real) for item in arg] if isinstance(arg, (list, tuple)) else arg


def _is_whole_number(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """What it is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= (_MOST_ELEMENTS if _is_whole_number(tensor.dtype) else _MOST_FLOATS)


def _asks_whether_finite(func: OpOverload, args: Sequence[Any]) -> bool:
    """Unknown numbers are assumed to be finite. torch.isfinite compares a tensor with itself and with inf."""
    if func in _ASKS_FINITE:
        return True
    return func in _COMPARISONS and (
        args[0] is args[1] or (isinstance(args[1], float) and math.isinf(args[1]))
    )


def _is_finite(values: torch.Tensor) -> bool:
    if not values.dtype.is_floating_point:
        return True
    return bool(values.isfinite().all()) if values.dim() else math.isfinite(values.item())


def _is_mask_to_add(entry: Representative) -> bool:
    """Whether unknown numbers that it is added to are not chosen where it is far below zero."""
    floats = entry.whole and entry.values.dtype.is_floating_point and entry.values.numel() > 1
    return floats and bool((entry.values < _NEVER_CHOSEN).any())


@functools.cache
def _default(dtype: torch.dtype) -> Representative:
    return Representative(torch.ones((), dtype=dtype), whole=False, known=False)


@functools.cache
def _without_elements(dtype: torch.dtype) -> Representative:
    return Representative(torch.empty(0, dtype=dtype), whole=True, known=True)


@functools.lru_cache(maxsize=256)
def _spread(dtype: torch.dtype, bound: float) -> torch.Tensor:
    """Unknown numbers that are compared with a bound beyond one: as those of a normal distribution."""
    if not dtype.is_floating_point or abs(bound) <= 1:
        return _default(dtype).values
    return torch.linspace(0, 1, _SAMPLE + 2)[1:-1].mul(2).sub(1).erfinv().mul(math.sqrt(2)).to(dtype)


def _is_whole(entry: Representative) -> bool:
    return entry.whole and entry.values.numel() > 1


def _sample(entry: Representative) -> torch.Tensor:
    if not entry.whole:
        return entry.values
    flat = entry.values.reshape(-1)
    sample = flat[:: math.ceil(flat.numel() / _SAMPLE) or 1]
    alike = flat.numel() > 0 and bool((sample == flat[0]).all()) and bool((flat == flat[0]).all())
    return flat[0] if alike else sample


def _fraction(entry: Representative) -> float:
    """How many of the elements are not zero. Rule: of an unknown condition, half."""
    values = entry.values
    if _is_unsure(entry):
        return 0.5
    return float(values.count_nonzero()) / max(values.numel(), 1)


def _is_unsure(entry: Representative) -> bool:
    """An unknown condition whose examples are all alike."""
    values = entry.values
    return not entry.known and values.dtype == torch.bool and bool(values.all()) == bool(values.any())


def _typical_rows(mask: torch.Tensor, found: Representative) -> int:
    """How many elements an unknown mask selects."""
    typical = math.ceil(mask.numel() * _fraction(found))
    if mask.dim() > 1 and typical >= _SEVERAL * len(mask):
        # As many in every row: programs give what they select a shape again, by x[mask].view(len(x), -1).
        typical = len(mask) * math.ceil(typical / len(mask))
    return typical


def _spread_positions(elements: int, chosen: int) -> torch.Tensor:
    return torch.arange(chosen) * elements // max(chosen, 1)


def _spread_mask(shape: Sequence[int], chosen: int) -> torch.Tensor:
    mask = torch.zeros(math.prod(shape), dtype=torch.bool)
    mask[_spread_positions(len(mask), chosen)] = True
    return mask.view(shape)


def _mean(entry: Representative) -> float:
    return _fraction(entry) if entry.values.dtype == torch.bool else float(entry.values.double().mean())


class ValueEstimates:
    """What the program reads of values, and sizes that depend on them.

    `note` and `note_once` write a note with the current line, which `site` gives. `allocated`: bytes, now.
    """

    def __init__(
        self,
        values: Values,
        note: Callable[[str], None],
        note_once: Callable[[str], None],
        site: Callable[[], Site | None],
        allocated: Callable[[], int],
        inside_model: Callable[[], bool],
    ) -> None:
        self._values = values
        self._inside_model = inside_model
        self._assumptions = _assumptions.get()
        self._note = note
        self._note_once = note_once
        self._site = site
        self._stated = WeakIdKeyDictionary()  # mask -> how many elements the program says it selects
        self._selected: dict[Line, tuple[int, int]] = {}  # guesses: so many of the elements of a mask
        # Of the last call that failed: the id of its error, and the shapes, rows of masks and numbers given.
        self._failed: tuple[int, list[tuple[int, ...]], set[int], list[int]] = (0, [], set(), [])
        self._asked: Counter[Line] = Counter()
        as_guessed = frozenset(each[:2] for each in self._assumptions.failed if not each[2])
        self._loops = _Loops(self._assumptions.sizes, as_guessed, allocated)
        self.conditions: dict[Site, str] = {}  # what those that are guesses were taken as, in order
        self._numbers: dict[Site, tuple[int, int]] = {}  # the least and most of whole ones that are guesses
        self.last_condition: Condition | None = None
        self.loops_cut = self._loops.cut
        self.sizes_assumed = False
        self.result_rows: Mapping[str, Callable[[int], int]] = {}  # of ops of libraries: typical, of so many

    def scalar(self, tensor: torch.Tensor) -> bool | int | float:
        """`.item()`, `if tensor:`"""
        self._values.resolve(tensor)
        found = self._values.of(tensor)
        value = found.values.reshape(-1)[0].item()
        if found.known and isinstance(value, bool):
            self._loops.count(_read_at(self._site() or Site("", 0, "")), value)
        return value if found.known else self._answer(value, tensor)

    def numbers(self, tensor: torch.Tensor) -> Any:
        """`.tolist()`. Of guesses, the first asks for all: a loop may wait for it."""
        self._values.resolve(tensor)
        values = self._values.whole(tensor)
        if not self._values.of(tensor).known and values.numel():
            first = values.reshape(-1)[0].item()
            answer = self._answer(first)
            if answer != first:
                values = torch.full_like(values, answer)
            elif type(answer) is int:
                self.read_integers()
                self._numbers[self._site() or Site("", 0, "")] = int(values.min()), int(values.max())
        return values.tolist()

    def equality(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """`torch.equal`, `torch.allclose`"""
        for tensor in args[:2]:
            self._values.resolve(tensor)
        left, right = (self._values.of(tensor) for tensor in args[:2])
        if args[0].shape != args[1].shape and func is aten.equal.default:
            return False
        if left.whole and right.whole:
            same = bool(func(left.values, right.values, *args[2:], **kwargs))
        else:
            same = bool((left.values.double().mean() - right.values.double().mean()).abs() < 1e-6)
        return same if left.known and right.known else bool(self._answer(same))

    def _answer(self, value: Any, condition: torch.Tensor | None = None) -> Any:
        """A guess that the program reads."""
        read = _read_at(self._site() or Site("", 0, ""))
        site, line = read.site, read.line
        self._asked[line] += 1
        asked = self._asked[line]
        failed = [each for each in self._assumptions.failed if each[:2] == line and 0 < each[2] <= asked]
        answered = self._loops.answer(read, value)
        value = answered.value
        if answered.prolonged:
            self.last_condition = (*line, 0, bool(value))
            if condition is not None:
                self._values.set_to_match(condition, value, answered.rounds)
        self.sizes_assumed |= self._loops.kept_memory
        if answered.halved:
            self._note("a number that a loop waits for, read from the GPU, halves with every further round")
        if isinstance(value, bool):
            answer = not max(failed)[3] if failed else value
            answer = answer != answered.cut
            taken = str(answer).lower()
            same = self.conditions.setdefault(site, taken) == taken
            self.conditions[site] = taken if same else "true in some rounds or calls and false in others"
            if self.last_condition is None or self.last_condition[2]:
                self.last_condition = (*line, asked, answer)
            return answer
        other = bool(failed) != answered.cut
        if isinstance(value, int):
            self.read_integers()
            number = 0 if other else value
            least, most = self._numbers.get(site, (number, number))
            self._numbers[site] = min(least, number), max(most, number)
        else:
            self._note_once(
                "numbers read from the GPU (a loss to print, a norm) are taken as 1.0 and what follows"
            )
        return type(value)(0) if other else value

    def notes(self) -> Iterator[Note]:
        for site, taken in self.conditions.items():
            text = f"a condition on values of the GPU is taken as {taken}"
            yield Note(text, site if site.file else None)
        for site, (least, most) in self._numbers.items():
            text = f"a whole number read from the GPU is taken as {least}"
            if most > least:
                text = f"whole numbers read from the GPU are taken as {least} to {most}"
            yield Note(text, site if site.file else None)

    def read_integers(self) -> None:
        """A model that reads positions computes sizes by them, such as periods."""
        self.sizes_assumed |= self._values.positions_guessed and self._inside_model()

    def state_selected(self, mask: torch.Tensor, rows: int, at_most: bool = False) -> None:
        """The program assigns so many values to the elements that the mask selects."""
        self._stated[mask] = min(rows, self._rows_selected(mask)) if at_most else rows

    def note_effects(self, func: OpOverload, args: Sequence[Any]) -> None:
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            # No gradient overflowed: the optimizer steps.
            self._values.set(args[1], torch.zeros(args[1].shape))

    def _size(self, op: str, typical: int, most: int, fewest: int = 1) -> int:
        """A size that depends on values; with a note where it is a guess."""
        if fewest >= most:
            return typical
        self.sizes_assumed = True
        size = self._assumptions.size(typical, most, fewest)
        self._note(
            f"the size of the result of {op} depends on values: {size:,} of at most {most:,} is assumed"
        )
        return size

    def count_classes(self, ids: torch.Tensor, op: str) -> int:
        """One more than the largest id."""
        found = self._values.of(ids)
        if ids.numel() == 0:
            return 0
        if not found.known and found.values.numel() == 1:
            self._note(f"{op}: how many classes there are depends on values; one per element is assumed")
            return int(ids.numel())
        classes = int(found.values.max()) + 1
        if not found.known:
            self._note(f"{op}: how many classes there are depends on values; {classes} are assumed")
        return classes

    def has_zeros(self, tensor: torch.Tensor) -> bool:
        """Whether an element is zero. Rule: of unknown numbers, only in the largest case."""
        known = self._values.known(tensor)
        if known is None:
            self.sizes_assumed = True
            return self._assumptions.sizes == "most"
        return not bool(known.all())

    def data_dependent_result(
        self, fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """The result of an op whose shape depends on values. Rule: what follows from the representative
        values; an unknown condition selects half."""
        if func._schema.is_mutable and "out" in kwargs:
            options = {name: value for name, value in kwargs.items() if name != "out"}
            result = self.data_dependent_result(fake, func.overloadpacket.default, args, options)
            return fake(aten.resize_.default, (kwargs["out"], list(result.shape)), {})
        if func.name() in self.result_rows:  # which are numbered
            there = args[0].shape[0]
            kept = self._size(op_name(func), self.result_rows[func.name()](there), there)
            return self._spread_evenly(_empty(fake, (kept,), torch.int64), there)
        rule = DATA_DEPENDENT_RESULTS.get(func.overloadpacket)
        if rule is None:
            self._note(
                f"the size of the result of {op_name(func)} depends on values and oomph has no rule for it: "
                "it is assumed to be as large as the first argument"
            )
            return results_like_first_argument(fake, func, args)
        for tensor in tensors_in(args, kwargs):
            self._values.resolve(tensor)
        call = OpCall(func, args, kwargs)
        return rule(self, fake, bind(*call), partial(self._values.compute, call))

    def call_failed(self, error: BaseException, args: Any, kwargs: Any) -> None:
        """A call into torch raised; what it was given says how many elements a mask should have selected."""
        if not self._selected or self._failed[0] == id(error):  # of the calls that it went through, the first
            return
        leaves = tree_leaves((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        shapes = [tuple(each.shape) for each in tensors]
        # What a mask selects of another operand, as in x[mask] = y, has no shape before.
        masks = {each.numel() for each in tensors if each.dtype is torch.bool}
        rows = {rows for rows, elements in self._selected.values() if elements in masks}
        numbers = [int(each) for each in leaves if isinstance(each, int | torch.SymInt)]
        self._failed = id(error), shapes, rows, numbers

    def share_stated(self, error: BaseException) -> tuple[str, int, Fraction] | None:
        """The part of a mask that a line selects, of a program that failed because it gave the selected
        elements a shape, as in x[mask].view(n, 32, 32), that does not go with the guess of their number, or
        because it used them with a tensor as long as the mask, as in x[mask] + y: the mask selects all."""
        failed, shapes, rows_of_masks, numbers = self._failed
        if failed != id(error):
            return None
        sizes = rows_of_masks.union(*shapes)
        for line, (rows, elements) in reversed(self._selected.items()):
            if rows != elements and {rows, elements} <= sizes:
                return *line, Fraction(1)
        if len(shapes) != 1:
            return None
        size, wanted = math.prod(shapes[0]), math.prod(each for each in numbers if each != -1)
        if -1 in numbers:
            wanted *= max(round(size / max(wanted, 1)), 1)
        for line, (rows, elements) in reversed(self._selected.items()):
            each = size // max(rows, 1)  # what a selected element has in further dimensions
            if each and rows * each == size and wanted % each == 0 and wanted <= elements * each:
                return *line, Fraction(wanted // each, elements)
        return None

    def _rows_selected(self, mask: torch.Tensor) -> int:
        """How many elements nonzero finds."""
        self._values.resolve(mask)
        found = self._values.of(mask)
        if mask in self._stated:
            return int(self._stated[mask])
        if found.whole and found.known:
            return int(found.values.count_nonzero())
        site = self._site() or Site("", 0, "")
        line = site.file, site.line
        if line in self._assumptions.shares:
            self._note("how many elements a mask selects follows from what the program does with them")
            return round(self._assumptions.shares[line] * mask.numel())
        rows = self._rows_guessed(mask, found)
        self._selected.pop(line, None)  # the latest is the last
        self._selected[line] = rows, mask.numel()
        return rows

    def _rows_guessed(self, mask: torch.Tensor, found: Representative) -> int:
        elements = mask.numel()
        op = "aten.nonzero (also run for x[mask])"
        if found.whole:
            count = int(found.values.count_nonzero())
            self.sizes_assumed = True
            self._note(f"the size of the result of {op} follows from values that are assumed")
            return count
        typical = _typical_rows(mask, found)
        if found.known:
            spread = 0 if typical in (0, elements) else 3 * math.isqrt(elements)
            return self._size(op, typical, min(elements, typical + spread), max(0, typical - spread))
        if mask.dtype != torch.bool and found.values.numel() == 1:  # unknown numbers are hardly ever zero
            return typical
        return self._size(op, typical, min(elements, 2 * typical))

    def _nonzero(self, fake: Fake, call: BoundArguments, compute: KnownResults) -> Any:
        source = call["self"]
        rows = self._rows_selected(source)
        # CUDA writes one dimension after the other.
        columns = _empty(fake, (source.dim(), rows), torch.int64)
        return self._spread_evenly(fake(aten.t.default, (columns,), {}), *source.shape)

    def _spread_evenly(self, indices: torch.Tensor, *shape: int) -> torch.Tensor:
        """Guess which elements of a tensor of this shape were selected: none twice."""
        if indices.numel() and is_small(indices):
            positions = _spread_positions(math.prod(shape), len(indices))
            each = torch.unravel_index(positions, shape)
            self._values.set(indices, torch.stack(each, 1).view(indices.shape), known=False)
        return indices

    def _index(self, fake: Fake, call: BoundArguments, compute: KnownResults) -> Any:
        """On the host. On the GPU, dispatch.py runs nonzero first."""
        plain: list[Any] = []
        for index in call["indices"]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                rows = self._rows_selected(index)
                plain += [_empty(fake, (rows,), torch.int64) for _ in range(index.dim())]
            else:
                plain.append(index)
        return fake(aten.index.Tensor, (call["self"], plain), {})

    def _masked_select(self, fake: Fake, call: BoundArguments, compute: KnownResults) -> Any:
        """On the host, as above."""
        source, mask = call["self"], call["mask"]
        elements = math.prod(torch.broadcast_shapes(source.shape, mask.shape))
        rows = self._rows_selected(mask) * elements // max(mask.numel(), 1)
        return _empty(fake, (rows,), source.dtype)

    def _unique(self, fake: Fake, call: BoundArguments, compute: KnownResults) -> Any:
        """Unique values, and on request the inverse and the counts. All are allocated as long as the input,
        however few values there are."""
        source, dim = call["self"], call.get("dim")
        if dim is not None:
            return self._unique_rows(fake, call, compute)
        n, computed, values = source.numel(), compute(), self._values.of(source)
        found = len(computed[0]) if computed is not None else n
        if computed is None and not source.dtype.is_floating_point and "sorted" in call:
            found = min(
                n, int(values.values.max()) - int(values.values.min()) + 1 if values.values.dim() else n
            )
        if not values.known or computed is None:
            found = self._size("aten.unique", found, n)
        inverse, counts = call["return_inverse"], call.get("return_counts", False)
        results = (
            _first_of(fake, n, found, source.dtype),
            _empty(fake, source.shape if inverse else (0,), torch.int64),
            _first_of(fake, n, found, torch.int64) if counts else _empty(fake, (0,), torch.int64),
        )
        return results if "return_counts" in call else results[:2]

    def _unique_rows(self, fake: Fake, call: BoundArguments, compute: KnownResults) -> Any:
        source, dim = call["self"], call["dim"]
        rows = source.size(dim) if source.dim() else 1
        found, computed = rows, compute()
        if computed is not None:
            found = computed[0].size(dim) if source.dim() else 1
        if computed is None or not self._values.of(source).known:
            found = self._size("aten.unique with dim", found, rows)
        shape = list(source.shape)
        if shape:
            shape[dim] = found
        inverse, counts = rows if call["return_inverse"] else 0, found if call["return_counts"] else 0
        return (
            _empty(fake, shape, source.dtype),
            _empty(fake, (inverse,), torch.int64),
            _empty(fake, (counts,), torch.int64),
        )

    def _bincount(self, fake: Fake, call: BoundArguments, compute: KnownResults) -> Any:
        ids, weights = call["self"], call["weights"]
        bins = self.count_classes(ids, "aten.bincount")
        dtype = torch.int64
        if weights is not None:
            dtype = torch.float32 if weights.dtype == torch.float32 else torch.float64
        return _empty(fake, (max(bins, call["minlength"]),), dtype)

    def _ctc_loss(self, fake: Fake, call: BoundArguments, compute: KnownResults) -> Any:
        source, targets, lengths = call["log_probs"], call["targets"], call["target_lengths"]
        if isinstance(lengths, torch.Tensor):
            value, batches = self._values.known(lengths), lengths.numel()
        else:
            value, batches = torch.tensor(lengths), len(lengths)
        if value is not None:
            longest = int(value.max())
        else:
            self._note(
                "aten._ctc_loss: the longest target depends on values; the largest possible is assumed"
            )
            longest = targets.shape[1] if targets.dim() == 2 else math.ceil(targets.numel() / batches)
        frames, batch = source.shape[0], source.shape[1]
        losses = _empty(fake, (batch,), source.dtype)
        return losses, _empty(fake, (batch, frames, 2 * longest + 1), source.dtype)

    def _repeat_interleave(self, fake: Fake, call: BoundArguments, compute: KnownResults) -> Any:
        repeats, total = call["repeats"], call["output_size"]
        if total is None:
            found, elements = self._values.of(repeats), repeats.numel()
            total = int(found.values.sum()) if found.whole else round(_mean(found) * elements)
            if not found.known:
                most = max(total, elements * int(found.values.max())) if found.values.numel() else 0
                total = self._size("aten.repeat_interleave (output_size= states it)", total, most)
        return _empty(fake, (total,), repeats.dtype)

    def _lstsq(self, fake: Fake, call: BoundArguments, compute: KnownResults) -> Any:
        matrix, right = call["self"], call["b"]
        unknowns, batch = matrix.shape[-1], matrix.shape[:-2]
        vector = right.dim() == matrix.dim() - 1
        columns = () if vector else (right.shape[-1],)
        overdetermined = matrix.shape[-2] > unknowns
        return (
            _empty(fake, (*batch, unknowns, *columns), matrix.dtype),
            _empty(fake, (*batch, *columns) if overdetermined else (0,), matrix.dtype),
            _empty(fake, (0,), torch.int64),
            _empty(fake, (0,), matrix.dtype),
        )


# Computes the op's results on the host; None where an input is not known.
KnownResults = Callable[[], tuple[torch.Tensor, ...] | None]
DataDependentRule = Callable[[ValueEstimates, Fake, BoundArguments, KnownResults], Any]
DATA_DEPENDENT_RESULTS: dict[Any, DataDependentRule] = {
    aten.nonzero: ValueEstimates._nonzero,
    aten.index: ValueEstimates._index,
    aten.masked_select: ValueEstimates._masked_select,
    **dict.fromkeys((aten._unique, aten._unique2, aten.unique_consecutive), ValueEstimates._unique),
    **dict.fromkeys((aten.unique_dim, aten.unique_dim_consecutive), ValueEstimates._unique_rows),
    aten.bincount: ValueEstimates._bincount,
    aten._ctc_loss: ValueEstimates._ctc_loss,
    aten.repeat_interleave: ValueEstimates._repeat_interleave,
    aten.linalg_lstsq: ValueEstimates._lstsq,
}


def results_like_first_argument(fake: Fake, func: OpOverload, args: Sequence[Any]) -> Any:
    first = next(tensors_in(args, {}))
    results = [fake(aten.empty_like.default, (first,), {}) for _ in func._schema.returns]
    return results[0] if len(results) == 1 else results


def _empty(fake: Fake, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return fake(aten.empty.memory_format, (list(shape),), {"dtype": dtype, "device": torch.device("cpu")})


def _first_of(fake: Fake, allocated: int, used: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that was shortened in place: its storage keeps its size."""
    whole = _empty(fake, (allocated,), dtype)
    return whole if used == allocated else fake(aten.slice.Tensor, (whole, 0, 0, used), {})


# ------------------------------------------------------------------------------------------------------ loops

# A trace answers `while tensor:` and `if tensor: break` by a guess, which may be the same forever, or end a
# loop at once that takes rounds with real values. Loops that ask too often are left. A number that the
# program reads and compares to end a loop, such as the error of a solver, halves after a few rounds. Where
# each round keeps memory, as with an adaptive ODE solver, and the guess allows only a few, their number is
# assumed.
_ROUNDS = {"fewest": 1, "typical": 4, "most": 12}  # of a loop that keeps memory and that a guess ends earlier
_MOST_ASKED = 100  # times that a loop asks the same before it gets the other answer
_MOST_ASKED_BY_CALLS = 1000  # by `if condition: return` outside a loop, which every layer of a model may ask
_MOST_HALVED = 40  # times that a number is halved that a loop waits for
_MOST_ASKED_ANYWHERE = 10_000  # of a line that does not look like the end of a loop


_Position = tuple[float, float]  # a line and a column
_NOWHERE: _Position = (math.inf, math.inf)


class _Answered(NamedTuple):
    """`value` is the guess, or its opposite where the loop is `prolonged`. `cut`: the program gets the other
    answer, once. `rounds`: how often in a row the line got the value. `halved`: it is a part of the guess."""

    value: Any
    rounds: int
    prolonged: bool
    cut: bool
    halved: bool


class _Asked(NamedTuple):
    """The last answer of a line, how often in a row, and the bytes allocated then, in one execution of the
    loop's function: the next execution starts its loop again. `left_at`: where in the source the answer was
    given that ends the loop. Conditions behind it end it, too, as b in `if a and b: break`."""

    answer: Any = None
    repeated: int = 0
    allocated: int = 0
    execution: object = None
    left_at: _Position = _NOWHERE


class _Loops:
    """`sizes`: "fewest", "typical" or "most" rounds. `as_guessed`: files and lines of loops that are not
    prolonged. `allocated`: bytes, now. `kept_memory`: a loop was cut that kept memory in its rounds."""

    def __init__(self, sizes: str, as_guessed: Collection[Line], allocated: Callable[[], int]) -> None:
        self._sizes, self._as_guessed, self._allocated = sizes, as_guessed, allocated
        self._asked: dict[Line, _Asked] = {}
        self._short: set[Line] = set()  # loops that a guess ends after few rounds
        self._left: set[Line] = set()  # of those in `cut`
        self.cut: list[Note] = []
        self.kept_memory = False

    def answer(self, read: _Read, value: Any) -> _Answered:
        """The program reads a guess here."""
        end, before = read.end, self._last(read)
        if before.left_at < read.place and end is not None and end.goes_on is not None:
            self._asked[read.line] = before._replace(left_at=read.place)
            return _Answered(not end.goes_on, 1, False, False, False)
        grew = self._allocated() > before.allocated
        ends = end is not None and end.goes_on is not None and value is (not end.goes_on)
        prolonged = end is not None and ends and self._runs_longer(read, end, before, grew)
        value = not value if prolonged else value
        repeated = self.count(read, value)
        if end is None:
            most = _MOST_ASKED_ANYWHERE
        elif not end.in_loop:
            most = _MOST_ASKED_BY_CALLS
        else:
            most = _ROUNDS["typical"] if self._sizes == "fewest" and grew else _MOST_ASKED
        if repeated > most:
            self._asked[read.line] = _Asked(execution=read.execution, left_at=read.place)
            self._leave(read, repeated, grew)
        halved = min(repeated - _ROUNDS[self._sizes], _MOST_HALVED)
        halves = end is not None and end.of_number and isinstance(value, float) and halved > 0
        if halves:
            value *= 0.5**halved  # not 0: the program may divide by it
        return _Answered(value, repeated, prolonged, repeated > most, halves)

    def count(self, read: _Read, value: Any) -> int:
        """How often in a row it got this answer."""
        end, last = read.end, self._last(read)
        if end is not None and end.together and value is not end.goes_on:  # the other conditions decide
            return last.repeated
        repeated = last.repeated + 1 if last.answer == value or not isinstance(value, bool) else 1
        self._asked[read.line] = _Asked(value, repeated, self._allocated(), read.execution)
        return repeated

    def _last(self, read: _Read) -> _Asked:
        last = self._asked.get(read.line, _Asked())
        return last if last.execution is read.execution else _Asked()

    def _runs_longer(self, read: _Read, end: _LoopEnd, last: _Asked, grew: bool) -> bool:
        """Whether a loop goes on that a guess would end."""
        again = last.answer == end.goes_on
        rounds = last.repeated * again + end.after_round
        if not end.in_loop or not rounds or (again and not grew):
            return False
        if rounds < _ROUNDS["typical"]:
            self._short.add(read.line)
        if read.line not in self._short or read.line in self._as_guessed:
            return False
        if rounds < _ROUNDS[self._sizes]:
            return True
        self._leave(read, rounds, grew)
        return False

    def _leave(self, read: _Read, rounds: int, grew: bool) -> None:
        self.kept_memory |= grew
        if read.line not in self._left:
            self._left.add(read.line)
            text = f"a loop whose end depends on values was left after {rounds} rounds"
            self.cut.append(Note(text, read.site))


def _frame(site: Site) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_lineno != site.line or frame.f_code.co_filename != site.file):
        frame = frame.f_back
    return frame


class _Mark:
    """Tells the executions of a function apart: ids of frames are used again, and a frame that is held keeps
    its tensors. It is in the place of the function that sys.settrace has for the frame, and calls it."""

    def __init__(self, traced: Any) -> None:
        self._traced = traced

    def __call__(self, *event: Any) -> _Mark:
        if self._traced is not None:
            self._traced = self._traced(*event) or self._traced
        return self


def _mark(frame: FrameType | None) -> object:
    if frame is not None and not isinstance(frame.f_trace, _Mark):
        frame.f_trace = _Mark(frame.f_trace)
    return frame and frame.f_trace


class _LoopEnd(NamedTuple):
    """A condition that can end a loop: with which answer the loop goes on, and whether it is asked after a
    round, not before. Outside a loop, `if condition: return` may end one of a caller. `together`: several
    conditions have to agree for the loop to end, as in `if a and b: break`."""

    line: int  # on which the whole condition begins: several that stand on lines of their own are one
    goes_on: bool | None  # None: of_number
    after_round: bool
    in_loop: bool
    together: bool = False
    of_number: bool = False  # not the condition, but a number that it compares: `error = x.max().item()`


class _Read(NamedTuple):
    """A place where the program reads a guess, and what it may end by that."""

    site: Site
    line: Line  # on which the condition begins, if it is one
    place: _Position
    end: _LoopEnd | None
    execution: object  # of the function that has the loop


def _read_at(site: Site) -> _Read:
    frame = _frame(site)
    place = _NOWHERE if frame is None else _position(frame.f_code, frame.f_lasti)
    ends = _loop_ends(site.file).get(site.line, ())
    end = next((end for begin, until, end in ends if begin <= place <= until), None)
    line = site.file, site.line if end is None else end.line
    return _Read(site, line, place, end, _mark(frame) if end is not None and end.in_loop else None)


@functools.lru_cache(maxsize=256)
def _position(code: CodeType, instruction: int) -> _Position:
    """Where its source begins, without which (`-X no_debug_ranges`) nothing is told apart."""
    line, _, column, _ = next(itertools.islice(code.co_positions(), instruction // 2, None))
    return _NOWHERE if line is None or column is None else (line, column)


@functools.lru_cache(maxsize=256)
def _loop_ends(file: str) -> dict[int, list[tuple[_Position, _Position, _LoopEnd]]]:
    """Line -> from where to where `while condition:` asks, or `if condition:` whose last statement is break
    or return. Also what is assigned to a name which such a condition of the loop around it has."""
    found: dict[int, list[tuple[_Position, _Position, _LoopEnd]]] = {}

    def add(node: ast.expr | ast.stmt, end: _LoopEnd) -> None:
        first, last = (
            (node.lineno, node.col_offset),
            (node.end_lineno or node.lineno, node.end_col_offset or 0),
        )
        for line in range(first[0], last[0] + 1):
            found.setdefault(line, []).append((first, last, end))

    def state(test: ast.expr, end: _LoopEnd) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            state(test.operand, end._replace(goes_on=not end.goes_on))
        elif isinstance(test, ast.BoolOp):
            together = end.together or isinstance(test.op, ast.Or) is end.goes_on
            for operand in test.values:
                state(operand, end._replace(together=together))
        else:
            add(test, end)

    def visit(node: ast.AST, in_loop: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.While):
                state(child.test, _LoopEnd(child.test.lineno, True, False, True))
            elif isinstance(child, ast.If) and isinstance(child.body[-1], (ast.Break, ast.Return)):
                state(child.test, _LoopEnd(child.test.lineno, False, True, in_loop))
            loop = isinstance(child, (ast.While, ast.For))
            visit(child, loop or (in_loop and not isinstance(child, (ast.FunctionDef, ast.Lambda))))
            if loop:
                for each in _assignments_of_tested(child):
                    add(each, _LoopEnd(each.lineno, None, False, True, of_number=True))

    with contextlib.suppress(SyntaxError, ValueError):
        visit(ast.parse("".join(linecache.getlines(file))), False)
    return found


def _assignments_of_tested(loop: ast.AST) -> Iterator[ast.Assign]:
    """Of the assignments in a loop to names that the conditions which end it have."""
    inside = list(ast.walk(loop))
    ends = [each for each in inside if isinstance(each, ast.If)]
    tests = [each.test for each in ends if isinstance(each.body[-1], ast.Break | ast.Return)]
    tests += [loop.test] if isinstance(loop, ast.While) else []
    tested = {name.id for test in tests for name in ast.walk(test) if isinstance(name, ast.Name)}
    for each in inside:
        if isinstance(each, ast.Assign) and any(getattr(one, "id", None) in tested for one in each.targets):
            yield each
