"""A converted layer: the frozen original is the teacher, the same weights plus a change are the student.

    original    h' = h + attention(norm_1 h)      out = h' + MLP_W(norm_2 h')
    student     mod = scale tanh(attention A)     out = h + MLP_(W + A diag(mod) B)(norm_2 h)

Attention runs once for both, and its result is not added to the student's stream: it only modulates.
"""

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from oomph.errors import UserError
from oomph.models.npt.component import NPComponent
from oomph.models.npt.matching import LayerLoss, matching_loss


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
