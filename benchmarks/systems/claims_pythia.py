"""The claims of report 001."""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from benchmarks.systems.claims import Claim, Figures, gb, gib, mb, millions
from oomph import gpus
from oomph.systems.pythia.model import PRESETS, create_pythia_70m
from oomph.systems.pythia.naive import REPORT, WIKITEXT_2_WORDS

CAPPED, WORDS = 10_000, 50_000  # the vocabulary after the report's fix, and before
TILE = 16
WIKITEXT_2_VOCABULARY = 33_278  # words that occur three times or more; Merity et al., 2016, table 1
ADAM = 4  # parameters, gradients, two moments: each as large as the parameters
_AFTER, _BEFORE = "breakdown V 10,000, 32 x 128", "breakdown V 50,000, 32 x 128"
_NAIVE, _NAIVE_AFTER = "pythia report naive 8 x 512", "pythia report naive 32 x 128, V 10,000"
_MODEL_AFTER = "pythia report model 32 x 128, V 10,000"


def total_params(vocab_size: int) -> int:
    return replace(PRESETS["report"], vocab_size=vocab_size).get_total_params()


def layer_params(preset: str = "report") -> int:
    """Of one layer: the difference that a seventh makes."""
    six = PRESETS[preset]
    return replace(six, num_layers=7).get_total_params() - six.get_total_params()


def parameter_table(vocab_size: int = CAPPED, tokens: int = 128) -> Mapping[str, int]:
    """Component -> parameters of the built model; the report's table."""
    model, _ = create_pythia_70m(vocab_size, device="meta")
    assert model.lm_head is not None

    def count(module: nn.Module) -> int:
        return sum(each.numel() for each in module.parameters())

    found = {
        "token embeddings": count(model.embedding),
        "position embeddings": tokens * PRESETS["report"].hidden_size,
        "transformer layers": count(model.layers),
        "final norm": count(model.norm),
        "LM head": count(model.lm_head),
    }
    return {**found, "total": sum(found.values())}


def broadcast_bytes(batch: int, tokens: int) -> int:
    """One product by broadcasting: [B, H, T, T, E], in fp32."""
    config = PRESETS["report"]
    return batch * tokens**2 * config.hidden_size * 4


def broadcast_products() -> int:
    """Two per layer: the scores, and attention weights times values."""
    return 2 * PRESETS["report"].num_layers


def identity_bytes(vocab_size: int) -> int:
    return 4 * vocab_size**2


def attended_blocks(tokens: int) -> tuple[int, int]:
    """(attended, total) blocks of the report's sparse pattern, without the causal mask."""
    pattern = create_pythia_70m(64, True, "meta")[1].pattern
    assert pattern is not None
    return pattern.count(tokens)


def _cause() -> str:
    total = broadcast_products() * broadcast_bytes(REPORT.batch, REPORT.tokens)
    return (
        f"{broadcast_products()} products of {gb(broadcast_bytes(8, 512))}: {gb(total)}; "
        f"identity matrix {gb(identity_bytes(WORDS))}"
    )


def _count(f: Figures, row: str = _AFTER) -> str:
    return f"{millions(f(row, 'count'))}, {mb(f(row, 'parameters'))}"


def _matmul(f: Figures) -> str:
    """Over the shapes of the report's model."""
    shapes = ("4096x512x512", "4096x2048x512", "4096x512x2048", "4096x10000x512")
    speedups = [f(f"matmul {shape} untiled", "ms") / f(f"matmul {shape} 16x16", "ms") for shape in shapes]
    return f"{min(speedups):.2f}-{max(speedups):.2f} x"


def tiled_speedup_in_l1() -> float:
    """If every read hits L1, which is as fast as shared memory: two loads for each multiply-add either way,
    and with tiles 2 / TILE more, to fill them."""
    return 2 / (2 + 2 / TILE)


def tiled_speedup_without_caches(gpu: gpus.GPU) -> float:
    """If every read goes to device memory, by a roofline: two floats for each multiply-add, or 2 / TILE."""
    assert gpu.bandwidth is not None
    assert gpu.fp32_tflops is not None
    arithmetic, reads = 2 / (gpu.fp32_tflops * 1e12), 2 * 4 / gpu.bandwidth
    return max(arithmetic, reads) / max(arithmetic, reads / TILE)


def _tiled_bounds() -> str:
    without_caches = tiled_speedup_without_caches(gpus.find("h200"))
    return (
        f"between {tiled_speedup_in_l1():.1f} x (every read hits L1) and {without_caches:.0f} x (no caches)"
    )


