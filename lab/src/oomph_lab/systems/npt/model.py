"""NPT: a frozen Hugging Face decoder with layers whose MLP weights attention changes per token.

    original    h' = h + attention(norm_1 h)      out = h' + MLP_W(norm_2 h')
    student     mod = scale tanh(attention A)     out = h + MLP_(W + A diag(mod) B)(norm_2 h)

Attention runs once for both; the student does not add it to the residual stream, it only modulates.
Each converted layer learns to match the original layer's output on the same input.

The presets are the report's three, and `tiny` for tests.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from pydantic import NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass as validated_dataclass
from torch import Tensor, nn

from oomph.errors import UserError
from oomph.nn import ModulatedLinear
from oomph.ops import linear_cross_entropy
from oomph.ops.modulation import TokenIndex, compute_weight_delta
from oomph.torch_internals import register_dataclass
from oomph_lab.systems.config_checks import STRICT, invalid_if, one_of
from oomph_lab.systems.npt.base_model import (
    SHAPES,
    base_vocab_size,
    frozen_linear,
    load_base,
    quantize_linear_layers,
)

LayerChoice = str | int | Sequence[int]
# Gradients of a mean over millions of elements underflow in float16. They are scaled by the number of
# elements times this power of two, which rounds nothing, and unscaled in float32.
_HEADROOM = 2**-8


class NPComponent(ModulatedLinear):
    """W + A diag(mod) B with mod = modulation_scale * tanh(attention A), replacing a projection of an MLP.

    The MLP calls it with its input only: inside `modulated_by(mod)` it computes the student's projection,
    elsewhere the frozen one. W has the base's dtype or 8 bits. A and B are at least float32, because most
    updates of a bfloat16 parameter are rounded away.
    """

    modulation_scale = 0.1
    on_cpu = False
    _current: Tensor | None = None  # the modulation inside `modulated_by`

    @classmethod
    def replacing(
        cls,
        linear: nn.Module,
        rank: int,
        *,
        modulation_scale: float = 0.1,
        eight_bit: bool = False,
        on_cpu: bool = False,
    ) -> NPComponent:
        """From an nn.Linear or GPT-2's Conv1D; shares its weight unless eight_bit."""
        made = cls.from_linear(linear, rank, eight_bit=eight_bit)
        assert isinstance(made, NPComponent)
        made.modulation_scale, made.on_cpu = modulation_scale, on_cpu
        wide = torch.promote_types(made.A.dtype, torch.float32)
        made.A, made.B = (nn.Parameter(factor.detach().to(wide)) for factor in (made.A, made.B))
        made.reset_parameters()
        return made

    def modulation(self, attention: Tensor) -> Tensor:
        """[..., d] -> [..., r], in (-modulation_scale, modulation_scale); computed in A's dtype."""
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
            return frozen_linear(h, self.base_weight, self.bias)
        if self.on_cpu:  # the low-rank product with its gradients; the frozen one stays where h is
            factor, A, B, low = (x.cpu() for x in (mod, self.A, self.B, h))
            delta = ((low.to(A.dtype) @ A) * factor) @ B
            return frozen_linear(h, self.base_weight, self.bias) + delta.to(h)
        return super().forward(h, mod)

    def compute_weight_delta(self, modulation: Tensor, token_idx: TokenIndex) -> Tensor:
        """dW of the given tokens, [..., d, f], for inspection; training never forms it.

        With on_cpu it is computed on the CPU; gradients still reach A and B.
        """
        A: Tensor = self.A
        B: Tensor = self.B
        if self.on_cpu:
            A, B, modulation = A.cpu(), B.cpu(), modulation.cpu()
        return compute_weight_delta(A, B, modulation, token_idx)

    def penalty(self, mod: Tensor) -> Tensor:
        """||dW||_F^2 per token, [...], without forming dW."""
        return self.weight_delta_norm(mod, squared=True)


@dataclass(frozen=True)
class LayerLoss:
    total: Tensor  # matching + regularization * penalty
    matching: Tensor  # mean squared error
    penalty: Tensor  # mean over tokens of ||dW||_F^2
    student: Tensor  # output [B, S, d]; requires grad only with stream="joint"


@dataclass(frozen=True)
class Layout:
    """The names of a layer's submodules in a family of models."""

    family: str
    norm_1: str
    attention: str
    norm_2: str
    mlp: str
    projection: str  # of the MLP, to be modulated


LAYOUTS = (
    Layout("Llama-like", "input_layernorm", "self_attn", "post_attention_layernorm", "mlp", "gate_proj"),
    Layout("GPT-2-like", "ln_1", "attn", "ln_2", "mlp", "c_fc"),
)


