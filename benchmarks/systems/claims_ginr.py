"""The claims of report 004."""

from collections.abc import Callable

import torch

from benchmarks.systems.claims import Claim, Figures, gib
from benchmarks.systems.figures import SEEDS
from oomph.systems.ginr.model import PRESETS, Mixing, MixingBlock

CONFIG = PRESETS["default"]
BATCH = 64
POSITIONS = CONFIG.image_size**2
FP32 = 4
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


CLAIMS = (
    Claim(
        "query positions",
        "1,024",
        lambda: f"{POSITIONS:,}",
        "right",
        "32 x 32",
        lambda f: (
            f"{(f(f'attention {_STATES}', 'saved') - 6 * states_bytes()) / (BATCH * CONFIG.heads * POSITIONS * FP32):,.0f}"
        ),
    ),
    Claim(
        "one attention matrix",
        "512M elements, 2GB",
        lambda: f"{attention_matrix_bytes() // FP32:,} elements, {gib(attention_matrix_bytes())}",
        "right",
        "64 x 8 x 1,024 x 1,024 x 4 bytes; the unit is GiB",
        _matrices(1),
    ),
    Claim(
        "bandwidth encoders",
        "4 self-attentions, 8GB",
        lambda: (
            f"{gib(4 * attention_matrix_bytes())} for num_layers=3; {gib(2 * attention_matrix_bytes())} as printed"
        ),
        "in part",
        "the printed code has one attention for each of two scales",
        _matrices(4),
    ),
    Claim(
        "modulation projections",
        "4 self-attentions, 8GB",
        lambda: (
            f"{gib(4 * attention_matrix_bytes())} for num_layers=3; {gib(2 * attention_matrix_bytes())} as printed"
        ),
        "in part",
        "the printed code has one attention for each of two scales",
        _matrices(4),
    ),
    Claim(
        "hidden value layers",
        "2GB",
        lambda: gib(attention_matrix_bytes()),
        "right",
        "one self-attention",
        _matrices(1),
    ),
    Claim(
        "all attention matrices of the decoder",
        "~18GB, nine of them",
        lambda: (
            f"{gib(attentions(3) * attention_matrix_bytes())} for num_layers=3; "
            f"{gib(attentions(2) * attention_matrix_bytes())} for the code as printed"
        ),
        "in part",
        "the printed code has one attention per branch: five in all",
        _matrices(9),
    ),
    Claim(
        "gradients double it",
        "~36GB",
        lambda: f"{gib((attentions(3) + 2) * attention_matrix_bytes())}: nine, and two temporary ones",
        "wrong",
        "the gradient of one matrix is freed before that of the next is computed",
        lambda f: (
            f"+{gib(f(f'attention {_STATES}') - f(f'attention {_STATES}', 'saved'))} in the backward pass of one, "
            "freed after it"
        ),
    ),
    Claim(
        "BiMamba encoder",
        "~2GB",
        lambda: f"{gib(BATCH * 512 * CONFIG.dim * CONFIG.expand * FP32)} for one tensor of its inner width",
        "in part",
        "about half of that is saved for backward",
        lambda f: gib(f("encoder 64", "saved")),
    ),
    Claim(
        "other activations",
        "~2GB",
        lambda: f"{gib(attentions(3) * feed_forward_saved())} of nine feed-forwards",
        "wrong",
        "each attention is followed by a feed-forward, which saves as much",
        lambda f: gib(f(_NAIVE) - 9 * f(f"attention {_STATES}", "saved") - f("encoder 64", "saved")),
    ),
    Claim(
        "grand total",
        "~40GB",
        lambda: f"{gib(attentions(3) * (attention_saved() + feed_forward_saved()))} saved by nine blocks",
        "in part",
        "it does exceed 40 GiB; two wrong terms come near the right sum",
        lambda f: gib(f(_NAIVE)),
    ),
    Claim(
        "a feed-forward saves for backward",
        "~0.1GB, 20x less than attention",
        lambda: (
            f"{gib(feed_forward_saved())}, {attention_saved() / feed_forward_saved():.2f} x less than attention"
        ),
        "wrong",
        "four tensors of width 2,048 and two of 512",
        lambda f: (
            f"{gib(f(f'feed-forward {_STATES}', 'saved'))}, "
            f"{f.ratio(f'attention {_STATES}', f'feed-forward {_STATES}', 'saved'):.2f} x less"
        ),
    ),
    Claim(
        "expansion of the feed-forward",
        "4x, 512 -> 2048 -> 512",
        lambda: f"{CONFIG.mult} x, {CONFIG.hidden_dim} -> {CONFIG.mult * CONFIG.hidden_dim}",
        "right",
        "twice, for GEGLU's gate; from what a feed-forward saves: two tensors of width 512, four of the wider",
        lambda f: f"{(f(f'feed-forward {_STATES}', 'saved') / states_bytes() - 2) / 4:.0f} x",
    ),
    Claim(
        "solution 1, feed-forward only, its blocks",
        "18GB -> 0.5GB, 36x",
        lambda: f"{reduction_by_solution_1():.0%} less; {gib(solution_1_saved())} saved by the blocks alone",
        "wrong",
        "a feed-forward saves about as much as attention: it still fails on 40 GiB",
        _step(1),
    ),
    Claim(
        "solution 1 in all",
        "~5GB",
        lambda: f"more than {gib(solution_1_saved())}",
        "wrong",
        "5 GiB is reached without changing the model: fused attention, checkpointing",
        lambda f: (
            f"{gib(f(solution(1)))}; the model with self-attention, checkpointed: "
            f"{gib(f('ginr self model 64, fp32 activation_checkpointing'))}"
        ),
    ),
    Claim(
        "solution 2, cross-attention to 256 latents",
        "18GB -> 4.5GB, 4x per attention",
        lambda: gib(attentions(3) * attention_matrix_bytes(CONFIG.num_latents)),
        "right",
        "for the matrices; the feed-forwards save 2.25 GiB each",
        _step(2),
    ),
    Claim(
        "solution 3, batch 16",
        "40GB -> 10GB",
        lambda: (
            f"a quarter: {gib(attentions(3) * (attention_saved() + feed_forward_saved()) / 4)} saved by nine blocks"
        ),
        "in part",
        "a quarter of a larger number",
        _step(3),
    ),
    Claim(
        "solution 3's cost",
        "4x slower",
        lambda: "four steps for the same images, each of a quarter of the work",
        "wrong",
        "the time for the same images hardly changes",
        lambda f: f"{4 * f.ratio(solution(3), _NAIVE, 'ms'):.2f} x the time for 64 images",
    ),
    Claim(
        "solution 4, gradient checkpointing",
        "~50 % less",
        lambda: (
            f"{gib(attention_saved() + feed_forward_saved())} for the block that is recomputed, instead of nine"
        ),
        "in part",
        "more: only one block's tensors exist at a time",
        lambda f: (
            f"{100 * (1 - f.ratio(solution(4), _NAIVE)):.0f} % less in the naive form; the model "
            f"{100 * (1 - f.ratio('ginr self model 64, fp32 activation_checkpointing', 'ginr self model 64, fp32')):.0f} %"
        ),
    ),
    Claim(
        "solution 4's cost",
        "~30 % slower",
        lambda: "one more forward pass, a third of the step",
        "right",
        "somewhat less",
        lambda f: (
            f"{f.slower(solution(4), _NAIVE)} in the naive form; the model "
            f"{f.slower('ginr self model 64, fp32 activation_checkpointing', 'ginr self model 64, fp32')}"
        ),
    ),
    Claim(
        "solution 5, lower resolution",
        "not recommended",
        lambda: f"{gib(attentions(3) * BATCH * CONFIG.heads * 256**2 * FP32)} of matrices at 16 x 16",
        "right",
        "sixteen times smaller matrices, and another task",
        _step(5),
    ),
    Claim(
        "SCENT's own remedy, fewer query positions",
        "works",
        lambda: (
            f"{gib(attentions(3) * BATCH * CONFIG.heads * 256**2 * FP32)} of matrices with 256 of 1,024 positions"
        ),
        "right",
        "the encoder sees the whole image; the decoder trains on a quarter of the positions",
        lambda f: gib(f("ginr queries naive 64, fp32")),
    ),
    Claim(
        "residual blocks have no such problem",
        "O(N)",
        lambda: f"{gib(attentions(3) * 3 * states_bytes())} saved by nine of them",
        "right",
        "with the six encoder layers of the original, the encoder needs most",
        lambda f: gib(f("ginr residual naive 64, fp32")),
    ),
    Claim(
        "quality of solution 1 against self-attention",
        "-1 to -2 dB",
        lambda: _squared_error((-1, -2), "self"),
        "wrong",
        "the report has no measurement; after equal steps feed-forwards are better than self-attention",
        lambda f: _small_db(f, "feedforward", "self"),
        lambda f: _db(f, "feedforward", "self"),
    ),
    Claim(
        "quality of solution 1 against residual blocks",
        "+3 to +5 dB",
        lambda: _squared_error((3, 5), "residual"),
        "in part",
        "the report has no measurement; the difference depends on the number of steps",
        lambda f: _small_db(f, "feedforward", "residual"),
        lambda f: _db(f, "feedforward", "residual"),
    ),
)
