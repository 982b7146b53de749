"""Write the committed rows into the tables of README.md, docs/ and lab/docs/.

    python -m benchmarks.tables

A table stands between the comments `<!-- name -->` and `<!-- /name -->`; the text between them is replaced.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from lab.benchmarks import RESULTS as LAB_RESULTS
from lab.benchmarks.systems.claims import stored_figures
from lab.benchmarks.systems.claims_ginr import solution
from lab.benchmarks.systems.figures import SEEDS

from benchmarks import RESULTS, ROOT
from benchmarks.accuracy.intervals import found_of, share
from benchmarks.rows import errors_of, median, stored, worst
from oomph import gpus
from oomph.prediction.ops import registry
from oomph.torch_internals import OpOverload
from oomph_lab.systems import SYSTEMS as REGISTRY

# A system, what failed, its naive and its model row, and what is to be known of the pair.
SYSTEMS = (
    (
        "hatchling",
        "a dk x dk transition for every token",
        "hatchling hn_xs naive 16 x 256",
        "hatchling hn_xs model 16 x 256",
        "hn_xs, 16 x 256",
    ),
    (
        "pythia",
        "V x V one-hot, products by broadcasting",
        "pythia report naive 8 x 512",
        "pythia report model 8 x 512",
        "V 50,304, 8 x 512",
    ),
    (
        "longctx",
        "all logits, in fp32, several times",
        "longctx 4B dense naive 1 x 32768 activation_checkpointing",
        "longctx 4B dense model 1 x 32768 activation_checkpointing",
        "4B, 1 x 32,768, checkpointed",
    ),
    (
        "npt",
        "a weight per token, [B, S, d, f]",
        "npt GPT-2 whole naive 1 x 64",
        "npt GPT-2 model 4 x 512",
        "GPT-2, naive 1 x 64, model 4 x 512",
    ),
    (
        "ginr",
        "nine N x N matrices per image",
        "ginr self naive 64, fp32",
        "ginr self model 64, autocast activation_checkpointing",
        "64 images, fp32; model bf16, recomputed",
    ),
)

MEASURED = ("measured_mib", "measured_ms")


def systems() -> str:
    """Naive against model, and how far off the predictions are over all measured forms."""
    rows = system_rows()
    cells = []
    for system, what, naive, model, shape in SYSTEMS:
        before, after = rows[naive], rows[model]
        mib, ms = (
            f"{number(before[key])} -> {number(after[key])}" for key in ("measured_mib", "measured_ms")
        )
        cells.append((f"`{system}`", what, shape, f"{mib} MiB", f"{ms} ms"))
    table = _table("system | what failed | shape | peak, naive -> model | a step, naive -> model", cells, 2)
    return f"{table}\n\n{_peaks_line(rows)}"


def _peaks_line(rows: Mapping[str, Mapping[str, str]]) -> str:
    errors = errors_of(rows.values(), "error_percent")
    return (
        f"- {len(errors)} forms and shapes measured: allocated peak predicted within "
        f"{abs(worst(errors)):.1f} %, median {median(errors):.2f} %"
    )


def races() -> str:
    """Whole training steps against other forms of the same model."""
    rows = [
        (
            name,
            f"{float(row['measured_ms']) / float(row['other_ms']):.2f} x",
            f"{number(row['measured_mib'])} / {number(row['other_mib'])}",
        )
        for name, row in system_rows().items()
        if row["other_ms"]
    ]
    return _table("race | time | MiB, ours / theirs", rows, 2)


def peaks(system: str) -> str:
    """Every measured form of a system."""
    rows = [
        (
            name,
            f"{number(row['measured_mib'])} MiB",
            percent(row["error_percent"]),
            f"{number(row['measured_ms'], 1)} ms" if row["measured_ms"] else "-",
        )
        for name, row in system_rows().items()
        if name.split()[0] == system and not row["other_ms"]
    ]
    return _table("form | measured | predicted | a step", rows, 3)


def _table(titles: str, rows: Iterable[Sequence[object]], right: int = 0) -> str:
    """A Markdown table; the last `right` columns are aligned to the right."""
    names = titles.split(" | ")
    lines = [f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in (names, *rows)]
    rule = "|---" * (len(names) - right) + "|---:" * right + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def number(value: str | float, decimals: int = 0) -> str:
    return f"{float(value):,.{decimals}f}"


def percent(value: str) -> str:
    return f"{float(value):+.2f} %" if value else "-"


def gib(size: str) -> str:
    return f"{int(size) / 2**30:.2f} GiB"


def mib(size: str) -> str:
    return f"{int(size) / 2**20:,.0f} MiB"


def claims(system: str) -> str:
    """The report's claims as `oomph systems` prints them."""
    rows = [tuple(one.values()) for one in REGISTRY[system].claims]
    return _table("claim | claimed | derived | predicted | measured | verdict | why", rows)


