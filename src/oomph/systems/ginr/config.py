"""The configuration of GINR; the presets are the report's model and the solutions that change it."""

from collections.abc import Mapping
from dataclasses import dataclass

from oomph.systems.config_checks import FieldChecks, checking
from oomph.systems.ginr.model import GINR, MIXINGS


@dataclass(frozen=True)
class GINRConfig:
    """query_mixing: how the decoder's blocks mix positions, see Mixing; "self" is the report's.
    queries_per_step: number of random positions per training step (SCENT's remedy); None: all.
    query_chunk: positions decoded at a time, with the same outputs; not with "self", which mixes all of them.
    """

    image_size: int = 32
    patch_size: int = 2
    channels: int = 3
    dim: int = 256
    num_latents: int = 256
    encoder_depth: int = 1
    d_state: int = 16
    d_conv: int = 4
    expand: int = 2
    processor_depth: int = 2
    feature_dim: int = 64
    hidden_dim: int = 512
    sigmas: tuple[float, ...] = (2.0, 8.0)  # one per scale; 16 is the highest frequency of 32 pixels
    num_layers: int = 3
    heads: int = 8
    dim_head: int = 64
    mult: int = 4
    locality: float = 10.0
    query_mixing: str = "self"
    queries_per_step: int | None = None
    query_chunk: int | None = None

    def __post_init__(self) -> None:
        with checking(self) as check:
            check.choice("query_mixing", MIXINGS)
            check.integers(
                *("image_size", "patch_size", "channels", "dim", "num_latents", "encoder_depth", "d_state"),
                *("d_conv", "expand", "feature_dim", "hidden_dim", "num_layers", "heads", "dim_head", "mult"),
            )
            check.integers("processor_depth", minimum=0)
            for name in ("queries_per_step", "query_chunk"):
                if getattr(self, name) is not None:
                    check.integers(name)
            check.number("locality", 0)
            check.multiple("image_size", "patch_size")
            self._check_grids(check)
            if not self.sigmas or not all(sigma > 0 for sigma in self.sigmas):
                check.reject("sigmas", "give one number > 0 for each scale")
            if self.query_chunk is not None and self.query_mixing == "self":
                check.reject(
                    "query_chunk",
                    "with query_mixing='self' all positions attend to each other, so chunks would change the "
                    "outputs; give queries_per_step, or another query_mixing",
                )

    def _check_grids(self, check: FieldChecks) -> None:
        if check.valid("feature_dim") and self.feature_dim % 2:
            check.reject("feature_dim", "give an even number: half are sines, half cosines")
        if check.valid("num_latents") and round(self.num_latents**0.5) ** 2 != self.num_latents:
            check.reject("num_latents", "give a square number: latents are placed on a grid")
        queries = self.queries_per_step
        if (
            queries is not None
            and check.valid("queries_per_step", "image_size")
            and queries > self.image_size**2
        ):
            check.reject("queries_per_step", f"the image has {self.image_size**2} positions")

    @property
    def layer_num(self) -> int:
        """The number of scales."""
        return len(self.sigmas)

    def build(self) -> GINR:
        return GINR(self)


PRESETS: Mapping[str, GINRConfig] = {
    "default": GINRConfig(),
    "solution_1_feedforward": GINRConfig(query_mixing="feedforward"),
    "solution_2_cross": GINRConfig(query_mixing="cross"),
    "solution_5_resolution": GINRConfig(image_size=16),
    "scent_queries": GINRConfig(queries_per_step=256),
    "residual": GINRConfig(query_mixing="residual", encoder_depth=6),  # the original, before SCENT's decoder
    "tiny": GINRConfig(
        image_size=8,
        dim=32,
        num_latents=16,
        processor_depth=1,
        feature_dim=16,
        hidden_dim=32,
        sigmas=(1.0, 3.0),
        num_layers=2,
        heads=2,
        dim_head=16,
        mult=2,
    ),
}
