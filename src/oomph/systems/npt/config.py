"""What an NPT is made of; the presets are the report's three configurations."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from oomph.systems.config_checks import checking
from oomph.systems.npt.base_model import SHAPES, load_base, vocabulary_of_base
from oomph.systems.npt.model import LayerChoice, NPComponent, NPTModel

_PRECISIONS = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class NPTOptimization:
    """use_cpu_offload: weight deltas that are looked at are made in host memory, with their gradients.
    mixed_precision: "no", "bf16" or "fp16", of the frozen base and the activations; A and B are float32.
    use_8bit: the base's linear layers are held in 8 bits.
    """

    use_cpu_offload: bool = False
    mixed_precision: str = "bf16"
    use_8bit: bool = False

    def __post_init__(self) -> None:
        with checking(self) as check:
            check.booleans("use_cpu_offload", "use_8bit")
            check.one_of("mixed_precision", _PRECISIONS)

    @property
    def dtype(self) -> torch.dtype:
        return _PRECISIONS[self.mixed_precision]


@dataclass(frozen=True)
class NPTConfig:
    """A frozen base, some of whose layers are made plastic.

    stream: whose output a layer hands to the next in training: the "teacher"'s, or the "student"'s, which is
        what the converted model will see when it is used; or "joint", the student's with its history, so that
        a layer also learns from the layers after it. A layer and its original always get the same input.
    gradients: "forward" makes a layer's gradients as soon as its loss is there, and keeps nothing for
        backward; "backward" leaves them to autograd, which a joint stream needs.
    """

    model_name: str = "llama-3.1-8b"  # one of SHAPES; the weights are random
    weights: str | None = None  # a local folder, instead
    convert_layers: LayerChoice = "upper_half"
    rank: int = 16
    modulation_scale: float = 0.1
    regularization: float = 0.01
    stream: str = "teacher"
    gradients: str = "forward"
    optimization: NPTOptimization = field(default_factory=NPTOptimization)

    def __post_init__(self) -> None:
        with checking(self) as check:
            check.one_of("model_name", SHAPES)
            check.one_of("stream", ("teacher", "student", "joint"))
            check.one_of("gradients", ("forward", "backward"))
            if self.stream == "joint" and self.gradients == "forward":
                check.refuse("gradients", "stream='joint' needs gradients='backward'")
            check.whole_numbers("rank")
            for name in ("modulation_scale", "regularization"):
                check.number_from(name, 0)

    @property
    def vocab_size(self) -> int:
        """The base's own."""
        return vocabulary_of_base(self.model_name, self.weights)

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
        convert_layers=4,
        rank=8,
        optimization=NPTOptimization(use_cpu_offload=True, mixed_precision="fp16"),
    ),
    "small": NPTConfig(model_name="gpt2", rank=8, optimization=NPTOptimization(mixed_precision="no")),
    "tiny": NPTConfig(
        model_name="llama-tiny",
        rank=4,
        optimization=NPTOptimization(mixed_precision="no"),
    ),
}
