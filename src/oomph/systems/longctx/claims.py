"""The claims of report 002."""

from oomph.systems.claims import Claim, gib
from oomph.systems.longctx.config import LongContextConfig
from oomph.systems.longctx.naive import REPORT

TOKENS = REPORT.tokens
SPARSE_PARAMS = 3_921_918_720  # with the report's own sparse attention, which differs from NSA
# Measured by the report, in GiB.
AFTER_FIRST_LAYER, AFTER_FORWARD, MODEL_AND_ACTIVATIONS = 25.87, 62.97, 68.0
BF16, FP32 = 2, 4


def config() -> LongContextConfig:
    return LongContextConfig.of(REPORT.preset)


def logits_bytes(tokens: int, itemsize: int = BF16) -> int:
    return tokens * config().vocab_size * itemsize


def parameter_bytes() -> int:
    return config().get_total_params() * BF16


def duplicate_rope_bytes() -> int:
    """Cosines and sines of every position, in every layer."""
    return config().num_layers * 2 * TOKENS * config().head_dim * BF16


def loss_forward_bytes(batch: int = 1) -> int:
    """Logits, their copy in fp32 and its log-softmax. With more than one row, the shifted logits are a copy
    as well: with one row, the slice without the last token is contiguous already."""
    copies = 1 if batch == 1 else 2
    return copies * logits_bytes(TOKENS) + 2 * logits_bytes(TOKENS, FP32)


def loss_backward_bytes() -> int:
    """Log-softmax, its gradient, and the gradient of the fp32 logits."""
    return 3 * logits_bytes(TOKENS, FP32)


def saved_by_chunked_loss() -> int:
    """Autograd saves the log-softmax of every chunk, because no chunk is recomputed."""
    chunk = 4096
    return sum(logits_bytes(min(chunk, TOKENS - start), FP32) for start in range(0, TOKENS, chunk))


def distinct_bf16_positions(tokens: int) -> int:
    """Distinct values of 0 .. tokens - 1 after rounding to 8 significant bits; tokens: a power of two.

    The first 256 are exact, each doubling after that has 128, and the last few round up to `tokens`.
    """
    doublings = (tokens - 1).bit_length() - 8
    return 256 + 128 * doublings + 1


def sharded_gib(gpus: int = 2) -> float:
    """The report's 68 GiB with sharded parameters; each GPU holds all of its activations."""
    return MODEL_AND_ACTIVATIONS - parameter_bytes() / 2**30 * (1 - 1 / gpus)


CLAIMS = (
    Claim(
        "logits at 131,072 tokens",
        "37.09 GB",
        lambda: gib(logits_bytes(TOKENS)),
        "right",
        "131,072 x 151,936 x 2 bytes; the unit is GiB",
    ),
    Claim(
        "logits at 4,096 and at 40,000 tokens",
        "1.16 GB, 11.32 GB",
        lambda: f"{gib(logits_bytes(4096))}, {gib(logits_bytes(40_000))}",
        "right",
        "the unit is GiB",
    ),
    Claim(
        "the loss needs",
        "111 GB",
        lambda: f"{gib(loss_forward_bytes())} in forward, {gib(loss_backward_bytes())} in backward",
        "wrong",
        "fp32 logits and log-softmax are 74 GiB each, and backward holds three such tensors; "
        "with more than one row, the shifted logits are a copy as well: "
        f"{gib(loss_forward_bytes(2))} in forward for the same tokens",
    ),
    Claim(
        "model parameters",
        "8.72 GB",
        lambda: f"{gib(SPARSE_PARAMS * BF16)} + {gib(duplicate_rope_bytes())} of rotary caches",
        "wrong",
        "each of the 36 layers has its own copy of the rotary cache",
    ),
    Claim(
        "after full forward, all layer activations",
        "62.97 GB",
        lambda: f"{AFTER_FIRST_LAYER:.2f} + {gib(logits_bytes(TOKENS))} of logits",
        "wrong",
        "layers 2 to 36 add nothing: the report measured under no_grad",
    ),
    Claim(
        "chunking the loss saves in training",
        "~37-74 GB",
        lambda: f"{gib(saved_by_chunked_loss())} saved for backward, as without chunks",
        "wrong",
        "no chunk is recomputed, so the log-softmax of each is saved for backward; only the peak falls",
    ),
    Claim(
        "two GPUs with FSDP",
        "68 GB -> ~34 GB each",
        lambda: f"{sharded_gib():.1f} GiB each",
        "wrong",
        "FSDP shards parameters, gradients and optimizer state; activations are not sharded",
    ),
    Claim(
        "the rotary cache is fixed",
        "positions on the right device",
        lambda: f"{distinct_bf16_positions(TOKENS):,} distinct positions of {TOKENS:,}",
        "in part",
        "positions have the dtype of inv_freq: in bf16 they are wrong from 257 on",
    ),
    Claim(
        "slowdown of the chunks",
        "5-10 % slower",
        lambda: "not derivable",
        "never measured",
        "the report has no measurement",
    ),
)
