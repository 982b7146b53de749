"""Hugging Face's Qwen3-4B (SDPA, gradient checkpointing, AdamW in bf16) at a context that fits in 80 GiB.

python benchmarks/longctx_peer.py [TOKENS]     # on a GPU: results/longctx_peer_<gpu>.json

In 23 GiB it fits at no context: weights, gradients and AdamW's averages alone are 30 GiB.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

import torch  # noqa: E402
from system_entries import language  # noqa: E402
from system_races import qwen3  # noqa: E402

import oomph  # noqa: E402
from oomph.models import longctx  # noqa: E402

LIMIT = 80 * 2**30
SIZE = longctx.PRESETS["qwen3-4B"]


def theirs(tokens: int) -> oomph.Workload:
    def build() -> torch.nn.Module:
        model = qwen3(SIZE, tokens)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    return language(build, SIZE.vocab_size, 1, tokens, dtype="bfloat16")


def main() -> int:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 20_480
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, LIMIT / total))
    found = oomph.measure(theirs(tokens), steps=3)
    row = {
        "tokens": tokens,
        "gpu": found.gpu_title,
        "torch": found.torch,
        "measured_mib": round(found.peak.allocated / 2**20, 1),
        "reserved_mib": round(found.peak.reserved / 2**20, 1),
        "tokens_per_second": round(tokens / found.seconds_per_step, 1),
    }
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else HERE / "results" / "longctx_peer_h200.json"
    out.write_text(json.dumps(row, indent=1) + "\n")
    print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
