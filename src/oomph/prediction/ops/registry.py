"""What is known of each op, in one entry: what CUDA allocates for it, what it refuses, how much work it is.

The files of this package hold the entries, one file for each family of ops; all that is said of an op stands
in one of them. What no entry says follows from the op's tags and its schema. `FACTS[func]` is looked up once
for each op of a trace.

Dtypes that CUDA refuses: the rules are those of torch 2.11 on an H200. Determinism: ops that call
`alertNotDeterministic` in ATen's native/cuda. (The list in torch's documentation is longer: it has ops that
are deterministic by now, such as cumsum.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import torch

from oomph.gpus import GPU
from oomph.prediction.ops.rules import (
    BoundArguments,
    CompositeRule,
    CudaKernel,
    FlopsRule,
    HostOutputsRule,
    TemporariesRule,
    Temporary,
    bind,
    op_name,
    program_error,
)
from oomph.torch_internals import OpOverload, deterministic_required

T = TypeVar("T")
LookUpRule = Callable[..., Iterable[tuple[int, Any]]]
KERNEL_OP = "oomph::kernel"  # called by a Triton kernel's launcher in place of the launch, on fake tensors


@dataclass(frozen=True, slots=True)
class OpFacts:
    """The defaults are those of an op without an entry."""

    func: OpOverload
    name: str

    # On fake tensors.
    is_kernel: bool = False  # stands for the launch of a Triton kernel
    is_view: bool = False  # of its first argument, without any effect of its own
    is_plain: bool = False  # its meta kernel, in C++, gives what it gives on fake tensors
    is_factory: bool = False  # takes no tensor
    initialises: bool = False  # its first argument, with numbers that nobody asks for
    half_on_cuda_only: bool = False  # torch fakes it by the CPU's kernels, which lack those types
    makes_sparse: bool = False
    converts_to: torch.layout | None = None  # of the sparse tensor that it makes of its first argument

    # What it does with the values and the devices of its arguments.
    reads: bool = False  # the host waits for values, and gets them
    takes_two_devices: bool = False
    takes_masks: bool = False
    assigns_by_index: bool = False
    looks_up: LookUpRule | None = None  # dimensions of the first argument, and the indices of each
    # Where autograd writes the result into the first argument, in the backward pass of plain tensors: into
    # "fresh zeros", into one of a "sum of gradients", or into what these nodes have just made.
    reuses_first: tuple[str, ...] = ()

    # What is known of the result's values, for values.py.
    makes_known: bool = False  # values that follow from the numbers it is given
    ignores_values: bool = False  # and so do these, whatever the values of its first tensor
    constant: int | None = None  # of all elements
    filled_with: int | None = None  # the position of the argument that all elements are
    leaves_unset: bool = False  # makes memory that nothing has been written to
    keeps_values: bool = False  # elements of its first tensor, or of the second
    random: Literal["", "integers", "normal", "uniform", "flags", "permutation"] = ""
    random_between: tuple[int | None, int] | None = None  # the arguments that bound them; None: 0
    chooses: int | None = None  # the result that holds positions along a dimension
    factorizes: bool = False  # the last result is 0 where the matrix can be factored

    # Memory.
    results: CudaKernel | None = None  # where the fake CPU kernel gives another shape, dtype or layout
    temporaries: TemporariesRule | None = None  # bytes that a kernel's host code allocates for itself
    allocation_order: tuple[int, ...] | None = None  # of the results, where it is not theirs
    host_outputs: HostOutputsRule | None = None  # indices of results that take no device memory
    composite: CompositeRule | None = None  # how CUDA decomposes an op that autograd never sees
    uses_cublas: Callable[[Sequence[Any]], bool] | None = None  # whether a call with these arguments does

    # Work: what a step's time is estimated from.
    is_free: bool = False  # nothing runs on the GPU
    is_collective: bool = False
    over_lists: bool = False  # of tensors
    flops: FlopsRule | None = None  # of other ops than these only the bytes are counted
    launches: int = 1  # of kernels
    passes: int = 1  # over the inputs
    reads_first: bool = True  # or the first argument says how the result looks
    gathers: bool = False  # reads of its first argument what the result is made of
    scatters: bool = False  # touches of its first argument, if in place, what the last tensor covers
    only_writes: bool = False
    elementwise: bool = False
    waits: bool = False  # the host waits for the result, whose size depends on data

    # What CUDA refuses and fake tensors let through.
    same_dtype: tuple[str, ...] = ()  # the arguments that must have one dtype
    dtypes: frozenset[torch.dtype] | None = None  # that those may have; None: any
    nondeterministic: Callable[[BoundArguments], bool] | None = None  # whether the call has no such kernel


_KNOWN = {field.name for field in fields(OpFacts)} - {"func", "name"}
# Facts by op ("aten::sort") and by overload ("aten::sort.stable"), which have precedence.
_ENTRIES: dict[str, dict[str, Any]] = {}
FILES: dict[str, set[str]] = {}  # op -> the modules that hold its entries


def op(*ops: str | OpOverload, **facts: Any) -> None:
    """Enter facts in the file that calls this. An op is an overload, or names of ops of ATen: `sort` for all
    overloads, or `sort.stable`."""
    _enter(ops, facts, sys._getframe(1).f_globals["__name__"])


def _enter(ops: Sequence[str | OpOverload], facts: Mapping[str, Any], module: str) -> None:
    assert facts.keys() <= _KNOWN, facts.keys() - _KNOWN
    for key in (key for each in ops for key in _keys(each)):
        entry = _ENTRIES.setdefault(key, {})
        assert not entry.keys() & facts.keys(), f"{key}: {entry.keys() & facts.keys()} is entered twice"
        entry.update(facts)
        FILES.setdefault(key.partition(".")[0], set()).add(module)


def _keys(op: str | OpOverload) -> list[str]:
    if isinstance(op, str):
        return [name if "::" in name else f"aten::{name}" for name in op.split()]
    return [_key(op)]


def _key(func: OpOverload) -> str:
    return f"{func._schema.name}.{func._overloadname}"


def _entering(fact: str) -> Callable[..., Callable[[T], T]]:
    """A decorator that enters a rule for one or more ops."""

    def for_ops(*ops: str | OpOverload) -> Callable[[T], T]:
        module = sys._getframe(1).f_globals["__name__"]

        def enter(rule: T) -> T:
            _enter(ops, {fact: rule}, module)
            return rule

        return enter

    return for_ops


cuda_kernel = _entering("results")
temporaries = _entering("temporaries")
host_outputs = _entering("host_outputs")
composite = _entering("composite")
flops = _entering("flops")


class _Facts(dict[OpOverload, OpFacts]):
    def __missing__(self, func: OpOverload) -> OpFacts:
        facts = self[func] = OpFacts(func, op_name(func), **(_derived(func) | _entered(func)))
        return facts


_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_OVER_LISTS = ("aten::_foreach_", "aten::_fused_ada", "aten::_fused_sgd", "aten::_amp_foreach_")


def _derived(func: OpOverload) -> dict[str, Any]:
    """What the op's tags, its schema and its name say."""
    return {
        "is_kernel": func._schema.name == KERNEL_OP,
        "is_factory": not any("Tensor" in str(argument.type) for argument in func._schema.arguments),
        "reads": torch.Tag.data_dependent_output in func.tags,
        "is_collective": func.namespace in _COLLECTIVES,
        "is_free": (func.is_view and not func._schema.is_mutable) or func.namespace == "prim",
        "over_lists": func._schema.name.startswith(_OVER_LISTS),
        "elementwise": torch.Tag.pointwise in func.tags,
    }


