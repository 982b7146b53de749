"""Every system's error on held-out data before and after training, on the CPU.

python -m lab.benchmarks.training.held_out [OUT.csv]     # minutes: results/held_out.csv

The tiny configs as they are; three decoders of report 004, over three seeds; and NPT on a base that was
trained before, over three seeds: a Llama of 64 features that learns the Python standard library first, so
that its layers compute something. Its tokenizer is saved beside it, as in a Hugging Face folder.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.rows import write

from lab.benchmarks import CONFIGS, RESULTS
from oomph_lab.training.config import OutputConfig, TrainConfig, load, load_dict
from oomph_lab.training.data import open_data
from oomph_lab.training.metrics import read_metrics
from oomph_lab.training.run import train

SEEDS = (0, 1, 2)
METRICS = ("loss", "perplexity", "psnr", "matching", "base_perplexity")
PRETRAINED = "npt on a trained base"
DECODERS = ("self", "feedforward", "residual")
ALWAYS = {"eval_at_start": "true", "save": "false", "device": "cpu"}
MODEL = {"rank": 16, "modulation_scale": 1.0, "regularization": 1e-4}
BASE_STEPS, STEPS, LENGTH, VOCABULARY = 800, 150, 64, 512


def train_base(folder: Path, steps: int = BASE_STEPS, source: str = "stdlib") -> float:
    """Train a tiny Llama on text, and save weights and tokenizer. Returns the last loss."""
    import transformers

    config = load_dict(
        {
            "system": "longctx",
            "model": {"preset": "tiny", "vocab_size": VOCABULARY},
            "data": {"source": source, "seq_len": LENGTH, "batch_size": 16, "workers": 0},
            "training": {"steps": 1},
        },
        "base",
    )
    data = open_data(config, folder)
    assert data.tokenizer is not None
    shape = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=data.tokenizer.sos,
        eos_token_id=data.tokenizer.eos,
        pad_token_id=data.tokenizer.pad,
    )
    model = transformers.LlamaForCausalLM(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    losses = []
    for _, batch in zip(range(steps), data.train, strict=False):
        loss = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    data.train.close()
    model.save_pretrained(folder)
    return statistics.mean(losses[-max(1, steps // 20) :])


def decoder(mixing: str, seed: int) -> TrainConfig:
    """Report 004's model in miniature: 8 x 8 pixels, batch 16, 200 steps."""
    training = {**ALWAYS, "steps": 200, "seed": seed, "eval_every": "null", "eval_batches": 8}
    changes = [f"model.query_mixing={mixing}", "data.batch_size=16"]
    return load(
        CONFIGS / "ginr_tiny.yaml", changes + [f"training.{key}={value}" for key, value in training.items()]
    )


def pretrained_npt(base: Path, seed: int) -> TrainConfig:
    return load_dict(
        {
            "system": "npt",
            "model": {"preset": "tiny", "weights": str(base), **MODEL},
            "data": {"seq_len": LENGTH, "batch_size": 8, "workers": 0},
            "optimizer": {"learning_rate": 1e-2},
            "training": {
                "steps": STEPS,
                "schedule": "cosine",
                "warmup": 20,
                "seed": seed,
                "eval_every": None,
                "eval_batches": 30,
                "eval_at_start": True,
                "save": False,
                "device": "cpu",
            },
        },
        "npt",
    )


def before_and_after(name: str, config: TrainConfig, folder: Path) -> list[dict[str, Any]]:
    """A row for each metric of the evaluations."""
    train(replace(config, output=OutputConfig(dir=str(folder))))
    found = read_metrics(folder / "metrics.jsonl", "evaluation")
    rows = []
    for metric in METRICS:
        if metric in found[0]:
            values = {"before": found[0][metric], "after": found[-1][metric]}
            seed, steps = config.training.seed, found[-1]["step"]
            rows.append({"run": name, "seed": seed, "steps": steps, "metric": metric, **values})
            print(rows[-1], flush=True)
    return rows


def main(out: Path) -> int:
    torch.manual_seed(0)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for file in sorted(CONFIGS.glob("*_tiny.yaml")):
            config = load(file, [f"training.{key}={value}" for key, value in ALWAYS.items()])
            rows += before_and_after(file.stem, config, Path(folder) / file.stem)
        for mixing, seed in itertools.product(DECODERS, SEEDS):
            run_folder = Path(folder) / f"{mixing}_{seed}"
            rows += before_and_after(f"ginr_tiny {mixing}", decoder(mixing, seed), run_folder)
        base = Path(folder) / "base"
        print(f"base: loss {train_base(base):.3f} after {BASE_STEPS} steps", flush=True)
        for seed in SEEDS:
            rows += before_and_after(PRETRAINED, pretrained_npt(base, seed), Path(folder) / f"seed_{seed}")
    write(out, [{key: _rounded(value) for key, value in row.items()} for row in rows])
    return 0


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "held_out.csv"))
