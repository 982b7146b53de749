"""Any Hugging Face decoder with some of its layers made plastic."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

from oomph.errors import UserError
from oomph.models.npt.component import NPComponent
from oomph.models.npt.frozen import hold_in_8_bits
from oomph.models.npt.layer import NPTLayer, Pass, layout_of
from oomph.ops import linear_cross_entropy

LayerChoice = str | int | Sequence[int]


@dataclass(frozen=True, eq=False)
class NPTOutput:
    """`loss` in training: the mean over converted layers of matching error plus regulariser."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    matching: Tensor | None = None  # per converted layer, mean squared error
    penalty: Tensor | None = None  # per converted layer, mean ||dW||_F^2


register_dataclass(NPTOutput)


class NPTModel(nn.Module):
    """Trains A and B of each converted layer to give the original layer's output; the base is frozen.

    In training, model(input_ids) is one pass through teacher and student together: `.loss` is the matching
    loss, and labels are not looked at. In evaluation it is the student as a language model: `.logits`, or
    with labels its `.loss`.
    """

    def __init__(
        self,
        base: nn.Module,
        layers: LayerChoice = "upper_half",
        rank: int = 16,
        *,
        modulation_scale: float = 0.1,
        regularization: float = 0.01,
        stream: str = "teacher",
        gradients: str = "forward",
        use_8bit: bool = False,
        use_cpu_offload: bool = False,
        component: type[NPComponent] = NPComponent,
    ) -> None:
        """`base` is changed: it belongs to this model from now on. `stream`, `gradients`: see NPTConfig.

        layers: "upper_half", "all", a number (the last n), or their indices.
        """
        super().__init__()
        self.base = base.requires_grad_(False).eval()
        self.current = Pass(stream=stream)
        blocks = _decoder_layers(base)
        self.converted = chosen_layers(layers, len(blocks))
        if use_8bit:
            _check_not_quantised(base)
        for index, block in enumerate(blocks):
            if index in self.converted:
                layout = layout_of(block)
                mlp = getattr(block, layout.mlp)
                made = component.replacing(
                    getattr(mlp, layout.projection),
                    rank,
                    modulation_scale=modulation_scale,
                    eight_bit=use_8bit,
                    on_host=use_cpu_offload,
                )
                setattr(mlp, layout.projection, made)
                blocks[index] = NPTLayer(
                    block, self.current, regularization=regularization, gradients=gradients
                )
            if use_8bit:
                hold_in_8_bits(block)
        self.train()

    def train(self, mode: bool = True) -> "NPTModel":
        """The base stays in evaluation: dropout would make the teacher's outputs random."""
        super().train(mode)
        self.base.eval()
        return self

    @property
    def np_layers(self) -> list[NPTLayer]:
        return [each for each in _decoder_layers(self.base) if isinstance(each, NPTLayer)]

    def trained_parameters(self) -> list[nn.Parameter]:
        return [each for each in self.parameters() if each.requires_grad]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> NPTOutput:
        if self.training:
            return self.match(input_ids, attention_mask)
        hidden = self._hidden("student", input_ids, attention_mask)
        head = _head(self.base)
        if labels is None:
            return NPTOutput(logits=head(hidden))
        bias = getattr(head, "bias", None)
        loss = linear_cross_entropy(hidden, head.weight, labels, bias=bias, shift=True, ignore_index=-100)
        assert isinstance(loss, Tensor)
        return NPTOutput(loss=loss)

    def match(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> NPTOutput:
        """The matching loss. attention_mask [B, S]: tokens that are 0 there do not count."""
        current = self.current
        current.token_mask, current.losses, current.recording = attention_mask, [], True
        try:
            self._hidden("match", input_ids, attention_mask)
            losses = current.losses
        finally:
            current.losses, current.recording = [], False
        return NPTOutput(
            loss=torch.stack([each.total for each in losses]).mean(),
            matching=torch.stack([each.matching for each in losses]),
            penalty=torch.stack([each.penalty for each in losses]),
        )

    def teacher_logits(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """What the original model gives."""
        logits: Tensor = _head(self.base)(self._hidden("teacher", input_ids, attention_mask))
        return logits

    def _hidden(self, role: str, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        self.current.role = role
        inner: Any = self.base.base_model
        output = inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        hidden: Tensor = output[0]
        return hidden


def convert(base: nn.Module, layers: LayerChoice = "upper_half", rank: int = 16, **options: Any) -> NPTModel:
    """A Hugging Face Llama- or GPT-2-like model, already loaded, with the chosen layers made plastic."""
    return NPTModel(base, layers, rank, **options)


def chosen_layers(choice: LayerChoice, count: int) -> tuple[int, ...]:
    """The indices that a choice names, in a model of `count` layers."""
    valid = f"the model has layers 0 to {count - 1}"
    if choice == "all":
        return tuple(range(count))
    if choice == "upper_half":
        return tuple(range(count // 2, count))
    if isinstance(choice, int) and not isinstance(choice, bool):
        if not 1 <= choice <= count:
            raise UserError(f"convert_layers={choice}: cannot convert so many; {valid}")
        return tuple(range(count - choice, count))
    if isinstance(choice, str) or not isinstance(choice, Sequence) or not choice:
        raise UserError(
            f"convert_layers={choice!r}; valid: 'upper_half', 'all', a number, or a list of indices"
        )
    missing = [each for each in choice if isinstance(each, bool) or each not in range(count)]
    if missing:
        names = ", ".join(map(str, missing))
        raise UserError(f"convert_layers={list(choice)} names layers that do not exist ({names}); {valid}")
    return tuple(sorted({int(each) for each in choice}))


def _decoder_layers(base: nn.Module) -> nn.ModuleList:
    inner = getattr(base, "base_model", base)
    for name in ("layers", "h"):
        if isinstance(found := getattr(inner, name, None), nn.ModuleList) and len(found):
            return found
    raise UserError(
        f"{type(base).__name__} has no decoder layers at .layers or .h; "
        "valid: a Hugging Face Llama- or GPT-2-like model for causal language modelling"
    )


def _head(base: nn.Module) -> Any:
    find: Any = getattr(base, "get_output_embeddings", None)
    head = None if find is None else find()
    if head is None:
        raise UserError(f"{type(base).__name__} has no output embeddings; valid: a ...ForCausalLM model")
    return head


def _check_not_quantised(base: nn.Module) -> None:
    if getattr(base, "is_quantized", False):
        raise UserError("use_8bit: the base is quantised already; load it in bfloat16, or leave use_8bit out")
