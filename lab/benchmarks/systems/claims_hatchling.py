"""The claims of report 000."""

from functools import partial

from lab.benchmarks.systems.claims import Claim, Figures, gib, mib
from oomph_lab.systems.hatchling.model import PRESETS
from oomph_lab.systems.hatchling.naive import REPORT, REPORT_CHUNK

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


def _chunks(size: int) -> Claim:
    return Claim(lambda: f"{mib(concatenated_chunks())}, as with 64", partial(_size, size))


CLAIMS = {
    "elements of one [B, T, H, dk, dk] tensor, batch 16, 256 tokens, 8 heads, dk 64": Claim(
        lambda: f"{transition_elements():,}", lambda f: f"{_temporary(f) / 4:,.0f}"
    ),
    "one such tensor in fp16": Claim(
        lambda: f"{transition_bytes(2) / 1e6:.0f} MB = {mib(transition_bytes(2))}",
        lambda f: f"{mib(_temporary(f))}, in fp32",
    ),
    "the allocation that failed": Claim(
        lambda: f"{mib(transition_bytes(4))} in fp32", lambda f: mib(_temporary(f))
    ),
    "peak of that operation": Claim(
        lambda: f"{mib(3 * transition_bytes(4))} at that line, {mib(alive_at_failure())} with the writes",
        lambda f: f"{mib(f('updates 256', 'forward'))} in forward, {mib(f('updates 256'))} with backward",
    ),
    "this operation exceeds the RTX 3090": Claim(
        lambda: f"{_LAYERS} layers save theirs for backward",
        lambda f: f"{_step(f, 'naive')} for the step, of 23.6 GiB",
    ),
    "chunks of 64 tokens take 4x less": Claim(
        lambda: f"{mib(concatenated_chunks())} when the chunks of one tensor are concatenated",
        lambda f: (
            f"{mib(f('updates 256', 'forward'))} -> {mib(f('updates 64', 'forward'))} in forward, "
            f"{mib(f('updates 256'))} -> {mib(f('updates 64'))} with backward"
        ),
    ),
    "the whole step with the fix": Claim(
        None, lambda f: f"{_step(f, 'naive')} -> {_step(f, _chunked_step(64))}"
    ),
    "32 tokens for very constrained memory": _chunks(32),
    "128 tokens for large GPUs": _chunks(128),
    "16 tokens if the failure persists": _chunks(16),
    "slowdown of the chunks": Claim(
        None,
        lambda f: (
            f"{f.slower('updates 64', 'updates 256')} for the operation; "
            f"{f.slower(_STEP.format(_chunked_step(64)), _STEP.format('naive'))} for the step"
        ),
        lambda f: (
            f"{f.slower('updates 64', 'updates 256')} for the operation; "
            f"{_LAYERS} of them make {100 * _LAYERS * _longer(f) / f(_STEP.format('naive'), 'ms'):+.0f} % of the step"
        ),
    ),
    "accuracy": Claim(
        None,
        lambda f: f"outputs and gradients differ by {f('chunked updates', 'error'):g} in fp32, on the CPU",
    ),
    "fallback: reduce batch_tokens": Claim(
        lambda: f"{mib(alive_at_failure() / 2)} of {mib(alive_at_failure())} with half the tokens",
        lambda f: f"{_step(f, 'naive')} -> {gib(f('hatchling hn_xs naive 8 x 256'))} with 2,048 tokens",
    ),
    "fallback: kda_mode: sequential": Claim(
        lambda: f"{mib(transition_bytes(4))} of states per layer: one dk x dv state for every token",
        lambda f: (
            f"{_step(f, 'sequential')}, {f.ratio(_STEP.format('sequential'), _STEP.format('naive'), 'ms'):.1f} x "
            "the scan's time"
        ),
        lambda f: f"{_step(f, 'naive')} -> {_step(f, 'sequential')}",
    ),
}
