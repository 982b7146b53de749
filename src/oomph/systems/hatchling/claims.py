"""The claims of report 000."""

from oomph.systems.claims import Claim, mib
from oomph.systems.hatchling.config import PRESETS
from oomph.systems.hatchling.naive import REPORT

CHUNK = 64  # the report's fix


def transition_elements(tokens: int = REPORT.tokens) -> int:
    """[B, T, H, dk, dk]"""
    config = PRESETS[REPORT.preset]
    return REPORT.batch * tokens * config.n_heads * config.head_dim**2


def transition_bytes(itemsize: int) -> int:
    return transition_elements() * itemsize


def alive_at_failure() -> int:
    """decay_diag, forget_rank1, their difference, and the writes: four tensors, in fp32."""
    return 4 * transition_bytes(4)


def concatenated_chunks() -> int:
    """At the end of the report's fix: the chunks of one tensor, and the tensor they are copied into."""
    chunks = REPORT.tokens // CHUNK
    return chunks * transition_elements(CHUNK) * 4 + transition_bytes(4)


CLAIMS = (
    Claim(
        "elements of one [B, T, H, dk, dk] tensor",
        "134M, ~268 MB in fp16",
        lambda: f"{transition_elements():,}; {transition_bytes(2) / 1e6:.0f} MB = {mib(transition_bytes(2))}",
        "right",
        "16 x 256 x 8 x 64 x 64, 2 bytes each",
    ),
    Claim(
        "the allocation that failed",
        "512 MiB, while a tensor is said to take 268 MB",
        lambda: f"{mib(transition_bytes(4))} in fp32",
        "in part",
        "512 MiB is one of these tensors in fp32: the line did not run in fp16",
    ),
    Claim(
        "peak of that operation",
        "~536 MB",
        lambda: f"{mib(alive_at_failure())}",
        "wrong",
        "decay_diag, forget_rank1, their difference and the writes are alive together, in fp32",
    ),
    Claim(
        "chunks of 64 tokens take 4x less",
        "~536 MB -> ~134 MB",
        lambda: f"{mib(concatenated_chunks())} when the chunks of one tensor are concatenated",
        "wrong",
        "the chunks are concatenated to the full size, and autograd saves the outer products of each",
    ),
    Claim(
        "slowdown of the chunks",
        "~5 % slower",
        lambda: "not derivable",
        "never measured",
        "the report has no measurement; `model.py` is measured against the scan",
    ),
)
