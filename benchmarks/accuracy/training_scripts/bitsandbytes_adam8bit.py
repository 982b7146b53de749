"""A float32 transformer under bf16 autocast with bitsandbytes' 8-bit Adam."""

import bitsandbytes as bnb
import torch
from torch import nn

WIDTH = 1024
layer = nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
model = nn.Sequential(
    nn.Embedding(16000, WIDTH), nn.TransformerEncoder(layer, 12), nn.Linear(WIDTH, 16000)
).cuda()
optimizer = bnb.optim.Adam8bit(model.parameters(), lr=1e-4)
for step in range(5):
    tokens = torch.randint(0, 16000, (8, 512), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item())
