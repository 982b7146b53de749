"""The claims of report 003."""

from collections.abc import Callable

from benchmarks.systems.claims import Claim, Figures, gib, mib

# The report's shape. Its d_ffn is Llama-2-7B's; Llama-3.1-8B has 14336.
BATCH, TOKENS, D_MODEL, D_FFN, D_FFN_8B, RANK = 4, 512, 4096, 11008, 14336, 16
FP32 = 4
GPU = "79GiB"
LAYERS = 16  # converted


def whole_delta_bytes(d_ffn: int = D_FFN) -> int:
    """[B, S, d, f] in fp32"""
    return BATCH * TOKENS * D_MODEL * d_ffn * FP32


def token_delta_bytes(batch: int, d_ffn: int = D_FFN) -> int:
    """[B, d, f] of one token"""
    return batch * D_MODEL * d_ffn * FP32


def modulation_elements() -> int:
    return BATCH * TOKENS * RANK


def model_bytes() -> int:
    """h A and (h A) * mod, [B, S, r] each."""
    return 2 * modulation_elements() * FP32


def base_bytes(itemsize: int) -> int:
    """Of the frozen Llama-3.1-8B."""
    return 8_030_261_248 * itemsize


def saved_by_the_loop(layers: int, tokens: int) -> int:
    """W + dW of every token, for the gradient of the layer's input; one row."""
    return layers * tokens * token_delta_bytes(1, D_FFN_8B)


def _at(tokens: int, f: Figures, row: str) -> float:
    """A loop over tokens adds the same for each: from the rows of 4 and of 8 tokens."""
    few, more = f(f"{row} 1 x 4"), f(f"{row} 1 x 8")
    return few + (more - few) * (tokens - 4) / 4


def _row(name: str, component: str, tokens: int) -> Callable[[Figures], str]:
    row = f"npt {name} {component}"
    return lambda f: f"{gib(f(f'{row} 1 x 8'))} at 8 tokens, {gib(_at(tokens, f, row))} at {tokens}"


