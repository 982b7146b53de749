"""The configuration of GINR; the presets are the report's model and the solutions that change it."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from oomph.systems.config_checks import STRICT, check_multiple, invalid_if, one_of, valid_if
from oomph.systems.ginr.model import GINR, MIXINGS


@dataclass(frozen=True, config=STRICT)
class GINRConfig:
    """query_mixing: how the decoder's blocks mix positions, see Mixing; "self" is the report's.
    queries_per_step: number of random positions per training step (SCENT's remedy); None: all.
    query_chunk: positions decoded at a time, with the same outputs; not with "self", which mixes all of them.
    """

    image_size: PositiveInt = 32
    patch_size: PositiveInt = 2
    channels: PositiveInt = 3
    dim: PositiveInt = 256
    num_latents: Annotated[
        PositiveInt,
        valid_if(lambda n: round(n**0.5) ** 2 == n, "give a square number: latents are placed on a grid"),
    ] = 256
    encoder_depth: PositiveInt = 1
    d_state: PositiveInt = 16
    d_conv: PositiveInt = 4
    expand: PositiveInt = 2
    processor_depth: NonNegativeInt = 2
    feature_dim: Annotated[
        PositiveInt, valid_if(lambda n: n % 2 == 0, "give an even number: half are sines, half cosines")
    ] = 64
    hidden_dim: PositiveInt = 512
    # One per scale; 16 is the highest frequency of 32 pixels.
    sigmas: Annotated[
        tuple[float, ...],
        valid_if(lambda each: each and min(each) > 0, "give one number > 0 for each scale"),
    ] = (2.0, 8.0)
    num_layers: PositiveInt = 3
    heads: PositiveInt = 8
    dim_head: PositiveInt = 64
    mult: PositiveInt = 4
    locality: NonNegativeFloat = 10.0
    query_mixing: Annotated[str, one_of(MIXINGS)] = "self"
    queries_per_step: PositiveInt | None = None
    query_chunk: PositiveInt | None = None

    def __post_init__(self) -> None:
        check_multiple(self, "image_size", of="patch_size")
        positions = self.image_size**2
        too_many = (self.queries_per_step or 0) > positions
        invalid_if(too_many, "queries_per_step", f"the image has {positions} positions")
        invalid_if(
            self.query_chunk is not None and self.query_mixing == "self",
            "query_chunk",
            "with query_mixing='self' all positions attend to each other, so chunks would change the "
            "outputs; give queries_per_step, or another query_mixing",
        )

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
