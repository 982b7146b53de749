"""Fine-tune GPT-2 on a 24 GB consumer GPU: does it fit?

oomph predict examples/gpt2.py:workload --gpu rtx3090
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from oomph import Workload


def batch(device: torch.device, B: int, T: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 50257, (B, T), device=device)
    return {"input_ids": ids, "labels": ids}


workload = Workload(
    model=lambda: GPT2LMHeadModel(GPT2Config()),
    batch=batch,
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
    autocast="bfloat16",
    sizes={"B": 16, "T": 1024},
)
