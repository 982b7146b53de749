"""MLPs in tiles of tokens: the hidden activations of all tokens never exist at once."""

import torch
from torch import Tensor, nn

from oomph.errors import ArgumentError
from oomph.ops.mlp import MLPWeights, tiled_mlp


class TiledMLP(nn.Module):
    """Runs any MLP by `tiled_mlp`. The wrapped module is its only child, as `.module`."""

    def __init__(self, module: nn.Module, *, tile: int | None = None) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise ArgumentError(f"module is a {type(module).__name__}; valid: an nn.Module")
        self.module = module
        self.tile = tile

    def forward(self, x: Tensor) -> Tensor:
        return tiled_mlp(self.module, x, tile=self.tile)

    def extra_repr(self) -> str:
        return f"tile={self.tile}"


class GatedMLP(nn.Module):
    """`down(act(gate x) * (up x))` from d features over f hidden ones, tiled; names as in Llama's MLP."""

    def __init__(
        self,
        d: int,
        f: int,
        activation: str = "silu",
        bias: bool = False,
        *,
        tile: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d, f, bias=bias, device=device, dtype=dtype)
        self.up_proj = nn.Linear(d, f, bias=bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(f, d, bias=bias, device=device, dtype=dtype)
        self.activation = activation
        self.tile = tile

    def forward(self, x: Tensor) -> Tensor:
        weights = MLPWeights(
            up=self.up_proj.weight,
            down=self.down_proj.weight,
            gate=self.gate_proj.weight,
            up_bias=self.up_proj.bias,
            gate_bias=self.gate_proj.bias,
            down_bias=self.down_proj.bias,
            activation=self.activation,
        )
        return tiled_mlp(weights, x, tile=self.tile)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, tile={self.tile}"
