"""Context parallelism of decoders: every rank of a group holds T / ranks consecutive tokens.

Softmax attention, dense or NSA, needs all tokens and treats heads alike: ranks exchange tokens for heads
before it and heads for tokens after it (all-to-all, as in DeepSpeed Ulysses). torch's own context_parallel
replaces F.scaled_dot_product_attention by a ring of CUDA kernels; it does not know NSA or oomph's attention.
KDA needs its state after the tokens before: a rank computes with the state that it receives, and sends its
last one on. Both are exact.

Legend: B batch, T tokens, D hidden size, C channels of a projection.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oomph.errors import UserError
from oomph.nn import KimiDeltaAttention, SpikingKDABlock
from oomph.parallel.collectives import all_to_all, reduce_from_group

_IGNORED = -100  # the label that counts nothing


def context_parallel(model: nn.Module, group: Any) -> None:
    """Change the model in place: it takes whole sequences, and returns the loss of all of them."""
    if not hasattr(model, "hidden_states") or not hasattr(model, "output"):
        raise UserError(
            "context parallelism is for the decoders of oomph_lab.systems (longctx, hatchling); "
            f"{type(model).__name__} is not one of them"
        )
    for module in list(model.modules()):
        if isinstance(module, SpikingKDABlock | KimiDeltaAttention):
            module.forward = _StatePassing(module, group)  # type: ignore[method-assign, assignment]
        elif hasattr(module, "o_proj") and hasattr(module, "num_kv_heads"):
            _exchange_heads(module, group)
    model.forward = _ShardedSequence(model, group)  # type: ignore[method-assign]


# ----------------------------------------------------------------------------------------- attention


def _exchange_heads(attention: Any, group: Any) -> None:
    """q, k, v and gates leave their projections as [B, T, C / ranks]; o_proj gets [B, T / ranks, C]."""
    ranks, kv_heads = dist.get_world_size(group), attention.num_kv_heads
    if getattr(attention, "qkv_proj", None) is not None:
        raise UserError("context parallelism needs separate projections; this model fuses q, k and v")
    if attention.num_heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise UserError(
            f"{attention.num_heads} heads with {kv_heads} for keys cannot be divided over cp={ranks} ranks"
        )
    copies = max(1, ranks // kv_heads)  # of each key head, one for every rank that needs it
    attention.num_heads //= ranks
    attention.num_kv_heads = kv_heads * copies // ranks

    def queries(module: nn.Module, args: Any, projected: Tensor) -> Tensor:
        return tokens_to_heads(projected, group)

    def keys(module: nn.Module, args: Any, projected: Tensor) -> Tensor:
        heads = projected.unflatten(-1, (kv_heads, -1)).repeat_interleave(copies, -2)
        return tokens_to_heads(heads.flatten(-2), group)

    def gates(module: nn.Module, args: Any, projected: Tensor) -> Tensor:  # NSA's three for each head
        return tokens_to_heads(projected.unflatten(-1, (3, -1)), group).flatten(-2)

    hooks = {"q_proj": queries, "gate_proj": gates}
    hooks |= dict.fromkeys(("k_proj", "v_proj"), queries if copies == 1 else keys)
    for name, hook in hooks.items():
        if hasattr(attention, name):
            getattr(attention, name).register_forward_hook(hook)
    attention.o_proj.register_forward_pre_hook(lambda module, args: (heads_to_tokens(args[0], group),))


def tokens_to_heads(x: Tensor, group: Any) -> Tensor:
    """[B, T / ranks, ..., C] -> [B, T, ..., C / ranks]"""
    ranks = dist.get_world_size(group)
    sent = x.unflatten(-1, (ranks, -1)).movedim(-2, 0)
    return all_to_all(sent, group).movedim(0, 1).flatten(1, 2)


def heads_to_tokens(x: Tensor, group: Any) -> Tensor:
    """[B, T, C / ranks] -> [B, T / ranks, C]"""
    ranks = dist.get_world_size(group)
    sent = x.unflatten(1, (ranks, -1)).movedim(1, 0)
    return all_to_all(sent, group).movedim(0, -2).flatten(-2)


# ----------------------------------------------------------------------------------------- KDA


class _StatePassing:
    """The forward of a KDA module that starts from the state of the rank before and passes its own on."""

    def __init__(self, module: nn.Module, group: Any) -> None:
        self.forward, self.group = module.forward, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def __call__(self, x: Tensor) -> Any:
        state = None
        if self.rank > 0:
            with torch.no_grad():
                _, empty = self.forward(x[:, :0])
            received = _Receive.apply(self, x, *_tensors(empty))  # type: ignore[no-untyped-call]
            state = type(empty)(*received)
        y, state = self.forward(x, state)
        if self.rank < self.ranks - 1:
            y = _Send.apply(self, y, *_tensors(state))  # type: ignore[no-untyped-call]
        return y, state


def _tensors(state: Any) -> list[Tensor]:
    return [getattr(state, field.name) for field in dataclasses.fields(state)]


class _Receive(torch.autograd.Function):
    """The state of the rank before. In backward its gradients are sent there. `x`: so that there is one."""

    @staticmethod
    def forward(ctx: Any, passing: _StatePassing, x: Tensor, *like: Tensor) -> tuple[Tensor, ...]:
        ctx.passing = passing
        return _receive(passing, passing.rank - 1, like)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        _send(ctx.passing, ctx.passing.rank - 1, grads)
        return (None, None, *(None for _ in grads))


class _Send(torch.autograd.Function):
    """y, after the state was sent to the next rank. In backward its gradients come from there."""

    @staticmethod
    def forward(ctx: Any, passing: _StatePassing, y: Tensor, *state: Tensor) -> Tensor:
        ctx.passing = passing
        ctx.save_for_backward(*state)
        _send(passing, passing.rank + 1, state)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        # Reading what is saved first has a checkpoint recompute: all ranks do, in their order, before any
        # waits for gradients of the next.
        like = ctx.saved_tensors
        return (None, grad, *_receive(ctx.passing, ctx.passing.rank + 1, like))


def _send(passing: _StatePassing, to: int, tensors: Any) -> None:
    for tensor in tensors:
        if tensor.numel():
            dist.send(tensor.contiguous(), group=passing.group, group_dst=to)


def _receive(passing: _StatePassing, source: int, like: Any) -> tuple[Tensor, ...]:
    received = tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in like)
    for tensor in received:
        if tensor.numel():
            dist.recv(tensor, group=passing.group, group_src=source)
    return received


# ----------------------------------------------------------------------------------------- the decoder


class _ShardedSequence:
    """The forward of a decoder over this rank's tokens of input_ids [B, T]."""

    def __init__(self, model: Any, group: Any) -> None:
        self.model, self.group = model, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def __call__(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        tokens = input_ids.shape[1]
        if labels is None:
            return self._logits(input_ids)
        if tokens % self.ranks:
            raise UserError(f"{tokens} tokens cannot be divided over cp={self.ranks} ranks")
        hidden = self._hidden_states(input_ids)
        own = hidden.shape[1]
        first = self.rank * own
        last = self.rank == self.ranks - 1
        # The model's loss of position t is that of label t + 1: the last position needs the next rank's.
        following = self._gathered(hidden[:, :1].detach())
        if not last:
            hidden = torch.cat([hidden, following[self.rank + 1]], 1)
        stop = first + own + (not last)
        output = self.model.output(hidden, labels[:, first:stop])
        valid = (labels[:, first + 1 : stop] != _IGNORED).sum()
        share = valid.double() / (labels[:, 1:] != _IGNORED).sum().clamp(min=1)
        part = torch.where(valid > 0, output.loss, 0.0) * share.to(output.loss.dtype)
        # Gradients are averaged over these ranks, and each has those of a part of the sum.
        gradient = self.ranks * part
        return dataclasses.replace(
            output, loss=reduce_from_group(part.detach(), self.group) + gradient - gradient.detach()
        )

    def _hidden_states(self, input_ids: Tensor) -> Tensor:
        """Of this rank's tokens. Positions are those of all: attention rotates after the exchange."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden: Tensor = self.model.hidden_states(input_ids.chunk(self.ranks, 1)[self.rank], positions)
        return hidden

    def _logits(self, input_ids: Tensor) -> Any:
        """For generation: padding behind the last token changes nothing before it."""
        tokens = input_ids.shape[1]
        padded = torch.nn.functional.pad(input_ids, (0, -tokens % self.ranks))
        hidden = self._hidden_states(padded)
        return self.model.output(torch.cat(self._gathered(hidden), 1)[:, :tokens], None)

    def _gathered(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.ranks)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return parts
