"""The claims of report 004."""

from oomph.systems.claims import Claim, gib
from oomph.systems.ginr.config import PRESETS

CONFIG = PRESETS["default"]
BATCH = 64
POSITIONS = CONFIG.image_size**2
FP32 = 4


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


# PSNR in dB of held-out crops after 1,000 steps of batch 64: benchmarks/results/training.csv.
MEASURED_DB = {"self": 27.89, "cross": 31.28, "feedforward": 33.35, "residual": 28.32}


def gain_db(mixing: str, other: str) -> float:
    return MEASURED_DB[mixing] - MEASURED_DB[other]


CLAIMS = (
    Claim(
        "one attention matrix",
        "2GB",
        lambda: gib(attention_matrix_bytes()),
        "right",
        "64 x 8 x 1,024 x 1,024 x 4 bytes; the unit is GiB",
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
    ),
    Claim(
        "gradients double it",
        "~36GB",
        lambda: f"{gib((attentions(3) + 2) * attention_matrix_bytes())}: nine, and two temporary ones",
        "wrong",
        "the gradient of one matrix is freed before that of the next is computed",
    ),
    Claim(
        "a feed-forward saves for backward",
        "~0.1GB",
        lambda: gib(feed_forward_saved()),
        "wrong",
        "four tensors of width 2,048 and two of 512",
    ),
    Claim(
        "solution 1, feed-forward only",
        "18GB -> 0.5GB, ~5GB in all",
        lambda: f"{reduction_by_solution_1():.0%} less; {gib(solution_1_saved())} saved by the blocks alone",
        "wrong",
        "a feed-forward saves about as much as attention: it still fails on 40 GiB",
    ),
    Claim(
        "solution 2, cross-attention to 256 latents",
        "18GB -> 4.5GB",
        lambda: gib(attentions(3) * attention_matrix_bytes(CONFIG.num_latents)),
        "right",
        "for the matrices; the feed-forwards save 2.25 GiB each",
    ),
    Claim(
        "quality of solution 1",
        "-1 to -2 dB, +3 to +5 dB over residual blocks",
        lambda: f"{gain_db('feedforward', 'self'):+.1f} dB, {gain_db('feedforward', 'residual'):+.1f} dB",
        "in part",
        "the report has no measurement; after 1,000 equal steps feed-forwards are better than "
        "self-attention, and better than residual blocks by as much as claimed",
    ),
)
