"""A bf16 GPT-2 with torchao's 8-bit AdamW."""

import torch
from torchao.optim import AdamW8bit
from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config(n_embd=1024, n_layer=24, n_head=16)
model = GPT2LMHeadModel(config).to("cuda", torch.bfloat16)
optimizer = AdamW8bit(model.parameters(), lr=1e-4)
for step in range(5):
    tokens = torch.randint(0, config.vocab_size, (4, 512), device="cuda")
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
