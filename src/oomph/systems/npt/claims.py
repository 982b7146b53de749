"""The claims of report 003."""

from oomph.systems.claims import Claim, gib, mib

# The report's shape. Its d_ffn is Llama-2-7B's; Llama-3.1-8B has 14336.
BATCH, TOKENS, D_MODEL, D_FFN, D_FFN_8B, RANK = 4, 512, 4096, 11008, 14336, 16
FP32 = 4


def whole_delta_bytes(d_ffn: int = D_FFN) -> int:
    """[B, S, d, f] in fp32"""
    return BATCH * TOKENS * D_MODEL * d_ffn * FP32


def token_delta_bytes(batch: int, d_ffn: int = D_FFN) -> int:
    """[B, d, f] of one token"""
    return batch * D_MODEL * d_ffn * FP32


def modulation_elements() -> int:
    return BATCH * TOKENS * RANK


def model_bytes() -> int:
    """h A and (h A) * mod, [B, S, r] each."""
    return 2 * modulation_elements() * FP32


CLAIMS = (
    Claim(
        "the weight delta of all tokens",
        "~448 GB at d_ffn 11008",
        lambda: f"{gib(whole_delta_bytes())}; {gib(whole_delta_bytes(D_FFN_8B))} at d_ffn {D_FFN_8B}",
        "wrong",
        "448 GiB is right for the d_ffn of Llama-3.1-8B, not for the one in the report",
    ),
    Claim(
        "modulation factors",
        "~32 KB",
        lambda: f"{modulation_elements():,} elements, {modulation_elements() * FP32 // 1024} KiB",
        "wrong",
        "the report gives the number of elements as bytes",
    ),
    Claim(
        "one token's delta",
        "~180 MB",
        lambda: f"{mib(token_delta_bytes(1))} at B=1, {mib(token_delta_bytes(BATCH))} at B={BATCH}",
        "in part",
        "right for one row (180 MB = 172 MiB); the shape given has four",
    ),
    Claim(
        "token by token instead of all at once",
        "<1 GB, >400x less",
        lambda: f"{gib(TOKENS * token_delta_bytes(BATCH))} saved per layer",
        "wrong",
        "autograd saves W + dW of every token for the gradient of the layer's input",
    ),
    Claim(
        "deltas computed on the CPU",
        "frees GPU memory",
        lambda: "no gradient reaches B through detach()",
        "wrong",
        "detach() cuts B off from training; without it, autograd saves the deltas on the GPU again",
    ),
    Claim(
        "efficient forward pass, no delta at all",
        "h @ W + (h @ A) * mod @ B",
        lambda: f"{model_bytes() // 1024} KiB besides the output",
        "right",
        "exactly the same function; `model.py` computes it this way",
    ),
)
