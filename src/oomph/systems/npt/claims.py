"""Report 003's claims, worked out."""

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
    """h A and its product with the modulation, [B, S, r] each."""
    return 2 * modulation_elements() * FP32


CLAIMS = (
    Claim(
        "003",
        "the weight delta of all tokens",
        "~448 GB at d_ffn 11008",
        lambda: f"{gib(whole_delta_bytes())}; {gib(whole_delta_bytes(D_FFN_8B))} at d_ffn {D_FFN_8B}",
        "wrong",
        "448 GiB is right for Llama-3.1-8B's d_ffn, not for the one the report names",
    ),
    Claim(
        "003",
        "modulation factors",
        "~32 KB",
        lambda: f"{modulation_elements():,} elements, {modulation_elements() * FP32 // 1024} KiB",
        "wrong",
        "the number of elements was taken for bytes",
    ),
    Claim(
        "003",
        "one token's delta",
        "~180 MB",
        lambda: f"{mib(token_delta_bytes(1))} at B=1, {mib(token_delta_bytes(BATCH))} at B={BATCH}",
        "in part",
        "right for one row (180 MB = 172 MiB); the shape given has four",
    ),
    Claim(
        "003",
        "token by token instead of all at once",
        "<1 GB, >400x less",
        lambda: f"{gib(TOKENS * token_delta_bytes(BATCH))} kept per layer",
        "wrong",
        "autograd keeps W + dW of every token, since the gradient of the layer's input needs it",
    ),
    Claim(
        "003",
        "deltas made in host memory",
        "frees GPU memory",
        lambda: "no gradient reaches B through detach()",
        "wrong",
        "what is offloaded with detach() is not trained; with its history it comes back, and is kept",
    ),
    Claim(
        "003",
        "efficient forward pass, no delta at all",
        "h @ W + (h @ A) * mod @ B",
        lambda: f"{model_bytes() // 1024} KiB besides the product",
        "right",
        "the same function, exactly; `model.py` computes this",
    ),
)
