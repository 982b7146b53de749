"""The claims of report 002."""

from bisect import bisect_left

from lab.benchmarks.systems.claims import Claim, Figures, gib
from oomph import gpus
from oomph_lab.systems.longctx.model import LongContextConfig
from oomph_lab.systems.longctx.naive import CHUNK, REPORT, should_chunk

TOKENS = REPORT.tokens
SPARSE_PARAMS = 3_921_918_720  # with the report's own sparse attention, which differs from NSA
# Measured by the report, in GiB.
AFTER_EMBEDDING, AFTER_FIRST_LAYER, MODEL_AND_ACTIVATIONS = 9.35, 25.87, 68.0
BF16, FP32 = 2, 4
_NAIVE = "longctx 4B dense naive 1 x 32768 activation_checkpointing"
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


def loss_forward_bytes() -> int:
    """Logits, their copy in fp32 and its log-softmax, of one row. Of several, the shifted logits are a copy as
    well: the slice of one without the last token is contiguous."""
    return logits_bytes(TOKENS) + 2 * logits_bytes(TOKENS, FP32)


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


CLAIMS = {
    "logits at 131,072 tokens, and the allocation that failed": Claim(
        lambda: gib(logits_bytes(TOKENS)), lambda f: gib(f(_STAGES, "logits"))
    ),
    "capacity of the GPU": Claim(
        lambda: f"{gpus.find(REPORT.gpu).memory / 2**30:.2f} GiB, an {gpus.find(REPORT.gpu).title}",
        lambda f: f"naive, 32,768 tokens: {gib(f(_NAIVE))}; 131,072 tokens: {gib(f('story longctx naive'))}",
        lambda f: f"naive, 32,768 tokens: {gib(f(_NAIVE))}",
    ),
    "logits at 4,096 tokens": Claim(
        lambda: f"{gib(logits_bytes(4096))}, {_chunked(4096)}",
        lambda f: (
            f"{gib(f('loss standard 4,096', 'forward'))} for the loss in forward: logits, fp32, log-softmax"
        ),
    ),
    "logits at 40,000 tokens": Claim(
        lambda: f"{gib(logits_bytes(40_000))}, {_chunked(40_000)}",
        lambda f: f"{gib(f(_STAGES, 'logits') * 40_000 / TOKENS)}, in proportion",
    ),
    "the loss is chunked automatically": Claim(
        lambda: f"from {chunked_from():,} tokens on; {gib(logits_bytes(CHUNK))} of logits in a chunk",
        lambda f: f"{gib(f('loss standard 32,768'))} for the loss below it, at 32,768 tokens",
    ),
    "fp32 intermediates of the loss": Claim(
        lambda: f"{gib(2 * logits_bytes(TOKENS, FP32))}: the fp32 logits and their log-softmax",
        lambda f: (
            f"{gib(4 * (f('loss standard 32,768', 'forward') - f(_STAGES, 'logits') / 4))} (4 x 32,768 tokens)"
        ),
    ),
    "the loss needs": Claim(
        lambda: f"{gib(loss_forward_bytes())} in forward, {gib(loss_backward_bytes())} in backward",
        lambda f: f"{gib(4 * f('loss standard 32,768'))} (4 x 32,768 tokens)",
    ),
    "parameters": Claim(
        lambda: f"{config().get_total_params():,}; {SPARSE_PARAMS:,} with the report's sparse attention",
        lambda f: f"{(f(_STAGES, 'parameters') - duplicate_rope_bytes()) / BF16 / 1e9:.2f}B, by its bytes",
    ),
    "model parameters": Claim(
        lambda: f"{gib(SPARSE_PARAMS * BF16)} + {gib(duplicate_rope_bytes())} of rotary caches",
        lambda f: f"{gib(f(_STAGES, 'parameters'))} with the caches",
    ),
    "after embedding": Claim(
        lambda: gib(SPARSE_PARAMS * BF16 + duplicate_rope_bytes() + hidden_bytes()),
        lambda f: gib(f(_STAGES, "embedding")),
    ),
    "hidden states": Claim(
        lambda: f"{hidden_bytes() / 2**20:.0f} MiB",
        lambda f: f"{(f(_STAGES, 'embedding') - f(_STAGES, 'parameters')) / 2**20:.0f} MiB",
    ),
    "after the first layer, attention activations": Claim(
        lambda: (
            f"+{AFTER_FIRST_LAYER - AFTER_EMBEDDING:.2f} GiB, "
            f"{(AFTER_FIRST_LAYER - AFTER_EMBEDDING) * 2**30 / hidden_bytes():.0f} tensors as large as the hidden states"
        ),
        lambda f: gib(f(_STAGES, "first_layer")),
    ),
    "after full forward, all layer activations": Claim(
        lambda: f"{AFTER_FIRST_LAYER:.2f} + {gib(logits_bytes(TOKENS))} of logits",
        lambda f: (
            f"{gib(f(_STAGES, 'layers'))} after all layers, {gib(f(_STAGES, 'forward'))} with the logits"
        ),
    ),
    "the chunked loss in all": Claim(
        lambda: f"{gib(saved_by_chunked_loss() + logits_bytes(CHUNK, FP32))} for the loss alone, in training",
        lambda f: f"{gib(f('loss chunked 131,072'))} for the loss alone",
    ),
    "chunking the loss saves in training": Claim(
        lambda: f"{gib(saved_by_chunked_loss())} saved for backward, as without chunks",
        lambda f: (
            f"saved at 32,768 tokens: {gib(f('loss standard 32,768', 'saved'))} -> "
            f"{gib(f('loss chunked 32,768', 'saved'))}; recomputed {gib(f('loss recomputed 32,768', 'saved'))}; "
            f"model {gib(f('loss model 32,768', 'saved'))}"
        ),
    ),
    "activations with gradient checkpointing": Claim(
        lambda: f"{gib(checkpointed_bytes())}: the inputs of 36 layers",
        lambda f: f"{gib(f('training longctx_4b'))} for the whole step",
    ),
    "two GPUs with FSDP": Claim(
        lambda: f"{sharded_gib():.1f} GiB each",
        lambda f: (
            f"{gib(f('training longctx_4b'))} on one GPU; on each of two {gib(f(_TWO.format('fsdp2')))} with FSDP2, "
            f"{gib(f(_TWO.format('fsdp2 x cp 2')))} with context parallelism as well, "
            f"{gib(f(_TWO.format('ddp')))} with DDP"
        ),
        lambda f: f"{gib(f('training longctx_4b'))} on one GPU",
    ),
    "131,072 tokens need": Claim(
        lambda: (
            f"{gib(parameter_bytes() + config().get_total_params() * 2)} of parameters and 8-bit AdamW; "
            "checkpoints on the host"
        ),
        lambda f: f"{gib(f('training longctx_4b_24gb'))}; with NSA {gib(f('training longctx_4b_24gb_nsa'))}",
        lambda f: (
            f"{gib(f('training longctx_4b_24gb'))}, {f('training longctx_4b_24gb', 'tokens_per_second'):,.0f} tokens/s; "
            f"with NSA {gib(f('training longctx_4b_24gb_nsa'))}, "
            f"{f('training longctx_4b_24gb_nsa', 'tokens_per_second'):,.0f} tokens/s"
        ),
    ),
    "the rotary cache is fixed": Claim(
        lambda: f"{distinct_bf16_positions(TOKENS):,} distinct positions of {TOKENS:,}",
        lambda f: f"{f('rope positions 131,072', 'distinct'):,.0f} distinct rows of the cache",
    ),
    "slowdown of the chunks": Claim(None, _losses),
    "quality of the chunked loss": Claim(
        None, lambda f: f"loss and gradients within {f('chunked loss', 'error'):.0e} in float64, on the CPU"
    ),
}
