"""Fixes that decide by names are tried on a small copy of the step before `oomph fit` proposes them.

Such as micro_batches, which knows labels and causal models by their names: what it takes for granted is
compared. One step runs on the CPU in float64, with and without the fix, on a few short rows of the Workload's
own batch. The copy is the Workload's model, if that is small; of a large one of transformers, a model of its
class with two narrow layers and few words. Of other large models there is none, and the proposal says so.
"""

from __future__ import annotations

import contextlib
import copy
import math
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from oomph.fixes.application import apply
from oomph.fixes.registry import Fix, FixContext
from oomph.fixes.training_changes import ChangedBatch, ShorterSequence, SmallerBatch, is_tokens
from oomph.fixes.verification import EXACT, Run, differences, widened
from oomph.prediction.isolation import in_fork
from oomph.records import FailedFixes, FixUse, Proposal
from oomph.torch_internals import tree_leaves
from oomph.units import counted
from oomph.workload import Workload

_CPU_SECONDS = 2.0
_MOST_PARAMETERS = 20_000_000
_LARGEST_BATCH = 1 << 28  # bytes, which the Workload makes whole
_ROWS, _TOKENS = 4, 32
_LAYERS, _HEAD_SIZE, _VOCABULARY = 2, 8, 1000
# Attributes of configurations of transformers, by the names that most have.
_DEPTHS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
_WIDTHS = (
    "hidden_size intermediate_size moe_intermediate_size shared_expert_intermediate_size head_dim n_inner "
    "ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff d_kv word_embed_proj_dim"
).split()


@dataclass(frozen=True)
class _Copy:
    workload: Workload
    what: str  # in words


class _NoCopyError(Exception):
    """Why nothing was compared."""


def checked_proposals(fix: Fix, context: FixContext) -> tuple[list[Proposal], list[FailedFixes]]:
    """The proposals of a fix, and what was left out because it changes the result of a small copy."""
    targets = list(fix.targets(context))
    assuming = [target for target in targets if target.assumes]
    if not assuming:
        return [fix.proposal(target) for target in targets], []
    use = FixUse(fix.name, assuming[0].options)
    is_same, found = in_fork(lambda: _compared(use, context))
    if is_same is False:
        return [fix.proposal(one) for one in targets if not one.assumes], [FailedFixes((use,), found)]
    if is_same is None:  # what it assumes stays in the note
        found = f"{assuming[0].assumes}; {found}"
    return [fix.proposal(replace(one, assumes=one.assumes and found)) for one in targets], []


def _compared(use: FixUse, context: FixContext) -> tuple[bool | None, str]:
    """Whether the result is the same with the fix, None where that is not known; and in words."""
    try:
        with _limited_time():
            one = _small_copy(context, 2 * use.options.get("parts", _ROWS // 2))
            before, draws = _one_step(one.workload)
            if draws:
                raise _NoCopyError("the step draws random numbers, as dropout does")
            if not before.losses[0].isfinite():
                raise _NoCopyError("the loss is not finite")
            after, _ = _one_step(apply(use, one.workload))
    except Exception as error:  # the user's program, on another device and with another model
        why = str(error) if isinstance(error, _NoCopyError) else f"a small copy cannot run: {error}"
        return None, f"not compared with the step without it ({why.splitlines()[0]})"
    worst = differences(before, after, comparable=True)[0]
    if worst.error <= EXACT:
        return True, f"compared in float64 on the CPU, loss and gradients are the same ({one.what})"
    size = f"{worst.error:.1g} of its largest entry" if math.isfinite(worst.error) else "more than it is"
    what = worst.name.removesuffix(" of step 1")
    return False, f"it changes the {what} by {size} (compared in float64 on the CPU: {one.what})"


def _one_step(workload: Workload) -> tuple[Run, bool]:
    """Loss and gradients, and whether the step draws random numbers."""
    device = torch.device("cpu")
    torch.manual_seed(0)
    model = workload.make_model(copy.deepcopy).double()  # the factory may return the user's own model
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    torch.manual_seed(1)
    batch = workload.make_batch(device)
    state = torch.get_rng_state()
    loss = workload.forward_backward(model, batch, device)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Run([loss.double()], gradients, {}, {}), not torch.equal(state, torch.get_rng_state())


def _small_copy(context: FixContext, rows: int) -> _Copy:
    batch, workload = context.batch, widened(context.workload)
    if batch is None:
        raise _NoCopyError("its batch cannot be made on the CPU")
    if sum(leaf.numel() * leaf.itemsize for leaf in _tensors(batch)) > _LARGEST_BATCH:
        raise _NoCopyError("its batch is large")
    given = []
    for fix, value in ((SmallerBatch(), rows), (ShorterSequence(), _TOKENS)):
        now = fix.count(batch)
        if now is not None and now > value:
            workload = fix.change_workload(workload, value=value)
        if now is not None:
            given.append(f"{min(now, value)} {fix.unit}")
    size = _parameters(context.model)
    if size <= _MOST_PARAMETERS:
        return _Copy(workload, f"the model, {' of '.join(given)}")
    made = _narrow_model(context.model)
    if made is None:
        raise _NoCopyError(f"the model has {size / 1e6:,.0f} million parameters")
    build, width = made
    workload = replace(workload, model=build, batch=ChangedBatch(workload.batch, _known_token))
    return _Copy(workload, f"{counted(_LAYERS, 'layer')} of width {width}, {' of '.join(given)}")


def _narrow_model(model: nn.Module) -> tuple[Callable[[], nn.Module], int] | None:
    """Builds a model of transformers of the same class, with the same number of heads."""
    config: Any = copy.deepcopy(getattr(model, "config", None))
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(width, int) or not hasattr(config, "to_diff_dict"):
        return None
    head_size = getattr(config, "head_dim", None) or width // heads
    divisor = 1
    while head_size % (2 * divisor * _HEAD_SIZE) == 0:
        divisor *= 2
    for name in _WIDTHS:
        if isinstance(value := getattr(config, name, None), int):
            setattr(config, name, value // divisor)
    for name in _DEPTHS:
        if isinstance(value := getattr(config, name, None), int):
            setattr(config, name, min(value, _LAYERS))
    if isinstance(kinds := getattr(config, "layer_types", None), list):
        config.layer_types = kinds[:_LAYERS]
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif name.endswith("_token_id") and isinstance(value, int) and value >= _VOCABULARY:
            setattr(config, name, 0)
    config.vocab_size = min(_VOCABULARY, getattr(config, "vocab_size", _VOCABULARY))
    kind: Any = type(model)
    with torch.device("meta"):
        size = _parameters(kind._from_config(copy.deepcopy(config)))
    if size > _MOST_PARAMETERS:
        raise _NoCopyError(f"even {_LAYERS} narrow layers have {size / 1e6:,.0f} million parameters")
    return lambda: kind._from_config(copy.deepcopy(config)), config.hidden_size


def _known_token(tensor: Tensor, batch: Any, name: str | None) -> Tensor:
    is_mask = tensor.dtype == torch.bool or not is_tokens(tensor)
    return tensor if is_mask else tensor.where(tensor < _VOCABULARY, tensor % _VOCABULARY)


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@contextlib.contextmanager
def _limited_time() -> Iterator[None]:
    """In a fork of its own: CPU time, so that the answer is the same on a busy machine."""

    def stop(*_: object) -> None:
        raise _NoCopyError(f"it takes more than {_CPU_SECONDS:.0f} s")

    if not hasattr(signal, "setitimer"):  # Windows
        yield
        return
    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, _CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
