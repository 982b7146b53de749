"""A timm model with timm's optimizer factory, mixup-like targets and a model average."""

import argparse

import timm
import torch
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="vit_small_patch16_224")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--opt", default="adamw")
args = parser.parse_args()

model = timm.create_model(args.model, pretrained=False, num_classes=1000, drop_path_rate=0.1).to("cuda")
ema = ModelEmaV3(model, decay=0.999)
optimizer = create_optimizer_v2(model, opt=args.opt, lr=1e-3, weight_decay=0.05)
criterion = SoftTargetCrossEntropy()
for step in range(8):
    images = torch.randn(args.batch_size, 3, 224, 224).to("cuda")
    targets = torch.softmax(torch.randn(args.batch_size, 1000), -1).to("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = criterion(model(images), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update(model, step=step)
    print(step, loss.item())
