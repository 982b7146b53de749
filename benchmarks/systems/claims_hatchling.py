"""The claims of report 000."""

from functools import partial

from benchmarks.systems.claims import Claim, Figures, gib, mib
from oomph.systems.hatchling.model import PRESETS
from oomph.systems.hatchling.naive import REPORT, REPORT_CHUNK

_STEP = "hatchling hn_xs {} 16 x 256"
_LAYERS = PRESETS["hn_xs"].n_layers * 3 // 4  # of delta attention


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
    chunks = REPORT.tokens // REPORT_CHUNK
    return chunks * transition_elements(REPORT_CHUNK) * 4 + transition_bytes(4)


def _step(f: Figures, form: str) -> str:
    return gib(f(_STEP.format(form)))


def _chunked_step(size: int) -> str:
    return f"chunked_updates {size}"


def _temporary(f: Figures) -> float:
    """One [B, T, H, dk, dk] tensor: at its peak the operation holds one more than it returns."""
    return f("updates 256", "forward") - f("updates 256", "saved")


def _longer(f: Figures) -> float:
    """Milliseconds by which chunks of 64 tokens make the operation longer."""
    return f("updates 64", "ms") - f("updates 256", "ms")


def _size(size: int, f: Figures) -> str:
    """Of chunks, against the report's 64."""
    return (
        f"{_step(f, _chunked_step(64))} -> {_step(f, _chunked_step(size))} for the step; "
        f"the operation {mib(f(f'updates {size}', 'forward'))}, {f.slower(f'updates {size}', 'updates 64')} time"
    )


CLAIMS = (
    Claim(
        "elements of one [B, T, H, dk, dk] tensor, batch 16, 256 tokens, 8 heads, dk 64",
        "134M",
        lambda: f"{transition_elements():,}",
        "right",
        "16 x 256 x 8 x 64 x 64",
        lambda f: f"{_temporary(f) / 4:,.0f}",
    ),
    Claim(
        "one such tensor in fp16",
        "~268 MB",
        lambda: f"{transition_bytes(2) / 1e6:.0f} MB = {mib(transition_bytes(2))}",
        "in part",
        "right for 2 bytes each; the line ran in fp32, where it is twice as much",
        lambda f: f"{mib(_temporary(f))}, in fp32",
    ),
    Claim(
        "the allocation that failed",
        "512 MiB, while a tensor is said to take 268 MB",
        lambda: f"{mib(transition_bytes(4))} in fp32",
        "in part",
        "512 MiB is one of these tensors in fp32: the line did not run in fp16",
        lambda f: mib(_temporary(f)),
    ),
    Claim(
        "peak of that operation",
        "~536 MB",
        lambda: f"{mib(3 * transition_bytes(4))} at that line, {mib(alive_at_failure())} with the writes",
        "wrong",
        "decay_diag, forget_rank1 and their difference are alive together, in fp32; "
        "the writes are a fourth, unless the first two are freed before them, as here",
        lambda f: f"{mib(f('updates 256', 'forward'))} in forward, {mib(f('updates 256'))} with backward",
    ),
    Claim(
        "this operation exceeds the RTX 3090",
        "536 MB for this operation alone",
        lambda: f"{_LAYERS} layers save theirs for backward",
        "in part",
        "the card was full already: autograd saves the results of every layer's scan",
        lambda f: f"{_step(f, 'naive')} for the step, of 23.6 GiB",
    ),
    Claim(
        "chunks of 64 tokens take 4x less",
        "~536 MB -> ~134 MB",
        lambda: f"{mib(concatenated_chunks())} when the chunks of one tensor are concatenated",
        "wrong",
        "the chunks are concatenated to the full size, and autograd saves the outer products of each",
        lambda f: (
            f"{mib(f('updates 256', 'forward'))} -> {mib(f('updates 64', 'forward'))} in forward, "
            f"{mib(f('updates 256'))} -> {mib(f('updates 64'))} with backward"
        ),
    ),
    Claim(
        "the whole step with the fix",
        "fits the RTX 3090",
        lambda: "not less than without it: the same tensors are saved",
        "wrong",
        "what is saved for backward does not change",
        lambda f: f"{_step(f, 'naive')} -> {_step(f, _chunked_step(64))}",
    ),
    Claim(
        "32 tokens for very constrained memory",
        "less memory, slower",
        lambda: f"{mib(concatenated_chunks())}, as with 64",
        "in part",
        "slower; the size of the chunks does not change what is saved",
        partial(_size, 32),
    ),
    Claim(
        "128 tokens for large GPUs",
        "more memory, faster",
        lambda: f"{mib(concatenated_chunks())}, as with 64",
        "in part",
        "faster; the size of the chunks does not change what is saved",
        partial(_size, 128),
    ),
    Claim(
        "16 tokens if the failure persists",
        "less memory",
        lambda: f"{mib(concatenated_chunks())}, as with 64",
        "wrong",
        "the size of the chunks does not change what is saved",
        partial(_size, 16),
    ),
    Claim(
        "slowdown of the chunks",
        "~5 % slower",
        lambda: "four times the kernels of one operation, and two copies",
        "right",
        "for the step, of which the operation is a small part",
        lambda f: (
            f"{f.slower('updates 64', 'updates 256')} for the operation; "
            f"{f.slower(_STEP.format(_chunked_step(64)), _STEP.format('naive'))} for the step"
        ),
        lambda f: (
            f"{f.slower('updates 64', 'updates 256')} for the operation; "
            f"{_LAYERS} of them make {100 * _LAYERS * _longer(f) / f(_STEP.format('naive'), 'ms'):+.0f} % of the step"
        ),
    ),
    Claim(
        "accuracy",
        "no change",
        lambda: "the same products in the same order",
        "right",
        "tests/ops compare outputs and gradients with the recurrence, in float64",
        lambda f: f"outputs and gradients differ by {f('chunked updates', 'error'):g} in fp32, on the CPU",
    ),
    Claim(
        "fallback: reduce batch_tokens",
        "helps if the failure persists",
        lambda: f"{mib(alive_at_failure() / 2)} of {mib(alive_at_failure())} with half the tokens",
        "right",
        "everything that the step saves is in proportion to the tokens; half of them are still too many",
        lambda f: f"{_step(f, 'naive')} -> {gib(f('hatchling hn_xs naive 8 x 256'))} with 2,048 tokens",
    ),
    Claim(
        "fallback: kda_mode: sequential",
        "helps if the failure persists",
        lambda: f"{mib(transition_bytes(4))} of states per layer: one dk x dv state for every token",
        "in part",
        "less than the scan, and slow: autograd saves the state of every token",
        lambda f: (
            f"{_step(f, 'sequential')}, {f.ratio(_STEP.format('sequential'), _STEP.format('naive'), 'ms'):.1f} x "
            "the scan's time"
        ),
        lambda f: f"{_step(f, 'naive')} -> {_step(f, 'sequential')}",
    ),
)
