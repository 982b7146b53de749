"""Are all fixes found that apply? On models of Hugging Face, timm and diffusers, and hand-written ones.

python -m benchmarks.fixes.breadth [names...] [--out F]     # results/fit_breadth.csv; eight minutes

What is expected is written here, by what a model and its step are; what applies is what `oomph fit` would
estimate: it is proposed, and the model takes it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.rows import chosen, stored, write

# What is expected of a model or a step: the letter in CASES, the reason, and the fixes.
EXPECTED = {
    "C": ("it has a list of blocks", ("activation_checkpointing", "activation_offloading")),
    "D": ("it has two blocks, of which one stays on the GPU", ("activation_checkpointing",)),
    "L": ("a linear layer over a vocabulary feeds a cross-entropy", ("fused_linear_cross_entropy",)),
    "M": ("its MLPs are modules of two or three matrices, without dropout", ("tiled_mlp",)),
    "A": ("its attention is eager, without dropout or a cap, as sdpa computes it", ("attn_implementation",)),
    "F": ("its own code computes softmax(q k^T) v", ("fused_attention",)),
    "B": ("the batch has several samples, and no layer mixes them", ("micro_batches",)),
    "U": ("torch has a fused kernel for the optimizer", ("fused_optimizer",)),
    "O": ("an optimizer of torch steps after every backward pass", ("optimizer_in_backward",)),
    "H": ("the optimizer's state is large, and of torch", ("optimizer_cpu_offload",)),
    "P": ("parameters are float32", ("bf16_parameters", "optimizer_8bit")),
}
# Workloads of the accuracy benchmark, and what is expected of each.
CASES = {
    "gpt2-fp32": "CLBUOHP",
    "gpt2-eager-attn": "CLBUOH",
    "pythia70m": "CLMBUOH",
    "llama1b-bf16": "CLMBUOH",
    "llama-eager-4096": "CLMAUOH",
    "mistral-sliding": "CLMBUOH",
    "gemma2-eager": "CLMBUOH",
    "gemma3-text": "CLMBUOH",
    "phi-autocast": "CLMBUOHP",
    "bloom-alibi": "CLBUOH",
    "opt-fp16": "CLBUOH",
    "qwen3-moe": "CLBUOH",
    "mixtral-eager-experts": "CLBUOH",
    "bert-mlm-fp32": "CLBUOHP",
    "albert-shared-layers": "LBUOHP",
    "deberta-v2": "CLBUOHP",
    "t5-small": "CLBUOHP",
    "vit-b16-autocast": "CBUOHP",
    "swin-tiny": "CBUOH",
    "convnext-tiny": "CBUOH",
    "clip": "CMBUOH",
    "whisper-tiny": "CLBUOH",
    "held-qwen2-amsgrad": "CLMBUH",
    "held-falcon-multi-query": "CLMBUOH",
    "held-gemma-vocabulary": "CLMBO",
    "held-bart-translate": "CLBO",
    "nanogpt-autocast": "CLMBUOHP",
    "bias-attention-fp32": "CLMBUOHP",
    "transformer-encoder": "CBUOHP",
    "attention_matrix": "CLFBUOHP",
    "timm:vit_small_patch16_224": "CMBUOHP",
    "diffusers:DiTTransformer2DModel": "DBUOHP",
}


@dataclass(frozen=True)
class Row:
    architecture: str
    applies: str  # fixes that are proposed, and that the model takes
    expected: str  # with the reason
    missing: str
    refused: str  # proposed, and refused by the model


def target_of(name: str) -> Any:
    import torch

    import oomph
    from benchmarks.accuracy import architectures
    from benchmarks.accuracy.workloads import ALL

    library, _, model = name.rpartition(":")
    if name == "attention_matrix":
        return attention_matrix()
    if not library:
        return ALL[name].target
    case = architectures.Case(library, model)

    def batch(device: Any) -> Any:
        built = architectures.build(case, "")
        made = architectures.batch(case, built, architectures.Variant(labels=library != "diffusers"))
        return {key: each.to(device) if hasattr(each, "to") else each for key, each in made.items()}

    def loss(model: Any, batch: Any) -> Any:
        labels = batch.pop("labels", None) if isinstance(batch, dict) else None
        out = model(*batch.values()) if library == "timm" else model(**batch)
        out = out if isinstance(out, torch.Tensor) else out[0]
        return out.float().mean() if labels is None else torch.nn.functional.cross_entropy(out, labels)

    return oomph.Workload(partial(architectures.build, case, ""), batch, loss)


def attention_matrix() -> Any:
    """A decoder whose attention is written out."""
    import torch
    from torch import nn

    import oomph

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out, self.norm = nn.Linear(256, 768), nn.Linear(256, 256), nn.LayerNorm(256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, t, d = x.shape
            q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
            scores = (q @ k.transpose(-2, -1)) * 64**-0.5
            future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
            weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
            return x + self.out((weights @ v).transpose(1, 2).reshape(b, t, d))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8000, 256)
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.head = nn.Linear(256, 8000, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids)
            for block in self.blocks:
                x = block(x)
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    def batch(device: Any) -> Any:
        return {"ids": torch.zeros(4, 2048, dtype=torch.int64, device=device)}

    return oomph.Workload(Decoder, batch, lambda model, batch: model(**batch))


def judged(name: str) -> Row:
    from oomph import gpus
    from oomph.fixes.application import apply
    from oomph.fixes.registry import FixContext, all_fixes
    from oomph.prediction import fake_model, predict
    from oomph.prediction.isolation import run_isolated

    workload = target_of(name)

    def found(progress: Any) -> dict[str, str]:
        """The proposed fixes, each with why the model refuses it."""
        prediction = predict(workload, gpu=gpus.find("h200"))
        context = FixContext(prediction, workload)
        proposed = {one.fix: one for fix in all_fixes() for one in fix.proposals(context)}
        refused = {}
        for fix, one in proposed.items():
            try:
                fake_model(apply(one, workload))
                refused[fix] = ""
            except Exception as error:
                refused[fix] = str(error).splitlines()[0]
        return refused

    proposed = run_isolated(found, lambda text, fraction: None)
    applies = [fix for fix, why in proposed.items() if not why]
    return compared(name, applies, "; ".join(f"{fix}: {why}" for fix, why in proposed.items() if why))


def compared(name: str, applies: list[str], refused: str) -> Row:
    expected = [EXPECTED[letter] for letter in CASES[name]]
    wanted = [fix for _, fixes in expected for fix in fixes]
    reasons = "; ".join(f"{' '.join(fixes)}: {why}" for why, fixes in expected)
    missing = " ".join(fix for fix in wanted if fix not in applies)
    return Row(name, " ".join(applies), reasons, missing, refused)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="architectures (default: all)")
    parser.add_argument("--out", type=Path, default=RESULTS / "fit_breadth.csv")
    given = parser.parse_args()
    rows = {
        name: compared(name, row["applies"].split(), row["refused"])
        for row in stored(given.out)
        if (name := row["architecture"]) in CASES
    }
    for name in chosen(given.names, CASES, "architecture"):
        rows[name] = judged(name)
        print(f"{name:32} missing: {rows[name].missing or 'none'}  applies: {rows[name].applies}", flush=True)
        write(given.out, [rows[name] for name in CASES if name in rows])
    missing = [name for name, row in rows.items() if row.missing]
    print(f"{len(rows) - len(missing)} of {len(rows)} with all fixes that are expected; {', '.join(missing)}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