CLAIMS = (
    Claim(
        "the weight delta of all tokens",
        "~448 GB at d_ffn 11008",
        lambda: f"{gib(whole_delta_bytes())}; {gib(whole_delta_bytes(D_FFN_8B))} at d_ffn {D_FFN_8B}",
        "wrong",
        "448 GiB is right for the d_ffn of Llama-3.1-8B, not for the one in the report",
        lambda f: (
            f"{gib(8 * f('deltas 4 x 64 x 11008', 'result'))}; {gib(8 * f('deltas 4 x 64 x 14336', 'result'))} "
            "(8 x 64 tokens)"
        ),
    ),
    Claim(
        "modulation factors",
        "~32 KB",
        lambda: f"{modulation_elements():,} elements, {modulation_elements() * FP32 // 1024} KiB",
        "wrong",
        "the report gives the number of elements as bytes",
        lambda f: f"{8 * f('deltas 4 x 64 x 11008', 'modulation') / 1024:.0f} KiB",
    ),
    Claim(
        "one token's delta",
        "~180 MB",
        lambda: f"{mib(token_delta_bytes(1))} at B=1, {mib(token_delta_bytes(BATCH))} at B={BATCH}",
        "in part",
        "right for one row (180 MB = 172 MiB); the shape given has four",
        lambda f: (
            f"{mib(f('deltas 1 x 1 x 11008', 'result'))} at B=1, {mib(f('deltas 4 x 1 x 11008', 'result'))} at B=4"
        ),
    ),
    Claim(
        "token by token instead of all at once",
        "<1 GB",
        lambda: f"{gib(TOKENS * token_delta_bytes(BATCH))} saved per layer",
        "wrong",
        "autograd saves W + dW of every token for the gradient of the layer's input",
        lambda f: (
            f"{gib(_at(512, f, 'npt Basic optimization per_token'))} for 512 tokens in 16 layers, one row"
        ),
    ),
    Claim(
        "reduction of memory",
        ">400x",
        lambda: "1 x: the loop saves as much as the einsum returns",
        "wrong",
        "true without gradients alone",
        lambda f: (
            f"{f.ratio('npt GPT-2 whole naive 1 x 64', 'npt GPT-2 per token naive 1 x 64'):.1f} x for GPT-2, 64 tokens"
        ),
    ),
    Claim(
        "batch 1 x accumulation 32 instead of 4 x 8",
        "same effective batch",
        lambda: f"{4 * 8} = {1 * 32} rows a step",
        "right",
        "gradients are averaged over the same rows; the activations of a pass are a quarter",
        lambda f: (
            f"{gib(f('training npt_default'))} at 1 x 512, {gib(f('npt Llama-3.1-8B model 4 x 512'))} at 4 x 512"
        ),
    ),
    Claim(
        "deltas computed on the CPU",
        "frees GPU memory",
        lambda: "no gradient reaches B through detach()",
        "wrong",
        "detach() cuts B off from training; without it, autograd saves the deltas on the GPU again",
        lambda f: (
            f"{gib(f('npt Basic optimization per_token 1 x 8'))} -> "
            f"{gib(f('npt + CPU offload per_token_offloaded 1 x 8'))} at 8 tokens"
        ),
    ),
    Claim(
        "efficient forward pass, no delta at all",
        "h @ W + (h @ A) * mod @ B",
        lambda: f"{model_bytes() // 1024} KiB in addition to the output",
        "right",
        "exactly the same function; `model.py` computes it this way",
        lambda f: gib(f("npt Llama-3.1-8B model 4 x 512")),
    ),
    Claim(
        "table: original, Llama-8B",
        ">80GB, fails",
        lambda: f"{gib(LAYERS * whole_delta_bytes(D_FFN_8B))} saved by {LAYERS} layers",
        "right",
        "by far: no GPU holds one of its layers",
        lambda f: f"{gib(f('story npt naive'))} at 4 x 512",
        lambda f: f"{gib(f('npt GPT-2 whole naive 1 x 64'))} for GPT-2 at 1 x 64",
    ),
    Claim(
        "table: basic optimization, Llama-8B",
        "~79GB, fails",
        lambda: (
            f"{gib(base_bytes(4) + saved_by_the_loop(LAYERS, 512))}: the fp32 base and W + dW of 512 tokens"
        ),
        "wrong",
        "79 GiB is what the GPU had when it failed",
        _row("Basic optimization", "per_token", 512),
    ),
    Claim(
        "table: + CPU offload",
        "~78GB, works",
        lambda: f"{gib(base_bytes(4) + saved_by_the_loop(LAYERS, 512))}: they come back to be saved",
        "wrong",
        "works only where detach() keeps B from learning",
        _row("+ CPU offload", "per_token_offloaded", 512),
    ),
    Claim(
        "table: + FP16",
        "~40GB, works",
        lambda: f"{gib(base_bytes(2) + saved_by_the_loop(LAYERS, 512))}: the base is half",
        "wrong",
        "fp16 halves the base, 15 GiB, not what the loop saves",
        _row("+ FP16", "per_token_offloaded", 512),
    ),
    Claim(
        "table: + fewer layers (4 instead of 16, rank 8, 256 tokens)",
        "~35GB, works",
        lambda: f"{gib(base_bytes(2) + saved_by_the_loop(4, 256))}",
        "wrong",
        "an eighth of what the loop saves, still far more than 35 GiB",
        _row("+ Fewer layers", "per_token_offloaded", 256),
    ),
    Claim(
        "table: small model, GPT-2",
        "~2GB, works",
        lambda: f"{gib(6 * 512 * 768 * 3072 * FP32)} of W + dW for 512 tokens in 6 layers",
        "wrong",
        "right for the model that forms no delta",
        lambda f: (
            f"{gib(f('npt GPT-2 per token naive 1 x 64'))} at 64 tokens, "
            f"{gib(f('npt GPT-2 per token naive 1 x 64') + 14 * (f('npt GPT-2 per token naive 1 x 64') - f('npt GPT-2 per token naive 1 x 32')))} "
            f"at 512; the model {gib(f('npt GPT-2 model 4 x 512'))} at 4 x 512"
        ),
        lambda f: (
            f"{gib(f('npt GPT-2 per token naive 1 x 64'))} at 64 tokens; "
            f"the model {gib(f('npt GPT-2 model 4 x 512'))} at 4 x 512"
        ),
    ),
    Claim(
        "8-bit loading of the base",
        "if the failure persists",
        lambda: f"{gib(base_bytes(2))} -> about {gib(base_bytes(1))}",
        "right",
        "the frozen base is most of what the model needs",
        lambda f: (
            f"{gib(f('npt Llama-3.1-8B model 4 x 512'))} -> {gib(f('npt Llama-3.1-8B 8-bit model 4 x 512'))}, "
            f"{f.slower('npt Llama-3.1-8B 8-bit model 4 x 512', 'npt Llama-3.1-8B model 4 x 512')} time"
        ),
    ),
)