def failed(system: str) -> str:
    story = REGISTRY[system].story
    return f"Out of memory on {gpus.find(story.gpu).title}: `{story.failed}`"


def commands(system: str) -> str:
    rows = [(f"`{theirs}`", f"`{ours}`") for theirs, ours in REGISTRY[system].story.commands.items()]
    return _table("the report | here", rows)


def story(system: str) -> str:
    """The stored outcome of `oomph systems NAME`."""
    rows = [row for row in stored(LAB_RESULTS / "stories.csv") if row["system"] == system]
    cells = [
        (
            row["form"],
            f"{number(row['needs_gib'], 1)} GiB" if row["needs_gib"] else "-",
            row["verdict"],
            f"`{row['failure']}`" if row["failure"] else "",
        )
        for row in rows
    ]
    typed = [row["command"].strip() for row in rows]
    took = f"{number(rows[0]['story_seconds'])} seconds on two cores."
    return "\n".join([_table("form | needs | verdict | where", cells), "", "```", *typed, "```", "", took])


# Report 004's decoders: title -> row of the naive form, run of the quality over three seeds
SOLUTIONS = {
    "the report's model: self-attention": ("ginr self naive 64, fp32", "self"),
    "1: feed-forwards": (solution(1), "feedforward"),
    "2: cross-attention to the latents": (solution(2), "cross"),
    "3: batch 16": (solution(3), "batch 16"),
    "4: gradient checkpointing": (solution(4), "self"),
    "5: 16 x 16 pixels": (solution(5), "resolution 16"),
    "SCENT: 256 of 1,024 queries": ("ginr queries naive 64, fp32", "queries"),
    "the original: residual blocks": ("ginr residual naive 64, fp32", "residual"),
    "ours: self-attention, fused, checkpointed": (
        "ginr self model 64, fp32 activation_checkpointing",
        "self",
    ),
}


def solutions() -> str:
    """The five solutions of report 004 beside each other: memory, time and quality."""
    figures, rows = stored_figures(), []
    for title, (name, quality) in SOLUTIONS.items():
        row = figures.get(name, {})
        predicted, measured = row.get("predicted", {}), row.get("measured", {})
        decibels = figures.get(f"training ginr {quality}, {SEEDS} seeds", {}).get("measured", {})
        per_batch = 4 if "batch 16" in title else 1
        rows.append(
            (
                title,
                f"{predicted['peak'] / 2**30:.1f} GiB" if predicted else "-",
                f"{measured['peak'] / 2**30:.1f} GiB" if measured else "-",
                f"{per_batch * measured['ms']:,.0f} ms" if measured else "-",
                f"{decibels['psnr']:.1f} dB (spread {decibels['spread']:.1f})" if decibels else "-",
            )
        )
    return _table("decoder | predicted | measured | time for 64 images | PSNR after 200 steps", rows)


def held_out() -> str:
    """Every system's error on held-out data before and after training."""
    rows = [row.values() for row in stored(LAB_RESULTS / "held_out.csv")]
    return _table("run | seed | steps | held out | before | after", rows)


def audit(system: str) -> str:
    """What a report names apart from figures, and where it is."""
    report = REGISTRY[system].report
    rows = [
        (row["item"], row["here"]) for row in stored(LAB_RESULTS / "audit.csv") if row["report"] == report
    ]
    return _table("item | here", rows)


def system_rows() -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in stored(LAB_RESULTS / "systems.csv")}


# ------------------------------------------------------------------------------------------- training

LONG_RUNS = {
    "longctx_4b": ("`longctx_4b`: plain AdamW in bf16, activation checkpointing", 80),
    "longctx_4b_24gb": ("`longctx_4b_24gb`: 8-bit AdamW in backward, offloaded checkpoints", 23),
    "longctx_4b_24gb, attention kept": ("the same with `activation_checkpointing:keep=attention`", 23),
    "longctx_4b_24gb_nsa": ("`longctx_4b_24gb_nsa`: with native sparse attention", 23),
    "longctx_8b": ("`longctx_8b`: 8-bit AdamW in backward, activation checkpointing", 80),
    "longctx_8b 262144": ("the same with `activation_offloading`, one step", 80),
}
PEERS = {
    "Qwen3-4B of Hugging Face": "Hugging Face's Qwen3-4B: SDPA, checkpointing, AdamW in bf16",
    "longctx qwen3-4B": "ours of Qwen3-4B's shape, activation checkpointing",
}
# The measure of a run that is reported beside its loss, and its format.
FIGURES = {"perplexity": "perplexity {:,.1f}", "psnr": "{:.2f} dB", "matching": "matching {:.4g}"}


