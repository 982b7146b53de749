"""The claims of report 004."""

from collections.abc import Callable

import torch

from lab.benchmarks.systems.claims import Claim, Figures, gib
from lab.benchmarks.systems.figures import SEEDS
from oomph_lab.systems.ginr.model import PRESETS, Mixing, MixingBlock

CONFIG = PRESETS["default"]
BATCH = 64
POSITIONS = CONFIG.image_size**2
FP32 = 4
_MODEL, _CHECKPOINTED = "ginr self model 64, fp32", "ginr self model 64, fp32 activation_checkpointing"
_NAIVE, _STATES = "ginr self naive 64, fp32", "eager 64 x 1,024"


def attention_matrix_bytes(keys: int = POSITIONS) -> int:
    return BATCH * CONFIG.heads * POSITIONS * keys * FP32


def attentions(num_layers: int) -> int:
    """In the decoder: num_layers - 1 in each of two branches per scale, and one between scales."""
    return 2 * CONFIG.layer_num * (num_layers - 1) + CONFIG.layer_num - 1


def states_bytes(width: int = CONFIG.hidden_dim) -> int:
    """One [B, N, width] in fp32."""
    return BATCH * POSITIONS * width * FP32


def feed_forward_saved() -> int:
    """For backward: the input, its norm; gate, gelu(gate), up and their product, mult times as wide."""
    return 2 * states_bytes() + 4 * states_bytes(CONFIG.mult * CONFIG.hidden_dim)


def attention_saved() -> int:
    """For backward: the input and its norm, q, k, v, the output of the heads, and the softmax matrix."""
    return 6 * states_bytes() + attention_matrix_bytes()


def reduction_by_solution_1() -> float:
    """Of what a block saves for backward, when a second feed-forward replaces attention."""
    return 1 - 2 * feed_forward_saved() / (attention_saved() + feed_forward_saved())


def solution_1_saved() -> int:
    return 2 * attentions(CONFIG.num_layers) * feed_forward_saved()


def solution(number: int | str) -> str:
    """The row of a solution's naive form."""
    batch, fix = (16 if number == 3 else 64), (" activation_checkpointing" if number == 4 else "")
    return f"ginr solution {number} naive {batch}, fp32{fix}"


def _matrices(count: int) -> Callable[[Figures], str]:
    return lambda f: gib(count * (f(f"attention {_STATES}", "saved") - 6 * states_bytes()))


def _db(f: Figures, mixing: str, other: str) -> str:
    few, many = (
        f(f"training ginr {mixing}{runs}", "psnr") - f(f"training ginr {other}{runs}", "psnr")
        for runs in (f", {SEEDS} seeds", "")
    )
    return f"{few:+.1f} dB after 200 steps, mean of {SEEDS} seeds; {many:+.1f} dB after 1,000, one seed"


def _small_db(f: Figures, mixing: str, other: str) -> str:
    runs = [f"training ginr_tiny {each}" for each in (mixing, other)]
    gain, spread = f(runs[0], "psnr") - f(runs[1], "psnr"), max(f(run, "spread") for run in runs)
    return f"{gain:+.1f} dB after 200 steps of a small model on the CPU, {SEEDS} seeds within {spread:.1f} dB"


def block_parameters(kind: str) -> float:
    """Of one of the decoder's blocks, in millions."""
    mixing = Mixing(kind, CONFIG.hidden_dim, CONFIG.dim, CONFIG.heads, CONFIG.dim_head, CONFIG.mult)
    with torch.device("meta"):
        return sum(each.numel() for each in MixingBlock(mixing).parameters()) / 1e6


def _squared_error(dbs: tuple[int, int], other: str) -> str:
    """What the claim says, and what the blocks have to do it with; which of them is better is not derived."""
    low, high = (10 ** (-db / 10) for db in dbs)
    return (
        f"{low:.2f}-{high:.2f} x the squared error; {block_parameters('feedforward'):.1f}M parameters in a block, "
        f"against {block_parameters(other):.1f}M"
    )


def _step(number: int) -> Callable[[Figures], str]:
    return lambda f: f"{gib(f(_NAIVE))} -> {gib(f(solution(number)))} for the step"


