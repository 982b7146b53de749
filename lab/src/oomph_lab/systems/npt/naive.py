"""The naive form of report 003: a weight delta [d, f] for every token, which autograd saves.

Legend: B batch, S tokens, d in, f out, r the rank.
"""

from dataclasses import replace

import torch
from torch import Tensor

from oomph.ops import Int8Weight
from oomph.ops.modulation import TokenIndex
from oomph_lab.systems.npt.model import NPComponent, NPTConfig, NPTModel

CHUNK = 16  # tokens of a chunk; the report does not say how many


class WholeDelta(NPComponent):
    """The original: one einsum computes the deltas of all tokens, [B, S, d, f]."""

    def forward(self, h: Tensor, mod: Tensor | None = None) -> Tensor:
        mod_BSr = self._current if mod is None else mod
        if mod_BSr is None:
            return super().forward(h)
        weight_BSdf = _dense_weight(self).to(self.A.dtype) + self._deltas(mod_BSr)
        return _add_bias(self, torch.einsum("bsd,bsdf->bsf", h.to(weight_BSdf.dtype), weight_BSdf)).to(
            h.dtype
        )

    def penalty(self, mod: Tensor) -> Tensor:
        return self._deltas(mod).square().sum(dim=(-2, -1))

    def _deltas(self, mod_BSr: Tensor) -> Tensor:
        return torch.einsum("bsr,dr,rf->bsdf", mod_BSr, self.A, self.B)


class DeltaPerToken(NPComponent):
    """The report's fix: a loop over tokens, with one delta [B, d, f] each. Autograd saves all of them."""

    def forward(self, h: Tensor, mod: Tensor | None = None) -> Tensor:
        mod_BSr = self._current if mod is None else mod
        if mod_BSr is None:
            return super().forward(h)
        outputs = []
        for token_idx in range(h.shape[1]):
            weight_Bdf = _dense_weight(self).to(self.A.dtype) + self.compute_weight_delta(mod_BSr, token_idx)
            outputs.append(torch.einsum("bd,bdf->bf", h[:, token_idx].to(weight_Bdf.dtype), weight_Bdf))
        return _add_bias(self, torch.stack(outputs, dim=1)).to(h.dtype)


class DeltaPerChunk(WholeDelta):
    """The same for CHUNK tokens at a time, [B, CHUNK, d, f]. Autograd saves all of them."""

    penalty = NPComponent.penalty

    def forward(self, h: Tensor, mod: Tensor | None = None) -> Tensor:
        mod_BSr = self._current if mod is None else mod
        if mod_BSr is None:
            return super().forward(h)
        parts = zip(h.split(CHUNK, dim=1), mod_BSr.split(CHUNK, dim=1), strict=True)
        return torch.cat([super(DeltaPerChunk, self).forward(*part) for part in parts], dim=1)


class OffloadedDeltaPerToken(DeltaPerToken):
    """The same with each delta computed on the CPU. Unlike in the report, B keeps its gradient."""

    def compute_weight_delta(self, modulation: Tensor, token_idx: TokenIndex) -> Tensor:
        return super().compute_weight_delta(modulation, token_idx).to(modulation.device)


COMPONENTS: dict[str, type[NPComponent]] = {
    "whole": WholeDelta,
    "per_token": DeltaPerToken,
    "per_chunk": DeltaPerChunk,
    "per_token_offloaded": OffloadedDeltaPerToken,
}


def build(config: NPTConfig, form: str = "naive", *, seq_len: int | None = None) -> NPTModel:
    """The same parameters and outputs as config.build(), with the report's memory use.

    form: "naive" is the component "whole"; the others have the names of COMPONENTS. The hidden states keep
    their autograd graph from layer to layer, as in the report: W + dW of every token is
    saved for the gradient of the layer's input.
    """
    return replace(config, stream="joint", gradients="backward").build(
        COMPONENTS["whole" if form == "naive" else form]
    )


def _dense_weight(component: NPComponent) -> Tensor:
    weight = component.base_weight
    return weight.dequantize() if isinstance(weight, Int8Weight) else weight


def _add_bias(component: NPComponent, y: Tensor) -> Tensor:
    return y if component.bias is None else y + component.bias