def training() -> str:
    """Every run; those with several seeds are in the table of the solutions."""
    rows = [row for row in stored(LAB_RESULTS / "training.csv") if ", seed " not in row["name"]]
    lines = [
        f"Measured on one {rows[0]['gpu']} (`lab.benchmarks.training`). The loss is the mean over a tenth of",
        "the steps at either end; speed is in tokens, for ginr in images; in brackets: runs shared the GPU.",
        "The allocator does not count what replays of CUDA graphs use (`training.cuda_graph`): their peak is",
        "what is allocated beside the graphs plus what a pass used while it was captured.",
        "",
    ]
    cells = []
    for row in rows:
        found = [text.format(float(row[key])) for key, text in FIGURES.items() if row[key]]
        if row["matching_at_start"]:
            found.append(f"at the start {float(row['matching_at_start']):.4g}")
        speed = number(row["tokens_per_second"])
        losses = f"{float(row['first_loss']):.4g} -> {float(row['last_loss']):.4g}"
        cells.append(
            (row["name"], number(row["steps"]), number(row["tokens_per_step"]),
             f"({speed})" if row["alone"] == "False" else speed, f"{number(row['measured_mib'])} MiB",
             percent(row["error_percent"]), losses, ", ".join(found) or "-")
        )  # fmt: skip
    titles = "run | steps | per step | per second | peak | predicted | loss | held out"
    changed = [f"- {row['name']}: `{row['changes']}`" for row in rows if row["changes"]]
    more = ["", "What differs from the configs:", "", *changed]
    return "\n".join([*lines, _table(titles, cells, 7), *more])


def long_context() -> str:
    """Report 002's model on one card, and the peer at the longest context that it has there."""
    runs = {row["name"]: row for row in stored(LAB_RESULTS / "training.csv")}
    peers = stored(LAB_RESULTS / "longctx_peer_h200.csv")
    cells = []
    for name, (title, allowed) in LONG_RUNS.items():
        row = runs[name]
        held = f"{float(row['reserved_mib']) / 1024:.1f} GiB" if row["reserved_mib"] else "-"
        tokens, speed = number(row["tokens_per_step"]), number(row["tokens_per_second"])
        cells.append((title, f"{allowed} GiB", tokens, speed, held))
    fitting = {row["limit_gib"] for row in peers if row["fits"] == "True"}
    for row in peers:
        tokens, speed, held = number(row["tokens"]), "-", "-"
        if row["fits"] == "True":
            speed = number(row["tokens_per_second"])
            held = f"{float(row['reserved_mib']) / 1024:.1f} GiB"
        elif row["limit_gib"] in fitting:
            tokens += " does not fit"
        else:
            tokens = f"none, not even {tokens}"
        cells.append((PEERS[row["who"]], f"{row['limit_gib']} GiB", tokens, speed, held))
    titles = "one GPU, every parameter trained | allowed | context | tokens/s | peak, reserved"
    return _table(titles, cells, 4)


def overhead() -> str:
    rows = stored(LAB_RESULTS / "training_overhead_h200.csv")
    cells = [
        (
            row["config"],
            *(f"{float(row[key]):.2f} ms" for key in ("bare_ms", "loop_ms")),
            percent(row["percent"]),
        )
        for row in rows
    ]
    about = f"What the loop costs on one {rows[0]['gpu']}: the same steps by hand and by the loop, in turns."
    return f"{about}\n\n{_table('config | bare step | in the loop | more', cells, 3)}"


SHOWN = {
    "gpt2-fp32": "GPT-2, fp32",
    "gpt2-autocast": "GPT-2, bf16 autocast",
    "llama1b-bf16": "Llama 1B, bf16",
    "llama1b-bf16-ckpt": "the same, checkpointed",
    "llama1b-sgd": "Llama 1B, fp32, GQA: unfused attention",
    "gemma2-eager": "Gemma 2, eager attention, softcap",
    "mixtral-eager-experts": "Mixtral, experts in a loop",
    "t5-small": "T5",
    "bert-mlm-fp16-autocast": "BERT, fp16 autocast",
    "llama-adafactor": "Llama, Adafactor",
    "own-optimizer": "an optimizer of one's own",
    "save-on-cpu": "activations saved on the host",
    "gradscaler-fp16": "fp16, GradScaler, clipping",
    "lstm": "LSTM",
    "resnet50": "ResNet-50",
    "convnext-tiny": "ConvNeXt",
    "unet-channels-last": "U-Net, channels last",
    "held-qwen2-amsgrad": "held out: Qwen2, AMSGrad",
    "held-phi3-reentrant": "held out: Phi-3, reentrant checkpoints",
    "held-step-in-backward": "held out: optimizer steps in backward",
    "held-master-weights": "held out: fp32 master weights, 8 micro-batches",
    "held-diffusion-average": "held out: diffusion U-Net, weight average",
    "held-graph-scatter": "held out: graph network",
}
SPEED = {
    "gpt2": "GPT-2, 8 x 1,024",
    "llama-1b": "Llama 1B, 2 x 2,048",
    "llama-8b": "Llama 8B, 1 x 4,096",
    "longctx-4b-nsa-131072": "`longctx_4b.yaml model.attention=nsa`: 36 layers, 4 x 131,072, checkpointed",
    "mamba-130m": "Mamba 130M, 2 x 32, its loop over tokens",
    "qwen3-0.6b": "Qwen3 0.6B, 2 x 2,048",
    "qwen3-0.6b-4-batches": "the same, four accumulated batches",
    "nanogpt": "nanoGPT's `train.py`, compiled: 40 accumulated and 200 evaluation batches",
}


