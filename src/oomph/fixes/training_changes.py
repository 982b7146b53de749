"""Fixes that change what is trained: batch, sequence, vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from oomph.errors import UserError
from oomph.fixes.journal import Journal
from oomph.fixes.micro_batches import LABEL_NAMES, leaf_name
from oomph.fixes.modules import copy_configs, is_plain_linear, names_option
from oomph.fixes.registry import Fix, FixContext, Target, check_whole_number, example_batch
from oomph.torch_internals import tree_flatten_with_path, tree_leaves, tree_unflatten
from oomph.workload import Workload, rows_of


@dataclass(frozen=True)
class ChangedBatch:
    """Makes a batch, then changes every tensor in it by `change(tensor, batch, name)`."""

    make: Callable[..., Any]
    change: Callable[[torch.Tensor, Any, str | None], torch.Tensor]

    def __call__(self, device: torch.device, **sizes: int) -> Any:
        batch = self.make(device, **sizes)
        leaves, structure = tree_flatten_with_path(batch)
        changed = [
            self.change(leaf, batch, leaf_name(path)) if isinstance(leaf, torch.Tensor) else leaf
            for path, leaf in leaves
        ]
        return tree_unflatten(changed, structure)


# -------------------------------------------------------------------------- smaller batch, shorter sequence


class _SmallerSize(Fix):
    """Reduces one of the workload's sizes; where no size has a known name, cuts the tensors of the batch."""

    kind = "training"
    size_names: ClassVar[tuple[str, ...]]
    unit: ClassVar[str]
    smallest_proposed: ClassVar[int]
    missing: ClassVar[str]

    @staticmethod
    def count(batch: Any) -> int | None:
        """The present size, from a batch."""
        raise NotImplementedError

    @staticmethod
    def cut(tensor: torch.Tensor, batch: Any, name: str | None, *, now: int, value: int) -> torch.Tensor:
        raise NotImplementedError

    def targets(self, context: FixContext) -> Iterable[Target]:
        _, now = self._current(context.workload, None)
        if now is not None and now >= self.smallest_proposed:
            yield Target(("batch",), {"value": now // 2}, f"{now // 2} {self.unit} instead of {now}")

    def change_workload(
        self, workload: Workload, *_: Any, size: str | None = None, value: int | None = None
    ) -> Workload:
        """`size`: which of the workload's sizes is reduced, by default one with a usual name; `value`: the
        new size, by default half."""
        name, now = self._current(workload, size)
        if now is None:
            raise UserError(f"fix {self.name!r}: the batch holds no {self.missing}")
        if value is None:
            value = now // 2
        check_whole_number(self.name, "value", value, 1, now - 1)
        if name is not None:
            return replace(workload, sizes={**(workload.sizes or {}), name: value})
        return replace(
            workload, batch=ChangedBatch(workload.batch, partial(type(self).cut, now=now, value=value))
        )

    def _current(self, workload: Workload, wanted: str | None) -> tuple[str | None, int | None]:
        """The name among the workload's sizes, if there is one, and the present size."""
        sizes = workload.sizes or {}
        if wanted is not None and wanted not in sizes:
            valid = f"the workload's sizes are {', '.join(sizes)}" if sizes else "the workload has no sizes"
            raise UserError(f"fix {self.name!r}: there is no size {wanted!r}; {valid}")
        name = wanted or next((name for name in sizes if name.lower() in self.size_names), None)
        return name, sizes[name] if name is not None else self.count(example_batch(workload))


class SmallerBatch(_SmallerSize):
    name = "smaller_batch"
    changes = "The batch has fewer rows: gradients are noisier, and the learning rate may have to follow."
    size_names = ("b", "bs", "batch", "batch_size", "rows", "n", "examples", "samples", "images")
    unit, smallest_proposed, missing = "rows", 2, "tensor with rows"

    @staticmethod
    def count(batch: Any) -> int | None:
        try:
            return rows_of(batch)
        except UserError:
            return None

    @staticmethod
    def cut(tensor: torch.Tensor, batch: Any, name: str | None, *, now: int, value: int) -> torch.Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != rows_of(batch):
            return tensor
        return tensor[:value].clone()  # a copy, so that the rest is freed


class ShorterSequence(_SmallerSize):
    name = "shorter_sequence"
    changes = "Sequences are cut: the model sees fewer tokens a step, and no dependence longer than they are."
    size_names = tuple(
        "t l s seq seq_len seq_length seqlen sequence sequence_length length context context_length "
        "block_size tokens max_length".split()
    )
    unit, smallest_proposed, missing = "tokens", 16, "integers of shape [rows, tokens]"

    @staticmethod
    def count(batch: Any) -> int | None:
        return next((leaf.shape[1] for leaf in tree_leaves(batch) if is_tokens(leaf)), None)

    @staticmethod
    def cut(tensor: torch.Tensor, batch: Any, name: str | None, *, now: int, value: int) -> torch.Tensor:
        if not is_tokens(tensor) or tensor.shape[1] != now:
            return tensor
        return tensor[:, :value].clone()  # a copy, so that the rest is freed


def is_tokens(leaf: Any) -> bool:
    return (
        isinstance(leaf, torch.Tensor)
        and leaf.dim() == 2
        and not leaf.is_floating_point()
        and not leaf.is_complex()
    )


# ----------------------------------------------------------------------------------- smaller vocabulary


_TOKEN_NAMES = (
    *LABEL_NAMES,
    *"input_ids decoder_input_ids encoder_input_ids token_ids ids tokens inputs input idx text x y".split(),
)


class SmallerVocabulary(Fix):
    """Embedding and head lose their last rows; the removed tokens become one unknown token."""

    name = "smaller_vocabulary"
    kind = "training"
    changes = "The vocabulary is cut to its first tokens; the others become one unknown token."

    def targets(self, context: FixContext) -> Iterable[Target]:
        size = vocabulary_size(context.model)
        if size is None or size < 4096:  # not worth a proposal
            return
        half = -(-size // 2 // 64) * 64
        where = tuple(dict.fromkeys(matrix.name for matrix in _matrices(context.model, size)))
        note = f"{half} tokens instead of {size}; the tokenizer must list frequent ones first"
        yield Target(where, {"size": half}, note)

    def change_workload(
        self,
        workload: Workload,
        *_: Any,
        size: int,
        unknown: int = 0,
        tokens: Sequence[str] | None = None,
    ) -> Workload:
        """`size`: how many tokens are left; `unknown`: the token that replaces the others; `tokens`: the
        names that token ids and labels have in the batch, by default the usual ones."""
        self._check(size, unknown)
        names = _TOKEN_NAMES if tokens is None else names_option(self.name, "tokens", tokens)
        change = partial(_replace_unknown, size=size, unknown=unknown, tokens=names)
        return replace(workload, batch=ChangedBatch(workload.batch, change))

    def change_model(
        self, model: nn.Module, journal: Journal, *, size: int, unknown: int = 0, **_: Any
    ) -> None:
        self._check(size, unknown)
        now = vocabulary_size(model)
        if now is None:
            raise UserError(f"fix {self.name!r}: the model has no embedding with a head of the same size")
        if size >= now:
            raise UserError(f"fix {self.name!r}: size={size} is not valid; the vocabulary has {now} tokens")
        copy_configs(model, journal)
        cut: dict[int, nn.Parameter] = {}  # tied weights stay tied
        for name, module, attribute in _matrices(model, now):
            own = getattr(module, attribute)
            if id(own) not in cut:
                cut[id(own)] = nn.Parameter(own.detach()[:size].clone(), own.requires_grad)
            journal.set(module, attribute, cut[id(own)], name, f"{attribute}: {now} rows cut to {size}")
        for name, owner, attribute in _size_attributes(model, now):
            journal.set(owner, attribute, size, name, f"{attribute}: {now} to {size}")
        for name, module in model.named_modules():
            padding = getattr(module, "padding_idx", None)
            if isinstance(module, nn.Embedding) and isinstance(padding, int) and padding >= size:
                journal.set(module, "padding_idx", unknown, name, f"padding_idx: {padding} to {unknown}")

    def _check(self, size: Any, unknown: Any) -> None:
        check_whole_number(self.name, "size", size, 2)
        check_whole_number(self.name, "unknown", unknown, 0, size - 1)


class _Matrix(NamedTuple):
    name: str
    module: nn.Module
    attribute: str


def vocabulary_size(model: nn.Module) -> int | None:
    """The largest number of tokens for which there are both an embedding and a head."""
    embeddings = {m.num_embeddings for m in model.modules() if type(m) is nn.Embedding}
    heads = {m.out_features for m in model.modules() if is_plain_linear(m)}
    return max(embeddings & heads, default=None)


def _matrices(model: nn.Module, size: int) -> Iterator[_Matrix]:
    """Weights and biases with one row per token."""
    for name, module in model.named_modules():
        embeds = type(module) is nn.Embedding and module.num_embeddings == size
        is_head = is_plain_linear(module) and module.out_features == size
        if embeds or is_head:
            yield _Matrix(name, module, "weight")
            if is_head and module.bias is not None:
                yield _Matrix(name, module, "bias")
        elif not isinstance(module, nn.Linear):
            bias = module._parameters.get("bias")  # BERT's head has a second name for it
            if bias is not None and tuple(bias.shape) == (size,):
                yield _Matrix(name, module, "bias")


def _size_attributes(model: nn.Module, size: int) -> Iterator[tuple[str, Any, str]]:
    """Attributes of modules and configs that hold the vocabulary's size."""
    for name, module in model.named_modules():
        for attribute in ("num_embeddings", "out_features", "vocab_size"):
            if vars(module).get(attribute) == size:
                yield name, module, attribute
    seen: set[int] = set()
    for module in model.modules():
        config = vars(module).get("config")
        for owner in (config, getattr(config, "text_config", None)):
            if isinstance(owner, type) or id(owner) in seen:
                continue
            if getattr(owner, "__dict__", {}).get("vocab_size") == size:
                seen.add(id(owner))
                yield "config", owner, "vocab_size"


def _replace_unknown(
    tensor: torch.Tensor, batch: Any, name: str | None, *, size: int, unknown: int, tokens: Sequence[str]
) -> torch.Tensor:
    """In token ids and labels: by their names, or without names all but vectors, which may be lengths."""
    chosen = name in tokens if name is not None else tensor.dim() > 1 or tensor is batch
    if not chosen or tensor.dtype not in (torch.int64, torch.int32):
        return tensor
    return tensor.masked_fill(tensor >= size, unknown)  # an ignore_index is negative and stays
