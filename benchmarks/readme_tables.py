"""Puts the committed rows into the README's two tables: `python benchmarks/readme_tables.py`."""

from __future__ import annotations

import csv
import re
import statistics
from pathlib import Path

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
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
    rows = list(csv.DictReader((HERE / "results/accuracy.csv").open()))
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
            f"- {len(chosen)} workloads {title}: allocated median {_median(allocated):.2f} %, worst "
            f"{_worst(allocated):+.2f} %, lowest {min(allocated):+.2f} %; reserved median "
            f"{_median(reserved):.2f} %, worst {_worst(reserved):+.2f} %"
        )
    return "\n".join(lines)


def _median(errors: list[float]) -> float:
    return statistics.median(map(abs, errors))


def _worst(errors: list[float]) -> float:
    return max(errors, key=abs)


def speed() -> str:
    lines = ["| step | time | host memory |", "|---|---:|---:|"]
    for row in csv.DictReader((HERE / "results/speed.csv").open()):
        lines.append(f"| {SPEED[row['case']]} | {float(row['seconds']):.1f} s | {row['host_gib']} GiB |")
    return "\n".join(lines)


def main() -> None:
    text = README.read_text()
    for name, table in (("accuracy", accuracy()), ("speed", speed())):
        pattern = rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)"
        assert re.search(pattern, text, re.DOTALL), name
        text = re.sub(pattern, lambda found, table=table: found[1] + table + found[2], text, flags=re.DOTALL)
    README.write_text(text)


if __name__ == "__main__":
    main()