def accuracy() -> str:
    rows = stored(RESULTS / "accuracy.csv")
    by_name = {row["workload"]: row for row in rows}
    cells = []
    for name, about in SHOWN.items():
        row = by_name[name]
        errors = (percent(row[f"{kind}_error_percent"]) for kind in ("allocated", "reserved"))
        cells.append((f"`{name}` {about}", gib(row["measured_allocated"]), *errors))
    lines = [_table("training step | measured | allocated | reserved", cells, 3), ""]
    for title, wanted in (("without convolutions", "False"), ("with convolutions", "True")):
        chosen = [row for row in rows if row["convolutions"] == wanted]
        allocated, reserved = (
            errors_of(chosen, f"{kind}_error_percent") for kind in ("allocated", "reserved")
        )
        lines.append(
            f"- {len(chosen)} workloads {title}: allocated median {median(allocated):.2f} %, worst "
            f"{worst(allocated):+.2f} %, lowest {min(allocated):+.2f} %; reserved median "
            f"{median(reserved):.2f} %, worst {worst(reserved):+.2f} %"
        )
    return "\n".join(lines)


def intervals() -> str:
    """Of programs that were drawn after the intervals were set (seed 3)."""
    rows = []
    stored_rows = stored(RESULTS / "intervals_h200.csv")
    for kind, name in (
        ("convolution", "convolutions"),
        ("data", "sizes that depend on values"),
        ("compiled", "compiled"),
    ):
        found = found_of([row for row in stored_rows if row["seed"] == "3"], kind)
        if found is None:
            continue
        median, tenth = found.widths["allocated"]
        of_reserved = found.widths["reserved"]
        rows.append(
            (
                f"{name}, {found.programs}",
                share(found.inside["allocated"]),
                f"{100 * median:.1f}, {100 * tenth:.0f} %",
                share(found.inside["reserved"]),
                f"{100 * of_reserved[0]:.0f}, {100 * of_reserved[1]:.0f} %",
                share(found.too_close),
                share(found.fits_wrongly),
                share(found.refused_wrongly),
            )
        )
    titles = (
        "programs | allocated inside | width: median, 90th percentile | reserved inside | width | "
        "too close to call | fits, and fails | does not fit, and runs"
    )
    return _table(titles, rows)


def speed() -> str:
    rows = [
        (
            SPEED[row["case"]],
            f"{float(row['seconds']):.1f} s",
            f"{float(row['threshold_seconds']):g} s" if row["threshold_seconds"] else "",
            f"{row['host_gib']} GiB",
        )
        for row in stored(RESULTS / "speed.csv")
    ]
    return _table("step | CPU time | aim | host memory", rows, 3)


def ranks_simulated() -> str:
    keys = ("predicted_allocated", "predicted_reserved", "sent")
    rows = [
        (row["run"], *(gib(row[key]) for key in keys), f"{float(row['step_seconds']):.3g} s")
        for row in stored(RESULTS / "ranks_simulated.csv")
    ]
    titles = "one rank of an H100 80GB | allocated | reserved | sent in a step | step, by a roofline"
    return _table(titles, rows, 4)