def _entered(func: OpOverload) -> dict[str, Any]:
    found = _ENTRIES.get(func._schema.name, {}) | _ENTRIES.get(_key(func), {})
    other = _without_out(func)
    if other is not func and "temporaries" not in found:
        rule = _ENTRIES.get(_key(other), {}).get("temporaries")
        return found if rule is None else found | {"temporaries": rule}
    return found


def _without_out(func: OpOverload) -> OpOverload:
    """An op that writes into `out` has the temporaries of the op that makes its result: `sum.dim_IntList` for
    `sum.IntList_out`. The op itself if it takes no `out`."""
    arguments = func._schema.arguments
    names = [argument.name for argument in arguments if not argument.is_out]
    if len(names) < len(arguments):
        for overload in func.overloadpacket.overloads():
            other: OpOverload = getattr(func.overloadpacket, overload)
            if [argument.name for argument in other._schema.arguments] == names:
                return other
    return func


FACTS = _Facts()


def entered(fact: str) -> dict[OpOverload, Any]:
    """The overloads that an entry says this of, and what it says."""
    found = {}
    for key, entry in _ENTRIES.items():
        if fact in entry:
            found.update(dict.fromkeys(_overloads(key), entry[fact]))
    return found


def _overloads(key: str) -> list[OpOverload]:
    name, _, overload = key.partition(".")
    namespace, _, op = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), op)
    return [getattr(packet, each) for each in ([overload] if overload else packet.overloads())]


def entries() -> dict[str, dict[str, Any]]:
    """All that is entered, by op: `sort` has the facts of all its overloads. For the docs."""
    found: dict[str, dict[str, Any]] = {}
    for key, entry in _ENTRIES.items():
        found.setdefault(key.partition(".")[0].removeprefix("aten::"), {}).update(entry)
    return found


def is_described(func: OpOverload) -> bool:
    """Whether an entry, a tag or the schema says what the op is. Others are taken to make their results, in
    order, in one kernel that goes over all arguments."""
    facts = FACTS[func]
    derived = facts.elementwise or facts.is_free or facts.is_factory or facts.reads
    return derived or facts.over_lists or facts.is_collective or func._schema.name in FILES


def temporaries_of(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], gpu: GPU
) -> list[Temporary]:
    rule = FACTS[func].temporaries
    return [size for size in rule(bind(func, args, kwargs), gpu) if size != 0] if rule is not None else []


def check_dtypes(facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise where the op's CUDA kernel would raise."""
    call = bind(facts.func, args, kwargs)
    found = {name: call[name].dtype for name in facts.same_dtype if call[name] is not None}
    if len(set(found.values())) > 1:
        raise program_error(RuntimeError(f"{facts.func}: expected the same dtype, but {_shown(found)}"))
    if facts.dtypes is not None and not facts.dtypes.issuperset(found.values()):
        raise program_error(NotImplementedError(f"{facts.func} is not implemented on CUDA: {_shown(found)}"))


def _shown(dtypes: Mapping[str, torch.dtype]) -> str:
    return ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for name, dtype in dtypes.items())


def lacks_deterministic_kernel(facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a run would raise at this call, because only deterministic kernels are allowed."""
    rule = facts.nondeterministic
    return rule is not None and deterministic_required() and rule(bind(facts.func, args, kwargs))


def always(call: Any) -> bool:
    return True
