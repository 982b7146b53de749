"""NPT: a Hugging Face decoder, frozen, with some layers whose MLP weights change per token with attention.

    original    h' = h + attention(norm_1 h)      out = h' + MLP_W(norm_2 h')
    student     mod = scale tanh(attention A)     out = h + MLP_(W + A diag(mod) B)(norm_2 h)

Attention runs once for both, and its result is not added to the student's residual stream: it only modulates.
Each converted layer learns to match the original layer's output on the same input.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

from oomph.errors import UserError
from oomph.nn import ModulatedLinear
from oomph.ops import linear_cross_entropy
from oomph.ops.modulation import TokenIndex, compute_weight_delta
from oomph.systems.npt.frozen_linear import frozen_product, hold_in_8_bits

LayerChoice = str | int | Sequence[int]
# Gradients of a mean over millions of elements are too small for float16. They are computed this much larger,
# times the number of elements, and divided again in float32; a power of two, so that it rounds nothing.
_HEADROOM = 2**-8


class NPComponent(ModulatedLinear):
    """W + A diag(mod) B with mod = modulation_scale * tanh(attention A), in place of an MLP's projection.

    The MLP calls it with its input alone. Inside `modulated_by(mod)` that gives the student's product,
    anywhere else the frozen layer's own. W stays in the base's dtype or in 8 bits; A and B are float32 (or
    wider), because updates of a bfloat16 parameter are mostly rounded away.
    """

    def __init__(
        self, *args: Any, modulation_scale: float = 0.1, on_host: bool = False, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.modulation_scale, self.on_host = modulation_scale, on_host
        self._current: Tensor | None = None

    @classmethod
    def replacing(
        cls,
        linear: nn.Module,
        rank: int,
        *,
        modulation_scale: float = 0.1,
        eight_bit: bool = False,
        on_host: bool = False,
    ) -> NPComponent:
        """From an nn.Linear or GPT-2's Conv1D, whose weight it shares unless `eight_bit`."""
        made = cls.from_linear(linear, rank, eight_bit=eight_bit)
        assert isinstance(made, NPComponent)
        made.modulation_scale, made.on_host = modulation_scale, on_host
        wide = torch.promote_types(made.A.dtype, torch.float32)
        made.A, made.B = (nn.Parameter(factor.detach().to(wide)) for factor in (made.A, made.B))
        made.reset_parameters()
        return made

    def modulation(self, attention: Tensor) -> Tensor:
        """[..., d] -> [..., r], at most modulation_scale in size; computed in A's dtype."""
        return self.modulation_scale * torch.tanh(attention.to(self.A.dtype) @ self.A)

    @contextmanager
    def modulated_by(self, mod: Tensor) -> Iterator[None]:
        self._current = mod
        try:
            yield
        finally:
            self._current = None

    def forward(self, h: Tensor, mod: Tensor | None = None) -> Tensor:
        """h [..., d], mod [..., r] or None -> [..., f]."""
        mod = self._current if mod is None else mod
        if mod is None:
            return frozen_product(h, self.base_weight, self.bias)
        return super().forward(h, mod)

    def compute_weight_delta(self, modulation: Tensor, token_idx: TokenIndex) -> Tensor:
        """The change of W at the tokens asked for, [..., d, f]: to look at; training never makes one.

        `on_host` makes it in host memory, where A and B go with their history: they keep their gradients.
        """
        A: Tensor = self.A
        B: Tensor = self.B
        if self.on_host:
            A, B, modulation = A.cpu(), B.cpu(), modulation.cpu()
        return compute_weight_delta(A, B, modulation, token_idx)

    def penalty(self, mod: Tensor) -> Tensor:
        """||dW||_F^2 per token, [...], without dW."""
        return self.weight_delta_norm(mod, squared=True)


@dataclass(frozen=True)
class LayerLoss:
    total: Tensor  # matching + regularization * penalty
    matching: Tensor  # mean squared error
    penalty: Tensor  # mean over tokens of ||dW||_F^2
    student: Tensor  # the student's output [B, S, d]; with its history only in a joint stream


@dataclass(frozen=True)
class Layout:
    """What a family of layers calls its parts."""

    family: str
    norm_1: str
    attention: str
    norm_2: str
    mlp: str
    projection: str  # of the mlp: the one that is modulated


LAYOUTS = (
    Layout("Llama-like", "input_layernorm", "self_attn", "post_attention_layernorm", "mlp", "gate_proj"),
    Layout("GPT-2-like", "ln_1", "attn", "ln_2", "mlp", "c_fc"),
)


def layout_of(layer: nn.Module) -> Layout:
    # More parts than these (a second norm after the MLP, say) would make another block than the maths has.
    parts = {name for name, _ in layer.named_children()}
    for layout in LAYOUTS:
        named = {layout.norm_1, layout.attention, layout.norm_2, layout.mlp}
        if parts == named and hasattr(getattr(layer, layout.mlp), layout.projection):
            return layout
    valid = "; ".join(
        f"{each.family}: {each.norm_1}, {each.attention}, {each.norm_2}, {each.mlp}.{each.projection}"
        for each in LAYOUTS
    )
    given = ", ".join(sorted(parts)) or "nothing"
    raise UserError(f"a {type(layer).__name__} made of {given} cannot be converted; valid: {valid}")


@dataclass
class Pass:
    """What one forward pass through the model tells its converted layers, and what they report."""

    role: str = "student"  # whose outputs: "student", "teacher", or "match" for the loss between them
    stream: str = "teacher"  # whose output the next layer gets in a matching pass
    token_mask: Tensor | None = None  # [B, S], which tokens count
    losses: list[LayerLoss] = field(default_factory=list)
    recording: bool = False  # off while backward runs a layer a second time