LOSSES = {
    "eager": "eager",
    "Liger": "Liger 0.8.5",
    "Liger C=8 fp32": "Liger, fp32 sums",
    "cce": "cce (filters)",
    "cce unfiltered": "cce, exact",
    "oomph 64MiB": "oomph, 64MiB",
    "oomph": "**oomph**",
}
SHAPES = ("4096x4096x128256", "16384x2560x151936", "8192x1024x151936", "32768x2560x151936")
# op, shape, contender, what it is compared with
PAIRS = (
    ("mlp", "SwiGLU 131072x2560x9216", "oomph", "eager"),
    ("modulated", "65536x4096x14336x16", "oomph", "bare h W"),
    ("attention", "B64 H8 N1024 D64", "oomph bf16", "SDPA flash bf16"),
    ("attention", "B64 H8 N1024 D64", "oomph bf16", "SDPA cuDNN bf16"),
    ("attention", "B64 H8 N1024 D64", "oomph bf16 locality", "SDPA flash bf16"),
    ("rotary", "B1 H32/8 T65536 D128", "oomph", "eager"),
    ("kda", "B1 T4096 H16 D128", "oomph", "fla"),
    ("kda", "B4 T8192 H32 D128", "oomph", "fla"),
    ("kda", "B1 T32768 H32 D128", "oomph", "fla"),
    ("kda", "B1 T32768 H32 D128", "oomph tight", "fla"),
    ("kda", "B16 T256 H8 D64", "oomph", "dense scan"),
    ("nsa", "B1 T32768 HQ64 H4 D128", "oomph", "fla, no window"),
    ("nsa", "B1 T32768 HQ64 H4 D128", "oomph", "SDPA cuDNN dense"),
    ("nsa", "B1 T131072 HQ32 H8 D128", "oomph", "SDPA cuDNN dense"),
    ("selective_scan", "B64 L512 d512 n16 bf16", "oomph", "dense [B,L,d,n]"),
    ("lif_gate", "B4 T4096 H12 D64", "oomph", "loop over time"),
)


def losses() -> str:
    """Time over the time of the three matrix products, and MiB above the two gradients."""
    rows = _op_rows("cross_entropy")
    cells = [
        (shape.replace("x", " x "), *(_loss_cell(rows.get((shape, name))) for name in LOSSES))
        for shape in SHAPES
    ]
    titles = ("tokens x width x classes", *LOSSES.values())
    return _table(" | ".join(titles), cells, len(LOSSES))


def _loss_cell(row: dict[str, str] | None) -> str:
    if row is None or not row["ratio_to_limit"]:
        return "-"
    above = float(row["peak_mib"]) - float(row["floor_mib"])
    return f"{float(row['ratio_to_limit']):.2f} / {above:,.0f}"


def other_ops() -> str:
    cells = []
    for op, shape, name, other in PAIRS:
        rows = _op_rows(op)
        ours, theirs = rows[shape, name], rows[shape, other]
        time = float(ours["median_ms"]) / float(theirs["median_ms"])
        shown = f"{time:.{2 if time >= 0.1 else 3}f} x"
        sizes = f"{number(ours['peak_mib'])} / {number(theirs['peak_mib'])}"
        cells.append((f"{op}{name.removeprefix('oomph')}", shape, other, shown, sizes))
    return _table("op | shape | against | time | MiB, ours / theirs", cells, 2)


FIXES = (
    ("qwen3-bf16", "fused_linear_cross_entropy"),
    ("qwen3-bf16", "activation_checkpointing"),
    ("qwen3-bf16", "fused_linear_cross_entropy + activation_checkpointing"),
    ("qwen3-bf16", "activation_checkpointing + activation_offloading"),
    ("qwen3-bf16", "micro_batches:parts=2"),
    ("llama-bf16", "tiled_mlp"),
    ("llama-bf16", "fused_linear_cross_entropy + activation_checkpointing + tiled_mlp"),
    ("gpt2-eager-autocast", "attn_implementation"),
    ("bert-fp32", "autocast"),
    ("vit-autocast", "activation_checkpointing"),
    ("hand-written-bf16", "fused_attention"),
)


def fixes() -> str:
    """Some of the measured pairs, and how far off the predictions are over all of them."""
    rows = {(row["model"], row["fixes"]): row for row in stored(RESULTS / "fixes.csv")}
    cells = []
    for model, name in FIXES:
        row = rows[model, name]
        peak = f"{number(rows[model, '']['measured_mib'])} -> {number(row['measured_mib'])} MiB"
        times = (f"x{number(row[f'{side}_slowdown'], 2)}" for side in ("measured", "predicted"))
        cells.append((model, name, peak, percent(row["peak_error_percent"]), *times))
    pairs = [row for row in rows.values() if row["fixes"]]
    peaks, times = (errors_of(pairs, f"{kind}_error_percent") for kind in ("peak", "slowdown"))
    near = sum(abs(error) <= 25 for error in times)
    return (
        f"{_table('model | fixes | peak | predicted | time | predicted', cells, 4)}\n\n"
        f"- {len(pairs)} pairs of a model and its fixes: peak off by at most {abs(worst(peaks)):.2f} %; the "
        f"change in time within 25 % on {near}, median {median(times):.0f} %, worst {abs(worst(times)):.0f} %"
    )


def _op_rows(op: str) -> dict[tuple[str, str], dict[str, str]]:
    rows = stored(RESULTS / "ops_h200.csv")
    return {(row["shape"], row["contender"]): row for row in rows if row["op"] == op}


