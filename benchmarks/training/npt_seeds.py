"""NPT on a base that was trained before: matching error and perplexity on held-out text, over three seeds.

python -m benchmarks.training.npt_seeds [OUT.csv]     # on the CPU, minutes: results/npt_seeds.csv

The base is a Llama of 64 features that learns the Python standard library first, so that its layers compute
something; its tokenizer is saved beside it, as in a Hugging Face folder.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks import RESULTS
from oomph.training.config import load_dict
from oomph.training.data import open_data
from oomph.training.run import train

SEEDS = (0, 1, 2)
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


def of_seed(base: Path, seed: int, folder: Path) -> dict[str, float]:
    config = load_dict(
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
                "save": False,
                "eval_every": None,
                "eval_at_start": True,
                "eval_batches": 30,
                "device": "cpu",
            },
            "output": {"dir": str(folder)},
        },
        "npt",
    )
    train(config)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    before, *_, after = [row for row in rows if "matching" in row]
    return {
        "seed": seed,
        "matching_before": before["matching"],
        "matching_after": after["matching"],
        "perplexity_before": before["perplexity"],
        "perplexity_after": after["perplexity"],
        "base_perplexity": after["base_perplexity"],
    }


def main(out: Path) -> int:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        print(f"base: loss {train_base(base):.3f} after {BASE_STEPS} steps", flush=True)
        rows = []
        for seed in SEEDS:
            rows.append({"steps": STEPS, **of_seed(base, seed, Path(folder) / f"seed_{seed}")})
            print(rows[-1], flush=True)
    fall = [row["matching_before"] - row["matching_after"] for row in rows]
    after = [row["matching_after"] for row in rows]
    spread = max(after) - min(after)
    print(f"matching falls by {min(fall):.4g} at least; it differs by {spread:.2g} between seeds")
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: float(f"{value:.6g}") for key, value in row.items()} for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "npt_seeds.csv"))
