"""The claims of report 003."""

from collections.abc import Callable

from lab.benchmarks.systems.claims import Claim, Figures, gib, mib

# The report's shape. Its d_ffn is Llama-2-7B's; Llama-3.1-8B has 14336.
BATCH, TOKENS, D_MODEL, D_FFN, D_FFN_8B, RANK = 4, 512, 4096, 11008, 14336, 16
FP32 = 4
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


CLAIMS = {
    "the weight delta of all tokens": Claim(
        lambda: f"{gib(whole_delta_bytes())}; {gib(whole_delta_bytes(D_FFN_8B))} at d_ffn {D_FFN_8B}",
        lambda f: (
            f"{gib(8 * f('deltas 4 x 64 x 11008', 'result'))}; {gib(8 * f('deltas 4 x 64 x 14336', 'result'))} "
            "(8 x 64 tokens)"
        ),
    ),
    "modulation factors": Claim(
        lambda: f"{modulation_elements():,} elements, {modulation_elements() * FP32 // 1024} KiB",
        lambda f: f"{8 * f('deltas 4 x 64 x 11008', 'modulation') / 1024:.0f} KiB",
    ),
    "one token's delta": Claim(
        lambda: f"{mib(token_delta_bytes(1))} at B=1, {mib(token_delta_bytes(BATCH))} at B={BATCH}",
        lambda f: (
            f"{mib(f('deltas 1 x 1 x 11008', 'result'))} at B=1, {mib(f('deltas 4 x 1 x 11008', 'result'))} at B=4"
        ),
    ),
    "token by token instead of all at once": Claim(
        lambda: f"{gib(TOKENS * token_delta_bytes(BATCH))} saved per layer",
        lambda f: (
            f"{gib(_at(512, f, 'npt Basic optimization per_token'))} for 512 tokens in 16 layers, one row"
        ),
    ),
    "reduction of memory": Claim(
        None,
        lambda f: (
            f"{f.ratio('npt GPT-2 whole naive 1 x 64', 'npt GPT-2 per token naive 1 x 64'):.1f} x for GPT-2, 64 tokens"
        ),
    ),
    "batch 1 x accumulation 32 instead of 4 x 8": Claim(
        lambda: f"{4 * 8} = {1 * 32} rows a step",
        lambda f: (
            f"{gib(f('training npt_default'))} at 1 x 512, {gib(f('npt Llama-3.1-8B model 4 x 512'))} at 4 x 512"
        ),
    ),
    "deltas computed on the CPU": Claim(
        None,
        lambda f: (
            f"{gib(f('npt Basic optimization per_token 1 x 8'))} -> "
            f"{gib(f('npt + CPU offload per_token_offloaded 1 x 8'))} at 8 tokens"
        ),
    ),
    "efficient forward pass, no delta at all": Claim(
        lambda: f"{model_bytes() // 1024} KiB in addition to the output",
        lambda f: gib(f("npt Llama-3.1-8B model 4 x 512")),
    ),
    "table: original, Llama-8B": Claim(
        lambda: f"{gib(LAYERS * whole_delta_bytes(D_FFN_8B))} saved by {LAYERS} layers",
        lambda f: f"{gib(f('story npt naive'))} at 4 x 512",
        lambda f: f"{gib(f('npt GPT-2 whole naive 1 x 64'))} for GPT-2 at 1 x 64",
    ),
    "table: basic optimization, Llama-8B": Claim(
        lambda: (
            f"{gib(base_bytes(4) + saved_by_the_loop(LAYERS, 512))}: the fp32 base and W + dW of 512 tokens"
        ),
        _row("Basic optimization", "per_token", 512),
    ),
    "table: + CPU offload": Claim(
        lambda: f"{gib(base_bytes(4) + saved_by_the_loop(LAYERS, 512))}: they come back to be saved",
        _row("+ CPU offload", "per_token_offloaded", 512),
    ),
    "table: + FP16": Claim(
        lambda: f"{gib(base_bytes(2) + saved_by_the_loop(LAYERS, 512))}: the base is half",
        _row("+ FP16", "per_token_offloaded", 512),
    ),
    "table: + fewer layers (4 instead of 16, rank 8, 256 tokens)": Claim(
        lambda: f"{gib(base_bytes(2) + saved_by_the_loop(4, 256))}",
        _row("+ Fewer layers", "per_token_offloaded", 256),
    ),
    "table: small model, GPT-2": Claim(
        lambda: f"{gib(6 * 512 * 768 * 3072 * FP32)} of W + dW for 512 tokens in 6 layers",
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
    "8-bit loading of the base": Claim(
        lambda: f"{gib(base_bytes(2))} -> about {gib(base_bytes(1))}",
        lambda f: (
            f"{gib(f('npt Llama-3.1-8B model 4 x 512'))} -> {gib(f('npt Llama-3.1-8B 8-bit model 4 x 512'))}, "
            f"{f.slower('npt Llama-3.1-8B 8-bit model 4 x 512', 'npt Llama-3.1-8B model 4 x 512')} time"
        ),
    ),
}