class PublicPrograms(NamedTuple):
    """What became of the programs that were tried, at the first try."""

    tried: int
    repositories: int
    unpredicted: int  # measured
    not_run: int  # not measured: they failed by themselves, or lacked a package or data
    allocated: list[float]  # errors, in percent
    reserved: list[float]

    @classmethod
    def of(cls, rows: Sequence[dict[str, str]]) -> PublicPrograms:
        allocated, reserved = (errors_of(rows, f"{kind}_error_percent") for kind in ("allocated", "reserved"))
        measured = sum(bool(row["measured_allocated"]) for row in rows)
        repositories = len({row["repository"] for row in rows if "/" in row["repository"]})
        unpredicted, not_run = measured - len(allocated), len(rows) - measured
        return cls(len(rows), repositories, unpredicted, not_run, allocated, reserved)

    def quantiles(self) -> str:
        within = sum(abs(one) <= 2 for one in self.allocated)
        share = within / (len(self.allocated) + self.unpredicted)
        return (
            f"allocated: median error {median(self.allocated):.2f} %, 90th percentile "
            f"{_of_ten(self.allocated):.1f} %, worst {worst(self.allocated):+.0f} %, {within} within 2 % "
            f"({100 * share:.0f} % of those measured); reserved: median {median(self.reserved):.2f} %, 90th "
            f"percentile {_of_ten(self.reserved):.1f} %, worst {worst(self.reserved):+.0f} %"
        )


def _of_ten(errors: Sequence[float]) -> float:
    """The error that nine of ten do not exceed."""
    return sorted(map(abs, errors))[math.ceil(0.9 * len(errors)) - 1]


def public_programs() -> str:
    counts = PublicPrograms.of(stored(RESULTS / "public_programs_h200.csv"))
    return (
        f"{counts.tried} training programs, of {counts.repositories} public repositories and of libraries, "
        "were tried (`public_programs_h200.csv`):\n\n"
        f"- {len(counts.allocated)} were predicted before they were measured; {counts.unpredicted} were "
        "measured without a prediction (it failed,\n  took too long or was not made before); "
        f"{counts.not_run} could not be compared, because they did not run or were not measured\n"
        f"- {counts.quantiles()}"
    )


def evidence() -> str:
    """One line for each claim of the README, with the file that holds its rows."""
    steps = stored(RESULTS / "accuracy.csv")
    of_peaks = {
        "training steps without convolutions": [row for row in steps if row["convolutions"] == "False"],
        "training steps with convolutions": [row for row in steps if row["convolutions"] == "True"],
        "training scripts as they are": stored(RESULTS / "scripts_h200.csv"),
        "compiled training steps": stored(RESULTS / "compiled.csv"),
        "runs of one rank of FSDP2, DDP, TP or CP": stored(RESULTS / "ranks_h200.csv"),
    }
    files = ("accuracy", "accuracy", "scripts_h200", "compiled", "ranks_h200")
    lines: list[Sequence[str]] = []
    for (title, rows), file in zip(of_peaks.items(), files, strict=True):
        errors, reserved = (errors_of(rows, f"{kind}_error_percent") for kind in ("allocated", "reserved"))
        found = (
            f"allocated: median error {median(errors):.2f} %, worst {worst(errors):+.2f} %; reserved: median "
            f"{median(reserved):.2f} %, worst {worst(reserved):+.2f} %"
        )
        lines.append((f"peak of {len(errors)} {title}, predicted", found, f"{file}.csv"))
    counts = PublicPrograms.of(stored(RESULTS / "public_programs_h200.csv"))
    found = (
        f"{counts.unpredicted} had no prediction by then (it failed, took too long or was not made), "
        f"{counts.not_run} could not be compared; {counts.quantiles()}"
    )
    title = (
        f"peak of {counts.tried} public programs, {len(counts.allocated)} predicted before they were measured"
    )
    lines.insert(3, (title, found, "public_programs_h200.csv"))
    capped, plans = stored(RESULTS / "capped_h200.csv"), stored(RESULTS / "plans_h200.csv")
    done, ran = ([row for row in rows if row["ran"] == "True"] for rows in (capped, plans))
    completed = f"{len(done)} of {len(capped)} completed"
    lines.append(("runs capped at predicted + margin", completed, "capped_h200.csv"))
    pairs = [row for row in stored(RESULTS / "fixes.csv") if row["fixes"]]
    peaks, times = (errors_of(pairs, f"{kind}_error_percent") for kind in ("peak", "slowdown"))
    found = f"peak: worst {worst(peaks):+.2f} %; time: median error {median(times):.0f} %, worst "
    found += f"{abs(worst(times)):.0f} %"
    lines.append((f"{len(pairs)} pairs of a model and fixes, predicted", found, "fixes.csv"))
    peaks, reserved, times = (
        errors_of(ran, f"{kind}_error_percent") for kind in ("allocated", "reserved", "ratio")
    )
    found = (
        f"{len(ran)} of {len(plans)} completed; allocated: worst {worst(peaks):+.2f} %; reserved: worst "
        f"{worst(reserved):+.2f} %; slowdown, fitted to them: median error {median(times):.0f} %, worst "
        f"{abs(worst(times)):.0f} %"
    )
    lines.append(("plans of `oomph fit`, run within their budget", found, "plans_h200.csv"))
    seconds = {row["case"]: f"{float(row['seconds']):.1f} s" for row in stored(RESULTS / "speed.csv")}
    found = f"GPT-2 {seconds['gpt2']}, Llama 1B {seconds['llama-1b']}, Llama 8B {seconds['llama-8b']}"
    lines.append(("CPU time of a prediction", found, "speed.csv"))
    loss, shape = _op_rows("cross_entropy"), "16384x2560x151936"
    ours, liger = loss[shape, "oomph"], loss[shape, "Liger"]
    found = f"{_ratio(ours, liger)} x Liger's time; {float(ours['ratio_to_limit']):.2f} x the three matrix "
    title = f"linear cross-entropy, {shape.replace('x', ' x ')}, bf16"
    lines.append((title, f"{found}products alone", "ops_h200.csv"))
    for op, shape, title, peer in (
        ("kda", "B4 T8192 H32 D128", "Kimi delta attention", "fla"),
        ("nsa", "B1 T32768 HQ64 H4 D128", "native sparse attention", "fla, no window"),
    ):
        ours, theirs = (_op_rows(op)[shape, name] for name in ("oomph", peer))
        sizes = f"{number(ours['peak_mib'])} MiB against {number(theirs['peak_mib'])}"
        lines.append((f"{title}, {shape}", f"{_ratio(ours, theirs)} x fla's time, {sizes}", "ops_h200.csv"))
    runs = {row["name"]: row for row in stored(LAB_RESULTS / "training.csv")}
    long = runs["longctx_4b_24gb, attention kept"]
    title = (
        f"{long['steps']} training steps of a 4B model at 131,072 tokens, attention's results kept in host "
        "memory, process limited to 23 GiB"
    )
    size = f"{float(long['measured_mib']) / 1024:.1f} GiB allocated"
    lines.append((title, f"{number(long['tokens_per_second'])} tokens/s, {size}", "training.csv, in lab/"))
    return _table("what | measured | rows in `benchmarks/results/`", lines)


