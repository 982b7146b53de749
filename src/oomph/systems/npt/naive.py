"""Field report 003, as it was: a weight delta [d, f] for every token, made, used, and kept by autograd.

Legend: B batch, S tokens, d in, f out, r the rank.
"""

from dataclasses import replace

import torch
from torch import Tensor

from oomph.ops import Int8Weight
from oomph.ops.modulation import TokenIndex
from oomph.systems.npt.config import NPTConfig
from oomph.systems.npt.model import NPComponent, NPTModel


class WholeDelta(NPComponent):
    """The original: one einsum makes the deltas of all tokens, [B, S, d, f]."""

    def forward(self, h: Tensor, mod: Tensor | None = None) -> Tensor:
        mod_BSr = self._current if mod is None else mod
        if mod_BSr is None:
            return super().forward(h)
        weight_BSdf = _matrix(self).to(self.A.dtype) + self._deltas(mod_BSr)
        return _biased(self, torch.einsum("bsd,bsdf->bsf", h.to(weight_BSdf.dtype), weight_BSdf)).to(h.dtype)

    def penalty(self, mod: Tensor) -> Tensor:
        return self._deltas(mod).square().sum(dim=(-2, -1))

    def _deltas(self, mod_BSr: Tensor) -> Tensor:
        return torch.einsum("bsr,dr,rf->bsdf", mod_BSr, self.A, self.B)


class DeltaPerToken(NPComponent):
    """The report's fix: one token's delta [B, d, f] after the other. Autograd keeps each of them."""

    def forward(self, h: Tensor, mod: Tensor | None = None) -> Tensor:
        mod_BSr = self._current if mod is None else mod
        if mod_BSr is None:
            return super().forward(h)
        outputs = []
        for token_idx in range(h.shape[1]):
            weight_Bdf = _matrix(self).to(self.A.dtype) + self.compute_weight_delta(mod_BSr, token_idx)
            outputs.append(torch.einsum("bd,bdf->bf", h[:, token_idx].to(weight_Bdf.dtype), weight_Bdf))
        return _biased(self, torch.stack(outputs, dim=1)).to(h.dtype)


class OffloadedDeltaPerToken(DeltaPerToken):
    """The same with each delta computed on the CPU. Unlike in the report, B keeps its gradient."""

    def compute_weight_delta(self, modulation: Tensor, token_idx: TokenIndex) -> Tensor:
        return super().compute_weight_delta(modulation, token_idx).to(modulation.device)


COMPONENTS: dict[str, type[NPComponent]] = {
    "whole": WholeDelta,
    "per_token": DeltaPerToken,
    "per_token_offloaded": OffloadedDeltaPerToken,
}


def build(config: NPTConfig, component: str = "whole", *, seq_len: int | None = None) -> NPTModel:
    """The model's parameters and outputs, with the report's memory. component: one of COMPONENTS.

    Converted layers follow one another in the autograd graph, as in the report. That is what makes it keep
    each token's W + dW: the gradient of the layer's input needs them.
    """
    return replace(config, stream="joint", gradients="backward").build(COMPONENTS[component])


def _matrix(component: NPComponent) -> Tensor:
    weight = component.base_weight
    return weight.dequantize() if isinstance(weight, Int8Weight) else weight


def _biased(component: NPComponent, y: Tensor) -> Tensor:
    return y if component.bias is None else y + component.bias