class NPTLayer(nn.Module):
    """Takes the place of a decoder layer, and is called like it."""

    def __init__(self, layer: nn.Module, current: Pass, *, regularization: float, gradients: str) -> None:
        super().__init__()
        self.layer, self.layout = layer, layout_of(layer)
        self.current = current
        self.regularization, self.gradients = regularization, gradients
        self._signature = inspect.signature(layer.forward)
        if hasattr(layer, "attention_type"):  # some models choose the mask by it
            self.attention_type = layer.attention_type

    def part(self, name: str) -> nn.Module:
        return self.layer.get_submodule(getattr(self.layout, name))

    @property
    def np_component(self) -> NPComponent:
        component = getattr(self.part("mlp"), self.layout.projection)
        assert isinstance(component, NPComponent)
        return component

    def forward(self, hidden_states: Tensor | tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        """[B, S, d] -> [B, S, d], or a tuple that begins with it, where the original gives one."""
        h = _first(hidden_states)
        if self.current.role == "teacher":
            return self.layer(h, *args, **kwargs)
        if self.current.role == "student":
            return self.student(h, self._attention_alone(h, args, kwargs))
        joint = self.current.stream == "joint"
        h = h if joint else h.detach()
        output, attention = self._original(h, args, kwargs, keep=joint)
        loss = matching_loss(self, h, attention, _first(output).detach())
        if self.current.recording:
            self.current.losses.append(loss)
        if self.current.stream == "teacher":
            return output
        return (loss.student, *output[1:]) if isinstance(output, tuple) else loss.student

    def student(self, h: Tensor, attention: Tensor, mod: Tensor | None = None) -> Tensor:
        """h + MLP_(W + dW)(norm_2 h)."""
        component = self.np_component
        mod = component.modulation(attention) if mod is None else mod
        with component.modulated_by(mod):
            out: Tensor = h + self.part("mlp")(self.part("norm_2")(h))
        return out

    def _original(
        self, h: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], keep: bool
    ) -> tuple[Any, Tensor]:
        """The original layer's output, and what its attention gave on the way; `keep`: with its history."""
        seen: list[Tensor] = []
        hook = self.part("attention").register_forward_hook(lambda *call: seen.append(_first(call[-1])))
        try:
            with torch.set_grad_enabled(keep and torch.is_grad_enabled()):
                output = self.layer(h, *args, **kwargs)
        finally:
            hook.remove()
        return output, seen[0]

    def _attention_alone(self, h: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Attention with the arguments the layer would give it: the student needs no MLP of the teacher's."""
        bound = self._signature.bind(h, *args, **kwargs).arguments
        given = {**bound, **bound.get("kwargs", {})}
        given.pop("kwargs", None)
        given.pop("hidden_states")
        return _first(self.part("attention")(hidden_states=self.part("norm_1")(h), **given))

    def extra_repr(self) -> str:
        return f"{self.layout.family}, regularization={self.regularization}, gradients={self.gradients!r}"


def _first(value: Any) -> Tensor:
    """Hidden states arrive bare or, from some layers, as the first of a tuple."""
    first = value[0] if isinstance(value, tuple | list) else value
    assert isinstance(first, Tensor)
    return first


def matching_loss(layer: NPTLayer, h: Tensor, attention: Tensor, target: Tensor) -> LayerLoss:
    trained = [each for each in layer.np_component.parameters() if each.requires_grad]
    if layer.gradients == "forward" and trained and torch.is_grad_enabled():
        return LayerLoss(*_GradientsInForward.apply(layer, h, attention, target, *trained))
    loss = _loss(layer, h, attention, target)
    student = loss.student if layer.current.stream == "joint" else loss.student.detach()
    return LayerLoss(loss.total, loss.matching.detach(), loss.penalty.detach(), student)


def _loss(layer: NPTLayer, h: Tensor, attention: Tensor, target: Tensor) -> LayerLoss:
    mod = layer.np_component.modulation(attention)
    student = layer.student(h, attention, mod)
    wide = torch.promote_types(student.dtype, torch.float32)
    error_BS = (student.to(wide) - target.to(wide)).square().mean(dim=-1)
    mask = layer.current.token_mask
    matching = _mean(error_BS, mask)
    penalty = _mean(layer.np_component.penalty(mod), mask)
    return LayerLoss(matching + layer.regularization * penalty, matching, penalty, student)


def _mean(x_BS: Tensor, mask_BS: Tensor | None) -> Tensor:
    if mask_BS is None:
        return x_BS.mean()
    weight_BS = mask_BS.to(x_BS.dtype)
    return (x_BS * weight_BS).sum() / weight_BS.sum().clamp(min=1)


class _GradientsInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Any, h: Tensor, attention: Tensor, target: Tensor, *trained: Tensor) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = _loss(layer, h, attention, target)
        factor = 2.0 ** (max(1, target.numel()).bit_length() - 1) * _HEADROOM
        gradients = torch.autograd.grad(loss.total, trained, torch.full_like(loss.total, factor))
        ctx.save_for_backward(*(each / factor for each in gradients))
        results = tuple(each.detach() for each in (loss.total, loss.matching, loss.penalty, loss.student))
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (None, None, None, None, *(g * each for each in ctx.saved_tensors))


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

    def train(self, mode: bool = True) -> NPTModel:
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