def layout_of(layer: nn.Module) -> Layout:
    # A layer with further submodules, such as a norm after the MLP, computes something else.
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
class PassState:
    """State of one forward pass, shared by the model and its converted layers."""

    role: str = "student"  # "student", "teacher", or "match" for the loss between the two
    stream: str = "teacher"  # the input of the next layer in a matching pass, see NPTConfig
    token_mask: Tensor | None = None  # [B, S], which tokens count
    losses: list[LayerLoss] = field(default_factory=list)
    recording: bool = False  # off while a checkpointed layer is recomputed


class NPTLayer(nn.Module):
    """Replaces a decoder layer, with the same signature."""

    def __init__(
        self, layer: nn.Module, current: PassState, *, regularization: float, gradients: str
    ) -> None:
        super().__init__()
        self.layer, self.layout = layer, layout_of(layer)
        self.current = current
        self.regularization, self.gradients = regularization, gradients
        self._signature = inspect.signature(layer.forward)
        if hasattr(layer, "attention_type"):  # some models select the mask by it
            self.attention_type = layer.attention_type

    def part(self, name: str) -> nn.Module:
        return self.layer.get_submodule(getattr(self.layout, name))

    @property
    def np_component(self) -> NPComponent:
        component = getattr(self.part("mlp"), self.layout.projection)
        assert isinstance(component, NPComponent)
        return component

    def forward(self, hidden_states: Tensor | tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        """[B, S, d] -> [B, S, d], or a tuple that starts with it if the original layer returns one."""
        h = _first(hidden_states)
        if self.current.role == "teacher":
            return self.layer(h, *args, **kwargs)
        if self.current.role == "student":
            return self.student(h, self._attention_only(h, args, kwargs))
        joint = self.current.stream == "joint"
        h = h if joint else h.detach()
        output, attention = self._original(h, args, kwargs, with_grad=joint)
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
        self, h: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], with_grad: bool
    ) -> tuple[Any, Tensor]:
        """The output of the original layer, and that of its attention."""
        seen: list[Tensor] = []
        hook = self.part("attention").register_forward_hook(lambda *call: seen.append(_first(call[-1])))
        try:
            with torch.set_grad_enabled(with_grad and torch.is_grad_enabled()):
                output = self.layer(h, *args, **kwargs)
        finally:
            hook.remove()
        return output, seen[0]

    def _attention_only(self, h: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Attention with the arguments that the layer would pass to it; the teacher's MLP is not needed."""
        bound = self._signature.bind(h, *args, **kwargs).arguments
        given = {**bound, **bound.get("kwargs", {})}
        given.pop("kwargs", None)
        given.pop("hidden_states")
        return _first(self.part("attention")(hidden_states=self.part("norm_1")(h), **given))


def _first(value: Any) -> Tensor:
    """Some layers take and return hidden states as the first element of a tuple."""
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
    """`loss` in training: the mean over converted layers of matching error plus regularization."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    matching: Tensor | None = None  # per converted layer, mean squared error
    penalty: Tensor | None = None  # per converted layer, mean ||dW||_F^2


register_dataclass(NPTOutput)


class NPTModel(nn.Module):
    """Trains A and B of each converted layer to match the output of the original layer; the base is frozen.

    In training, model(input_ids) runs teacher and student in one pass: `.loss` is the matching loss, and
    labels are ignored. In evaluation the student is a language model: `.logits`, or with labels `.loss`.
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
        """base: modified in place. stream, gradients: see NPTConfig.

        layers: "upper_half", "all", a number (the last n layers), or a list of indices.
        """
        super().__init__()
        self.base = base.requires_grad_(False).eval()
        self.current = PassState(stream=stream)
        blocks = _decoder_layers(base)
        self.converted = layer_indices(layers, len(blocks))
        if use_8bit:
            _check_not_quantized(base)
        for index, block in enumerate(blocks):
            if index in self.converted:
                layout = layout_of(block)
                mlp = getattr(block, layout.mlp)
                made = component.replacing(
                    getattr(mlp, layout.projection),
                    rank,
                    modulation_scale=modulation_scale,
                    eight_bit=use_8bit,
                    on_cpu=use_cpu_offload,
                )
                setattr(mlp, layout.projection, made)
                blocks[index] = NPTLayer(
                    block, self.current, regularization=regularization, gradients=gradients
                )
            if use_8bit:
                quantize_linear_layers(block)
        self.train()

    def train(self, mode: bool = True) -> NPTModel:
        """The base stays in eval mode: dropout would make the teacher random."""
        super().train(mode)
        self.base.eval()
        return self

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> NPTOutput:
        if self.training:
            return self.match(input_ids, attention_mask)
        hidden = self._hidden("student", input_ids, attention_mask)
        if labels is None:
            return NPTOutput(logits=_head(self.base)(hidden))
        return NPTOutput(loss=self._language_loss(hidden, labels))

    def match(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> NPTOutput:
        """The matching loss. attention_mask [B, S]: tokens with 0 are left out of the means."""
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

    def teacher_loss(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The language-model loss of the original model."""
        return self._language_loss(self._hidden("teacher", input_ids, None), labels)

    def _language_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        head = _head(self.base)
        bias = getattr(head, "bias", None)
        loss = linear_cross_entropy(hidden, head.weight, labels, bias=bias, shift=True, ignore_index=-100)
        assert isinstance(loss, Tensor)
        return loss

    def _hidden(self, role: str, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        self.current.role = role
        inner: Any = self.base.base_model
        output = inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        hidden: Tensor = output[0]
        return hidden


def convert(base: nn.Module, layers: LayerChoice = "upper_half", rank: int = 16, **options: Any) -> NPTModel:
    """Convert the chosen layers of a loaded Hugging Face Llama- or GPT-2-like model."""
    return NPTModel(base, layers, rank, **options)


_PRECISIONS = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@validated_dataclass(frozen=True, config=STRICT)
class NPTOptimization:
    """use_cpu_offload: the low-rank product is computed on the CPU, in training too; gradients reach A and B.
        It frees little, since no weight delta is formed.
    mixed_precision: "no", "bf16" or "fp16", for the frozen base and the activations; A and B are float32.
    use_8bit: quantize the linear layers of the base to 8 bits.
    """

    use_cpu_offload: bool = False
    mixed_precision: Annotated[str, one_of(_PRECISIONS)] = "bf16"
    use_8bit: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return _PRECISIONS[self.mixed_precision]


@validated_dataclass(frozen=True, config=STRICT)
class NPTConfig:
    """A frozen base model with some converted layers.

    stream: the input of the next layer in training: the output of the "teacher"; of the "student", as in
        inference; or "joint", the student's without detach(), so that a layer also learns from the layers
        after it. A layer and its original always get the same input.
    gradients: "forward" computes the gradients of a layer together with its loss and saves nothing for
        backward; "backward" leaves them to autograd, which stream="joint" needs.
    """

    model_name: Annotated[str, one_of(SHAPES)] = "llama-3.1-8b"  # one of SHAPES, with random weights
    weights: str | None = None  # a local Hugging Face folder instead
    convert_layers: LayerChoice = "upper_half"
    rank: PositiveInt = 16
    modulation_scale: NonNegativeFloat = 0.1
    regularization: NonNegativeFloat = 0.01
    stream: Literal["teacher", "student", "joint"] = "teacher"
    gradients: Literal["forward", "backward"] = "forward"
    optimization: NPTOptimization = field(default_factory=NPTOptimization)

    def __post_init__(self) -> None:
        wrong = self.stream == "joint" and self.gradients == "forward"
        invalid_if(wrong, "gradients", "stream='joint' needs gradients='backward'")

    @property
    def vocab_size(self) -> int:
        """Of the base model."""
        return base_vocab_size(self.model_name, self.weights)

    def build(self, component: type[NPComponent] = NPComponent) -> NPTModel:
        base = load_base(self.model_name, self.weights, self.optimization.dtype)
        return NPTModel(
            base,
            self.convert_layers,
            self.rank,
            modulation_scale=self.modulation_scale,
            regularization=self.regularization,
            stream=self.stream,
            gradients=self.gradients,
            use_8bit=self.optimization.use_8bit,
            use_cpu_offload=self.optimization.use_cpu_offload,
            component=component,
        )


PRESETS: Mapping[str, NPTConfig] = {
    "default": NPTConfig(),
    "optimized": NPTConfig(
        convert_layers=4, rank=8, optimization=NPTOptimization(use_cpu_offload=True, mixed_precision="fp16")
    ),
    "small": NPTConfig(model_name="gpt2", rank=8, optimization=NPTOptimization(mixed_precision="no")),
    "tiny": NPTConfig(model_name="llama-tiny", rank=4, optimization=NPTOptimization(mixed_precision="no")),
}


def layer_indices(choice: LayerChoice, count: int) -> tuple[int, ...]:
    """The indices of the chosen layers in a model of `count` layers."""
    valid = f"the model has layers 0 to {count - 1}"
    if choice == "all":
        return tuple(range(count))
    if choice == "upper_half":
        return tuple(range(count // 2, count))
    if isinstance(choice, int) and not isinstance(choice, bool):
        if not 1 <= choice <= count:
            raise UserError(f"convert_layers={choice} is more than there are; {valid}")
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


def _check_not_quantized(base: nn.Module) -> None:
    if getattr(base, "is_quantized", False):
        raise UserError("use_8bit: the base is already quantized; load it in bfloat16, or leave use_8bit out")
