"""ResNet-50 from torchvision on random images."""

import argparse
import time

import torch
from torchvision import models

parser = argparse.ArgumentParser()
parser.add_argument("--arch", default="resnet50")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--channels-last", action="store_true")
args = parser.parse_args()

model = getattr(models, args.arch)(num_classes=1000).cuda()
images = torch.randn(args.batch_size, 3, 224, 224, device="cuda")
if args.channels_last:
    model = model.to(memory_format=torch.channels_last)
    images = images.to(memory_format=torch.channels_last)
labels = torch.randint(0, 1000, (args.batch_size,), device="cuda")
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)

for step in range(args.steps):
    start = time.time()
    loss = criterion(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    print(f"{step} loss {loss.item():.3f} {args.batch_size / (time.time() - start):.0f} images/s")
