"""One Adam for each parameter, stepped as soon as the gradient is accumulated."""

import torch
from torch import nn

model = nn.Sequential(
    nn.Embedding(30000, 1024),
    *[nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True) for _ in range(8)],
    nn.Linear(1024, 30000),
).cuda()
optimizers = {p: torch.optim.Adam([p], lr=1e-4, foreach=False) for p in model.parameters()}


def step_now(p):
    optimizers[p].step()
    optimizers[p].zero_grad()


for p in model.parameters():
    p.register_post_accumulate_grad_hook(step_now)
for step in range(6):
    tokens = torch.randint(0, 30000, (8, 257), device="cuda")
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    print(step, loss.item())
