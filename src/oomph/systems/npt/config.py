"""The configuration of NPT and its presets: the report's three, and `tiny` for tests."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from oomph.systems.config_checks import checking
from oomph.systems.npt.base_model import SHAPES, base_vocab_size, load_base
from oomph.systems.npt.model import LayerChoice, NPComponent, NPTModel

_PRECISIONS = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class NPTOptimization:
    """use_cpu_offload: the low-rank product is computed on the CPU, in training too; gradients reach A and B.
        It frees little, since no weight delta is formed.
    mixed_precision: "no", "bf16" or "fp16", for the frozen base and the activations; A and B are float32.
    use_8bit: quantize the linear layers of the base to 8 bits.
    """

    use_cpu_offload: bool = False
    mixed_precision: str = "bf16"
    use_8bit: bool = False

    def __post_init__(self) -> None:
        with checking(self) as check:
            check.booleans("use_cpu_offload", "use_8bit")
            check.choice("mixed_precision", _PRECISIONS)

    @property
    def dtype(self) -> torch.dtype:
        return _PRECISIONS[self.mixed_precision]


@dataclass(frozen=True)
class NPTConfig:
    """A frozen base model with some converted layers.

    stream: the input of the next layer in training: the output of the "teacher"; of the "student", as in
        inference; or "joint", the student's without detach(), so that a layer also learns from the layers
        after it. A layer and its original always get the same input.
    gradients: "forward" computes the gradients of a layer together with its loss and saves nothing for
        backward; "backward" leaves them to autograd, which stream="joint" needs.
    """

    model_name: str = "llama-3.1-8b"  # one of SHAPES, with random weights
    weights: str | None = None  # a local Hugging Face folder instead
    convert_layers: LayerChoice = "upper_half"
    rank: int = 16
    modulation_scale: float = 0.1
    regularization: float = 0.01
    stream: str = "teacher"
    gradients: str = "forward"
    optimization: NPTOptimization = field(default_factory=NPTOptimization)

    def __post_init__(self) -> None:
        with checking(self) as check:
            check.choice("model_name", SHAPES)
            check.choice("stream", ("teacher", "student", "joint"))
            check.choice("gradients", ("forward", "backward"))
            if self.stream == "joint" and self.gradients == "forward":
                check.reject("gradients", "stream='joint' needs gradients='backward'")
            check.integers("rank")
            for name in ("modulation_scale", "regularization"):
                check.number(name, 0)

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
