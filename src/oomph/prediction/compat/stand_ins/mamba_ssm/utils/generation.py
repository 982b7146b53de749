"""state-spaces/mamba, mamba_ssm/utils/generation.py: the names that models refer to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class InferenceParams:
    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[Any, Any] = field(default_factory=dict)
    lengths_per_sample: Any = None


class GenerationMixin:
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("oomph's stand-in for mamba_ssm does not generate")
