"""Fewer words: embedding and head lose their last rows, and what they stood for becomes one unknown word."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from oomph.errors import UserError
from oomph.fixes.batches import Changed
from oomph.fixes.journal import Journal
from oomph.fixes.modules import copy_configs, is_plain_linear
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.workload import Workload

_LEAST = 4096  # words: smaller vocabularies are not worth a proposal
_ROUND = 64


class SmallerVocabulary(Fix):
    name = "smaller_vocabulary"
    kind = "training"
    changes = (
        "The vocabulary is cut to its first words: rarer ones are read, and learnt, as one unknown word."
    )

    def targets(self, context: FixContext) -> Iterable[Target]:
        size = vocabulary_of(context.model)
        if size is None or size < _LEAST:
            return
        half = -(-size // 2 // _ROUND) * _ROUND
        where = tuple(dict.fromkeys(matrix.name for matrix in _matrices(context.model, size)))
        note = f"{half} words instead of {size}; the tokenizer must put the frequent ones first"
        yield Target(where, {"size": half}, note)

    def change_workload(self, workload: Workload, *_: Any, size: int, unknown: int = 0) -> Workload:
        """`size`: how many words are left; `unknown`: the token that stands for the others."""
        _check(self.name, size, unknown)
        change = partial(_known_words, size=size, unknown=unknown)
        return replace(workload, batch=Changed(workload.batch, change))

    def change_model(self, model: nn.Module, journal: Journal, *, size: int, unknown: int = 0) -> None:
        _check(self.name, size, unknown)
        now = vocabulary_of(model)
        if now is None:
            raise UserError(f"fix {self.name!r}: the model has no embedding with a head of the same size")
        if size >= now:
            raise UserError(f"fix {self.name!r}: size={size} is not valid; the model knows {now} words")
        copy_configs(model, journal)
        made: dict[int, nn.Parameter] = {}  # tied weights stay tied
        for name, module, attribute in _matrices(model, now):
            own = getattr(module, attribute)
            if id(own) not in made:
                made[id(own)] = nn.Parameter(own.detach()[:size].clone(), own.requires_grad)
            journal.set(module, attribute, made[id(own)], name, f"{attribute}: {now} rows cut to {size}")
        for name, owner, attribute in _counts(model, now):
            journal.set(owner, attribute, size, name, f"{attribute}: {now} to {size}")
        for name, module in model.named_modules():
            padding = getattr(module, "padding_idx", None)
            if isinstance(module, nn.Embedding) and isinstance(padding, int) and padding >= size:
                journal.set(module, "padding_idx", unknown, name, f"padding_idx: {padding} to {unknown}")


class _Matrix(NamedTuple):
    name: str
    module: nn.Module
    attribute: str


def vocabulary_of(model: nn.Module) -> int | None:
    """The most words for which there are both an embedding and a head."""
    embeddings = {m.num_embeddings for m in model.modules() if type(m) is nn.Embedding}
    heads = {m.out_features for m in model.modules() if is_plain_linear(m)}
    return max(embeddings & heads, default=None)


def _matrices(model: nn.Module, size: int) -> Iterator[_Matrix]:
    """Weights and biases with a row a word, wherever they appear."""
    for name, module in model.named_modules():
        embeds = type(module) is nn.Embedding and module.num_embeddings == size
        scores = is_plain_linear(module) and module.out_features == size
        if embeds or scores:
            yield _Matrix(name, module, "weight")
            if scores and module.bias is not None:
                yield _Matrix(name, module, "bias")
        elif isinstance(module._parameters.get("bias"), nn.Parameter):
            bias = module._parameters["bias"]  # BERT's head keeps a second name for it
            if bias is not None and tuple(bias.shape) == (size,) and not isinstance(module, nn.Linear):
                yield _Matrix(name, module, "bias")


def _counts(model: nn.Module, size: int) -> Iterator[tuple[str, Any, str]]:
    """Numbers that say how many words there are."""
    for name, module in model.named_modules():
        for attribute in ("num_embeddings", "out_features", "vocab_size"):
            if vars(module).get(attribute) == size:
                yield name, module, attribute
    seen: set[int] = set()
    for _, module in model.named_modules():
        config = vars(module).get("config")
        for owner in (config, getattr(config, "text_config", None)):
            if isinstance(owner, type) or id(owner) in seen:
                continue
            if getattr(owner, "__dict__", {}).get("vocab_size") == size:
                seen.add(id(owner))
                yield "config", owner, "vocab_size"


def _known_words(tensor: torch.Tensor, batch: Any, *, size: int, unknown: int) -> torch.Tensor:
    if tensor.dtype not in (torch.int64, torch.int32) or tensor.dim() == 0:
        return tensor
    return tensor.masked_fill(tensor >= size, unknown)  # what a loss ignores is negative


def _check(fix: str, size: Any, unknown: Any) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 2:
        raise UserError(f"fix {fix!r}: size={size!r} is not valid; give a whole number >= 2")
    if isinstance(unknown, bool) or not isinstance(unknown, int) or not 0 <= unknown < size:
        raise UserError(f"fix {fix!r}: unknown={unknown!r} is not valid; give 0 to {size - 1}")
