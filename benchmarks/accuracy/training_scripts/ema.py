"""An MLP-Mixer with a moving average of its weights, evaluated and saved."""

import copy

import torch
from torch import nn


class MixerBlock(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, dim=768, depth=8, patch=16, size=224):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, stride=patch)
        self.blocks = nn.Sequential(*[MixerBlock((size // patch) ** 2, dim) for _ in range(depth)])
        self.head = nn.Linear(dim, 1000)

    def forward(self, x):
        return self.head(self.blocks(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


def update(average, model, decay=0.999):
    with torch.no_grad():
        for a, p in zip(average.state_dict().values(), model.state_dict().values()):
            a.mul_(decay).add_(p, alpha=1 - decay)


model = Mixer().cuda()
average = copy.deepcopy(model).requires_grad_(False).eval()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
for step in range(8):
    images, labels = torch.randn(64, 3, 224, 224).cuda(), torch.randint(1000, (64,)).cuda()
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    update(average, model)
    if step % 4 == 0:
        with torch.no_grad():
            print(step, loss.item(), (average(images).argmax(-1) == labels).float().mean().item())
        torch.save(average.state_dict(), "average.pt")
average.load_state_dict(torch.load("average.pt", map_location="cuda"))
