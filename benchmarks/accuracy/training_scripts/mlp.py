"""A multilayer perceptron on random features."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=4096)
parser.add_argument("--batch-size", type=int, default=8192)
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data = TensorDataset(torch.randn(65536, 512), torch.randint(0, 100, (65536,)))
loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, pin_memory=True)
model = nn.Sequential(
    nn.Linear(512, args.width),
    nn.ReLU(),
    nn.Dropout(0.1),
    nn.Linear(args.width, args.width),
    nn.ReLU(),
    nn.Dropout(0.1),
    nn.Linear(args.width, 100),
).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()

for epoch in range(args.epochs):
    total = 0.0
    for inputs, targets in loader:
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: loss {total / len(loader):.4f}")
