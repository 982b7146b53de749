"""The check scripts of three reports, with correct figures.

    python -m lab.benchmarks.systems.report_checks pythia|longctx|npt

pythia: the table of parameters. longctx and npt: the report's implementations are compared with ours in
float64 on a small shape, and their memory is predicted at the report's shape.

Legend: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

import argparse
import bisect
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.benchmarks.systems import claims_npt as npt_claims, claims_pythia as pythia_claims
from lab.benchmarks.systems.claims import gib, mib
from lab.benchmarks.systems.claims_longctx import TOKENS, logits_bytes
from oomph.prediction import predict
from oomph.records import Prediction
from oomph.workload import Workload
from oomph_lab.systems.longctx import PRESETS as LONGCTX, LongContext
from oomph_lab.systems.longctx.naive import CHUNK, chunked_loss, next_token_loss, should_chunk
from oomph_lab.systems.npt import PRESETS as NPT, NPComponent, NPTConfig, NPTOptimization
from oomph_lab.systems.npt.naive import COMPONENTS, build as build_naive_npt
from oomph_lab.systems.pythia import PRESETS as PYTHIA, create_pythia_70m
from oomph_lab.systems.pythia.naive import REPORT_VOCAB_SIZE

Print = Callable[[str], None]
TOLERANCE = 1e-10  # relative, in float64


def relative_error(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((one - right).abs().max() / right.abs().max()) for one, right in pairs)


def _agreement(name: str, error: float, reference: str) -> str:
    wrong = "" if error <= TOLERANCE else ", WRONG"
    return f"  {name}: within {error:.1e} of {reference}{wrong}"


# ------------------------------------------------------------------------------------------- pythia


def check_pythia(write: Print) -> bool:
    """The parameter table of report 001, from the built model. Returns whether get_total_params() agrees."""
    agree = True
    for vocab_size in (pythia_claims.CAPPED, REPORT_VOCAB_SIZE):
        table = pythia_claims.parameter_table(vocab_size)
        write(f"create_pythia_70m(vocab_size={vocab_size})")
        for name, count in table.items():
            write(f"  {name:20}{count:>12,}{count * 4 / 1e6:>9.1f} MB")
        total = create_pythia_70m(vocab_size, device="meta")[1].get_total_params()
        agree = agree and total == table["total"]
        held = {"parameters": 1, "gradients": 1, "Adam's averages": 2}
        for name, times in held.items():
            write(f"  {name:20}{'':12}{times * total * 4 / 1e6:>9.1f} MB")
    published = PYTHIA["pythia"].get_total_params()
    write(f"published Pythia-70M: {published:,}")
    return agree


# ------------------------------------------------------------------------------------------- longctx

LossFunction = Callable[[LongContext, Tensor, Tensor], Tensor]  # (model, hidden_BTD, labels_BT) -> loss
# Large enough that our loss works in blocks; neither size is a multiple of the other.
SMALL = replace(LONGCTX["tiny"], hidden_size=16, num_layers=1, vocab_size=8192)
SMALL_TOKENS, SMALL_CHUNK = 389, 100


def standard_loss(model: LongContext, hidden_BTD: Tensor, labels_BT: Tensor) -> Tensor:
    return next_token_loss(F.linear(hidden_BTD, model.head_weight), labels_BT)


def losses(chunk_size: int = CHUNK) -> Mapping[str, LossFunction]:
    """The report's loss before and after its fix, the fix with recomputation, and ours."""
    return {
        "standard": standard_loss,
        "report, chunked": partial(chunked_loss, chunk_size=chunk_size),
        "chunked, recomputed": partial(chunked_loss, chunk_size=chunk_size, recompute=True),
        "model": lambda model, hidden, labels: model._compute_loss_chunked(hidden, labels, chunk_size),
    }


def loss_error(loss: LossFunction) -> float:
    """The largest relative error of the loss and its gradients against the standard loss, in float64."""
    torch.manual_seed(0)
    model = SMALL.build().double()
    hidden = torch.randn(2, SMALL_TOKENS, SMALL.hidden_size, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, SMALL.vocab_size, (2, SMALL_TOKENS))
    labels[:, 50:70] = -100

    def results(function: LossFunction) -> list[Tensor]:
        value = function(model, hidden, labels)
        return [value.detach(), *torch.autograd.grad(value, (hidden, model.head_weight))]

    return relative_error(results(loss), results(standard_loss))


@dataclass(frozen=True)
class LossMemory:
    """Bytes of the loss alone, from hidden states to their gradients, without its inputs."""

    saved: int  # for backward
    peak: int