def _ratio(ours: dict[str, str], theirs: dict[str, str]) -> str:
    return f"{float(ours['median_ms']) / float(theirs['median_ms']):.2f}"


def public() -> str:
    """Public programs: how many are close, and those that are not."""
    rows = stored(RESULTS / "public_programs_h200.csv")
    cells = [
        (
            row["program"],
            row["repository"],
            *(percent(row[f"{kind}_error_percent"]) for kind in ("allocated", "reserved")),
            row["note"],
        )
        for row in rows
        if row["allocated_error_percent"] and abs(float(row["allocated_error_percent"])) > 2
    ]
    header = "program | repository | allocated | reserved | note"
    return f"{public_programs()}\n\nThose that were more than 2 % off:\n\n{_table(header, cells)}"


_SOURCE = re.compile(r"[\w/]+\.(?:cpp|cuh?|h)\b")


def rules() -> str:
    """What the registry says of each op, by the file that says it."""
    families: dict[str, list[str]] = {}
    for op, files in registry.FILES.items():
        families.setdefault(max(files), []).append(op.removeprefix("aten::"))
    return "\n\n".join(_family(module, sorted(ops)) for module, ops in sorted(families.items()))


def _family(module: str, ops: Sequence[str]) -> str:
    path = module.removeprefix("oomph.").replace(".", "/")
    about = (sys.modules[module].__doc__ or "").strip()
    entries = registry.entries()
    own = f"test_{module.rpartition('.')[2]}"
    cells = []
    for op in ops:
        entry = entries[op]
        called = "test_rule_failures" if any(map(callable, entry.values())) else ""
        test = _test_of(op) or (own if own in _tests() else called)
        cells.append((f"`{op}`", ", ".join(_facts(entry)), ", ".join(_sources(entry)), test))
    return f"### `{path}.py`\n\n{about}\n\n{_table('op | entered | source of its own | test', cells)}"


@cache
def _tests() -> dict[str, str]:
    """Tests of rules first."""
    first = ("kernel_temporaries", "attention", "cudnn", "deterministic", "work")
    names = [f"test_{name}" for name in first]
    names += sorted(path.stem for path in (ROOT / "tests/prediction").glob("test_*.py"))
    return {name: (ROOT / f"tests/prediction/{name}.py").read_text() for name in dict.fromkeys(names)}


