"""GPT-2 from scratch in a plain loop: oomph predict examples/train.py --gpu rtx3090 -- --batch-size 16"""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--length", type=int, default=1024)
args = parser.parse_args()

config = GPT2Config()
tokens = torch.randint(0, config.vocab_size, (1024, args.length))
model = GPT2LMHeadModel(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

for step, (batch,) in enumerate(DataLoader(TensorDataset(tokens), args.batch_size, shuffle=True)):
    batch = batch.cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
