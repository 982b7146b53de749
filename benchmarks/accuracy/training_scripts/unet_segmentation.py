"""U-Net for segmentation, with a dice loss and a validation pass."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class DoubleConv(nn.Sequential):
    def __init__(self, i, o):
        super().__init__(
            nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True),
            nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True),
        )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, classes, widths=(64, 128, 256, 512)):
        super().__init__()
        self.down = nn.ModuleList(DoubleConv(i, o) for i, o in zip((3, *widths), widths))
        self.bottom = DoubleConv(widths[-1], 2 * widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths))
        self.merge = nn.ModuleList(DoubleConv(2 * w, w) for w in reversed(widths))
        self.out = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x):
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips)):
            x = merge(torch.cat([skip, up(x)], dim=1))
        return self.out(x)


def dice_loss(logits, target, classes):
    probabilities = F.softmax(logits, dim=1)
    one_hot = F.one_hot(target, classes).permute(0, 3, 1, 2).float()
    overlap = (probabilities * one_hot).sum((2, 3))
    return 1 - (2 * overlap / ((probabilities + one_hot).sum((2, 3)) + 1e-6)).mean()


parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int, default=256)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--classes", type=int, default=8)
args = parser.parse_args()
model = UNet(args.classes).to("cuda")
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-5, weight_decay=1e-8, momentum=0.99)
for step in range(12):
    images = torch.randn(args.batch, 3, args.size, args.size).to("cuda")
    masks = torch.randint(0, args.classes, (args.batch, args.size, args.size)).to("cuda")
    logits = model(images)
    loss = F.cross_entropy(logits, masks) + dice_loss(logits, masks, args.classes)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 5 == 0:
        model.eval()
        with torch.inference_mode():
            print(step, loss.item(), (model(images).argmax(1) == masks).float().mean().item())
        model.train()