def loss_memory(loss: LossFunction, seq_len: int = TOKENS) -> LossMemory:
    """Predicted for the report's 4B model, one row, in bf16."""
    config = replace(LONGCTX["4B"], num_layers=1)

    def setup() -> Callable[[], None]:
        model = config.build().to("cuda", torch.bfloat16)
        hidden = torch.randn(1, seq_len, config.hidden_size, device="cuda", dtype=torch.bfloat16)
        labels = torch.zeros(1, seq_len, device="cuda", dtype=torch.long)
        return lambda: loss(model, hidden.requires_grad_(), labels).backward()

    prediction = predict(setup)
    inputs = _allocated_at(prediction, "step 1")
    saved = _allocated_at(prediction, "backward") - inputs
    return LossMemory(saved=saved, peak=prediction.steps[0].allocated - inputs)


def _allocated_at(prediction: Prediction, mark: str) -> int:
    """At the first mark of that name."""
    index = next(i for i, event in enumerate(prediction.events) if event.label == mark)
    after = bisect.bisect_right(prediction.timeline, index, key=lambda moment: moment.event)
    return prediction.timeline[after - 1].allocated if after else 0


def check_longctx(write: Print) -> bool:
    """The verifier of report 002, with gradients and memory. Returns whether all losses agree."""
    for number, seq_len in enumerate((4096, 40_000), 1):
        chunks = should_chunk(seq_len, LONGCTX["4B"].vocab_size)
        write(f"Test {number}: seq_len={seq_len}, logits={gib(logits_bytes(seq_len))}, should_chunk={chunks}")
        write("  Chunked loss used" if chunks else "  Standard loss used")
    write(f"Test 3: loss and gradients in float64, seq_len={SMALL_TOKENS}, chunk_size={SMALL_CHUNK}")
    agree = True
    for name, loss in list(losses(SMALL_CHUNK).items())[1:]:
        error = loss_error(loss)
        agree = agree and error <= TOLERANCE
        write(_agreement(name, error, "the standard loss"))
    write(f"Test 4: predicted memory of the loss at seq_len={TOKENS}, without its inputs")
    write(f"  {'':22}{'saved for backward':>19}{'peak':>14}")
    for name, loss in losses().items():
        memory = loss_memory(loss)
        write(f"  {name:22}{gib(memory.saved):>19}{gib(memory.peak):>14}")
    write("  Chunking alone lowers the peak, but saves the same log-softmax for backward.")
    return agree


# ------------------------------------------------------------------------------------------- npt

# Tracing a loop over 512 tokens in 16 layers takes long. Each token adds the same, so two short predictions
# give the slope.
FEW_TOKENS, MORE_TOKENS = 2, 4


@dataclass(frozen=True)
class Configuration:
    """A row of the report's table: what it claims, and the configuration it describes."""

    name: str
    model: str
    claimed: str
    config: NPTConfig
    component: str | None = None  # of COMPONENTS; None: the report has no such row
    batch: int = 1
    length: int = 512


def _llama(precision: str = "no", **options: bool) -> NPTConfig:
    return replace(NPT["default"], optimization=NPTOptimization(mixed_precision=precision, **options))


_OFFLOADED = "per_token_offloaded"
CONFIGURATIONS = (
    Configuration("Original", "Llama-8B", ">80GB, fails", _llama(), "whole", batch=4),
    Configuration("Basic optimization", "Llama-8B", "~79GB, fails", _llama(), "per_token"),
    Configuration("+ CPU offload", "Llama-8B", "~78GB, works", _llama(use_cpu_offload=True), _OFFLOADED),
    Configuration("+ FP16", "Llama-8B", "~40GB, works", _llama("fp16", use_cpu_offload=True), _OFFLOADED),
    Configuration("+ Fewer layers", "Llama-8B", "~35GB, works", NPT["optimized"], _OFFLOADED, length=256),
    Configuration("Small model", "GPT-2", "~2GB, works", NPT["small"], "per_token"),
    Configuration("model", "Llama-8B", "", _llama("bf16"), batch=4),
    Configuration("model, 8-bit base", "Llama-8B", "", _llama("bf16", use_8bit=True), batch=4),
)


def naive_peak(row: Configuration) -> int | None:
    """Predicted peak of the report's implementation; a loop over tokens is extrapolated."""
    if row.component is None:
        return None
    peak = partial(_predicted_peak, row.config, row.component, row.batch)
    if row.component == "whole":
        return peak(row.length)
    few, more = map(peak, (FEW_TOKENS, MORE_TOKENS))
    return few + (more - few) * (row.length - FEW_TOKENS) // (MORE_TOKENS - FEW_TOKENS)


