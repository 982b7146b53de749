"""Report 000's claims, worked out."""

from oomph.systems.claims import Claim, mib, whole
from oomph.systems.hatchling.config import PRESETS
from oomph.systems.hatchling.naive import REPORT

CHUNK = 64  # the report's fix


def transition_elements(tokens: int = whole(REPORT["tokens"])) -> int:
    """[B, T, H, dk, dk]"""
    config = PRESETS[str(REPORT["preset"])]
    return whole(REPORT["batch"]) * tokens * config.n_heads * config.head_dim**2


def transition_bytes(itemsize: int) -> int:
    return transition_elements() * itemsize


def alive_at_the_line() -> int:
    """decay_diag, forget_rank1, their difference, and the writes: four of them, in fp32."""
    return 4 * transition_bytes(4)


def joined_after_chunks() -> int:
    """At the end of the report's fix: the chunks of one tensor, and the whole they are copied into."""
    chunks = whole(REPORT["tokens"]) // CHUNK
    return chunks * transition_elements(CHUNK) * 4 + transition_bytes(4)


CLAIMS = (
    Claim(
        "000",
        "elements of one [B, T, H, dk, dk] tensor",
        "134M, ~268 MB in fp16",
        lambda: f"{transition_elements():,}; {transition_bytes(2) / 1e6:.0f} MB = {mib(transition_bytes(2))}",
        "right",
        "16 x 256 x 8 x 64 x 64, 2 bytes each",
    ),
    Claim(
        "000",
        "the request that failed",
        "512 MiB, while a tensor is said to take 268 MB",
        lambda: f"{mib(transition_bytes(4))} in fp32",
        "in part",
        "512 MiB is one of these tensors in fp32: the line did not run in fp16",
    ),
    Claim(
        "000",
        "peak of that operation",
        "~536 MB",
        lambda: f"{mib(alive_at_the_line())}",
        "wrong",
        "decay_diag, forget_rank1, their difference and the writes are alive together, in fp32",
    ),
    Claim(
        "000",
        "chunks of 64 tokens take 4x less",
        "~536 MB -> ~134 MB",
        lambda: f"{mib(joined_after_chunks())} when one tensor's chunks are joined",
        "wrong",
        "the chunks are joined to the full size again, and autograd keeps the outer products of each",
    ),
    Claim(
        "000",
        "price of the chunks",
        "~5 % slower",
        lambda: "no figure follows from arithmetic",
        "never measured",
        "the report gives no run; `model.py` is measured against the scan",
    ),
)
