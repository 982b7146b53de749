"""The claims of report 001."""

from dataclasses import replace

from oomph.systems.claims import Claim, gb, millions
from oomph.systems.pythia.config import PRESETS, create_pythia_70m
from oomph.systems.pythia.naive import REPORT

CAPPED, WORDS = 10_000, 50_000  # the vocabulary after the report's fix, and before
ADAM = 4  # parameters, gradients, two moments: each as large as the parameters


def total_params(vocab_size: int) -> int:
    return replace(PRESETS["report"], vocab_size=vocab_size).get_total_params()


def layer_params(preset: str = "report") -> int:
    """Of one layer: the difference that a seventh makes."""
    six = PRESETS[preset]
    return replace(six, num_layers=7).get_total_params() - six.get_total_params()


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


CLAIMS = (
    Claim(
        "parameters of the six layers",
        "6 x 11M = 66M",
        lambda: (
            f"6 x {layer_params() / 1e6:.3f}M = {6 * layer_params() / 1e6:.2f}M; "
            f"published: 6 x {layer_params('pythia') / 1e6:.3f}M"
        ),
        "wrong",
        "4 d^2 of attention and 8 d^2 of MLP at d 512 are 3.15M; the published layers have more biases",
    ),
    Claim(
        "the model with 10,000 words",
        "~76M, 304 MB in fp32",
        lambda: f"{millions(total_params(CAPPED))}, {total_params(CAPPED) * 4 / 1e6:.0f} MB",
        "wrong",
        "follows from the 66M above",
    ),
    Claim(
        "the cap makes it the 70M model",
        "~70M",
        lambda: f"{PRESETS['pythia'].get_total_params():,} at 50,304 words",
        "wrong",
        "70M needs the published vocabulary of 50,304; a cap of 10,000 words trains a smaller model",
    ),
    Claim(
        "the model with 50,000 words",
        "200M+",
        lambda: millions(total_params(WORDS)),
        "wrong",
        "no configuration of the report has 200M",
    ),
    Claim(
        "40 GB+ are gradients and optimizer state",
        "40GB+",
        lambda: f"{gb(ADAM * 4 * total_params(WORDS))} with parameters; {_cause()}",
        "wrong",
        "at B=8, T=512 the products by broadcasting alone pass 40 GB",
    ),
    Claim(
        "the same after the fix, B=32, T=128",
        "5-8 GB, and 3.2 GB further on",
        lambda: (
            f"{gb(ADAM * 4 * total_params(CAPPED))} of parameters, gradients and Adam; "
            f"{broadcast_products()} products of {gb(broadcast_bytes(32, 128))}"
        ),
        "wrong",
        "two figures for the same run; the products are still computed by broadcasting",
    ),
    Claim(
        "--sparse saves attention at 128 tokens",
        "sparse attention",
        lambda: ", ".join("{} of {} blocks at T={}".format(*attended_blocks(t), t) for t in (128, 256, 512)),
        "wrong",
        "with blocks of 64, all blocks of 128 tokens are neighbours: none is skipped",
    ),
)
