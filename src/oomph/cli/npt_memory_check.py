"""Report 003's check of its memory, with the numbers as they are.

    python -m oomph.cli.npt_memory_check

Sizes by arithmetic, then that all three forms compute the same, then its table of configurations, predicted.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from oomph.ops.modulation import TokenIndex
from oomph.prediction import predict
from oomph.systems.claims import gib, mib
from oomph.systems.npt import PRESETS, NPComponent, NPTConfig, NPTModel, NPTOptimization, claims, naive
from oomph.workload import Workload

_TOLERANCE = 1e-10  # of float64
# A loop over 512 tokens in 16 layers takes long to trace, and each token adds the same: a few tell the rest.
_FEW, _MORE = 2, 4


class OffloadedDeltaPerToken(naive.DeltaPerToken):
    """The report's loop with each delta made in host memory; it keeps its history, so that B learns."""

    def compute_weight_delta(self, modulation: Tensor, token_idx: TokenIndex) -> Tensor:
        return super().compute_weight_delta(modulation, token_idx).to(modulation.device)


FORMS: dict[str, type[NPComponent]] = {
    "whole": naive.WholeDelta,
    "per token": naive.DeltaPerToken,
    "per token, offloaded": OffloadedDeltaPerToken,
}


@dataclass(frozen=True)
class Configuration:
    """A row of the report's table: what it claims, and what it describes."""

    name: str
    model: str
    claimed: str
    config: NPTConfig
    form: str | None = None  # of FORMS; None: there is nothing of the report's to predict
    batch: int = 1
    length: int = 512


def _llama(precision: str = "no", **options: bool) -> NPTConfig:
    return replace(PRESETS["default"], optimization=NPTOptimization(mixed_precision=precision, **options))


_HOST = "per token, offloaded"
CONFIGURATIONS = (
    Configuration("Original", "Llama-8B", ">80GB, fails", _llama(), "whole", batch=4),
    Configuration("Basic optimization", "Llama-8B", "~79GB, fails", _llama(), "per token"),
    Configuration("+ CPU offload", "Llama-8B", "~78GB, works", _llama(use_cpu_offload=True), _HOST),
    Configuration("+ FP16", "Llama-8B", "~40GB, works", _llama("fp16", use_cpu_offload=True), _HOST),
    Configuration("+ Fewer layers", "Llama-8B", "~35GB, works", PRESETS["optimized"], _HOST, length=256),
    Configuration("Small model", "GPT-2", "~2GB, works", PRESETS["small"], "per token"),
    Configuration("Ours", "Llama-8B", "", _llama("bf16"), batch=4),
    Configuration("Ours, 8-bit base", "Llama-8B", "", _llama("bf16", use_8bit=True), batch=4),
)


def predicted_peak(build: Callable[[], NPTModel], batch: int, length: int) -> int:
    """Allocated at the peak of a training step with AdamW, in bytes."""

    def inputs(device: torch.device) -> dict[str, Tensor]:
        return {"input_ids": torch.zeros(batch, length, dtype=torch.long, device=device)}

    return predict(Workload(build, inputs)).peak.allocated


def reports_peak(row: Configuration) -> int | None:
    """The report's form of the row, predicted; the loop over tokens is extended from a few of them."""
    if row.form is None:
        return None
    if row.form == "whole":
        return _reports_peak(row.config, row.form, row.batch, row.length)
    few, more = (_reports_peak(row.config, row.form, row.batch, tokens) for tokens in (_FEW, _MORE))
    return few + (more - few) * (row.length - _FEW) // (_MORE - _FEW)


@lru_cache
def _reports_peak(config: NPTConfig, form: str, batch: int, length: int) -> int:
    joint = replace(config, stream="joint", gradients="backward")
    return predicted_peak(lambda: joint.build(FORMS[form]), batch, length)


def our_peak(row: Configuration) -> int:
    # Offloading concerns deltas that are looked at; training makes none.
    optimization = replace(row.config.optimization, use_cpu_offload=False)
    return _our_peak(replace(row.config, optimization=optimization), row.batch, row.length)


@lru_cache
def _our_peak(config: NPTConfig, batch: int, length: int) -> int:
    return predicted_peak(config.build, batch, length)


def largest_difference(form: str) -> float:
    """Of a form's outputs and gradients from ours: float64, on this machine."""
    torch.manual_seed(0)
    linear = nn.Linear(24, 40, dtype=torch.float64)
    attention, h = (torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mine = NPComponent.replacing(linear, 4)
    nn.init.normal_(mine.B)
    theirs = FORMS[form].replacing(linear, 4)
    theirs.load_state_dict(mine.state_dict())
    pairs = zip(_results(theirs, attention, h), _results(mine, attention, h), strict=True)
    return max(float((found - right).abs().max() / right.abs().max()) for found, right in pairs)


def _results(component: NPComponent, attention: Tensor, h: Tensor) -> list[Tensor]:
    """Output, size of the deltas, and gradients of both to all that is trained or came before."""
    mod = component.modulation(attention)
    y, penalty = component(h, mod), component.penalty(mod)
    loss = y.square().mean() + 0.1 * penalty.mean()
    gradients = torch.autograd.grad(loss, (component.A, component.B, attention, h))
    return [y.detach(), penalty.detach(), *gradients]


def sizes() -> Iterator[tuple[str, str, str]]:
    """(what, at d_ffn 11008, at 14336)"""
    widths = (claims.D_FFN, claims.D_FFN_8B)
    rows = {
        "old approach, all tokens' deltas": [gib(claims.whole_delta_bytes(f)) for f in widths],
        "one token's delta, B=1": [mib(claims.token_delta_bytes(1, f)) for f in widths],
        f"one token's delta, B={claims.BATCH}": [
            mib(claims.token_delta_bytes(claims.BATCH, f)) for f in widths
        ],
        f"{claims.TOKENS} tokens one by one, kept": [
            gib(claims.TOKENS * claims.token_delta_bytes(claims.BATCH, f)) for f in widths
        ],
        "modulation": [f"{claims.modulation_elements() * claims.FP32 // 1024} KiB"] * 2,
        "ours: h A, and its product with it": [f"{claims.ours_bytes() // 1024} KiB"] * 2,
    }
    yield from ((what, *pair) for what, pair in rows.items())  # type: ignore[misc]


def main() -> int:
    shape = f"[{claims.BATCH}, {claims.TOKENS}, {claims.D_MODEL}, d_ffn]"
    print(f"Weight deltas {shape} in fp32, rank {claims.RANK}, one layer")
    print(f"  {'':36}{f'd_ffn {claims.D_FFN}':>14}{f'd_ffn {claims.D_FFN_8B}':>14}")
    for what, narrow, wide in sizes():
        print(f"  {what:36}{narrow:>14}{wide:>14}")
    print("Outputs and gradients, in float64 on a small shape")
    same = True
    for form in FORMS:
        error = largest_difference(form)
        same = same and error <= _TOLERANCE
        print(f"  {form}: within {error:.1e} of ours{'' if error <= _TOLERANCE else ', WRONG'}")
    print("Peak of a training step, predicted (a loop over tokens: extended from its first few)")
    print(f"  {'':22}{'model':10}{'claimed':16}{'report, predicted':>18}{'ours there':>14}")
    for row in CONFIGURATIONS:
        theirs = reports_peak(row)
        shown = "" if theirs is None else gib(theirs)
        print(f"  {row.name:22}{row.model:10}{row.claimed:16}{shown:>18}{gib(our_peak(row)):>14}", flush=True)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
