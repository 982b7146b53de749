"""Puts the committed rows into the tables of the README and of docs/: `python benchmarks/readme_tables.py`.

A table stands between two comments, `<!-- name -->` and `<!-- /name -->`; what is between them is replaced.
"""

from __future__ import annotations

import csv
import re
import statistics
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # also where this file itself is imported from elsewhere

from system_tables import (  # noqa: E402
    RESULTS,
    ROOT,
    SYSTEMS,
    claims,
    long_context,
    median,
    overhead,
    peaks,
    races,
    stored,
    systems,
    training,
    training_in_short,
    worst,
)

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
    "4b-36-layers-131072": "36 layers of a 4B model at 131,072 tokens, checkpointed",
    "llama-8b": "Llama 8B, 1 x 4,096",
}


def accuracy() -> str:
    rows = stored(RESULTS / "accuracy.csv")
    by_name = {row["workload"]: row for row in rows}
    lines = ["| training step | measured | allocated | reserved |", "|---|---:|---:|---:|"]
    for name, about in SHOWN.items():
        row = by_name[name]
        gib = int(row["measured_allocated"]) / 2**30
        lines.append(
            f"| `{name}` {about} | {gib:.2f} GiB | {float(row['allocated_error_percent']):+.2f} % "
            f"| {float(row['reserved_error_percent']):+.2f} % |"
        )
    lines.append("")
    for title, wanted in (("without convolutions", "False"), ("with convolutions", "True")):
        chosen = [row for row in rows if row["convolutions"] == wanted]
        allocated = [float(row["allocated_error_percent"]) for row in chosen]
        reserved = [float(row["reserved_error_percent"]) for row in chosen]
        lines.append(
            f"- {len(chosen)} workloads {title}: allocated median {median(allocated):.2f} %, worst "
            f"{worst(allocated):+.2f} %, lowest {min(allocated):+.2f} %; reserved median "
            f"{median(reserved):.2f} %, worst {worst(reserved):+.2f} %"
        )
    return "\n".join(lines)


def speed() -> str:
    lines = ["| step | time | host memory |", "|---|---:|---:|"]
    for row in stored(RESULTS / "speed.csv"):
        lines.append(f"| {SPEED[row['case']]} | {float(row['seconds']):.1f} s | {row['host_gib']} GiB |")
    return "\n".join(lines)


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
    lines = [
        f"| tokens x width x classes | {' | '.join(LOSSES.values())} |",
        f"|---|{'---:|' * len(LOSSES)}",
    ]
    for shape in SHAPES:
        cells = [_loss_cell(rows.get((shape, name))) for name in LOSSES]
        lines.append(f"| {shape.replace('x', ' x ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _loss_cell(row: dict[str, str] | None) -> str:
    if row is None or not row["ratio_to_limit"]:
        return "-"
    above = float(row["peak_mib"]) - float(row["floor_mib"])
    return f"{float(row['ratio_to_limit']):.2f} / {above:,.0f}"


def other_ops() -> str:
    lines = ["| op | shape | against | time | MiB, ours / theirs |", "|---|---|---|---:|---:|"]
    for op, shape, name, other in PAIRS:
        rows = _op_rows(op)
        ours, theirs = rows[shape, name], rows[shape, other]
        time = float(ours["median_ms"]) / float(theirs["median_ms"])
        label = f"{op}{name.removeprefix('oomph')}"
        lines.append(
            f"| {label} | {shape} | {other} | {time:.{2 if time >= 0.1 else 3}f} x "
            f"| {float(ours['peak_mib']):,.0f} / {float(theirs['peak_mib']):,.0f} |"
        )
    return "\n".join(lines)


FIXES = (
    ("qwen3-bf16", "fused_loss"),
    ("qwen3-bf16", "recompute"),
    ("qwen3-bf16", "fused_loss + recompute"),
    ("qwen3-bf16", "recompute + offload_activations"),
    ("qwen3-bf16", "micro_batches:parts=2"),
    ("llama-bf16", "tiled_mlp"),
    ("llama-bf16", "fused_loss + recompute + tiled_mlp"),
    ("gpt2-eager-autocast", "attention_backend"),
    ("bert-fp32", "autocast"),
    ("vit-autocast", "recompute"),
    ("hand-written-bf16", "fused_attention"),
)


def fixes() -> str:
    """Some of the measured pairs, and how far off the predictions are over all of them."""
    with (HERE / "results/fixes.csv").open(newline="") as file:
        rows = {(row["model"], row["fixes"]): row for row in csv.DictReader(file)}
    lines = ["| model | fixes | peak | predicted | time | predicted |", "|---|---|---:|---:|---:|---:|"]
    for model, name in FIXES:
        row = rows[model, name]
        before, after = float(rows[model, ""]["measured_mib"]), float(row["measured_mib"])
        lines.append(
            f"| {model} | {name} | {before:,.0f} -> {after:,.0f} MiB "
            f"| {float(row['peak_error_percent']):+.2f} % | x{float(row['measured_slowdown']):.2f} "
            f"| x{float(row['predicted_slowdown']):.2f} |"
        )
    pairs = [row for row in rows.values() if row["fixes"]]
    peaks = [abs(float(row["peak_error_percent"])) for row in pairs]
    times = [abs(float(row["slowdown_error_percent"])) for row in pairs]
    near = sum(error <= 25 for error in times)
    lines += [
        "",
        f"- {len(pairs)} pairs of a model and its fixes: peak off by at most {max(peaks):.2f} %; the "
        f"change in time within 25 % on {near}, median {statistics.median(times):.0f} %, "
        f"worst {max(times):.0f} %",
    ]
    return "\n".join(lines)


def _op_rows(op: str) -> dict[tuple[str, str], dict[str, str]]:
    with (HERE / "results/ops_h200.csv").open(newline="") as file:
        return {(row["shape"], row["contender"]): row for row in csv.DictReader(file) if row["op"] == op}


Tables = Mapping[str, Callable[[], str]]
FILES: Mapping[str, Tables] = {
    "README.md": {
        "fixes": fixes,
        "accuracy": accuracy,
        "speed": speed,
        "losses": losses,
        "other ops": other_ops,
        "systems": systems,
        "races": races,
        "training": training_in_short,
        "long context": long_context,
    },
    "docs/systems.md": {
        "systems": systems,
        "races": races,
        **{name: partial(peaks, name) for name, *_ in SYSTEMS},
        **{f"claims of {name}": partial(claims, name) for name, *_ in SYSTEMS},
    },
    "docs/training.md": {"training": training, "overhead": overhead, "long context": long_context},
}


def replaced(text: str, tables: Tables) -> str:
    """The text with its tables anew."""
    for name, table in tables.items():
        found = re.search(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", text, re.DOTALL)
        assert found, name
        made = table()
        text = text[: found.start()] + (f"{made}\n" if made else "") + text[found.end() :]
    return text


def main() -> None:
    for name, tables in FILES.items():
        path = ROOT / name
        path.write_text(replaced(path.read_text(), tables))


if __name__ == "__main__":
    main()
