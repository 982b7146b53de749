"""float8 training with torchao: the MLPs of a bf16 transformer, dynamic scaling."""

import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

WIDTH, LAYERS = 2048, 8


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


model = nn.Sequential(*(MLP() for _ in range(LAYERS)), nn.Linear(WIDTH, 10)).to("cuda", torch.bfloat16)
convert_to_float8_training(model, module_filter_fn=lambda module, name: module.out_features != 10)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(5):
    x = torch.randn(8192, WIDTH, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, 10, (8192,), device="cuda")
    loss = nn.functional.cross_entropy(model(x), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
