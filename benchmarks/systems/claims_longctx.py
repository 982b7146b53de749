"""The claims of report 002."""

from bisect import bisect_left

from benchmarks.systems.claims import Claim, Figures, gib
from oomph import gpus
from oomph.systems.longctx.model import LongContextConfig
from oomph.systems.longctx.naive import CHUNK, REPORT, should_chunk

TOKENS = REPORT.tokens
SPARSE_PARAMS = 3_921_918_720  # with the report's own sparse attention, which differs from NSA
# Measured by the report, in GiB.
AFTER_EMBEDDING, AFTER_FIRST_LAYER, MODEL_AND_ACTIVATIONS = 9.35, 25.87, 68.0
BF16, FP32 = 2, 4
_STAGES = "forward stages 131,072"
_TWO = "4B, 1 x 131,072, {} over 2"


def config() -> LongContextConfig:
    return LongContextConfig.of(REPORT.preset)


def logits_bytes(tokens: int, itemsize: int = BF16) -> int:
    return tokens * config().vocab_size * itemsize


def hidden_bytes() -> int:
    """[1, T, D] in bf16."""
    return TOKENS * config().hidden_size * BF16


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
    return sum(logits_bytes(min(CHUNK, TOKENS - start), FP32) for start in range(0, TOKENS, CHUNK))


def distinct_bf16_positions(tokens: int) -> int:
    """Distinct values of 0 .. tokens - 1 after rounding to 8 significant bits; tokens: a power of two.

    The first 256 are exact, each doubling after that has 128, and the last few round up to `tokens`.
    """
    doublings = (tokens - 1).bit_length() - 8
    return 256 + 128 * doublings + 1


def sharded_gib() -> float:
    """The report's 68 GiB with parameters sharded over 2 GPUs; each GPU holds all of its activations."""
    return MODEL_AND_ACTIVATIONS - parameter_bytes() / 2 / 2**30


def checkpointed_bytes() -> int:
    """With gradient checkpointing: the input of every layer."""
    return config().num_layers * hidden_bytes()


def _chunked(tokens: int) -> str:
    return "chunked" if should_chunk(tokens, config().vocab_size) else "standard"


def chunked_from() -> int:
    """The shortest sequence that the report's rule chunks."""
    return bisect_left(range(TOKENS), True, key=lambda tokens: should_chunk(tokens, config().vocab_size))


def _losses(f: Figures) -> str:
    others = {"chunked": "", "recomputed": " with recomputation", "model": " for the model's loss"}
    found = (f"{f.slower(f'loss {name} 32,768', 'loss standard 32,768')}{of}" for name, of in others.items())
    return ", ".join(found) + ", at 32,768 tokens"


