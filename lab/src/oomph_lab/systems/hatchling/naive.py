"""The naive form of report 000: a dk x dk transition and a dk x dv write per token, then a scan over them.

At the report's shape (batch 16, 256 tokens, 8 heads, dk 64) each tensor has 512 MiB in fp32, four of them are
alive at the line that failed, and autograd saves the intermediate results of every layer's scan.
"""

from dataclasses import replace

from oomph_lab.systems.hatchling.model import Hatchling, HatchlingConfig
from oomph_lab.systems.reports import ReportedRun

REPORT = ReportedRun("rtx3090", "hn_xs", batch=16, tokens=256)  # the first stage of its curriculum
REPORT_CHUNK = 64  # tokens; the default of its fix


class NaiveHatchling(Hatchling):
    """The same parameters, outputs and gradients as Hatchling, computed with dense transitions."""

    def __init__(self, config: HatchlingConfig, memory_chunk_size: int | None = None) -> None:
        """memory_chunk_size: None is the code that failed. 64 is the report's fix, which computes the
        transitions in chunks and concatenates them to the full size again."""
        size = max(1, config.context_length) if memory_chunk_size is None else memory_chunk_size
        super().__init__(replace(config, kda_mode="scan", kda_memory_chunk_size=size))


def build(config: HatchlingConfig, form: str = "naive", *, seq_len: int | None = None) -> NaiveHatchling:
    """form "chunked_updates": the report's fix, in chunks of config.kda_memory_chunk_size tokens, or 64."""
    return NaiveHatchling(config, None if form == "naive" else config.kda_memory_chunk_size or REPORT_CHUNK)
