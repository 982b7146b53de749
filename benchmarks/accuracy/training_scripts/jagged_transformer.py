"""A transformer on sequences of different lengths, as a jagged nested tensor without padding."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, LAYERS, VOCABULARY = 768, 12, 8, 16000


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, [HEADS, WIDTH // HEADS]).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attention = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = x + self.out(attention)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
model = nn.ModuleList([embedding, *(Block() for _ in range(LAYERS)), head]).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
lengths = [97 * (1 + index % 11) for index in range(16)]
for step in range(5):
    sentences = [torch.randint(0, VOCABULARY, (length,)) for length in lengths]
    tokens = torch.nested.nested_tensor(sentences, layout=torch.jagged, device="cuda")
    x = tokens
    for module in model:
        x = module(x)
    loss = F.cross_entropy(x.values(), tokens.values())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