_ENCODERS = Claim(
    lambda: (
        f"{gib(4 * attention_matrix_bytes())} for num_layers=3; {gib(2 * attention_matrix_bytes())} as printed"
    ),
    _matrices(4),
)
CLAIMS = {
    "query positions": Claim(
        lambda: f"{POSITIONS:,}",
        lambda f: (
            f"{(f(f'attention {_STATES}', 'saved') - 6 * states_bytes()) / (BATCH * CONFIG.heads * POSITIONS * FP32):,.0f}"
        ),
    ),
    "one attention matrix": Claim(
        lambda: f"{attention_matrix_bytes() // FP32:,} elements, {gib(attention_matrix_bytes())}",
        _matrices(1),
    ),
    "bandwidth encoders": _ENCODERS,
    "modulation projections": _ENCODERS,
    "hidden value layers": Claim(lambda: gib(attention_matrix_bytes()), _matrices(1)),
    "all attention matrices of the decoder": Claim(
        lambda: (
            f"{gib(attentions(3) * attention_matrix_bytes())} for num_layers=3; "
            f"{gib(attentions(2) * attention_matrix_bytes())} for the code as printed"
        ),
        _matrices(9),
    ),
    "gradients double it": Claim(
        lambda: f"{gib((attentions(3) + 2) * attention_matrix_bytes())}: nine, and two temporary ones",
        lambda f: (
            f"+{gib(f(f'attention {_STATES}') - f(f'attention {_STATES}', 'saved'))} in the backward pass of one, "
            "freed after it"
        ),
    ),
    "BiMamba encoder": Claim(
        lambda: f"{gib(BATCH * 512 * CONFIG.dim * CONFIG.expand * FP32)} for one tensor of its inner width",
        lambda f: gib(f("encoder 64", "saved")),
    ),
    "other activations": Claim(
        lambda: f"{gib(attentions(3) * feed_forward_saved())} of nine feed-forwards",
        lambda f: gib(f(_NAIVE) - 9 * f(f"attention {_STATES}", "saved") - f("encoder 64", "saved")),
    ),
    "grand total": Claim(
        lambda: f"{gib(attentions(3) * (attention_saved() + feed_forward_saved()))} saved by nine blocks",
        lambda f: gib(f(_NAIVE)),
    ),
    "a feed-forward saves for backward": Claim(
        lambda: (
            f"{gib(feed_forward_saved())}, {attention_saved() / feed_forward_saved():.2f} x less than attention"
        ),
        lambda f: (
            f"{gib(f(f'feed-forward {_STATES}', 'saved'))}, "
            f"{f.ratio(f'attention {_STATES}', f'feed-forward {_STATES}', 'saved'):.2f} x less"
        ),
    ),
    "expansion of the feed-forward": Claim(
        lambda: f"{CONFIG.mult} x, {CONFIG.hidden_dim} -> {CONFIG.mult * CONFIG.hidden_dim}",
        lambda f: f"{(f(f'feed-forward {_STATES}', 'saved') / states_bytes() - 2) / 4:.0f} x",
    ),
    "solution 1, feed-forward only, its blocks": Claim(
        lambda: f"{reduction_by_solution_1():.0%} less; {gib(solution_1_saved())} saved by the blocks alone",
        _step(1),
    ),
    "solution 1 in all": Claim(
        lambda: f"more than {gib(solution_1_saved())}",
        lambda f: (
            f"{gib(f(solution(1)))}; the model with self-attention, checkpointed: {gib(f(_CHECKPOINTED))}"
        ),
    ),
    "solution 2, cross-attention to 256 latents": Claim(
        lambda: gib(attentions(3) * attention_matrix_bytes(CONFIG.num_latents)), _step(2)
    ),
    "solution 3, batch 16": Claim(
        lambda: (
            f"a quarter: {gib(attentions(3) * (attention_saved() + feed_forward_saved()) / 4)} saved by nine blocks"
        ),
        _step(3),
    ),
    "solution 3's cost": Claim(
        None, lambda f: f"{4 * f.ratio(solution(3), _NAIVE, 'ms'):.2f} x the time for 64 images"
    ),
    "solution 4, gradient checkpointing": Claim(
        lambda: (
            f"{gib(attention_saved() + feed_forward_saved())} for the block that is recomputed, instead of nine"
        ),
        lambda f: (
            f"{100 * (1 - f.ratio(solution(4), _NAIVE)):.0f} % less in the naive form; the model "
            f"{100 * (1 - f.ratio(_CHECKPOINTED, _MODEL)):.0f} %"
        ),
    ),
    "solution 4's cost": Claim(
        None,
        lambda f: (
            f"{f.slower(solution(4), _NAIVE)} in the naive form; the model {f.slower(_CHECKPOINTED, _MODEL)}"
        ),
    ),
    "solution 5, lower resolution": Claim(
        lambda: f"{gib(attentions(3) * BATCH * CONFIG.heads * 256**2 * FP32)} of matrices at 16 x 16",
        _step(5),
    ),
    "SCENT's own remedy, fewer query positions": Claim(
        lambda: (
            f"{gib(attentions(3) * BATCH * CONFIG.heads * 256**2 * FP32)} of matrices with 256 of 1,024 positions"
        ),
        lambda f: gib(f("ginr queries naive 64, fp32")),
    ),
    "residual blocks have no such problem": Claim(
        lambda: f"{gib(attentions(3) * 3 * states_bytes())} saved by nine of them",
        lambda f: gib(f("ginr residual naive 64, fp32")),
    ),
    "quality of solution 1 against self-attention": Claim(
        lambda: _squared_error((-1, -2), "self"),
        lambda f: _small_db(f, "feedforward", "self"),
        lambda f: _db(f, "feedforward", "self"),
    ),
    "quality of solution 1 against residual blocks": Claim(
        lambda: _squared_error((3, 5), "residual"),
        lambda f: _small_db(f, "feedforward", "residual"),
        lambda f: _db(f, "feedforward", "residual"),
    ),
}
