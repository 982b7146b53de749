"""The claims of report 001."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import nn

from lab.benchmarks.systems.claims import Claim, Figures, gb, gib, mb, millions
from oomph import gpus
from oomph_lab.systems.pythia.model import PRESETS, create_pythia_70m
from oomph_lab.systems.pythia.naive import REPORT, WIKITEXT_2_WORDS

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


def _embedding(words: int, f: Figures) -> str:
    """Of so many words: the model has two, and counts with two vocabularies give the size of a word."""
    return millions((f(_BEFORE, "count") - f(_AFTER, "count")) * words / (WORDS - CAPPED) / 2)


_50_000_WORDS = Claim(lambda: millions(WORDS * PRESETS["report"].hidden_size), partial(_embedding, WORDS))
CLAIMS = {
    "every word of the data in the vocabulary": Claim(
        lambda: f"{WIKITEXT_2_VOCABULARY:,} in WikiText-2 with its <unk>; the rows below have {WORDS:,}",
        lambda f: f"{mb(f(_BEFORE, 'parameters') - f(_AFTER, 'parameters'))} more parameters at {WORDS:,}",
    ),
    "token embeddings with 50,000 words": _50_000_WORDS,
    "LM head with 50,000 words": _50_000_WORDS,
    "the model with 50,000 words": Claim(lambda: millions(total_params(WORDS)), lambda f: _count(f, _BEFORE)),
    "that model takes": Claim(
        lambda: (
            f"{gb(4 * total_params(WORDS))} in fp32, {gb(ADAM * 4 * total_params(WORDS))} with gradients and Adam"
        ),
        lambda f: gb(f(_BEFORE, "parameters")),
    ),
    "40 GB+ are gradients and optimizer state": Claim(
        lambda: f"{gb((ADAM - 1) * 4 * total_params(WORDS))}; {_cause()}",
        lambda f: (
            f"{gb(f(_BEFORE, 'gradients') + f(_BEFORE, 'optimizer'))} of {gb(f(_NAIVE))} for the naive step"
        ),
    ),
    "batch 8 does not fit 80 GB": Claim(
        _cause, lambda f: f"{gib(f(_NAIVE))}; the model {gib(f('pythia report model 8 x 512'))}"
    ),
    "all batches in memory": Claim(
        lambda: f"{mb(8 * WIKITEXT_2_WORDS)} for WikiText-2 as int64",
        lambda f: f"{mb(8 * f('data resident', 'tokens'))} for WikiText-2",
    ),
    "batch 32 works after the fix": Claim(
        lambda: f"{broadcast_products()} products of {gb(broadcast_bytes(32, 128))}",
        lambda f: f"{gib(f(_NAIVE_AFTER))} naive, {gib(f(_MODEL_AFTER))} model",
    ),
    "the cap makes it the 70M model": Claim(
        lambda: f"{PRESETS['pythia'].get_total_params():,} at 50,304 words", _count
    ),
    "model, gradients and optimizer after the fix": Claim(
        lambda: f"{gb(ADAM * 4 * total_params(CAPPED))}",
        lambda f: gb(sum(f(_AFTER, part) for part in ("parameters", "gradients", "optimizer"))),
    ),
    "token embeddings, 10,000 words": Claim(
        lambda: _component("token embeddings"),
        partial(_embedding, CAPPED),
    ),
    "position embeddings": Claim(
        lambda: _component("position embeddings"),
        lambda f: (
            f"{f(_AFTER, 'count') - parameter_table()['total'] + 128 * 512:,.0f}, the rest of the count"
        ),
    ),
    "parameters of the six layers": Claim(
        lambda: (
            f"6 x {layer_params() / 1e6:.3f}M = {6 * layer_params() / 1e6:.2f}M; "
            f"published: 6 x {layer_params('pythia') / 1e6:.3f}M"
        ),
        lambda f: millions(f(_AFTER, "count") - 2 * CAPPED * 512 - 128 * 512),
    ),
    "LM head, 10,000 words": Claim(
        lambda: _component("LM head"),
        partial(_embedding, CAPPED),
    ),
    "the model with 10,000 words, and what get_total_params() prints": Claim(
        lambda: f"{millions(total_params(CAPPED))}, {total_params(CAPPED) * 4 / 1e6:.0f} MB", _count
    ),
    "gradients": Claim(lambda: mb(4 * total_params(CAPPED)), lambda f: mb(f(_AFTER, "gradients"))),
    "Adam's two averages": Claim(lambda: mb(8 * total_params(CAPPED)), lambda f: mb(f(_AFTER, "optimizer"))),
    "activations at B=32, T=128": Claim(
        lambda: (
            f"{gb(broadcast_products() * 2 * broadcast_bytes(32, 128))} of copies for the naive products alone"
        ),
        lambda f: (
            f"{gb(f(_NAIVE_AFTER) - 4 * f(_AFTER, 'parameters'))} naive, {gb(f(_AFTER, 'activations'))} model"
        ),
    ),
    "the same after the fix, in all, B=32, T=128": Claim(
        lambda: (
            f"{gb(ADAM * 4 * total_params(CAPPED))} of parameters, gradients and Adam; "
            f"{broadcast_products()} products of {gb(broadcast_bytes(32, 128))}"
        ),
        lambda f: f"{gb(f(_NAIVE_AFTER))} naive, {gb(f(_MODEL_AFTER))} model",
    ),
    "--sparse saves attention at 128 tokens": Claim(
        lambda: ", ".join("{} of {} blocks at T={}".format(*attended_blocks(t), t) for t in (128, 256, 512)),
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
    "shared-memory tiles of 16 x 16 speed up the matrix products": Claim(
        lambda: f"{TILE} times fewer reads of global memory; how much faster depends on caches",
        lambda f: _tiled_bounds(),
        _matmul,
    ),
}