def model_peak(row: Configuration) -> int:
    """Predicted peak of our implementation, which never forms the weight deltas that would be offloaded."""
    optimization = replace(row.config.optimization, use_cpu_offload=False)
    return _predicted_peak(replace(row.config, optimization=optimization), None, row.batch, row.length)


@lru_cache
def _predicted_peak(config: NPTConfig, component: str | None, batch: int, length: int) -> int:
    """Bytes allocated at the peak of a training step with AdamW. `component`: of the report; None: ours."""
    build = config.build if component is None else partial(build_naive_npt, config, component)

    def inputs(device: torch.device) -> dict[str, Tensor]:
        return {"input_ids": torch.zeros(batch, length, dtype=torch.long, device=device)}

    return predict(Workload(build, inputs)).peak.allocated


def component_error(name: str) -> float:
    """The largest relative error of a component's outputs and gradients against ours, in float64."""
    torch.manual_seed(0)
    linear = nn.Linear(24, 40, dtype=torch.float64)
    attention, h = (torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True) for _ in range(2))
    ours = NPComponent.replacing(linear, 4)
    nn.init.normal_(ours.B)
    naive = COMPONENTS[name].replacing(linear, 4)
    naive.load_state_dict(ours.state_dict())

    def results(component: NPComponent) -> list[Tensor]:
        mod = component.modulation(attention)
        y, penalty = component(h, mod), component.penalty(mod)
        loss = y.square().mean() + 0.1 * penalty.mean()
        gradients = torch.autograd.grad(loss, (component.A, component.B, attention, h))
        return [y.detach(), penalty.detach(), *gradients]

    return relative_error(results(naive), results(ours))


def delta_sizes() -> dict[str, tuple[str, str]]:
    """What is allocated -> its size at the report's d_ffn, and at Llama-3.1-8B's."""
    c = npt_claims
    sizes: dict[str, Callable[[int], str]] = {
        "weight deltas of all tokens": lambda f: gib(c.whole_delta_bytes(f)),
        "one token's delta, B=1": lambda f: mib(c.token_delta_bytes(1, f)),
        f"one token's delta, B={c.BATCH}": lambda f: mib(c.token_delta_bytes(c.BATCH, f)),
        f"{c.TOKENS} tokens' deltas saved one by one": lambda f: gib(
            c.TOKENS * c.token_delta_bytes(c.BATCH, f)
        ),
        "modulation": lambda f: f"{c.modulation_elements() * c.FP32 // 1024} KiB",
        "model: h A, and (h A) * mod": lambda f: f"{c.model_bytes() // 1024} KiB",
    }
    return {what: (size(c.D_FFN), size(c.D_FFN_8B)) for what, size in sizes.items()}


def check_npt(write: Print) -> bool:
    """The memory-efficiency check of report 003. Returns whether all implementations agree."""
    c = npt_claims
    write(f"Weight deltas [{c.BATCH}, {c.TOKENS}, {c.D_MODEL}, d_ffn] in fp32, rank {c.RANK}, one layer")
    write(f"  {'':36}{f'd_ffn {c.D_FFN}':>14}{f'd_ffn {c.D_FFN_8B}':>14}")
    for what, (narrow, wide) in delta_sizes().items():
        write(f"  {what:36}{narrow:>14}{wide:>14}")
    write("Outputs and gradients, in float64 on a small shape")
    agree = True
    for name in COMPONENTS:
        error = component_error(name)
        agree = agree and error <= TOLERANCE
        write(_agreement(name, error, "the model"))
    write("Predicted peak of a training step (a loop over tokens is extrapolated from its first few)")
    write(f"  {'':22}{'base':10}{'claimed':16}{'report, predicted':>18}{'model':>14}")
    NPT["tiny"].build()  # imports transformers once, not in the child process of every prediction
    with ThreadPoolExecutor(2) as pool:
        peaks = zip(pool.map(naive_peak, CONFIGURATIONS), pool.map(model_peak, CONFIGURATIONS), strict=True)
        for row, (naive, model) in zip(CONFIGURATIONS, peaks, strict=True):
            shown = "" if naive is None else gib(naive)
            write(f"  {row.name:22}{row.model:10}{row.claimed:16}{shown:>18}{gib(model):>14}")
    return agree


CHECKS = {"pythia": check_pythia, "longctx": check_longctx, "npt": check_npt}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("system", choices=CHECKS)
    sys.exit(0 if CHECKS[parser.parse_args().system](print) else 1)
