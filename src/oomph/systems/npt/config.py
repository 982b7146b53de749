"""The configuration of NPT and its presets: the report's three, and `tiny` for tests."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Literal

import torch
from pydantic import NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass

from oomph.systems.config_checks import STRICT, invalid_if, one_of
from oomph.systems.npt.base_model import SHAPES, base_vocab_size, load_base
from oomph.systems.npt.model import LayerChoice, NPComponent, NPTModel

_PRECISIONS = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, config=STRICT)
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


@dataclass(frozen=True, config=STRICT)
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