CLAIMS = (
    Claim(
        "logits at 131,072 tokens, and the allocation that failed",
        "37.09 GB",
        lambda: gib(logits_bytes(TOKENS)),
        "right",
        "131,072 x 151,936 x 2 bytes; the unit is GiB",
        lambda f: gib(f(_STAGES, "logits")),
    ),
    Claim(
        "capacity of the GPU",
        "94.97 GiB",
        lambda: f"{gpus.find(REPORT.gpu).memory / 2**30:.2f} GiB, an {gpus.find(REPORT.gpu).title}",
        "right",
        "the story is predicted on that card; at 32,768 tokens the naive step fits it, at 131,072 it does not",
        lambda f: (
            f"naive, 32,768 tokens: {gib(f('longctx 4B dense naive 1 x 32768 activation_checkpointing'))}; "
            f"131,072 tokens: {gib(f('story longctx naive'))}"
        ),
        lambda f: (
            f"naive, 32,768 tokens: {gib(f('longctx 4B dense naive 1 x 32768 activation_checkpointing'))}"
        ),
    ),
    Claim(
        "logits at 4,096 tokens",
        "1.16 GB, standard",
        lambda: f"{gib(logits_bytes(4096))}, {_chunked(4096)}",
        "right",
        "the unit is GiB",
        lambda f: (
            f"{gib(f('loss standard 4,096', 'forward'))} for the loss in forward: logits, fp32, log-softmax"
        ),
    ),
    Claim(
        "logits at 40,000 tokens",
        "11.32 GB, chunked",
        lambda: f"{gib(logits_bytes(40_000))}, {_chunked(40_000)}",
        "right",
        "the unit is GiB",
        lambda f: f"{gib(f(_STAGES, 'logits') * 40_000 / TOKENS)}, in proportion",
    ),
    Claim(
        "the loss is chunked automatically",
        "above 10 GB of logits",
        lambda: f"from {chunked_from():,} tokens on; {gib(logits_bytes(CHUNK))} of logits in a chunk",
        "in part",
        "the threshold counts the logits alone, and a chunk that is not recomputed is saved; "
        "the model's loss needs no threshold",
        lambda f: f"{gib(f('loss standard 32,768'))} for the loss below it, at 32,768 tokens",
    ),
    Claim(
        "fp32 intermediates of the loss",
        "~74 GB",
        lambda: f"{gib(2 * logits_bytes(TOKENS, FP32))}: the fp32 logits and their log-softmax",
        "wrong",
        "there are two of 74 GiB",
        lambda f: (
            f"{gib(4 * (f('loss standard 32,768', 'forward') - f(_STAGES, 'logits') / 4))} (4 x 32,768 tokens)"
        ),
    ),
    Claim(
        "the loss needs",
        "111 GB",
        lambda: f"{gib(loss_forward_bytes())} in forward, {gib(loss_backward_bytes())} in backward",
        "wrong",
        "fp32 logits and log-softmax are 74 GiB each, and backward holds three such tensors; "
        "with more than one row, the shifted logits are a copy as well: "
        f"{gib(loss_forward_bytes(2))} in forward for the same tokens",
        lambda f: f"{gib(4 * f('loss standard 32,768'))} (4 x 32,768 tokens)",
    ),
    Claim(
        "parameters",
        "3.92B",
        lambda: f"{config().get_total_params():,}; {SPARSE_PARAMS:,} with the report's sparse attention",
        "right",
        "the count of the built model",
        lambda f: f"{(f(_STAGES, 'parameters') - duplicate_rope_bytes()) / BF16 / 1e9:.2f}B, by its bytes",
    ),
    Claim(
        "model parameters",
        "8.72 GB",
        lambda: f"{gib(SPARSE_PARAMS * BF16)} + {gib(duplicate_rope_bytes())} of rotary caches",
        "in part",
        "8.72 GiB are allocated, but not by the parameters alone: each of the 36 layers has its own rotary cache",
        lambda f: f"{gib(f(_STAGES, 'parameters'))} with the caches",
    ),
    Claim(
        "after embedding",
        "9.35 GB",
        lambda: gib(SPARSE_PARAMS * BF16 + duplicate_rope_bytes() + hidden_bytes()),
        "right",
        "parameters, caches and hidden states; the unit is GiB",
        lambda f: gib(f(_STAGES, "embedding")),
    ),
    Claim(
        "hidden states",
        "+640 MB",
        lambda: f"{hidden_bytes() / 2**20:.0f} MiB",
        "right",
        "131,072 x 2,560 x 2 bytes; the unit is MiB",
        lambda f: f"{(f(_STAGES, 'embedding') - f(_STAGES, 'parameters')) / 2**20:.0f} MiB",
    ),
    Claim(
        "after the first layer, attention activations",
        "25.87 GB",
        lambda: (
            f"+{AFTER_FIRST_LAYER - AFTER_EMBEDDING:.2f} GiB, "
            f"{(AFTER_FIRST_LAYER - AFTER_EMBEDDING) * 2**30 / hidden_bytes():.0f} tensors as large as the hidden states"
        ),
        "in part",
        "the report's attention keeps its temporaries cached; with fused attention a layer leaves its output alone",
        lambda f: gib(f(_STAGES, "first_layer")),
    ),
    Claim(
        "after full forward, all layer activations",
        "62.97 GB",
        lambda: f"{AFTER_FIRST_LAYER:.2f} + {gib(logits_bytes(TOKENS))} of logits",
        "wrong",
        "layers 2 to 36 add nothing: the report measured under no_grad",
        lambda f: (
            f"{gib(f(_STAGES, 'layers'))} after all layers, {gib(f(_STAGES, 'forward'))} with the logits"
        ),
    ),
    Claim(
        "the chunked loss in all",
        "~66 GB",
        lambda: f"{gib(saved_by_chunked_loss() + logits_bytes(CHUNK, FP32))} for the loss alone, in training",
        "wrong",
        "true under no_grad alone: in training every chunk's log-softmax is saved",
        lambda f: f"{gib(f('loss chunked 131,072'))} for the loss alone",
    ),
    Claim(
        "chunking the loss saves in training",
        "~37-74 GB",
        lambda: f"{gib(saved_by_chunked_loss())} saved for backward, as without chunks",
        "wrong",
        "no chunk is recomputed, so the log-softmax of each is saved for backward; only the peak falls",
        lambda f: (
            f"saved at 32,768 tokens: {gib(f('loss standard 32,768', 'saved'))} -> "
            f"{gib(f('loss chunked 32,768', 'saved'))}; recomputed {gib(f('loss recomputed 32,768', 'saved'))}; "
            f"model {gib(f('loss model 32,768', 'saved'))}"
        ),
    ),
    Claim(
        "activations with gradient checkpointing",
        "60-90 GB",
        lambda: f"{gib(checkpointed_bytes())}: the inputs of 36 layers",
        "wrong",
        "without the logits; parameters, gradients and AdamW take 29 GiB more",
        lambda f: f"{gib(f('training longctx_4b'))} for the whole step",
    ),
    Claim(
        "two GPUs with FSDP",
        "68 GB -> ~34 GB each",
        lambda: f"{sharded_gib():.1f} GiB each",
        "wrong",
        "FSDP shards parameters, gradients and optimizer state; activations are not sharded. "
        "Context parallelism shards them, and DDP shards nothing",
        lambda f: (
            f"{gib(f('training longctx_4b'))} on one GPU; on each of two {gib(f(_TWO.format('fsdp2')))} with FSDP2, "
            f"{gib(f(_TWO.format('fsdp2 x cp 2')))} with context parallelism as well, "
            f"{gib(f(_TWO.format('ddp')))} with DDP"
        ),
        lambda f: f"{gib(f('training longctx_4b'))} on one GPU",
    ),
    Claim(
        "131,072 tokens need",
        "2+ GPUs (recommended)",
        lambda: (
            f"{gib(parameter_bytes() + config().get_total_params() * 2)} of parameters and 8-bit AdamW; "
            "checkpoints on the host"
        ),
        "wrong",
        "one GPU trains it: an H200 that was limited to 23 GiB",
        lambda f: f"{gib(f('training longctx_4b_24gb'))}; with NSA {gib(f('training longctx_4b_24gb_nsa'))}",
        lambda f: (
            f"{gib(f('training longctx_4b_24gb'))}, {f('training longctx_4b_24gb', 'tokens_per_second'):,.0f} tokens/s; "
            f"with NSA {gib(f('training longctx_4b_24gb_nsa'))}, "
            f"{f('training longctx_4b_24gb_nsa', 'tokens_per_second'):,.0f} tokens/s"
        ),
    ),
    Claim(
        "the rotary cache is fixed",
        "positions on the right device",
        lambda: f"{distinct_bf16_positions(TOKENS):,} distinct positions of {TOKENS:,}",
        "in part",
        "positions have the dtype of inv_freq: in bf16 they are wrong from 257 on",
        lambda f: f"{f('rope positions 131,072', 'distinct'):,.0f} distinct rows of the cache",
    ),
    Claim(
        "slowdown of the chunks",
        "5-10 % slower",
        lambda: "the same products; each chunk reads the head's weight again, 742 MiB",
        "wrong",
        "chunks that are not recomputed are no slower; those that save memory, by recomputation, are much slower",
        _losses,
    ),
    Claim(
        "quality of the chunked loss",
        "no impact",
        lambda: "the same sum in another order",
        "right",
        "`python -m benchmarks.systems.report_checks longctx` compares them with the standard loss's",
        lambda f: f"loss and gradients within {f('chunked loss', 'error'):.0e} in float64, on the CPU",
    ),
)
