"""Report 000's failure: a dk x dk transition and a dk x dv write for every token, then a scan over them.

At the report's shape (batch 16, 256 tokens, 8 heads, dk 64) each is 512 MiB in fp32, four of them are alive
at the line that failed, and autograd keeps the scan's intermediate results of every layer.
"""

from dataclasses import replace

from oomph.systems.hatchling.config import HatchlingConfig
from oomph.systems.hatchling.model import Hatchling

# On what the report ran: an RTX 3090, the first step of the curriculum.
REPORT = {"gpu": "rtx3090", "preset": "hn_xs", "batch": 16, "tokens": 256}


class NaiveHatchling(Hatchling):
    """The model's parameters, outputs and gradients, by dense transitions."""

    def __init__(self, config: HatchlingConfig, memory_chunk_size: int | None = None) -> None:
        """memory_chunk_size: None is the report's code as it failed, 64 its own fix, which cuts the making of
        the transitions into chunks and joins these to the full size again."""
        all_at_once = max(1, config.context_length) if memory_chunk_size is None else memory_chunk_size
        super().__init__(replace(config, kda_mode="scan", kda_memory_chunk_size=all_at_once))


def build(config: HatchlingConfig, *, seq_len: int | None = None) -> NaiveHatchling:
    return NaiveHatchling(config)