def _test_of(op: str) -> str:
    """The first that names the op, or calls the function of its name."""
    for named in (rf"aten\.{op}\b", rf"\.{op.lstrip('_').removesuffix('_backward')}\("):
        for name, text in _tests().items():
            if re.search(named, text):
                return name
    return ""


def _facts(entry: Mapping[str, Any]) -> Iterator[str]:
    for fact in registry.OpFacts.__dataclass_fields__:
        value = entry.get(fact)
        if value is None:
            continue
        if callable(value) or value is True:
            yield fact
        elif value is False:
            yield f"not {fact}"
        elif fact == "dtypes":
            yield "dtypes of products"
        else:
            yield f"{fact} {' '.join(value) if fact in ('same_dtype', 'reuses_first') else value}"


def _sources(entry: Mapping[str, Any]) -> list[str]:
    """The files of ATen that the docstrings of the op's rules name."""
    rules = [getattr(value, "func", value) for value in entry.values() if callable(value)]
    return sorted({file for rule in rules for file in _SOURCE.findall(rule.__doc__ or "")})


def ops_without_entry() -> str:
    """Those of the corpus of which nothing is known."""
    used = stored(RESULTS / "ops_used.csv")
    rows = [row for row in used if not registry.is_described(_overload(row["op"]))]
    cells = [(f"`{row['op']}`", row["programs"]) for row in rows]
    about = f"{len(rows)} of the {len(used)} ops that the accuracy Workloads call, and by how many:"
    return f"{about}\n\n{_table('op | programs', cells, 1)}"


def _overload(name: str) -> OpOverload:
    namespace, op, overload = name.split(".")
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), op), overload)
    return found


def compiled() -> str:
    rows = [
        (row["case"], *_predicted_and_measured(row), percent(row["allocated_error_percent"]))
        for row in stored(RESULTS / "compiled.csv")
    ]
    return _table("case | predicted | measured | error", rows, 3)


def _predicted_and_measured(row: Mapping[str, str]) -> tuple[str, str]:
    return mib(row["predicted_allocated"]), mib(row["measured_allocated"])


def ranks_measured() -> str:
    rows = [
        (
            row["run"],
            *_predicted_and_measured(row),
            *(percent(row[f"{kind}_error_percent"]) for kind in ("allocated", "reserved")),
        )
        for row in stored(RESULTS / "ranks_h200.csv")
    ]
    return _table("run | predicted | measured | error | error of reserved", rows, 4)


def launch_lines() -> str:
    """Lines of documentations: how many are predicted, by framework."""
    rows = stored(RESULTS / "launch_lines.csv")
    counts: dict[str, list[bool]] = {}
    for row in rows:
        counts.setdefault(row["framework"], []).append(row["outcome"] == "predicted")
    each = ", ".join(f"{name} {sum(found)} of {len(found)}" for name, found in counts.items())
    done = sum(map(sum, counts.values()))
    return (
        f"Of {len(rows)} lines from documentations, with small local models in place of names on the hub, "
        f"{done} are predicted: {each} (`benchmarks/results/launch_lines.csv`)."
    )


Tables = Mapping[str, Callable[[], str]]
FILES: Mapping[str, Tables] = {
    "README.md": {"evidence": evidence, "systems": systems},
    "docs/accuracy.md": {
        "accuracy": accuracy,
        "fixes": fixes,
        "public": public,
        "intervals": intervals,
        "speed": speed,
    },
    "docs/predict.md": {"launch lines": launch_lines},
    "docs/many_gpus.md": {"ranks": ranks_simulated, "ranks measured": ranks_measured},
    "docs/torch_compile.md": {"compiled": compiled},
    "docs/rules.md": {"rules": rules, "without entry": ops_without_entry},
    "docs/ops.md": {"losses": losses, "other ops": other_ops},
    "lab/docs/systems.md": {"systems": systems, "races": races, "held out": held_out},
    **{
        f"lab/docs/report_{system.report}.md": {
            name: partial(peaks, name),
            f"failed {name}": partial(failed, name),
            f"commands {name}": partial(commands, name),
            f"story {name}": partial(story, name),
            f"claims of {name}": partial(claims, name),
            f"audit {name}": partial(audit, name),
            **({"solutions": solutions} if name == "ginr" else {}),
        }
        for name, system in REGISTRY.items()
    },
    "lab/docs/training.md": {"training": training, "overhead": overhead, "long context": long_context},
}


def replaced(text: str, tables: Tables) -> str:
    """The text with its tables anew."""
    for name, table in tables.items():
        found = re.search(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", text, re.DOTALL)
        assert found, name
        text = f"{text[: found.start()]}{table()}\n{text[found.end() :]}"
    return text


def main() -> None:
    for name, tables in FILES.items():
        path = ROOT / name
        path.write_text(replaced(path.read_text(), tables))


if __name__ == "__main__":
    main()
