"""The claims of report 000."""

from benchmarks.systems.claims import Claim, Figures, gib, mib
from oomph.systems.hatchling.config import PRESETS
from oomph.systems.hatchling.naive import REPORT, REPORT_CHUNK

_STEP = "hatchling hn_xs {} 16 x 256"


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


CLAIMS = (
    Claim(
        "elements of one [B, T, H, dk, dk] tensor, batch 16, 256 tokens, 8 heads, dk 64",
        "134M",
        lambda: f"{transition_elements():,}",
        "right",
        "16 x 256 x 8 x 64 x 64",
        lambda f: f"{f('updates 256', 'saved') / 2 / 4 / 1e6:.0f}M, from the two that are kept",
    ),
    Claim(
        "one such tensor in fp16",
        "~268 MB",
        lambda: f"{transition_bytes(2) / 1e6:.0f} MB = {mib(transition_bytes(2))}",
        "in part",
        "right for 2 bytes each; the line ran in fp32, where it is twice as much",
        lambda f: f"{mib(f('updates 256', 'saved') / 2)} each, in fp32",
    ),
    Claim(
        "the allocation that failed",
        "512 MiB, while a tensor is said to take 268 MB",
        lambda: f"{mib(transition_bytes(4))} in fp32",
        "in part",
        "512 MiB is one of these tensors in fp32: the line did not run in fp16",
        lambda f: f"{mib(f('updates 256', 'saved') / 2)} each",
    ),
    Claim(
        "peak of that operation",
        "~536 MB",
        lambda: f"{mib(alive_at_failure())}",
        "wrong",
        "decay_diag, forget_rank1 and their difference are alive together, in fp32, before the writes",
        lambda f: f"{mib(f('updates 256', 'forward'))} in forward, {mib(f('updates 256'))} with backward",
        lambda f: f"{mib(f('updates 256', 'saved'))} stay after it",
    ),
    Claim(
        "this operation exceeds the RTX 3090",
        "536 MB for this operation alone",
        lambda: f"{PRESETS['hn_xs'].n_layers * 3 // 4} layers save theirs for backward",
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
        lambda f: f"{mib(f('updates 256', 'forward'))} -> {mib(f('updates 64', 'forward'))} in forward",
        lambda f: f"{_step(f, 'naive')} -> {_step(f, _chunked_step(64))} for the step",
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
        "less memory",
        lambda: f"{mib(concatenated_chunks())}, as with 64",
        "wrong",
        "the size of the chunks does not change what is saved",
        lambda f: f"{_step(f, _chunked_step(32))}, {mib(f('updates 32', 'forward'))} for the operation",
        lambda f: f"{_step(f, _chunked_step(64))} -> {_step(f, _chunked_step(32))}",
    ),
    Claim(
        "128 tokens for large GPUs",
        "more memory, faster",
        lambda: f"{mib(concatenated_chunks())}, as with 64",
        "wrong",
        "the size of the chunks does not change what is saved",
        lambda f: (
            f"{_step(f, _chunked_step(128))}, {mib(f('updates 128', 'forward'))} for the operation; "
            f"{f.slower(_STEP.format(_chunked_step(128)), _STEP.format(_chunked_step(64)))} time"
        ),
        lambda f: f"{_step(f, _chunked_step(64))} -> {_step(f, _chunked_step(128))}",
    ),
    Claim(
        "16 tokens if the failure persists",
        "less memory",
        lambda: f"{mib(concatenated_chunks())}, as with 64",
        "wrong",
        "the size of the chunks does not change what is saved",
        lambda f: f"{_step(f, _chunked_step(16))}, {mib(f('updates 16', 'forward'))} for the operation",
        lambda f: f"{_step(f, _chunked_step(64))} -> {_step(f, _chunked_step(16))}",
    ),
    Claim(
        "slowdown of the chunks",
        "~5 % slower",
        lambda: "four times the kernels of one operation, and two copies",
        "never measured",
        "the report has no measurement; the prediction knows bytes and operations, not the launches of small kernels",
        lambda f: f"{f.slower(_STEP.format(_chunked_step(64)), _STEP.format('naive'))} for the step",
    ),
    Claim(
        "32 is slower",
        "slower",
        lambda: "twice the kernels of 64",
        "never measured",
        "the report has no measurement",
        lambda f: f.slower(_STEP.format(_chunked_step(32)), _STEP.format(_chunked_step(64))),
    ),
    Claim(
        "accuracy",
        "no change",
        lambda: "the same products in the same order",
        "right",
        "tested: outputs and gradients in float64 equal those of the recurrence",
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