def _component(name: str) -> str:
    count = parameter_table()[name]
    return f"{count / 1e6:.3f}M, {mb(4 * count)}"


CLAIMS = (
    Claim(
        "every word of the data in the vocabulary",
        "30K-50K+ instead of 10K",
        lambda: f"{WIKITEXT_2_VOCABULARY:,} in WikiText-2 with its <unk>; the rows below have {WORDS:,}",
        "right",
        "the published size of the tokenized WikiText-2's vocabulary; it adds parameters, not the missing 40 GB",
        lambda f: f"{mb(f(_BEFORE, 'parameters') - f(_AFTER, 'parameters'))} more parameters at {WORDS:,}",
    ),
    Claim(
        "token embeddings with 50,000 words",
        "25.6M",
        lambda: f"{millions(WORDS * PRESETS['report'].hidden_size)}",
        "right",
        "50,000 x 512",
        lambda f: f"{millions((f(_BEFORE, 'count') - f(_AFTER, 'count')) * WORDS / (WORDS - CAPPED) / 2)}",
    ),
    Claim(
        "LM head with 50,000 words",
        "25.6M",
        lambda: f"{millions(WORDS * PRESETS['report'].hidden_size)}",
        "right",
        "50,000 x 512, not tied",
        lambda f: f"{millions((f(_BEFORE, 'count') - f(_AFTER, 'count')) * WORDS / (WORDS - CAPPED) / 2)}",
    ),
    Claim(
        "the model with 50,000 words",
        "200M+",
        lambda: millions(total_params(WORDS)),
        "wrong",
        "no configuration of the report has 200M",
        lambda f: _count(f, _BEFORE),
    ),
    Claim(
        "that model takes",
        "5-6 GB",
        lambda: (
            f"{gb(4 * total_params(WORDS))} in fp32, {gb(ADAM * 4 * total_params(WORDS))} with gradients and Adam"
        ),
        "wrong",
        "70M parameters of 4 bytes",
        lambda f: gb(f(_BEFORE, "parameters")),
    ),
    Claim(
        "40 GB+ are gradients and optimizer state",
        "40GB+",
        lambda: f"{gb((ADAM - 1) * 4 * total_params(WORDS))}; {_cause()}",
        "wrong",
        "at B=8, T=512 the products by broadcasting alone pass 40 GB",
        lambda f: (
            f"{gb(f(_BEFORE, 'gradients') + f(_BEFORE, 'optimizer'))} of {gb(f(_NAIVE))} for the naive step"
        ),
    ),
    Claim(
        "batch 8 does not fit 80 GB",
        "OOM",
        _cause,
        "right",
        "for another reason than the report's; the model fits with the same vocabulary",
        lambda f: f"{gib(f(_NAIVE))}; the model {gib(f('pythia report model 8 x 512'))}",
    ),
    Claim(
        "all batches in memory",
        "memory-inefficient",
        lambda: f"{mb(8 * WIKITEXT_2_WORDS)} for WikiText-2 as int64",
        "in part",
        "true, and too little to matter for this failure",
        lambda f: f"{mb(8 * f('data resident', 'tokens'))} for WikiText-2",
    ),
    Claim(
        "batch 32 works after the fix",
        "32+ on 80 GB",
        lambda: f"{broadcast_products()} products of {gb(broadcast_bytes(32, 128))}",
        "right",
        "the shorter sequence makes it fit, 128 instead of 512 tokens",
        lambda f: f"{gib(f(_NAIVE_AFTER))} naive, {gib(f(_MODEL_AFTER))} model",
    ),
    Claim(
        "the cap makes it the 70M model",
        "~70M",
        lambda: f"{PRESETS['pythia'].get_total_params():,} at 50,304 words",
        "wrong",
        "70M needs the published vocabulary of 50,304; a cap of 10,000 words trains a smaller model",
        _count,
    ),
    Claim(
        "model, gradients and optimizer after the fix",
        "5-8 GB",
        lambda: f"{gb(ADAM * 4 * total_params(CAPPED))}",
        "wrong",
        "29.2M parameters, 16 bytes each",
        lambda f: gb(sum(f(_AFTER, part) for part in ("parameters", "gradients", "optimizer"))),
    ),
    Claim(
        "token embeddings, 10,000 words",
        "5.1M, 20MB",
        lambda: _component("token embeddings"),
        "right",
        "10,000 x 512",
        lambda f: millions((f(_BEFORE, "count") - f(_AFTER, "count")) * CAPPED / (WORDS - CAPPED) / 2),
    ),
    Claim(
        "position embeddings",
        "65K, 0.3MB",
        lambda: _component("position embeddings"),
        "right",
        "128 x 512",
        lambda f: (
            f"{f(_AFTER, 'count') - parameter_table()['total'] + 128 * 512:,.0f}, the rest of the count"
        ),
    ),
    Claim(
        "parameters of the six layers",
        "6 x 11M = 66M, 264MB",
        lambda: (
            f"6 x {layer_params() / 1e6:.3f}M = {6 * layer_params() / 1e6:.2f}M; "
            f"published: 6 x {layer_params('pythia') / 1e6:.3f}M"
        ),
        "wrong",
        "4 d^2 of attention and 8 d^2 of MLP at d 512 are 3.15M; the published layers have more biases",
        lambda f: millions(f(_AFTER, "count") - 2 * CAPPED * 512 - 128 * 512),
    ),
    Claim(
        "LM head, 10,000 words",
        "5.1M, 20MB",
        lambda: _component("LM head"),
        "right",
        "10,000 x 512, not tied",
        lambda f: millions((f(_BEFORE, "count") - f(_AFTER, "count")) * CAPPED / (WORDS - CAPPED) / 2),
    ),
    Claim(
        "the model with 10,000 words, and what get_total_params() prints",
        "~76M, 304 MB in fp32",
        lambda: f"{millions(total_params(CAPPED))}, {total_params(CAPPED) * 4 / 1e6:.0f} MB",
        "wrong",
        "follows from the 66M above",
        _count,
    ),
    Claim(
        "gradients",
        "304MB",
        lambda: mb(4 * total_params(CAPPED)),
        "wrong",
        "as large as the parameters, which are fewer",
        lambda f: mb(f(_AFTER, "gradients")),
    ),
    Claim(
        "Adam's two averages",
        "608MB",
        lambda: mb(8 * total_params(CAPPED)),
        "wrong",
        "twice the parameters, which are fewer",
        lambda f: mb(f(_AFTER, "optimizer")),
    ),
    Claim(
        "activations at B=32, T=128",
        "~2GB",
        lambda: (
            f"{gb(broadcast_products() * 2 * broadcast_bytes(32, 128))} of copies for the naive products alone"
        ),
        "wrong",
        "the naive form needs far more, a batched product far less",
        lambda f: (
            f"{gb(f(_NAIVE_AFTER) - 4 * f(_AFTER, 'parameters'))} naive, {gb(f(_AFTER, 'activations'))} model"
        ),
    ),
    Claim(
        "the same after the fix, in all, B=32, T=128",
        "5-8 GB, and 3.2 GB further on",
        lambda: (
            f"{gb(ADAM * 4 * total_params(CAPPED))} of parameters, gradients and Adam; "
            f"{broadcast_products()} products of {gb(broadcast_bytes(32, 128))}"
        ),
        "wrong",
        "two figures for the same run; the products are still computed by broadcasting",
        lambda f: f"{gb(f(_NAIVE_AFTER))} naive, {gb(f(_MODEL_AFTER))} model",
    ),
    Claim(
        "--sparse saves attention at 128 tokens",
        "sparse attention",
        lambda: ", ".join("{} of {} blocks at T={}".format(*attended_blocks(t), t) for t in (128, 256, 512)),
        "wrong",
        "with blocks of 64, all blocks of 128 tokens are neighbours: none is skipped",
        lambda f: (
            f"at 512 tokens {f.slower('pythia report model 8 x 512 local', 'pythia report model 8 x 512')}; at 16,384: "
            + ", ".join(
                f"{kind} {f.slower(f'pythia report {kind} 1 x 16384', 'pythia report dense 1 x 16384')}"
                for kind in ("local", "global", "mixed")
            )
        ),
        lambda f: (
            f"at 512 tokens {f.slower('pythia report model 8 x 512 local', 'pythia report model 8 x 512')} time"
        ),
    ),
    Claim(
        "shared-memory tiles of 16 x 16 speed up the matrix products",
        "2-3 x",
        lambda: f"{TILE} times fewer reads of global memory; how much faster depends on caches",
        "in part",
        "faster by less than claimed, and five times slower than cuBLAS",
        lambda f: _tiled_bounds(),
        _matmul,
    ),
)
