"""A wide residual network in fp16 with a gradient scaler, in channels_last format."""

import argparse

import torch
from torch import nn
from torch.amp import GradScaler, autocast

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=256)
args = parser.parse_args()
torch.backends.cudnn.benchmark = False


class Residual(nn.Module):
    def __init__(self, i, o, stride):
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(i), nn.BatchNorm2d(o)
        self.conv1 = nn.Conv2d(i, o, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(o, o, 3, 1, 1, bias=False)
        self.shortcut = nn.Identity() if i == o else nn.Conv2d(i, o, 1, stride, bias=False)

    def forward(self, x):
        h = torch.relu(self.norm1(x))
        return self.shortcut(h) + self.conv2(torch.relu(self.norm2(self.conv1(h))))


w = 16 * args.width
model = nn.Sequential(
    nn.Conv2d(3, w, 3, padding=1), Residual(w, w, 1), Residual(w, 2 * w, 2), Residual(2 * w, 2 * w, 1),
    Residual(2 * w, 4 * w, 2), Residual(4 * w, 4 * w, 1),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * w, 100),
).to("cuda", memory_format=torch.channels_last)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = GradScaler("cuda")
for step in range(30):
    images = torch.randn(args.batch_size, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(0, 100, (args.batch_size,), device="cuda")
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item(), scaler.get_scale())
