"""An ordinary training script: oomph predict examples/script.py --gpu rtx3090 -- --batch-size 32"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()

device = torch.device("cuda")
images, labels = torch.randn(4096, 3, 64, 64), torch.randint(0, 10, (4096,))
loader = DataLoader(TensorDataset(images, labels), args.batch_size, shuffle=True, num_workers=2)
layers: list[nn.Module] = []
for inputs, outputs in ((3, 64), (64, 128), (128, 256)):
    layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for epoch in range(args.epochs):
    for x, y in loader:
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.3f}")
    torch.save(model.state_dict(), "model.pt")
