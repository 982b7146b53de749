"""Metric learning: one encoder applied to anchor, positive and negative images."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Triplets(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        anchor = torch.randn(3, 64, 64)
        return anchor, anchor + 0.1 * torch.randn(3, 64, 64), torch.randn(3, 64, 64)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 5, padding=2), nn.PReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 5, padding=2), nn.PReLU(), nn.MaxPool2d(2),
            nn.Conv2d(128, 256, 3, padding=1), nn.PReLU(), nn.AdaptiveAvgPool2d(4),
        )  # fmt: skip
        self.fc = nn.Sequential(nn.Linear(256 * 16, 1024), nn.PReLU(), nn.Linear(1024, 128))

    def forward(self, x):
        return nn.functional.normalize(self.fc(self.features(x).flatten(1)))


model = Encoder().cuda()
loss_fn = nn.TripletMarginLoss(margin=0.5)
optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
for epoch in range(2):
    for anchor, positive, negative in DataLoader(Triplets(), batch_size=128):
        a, p, n = model(anchor.cuda()), model(positive.cuda()), model(negative.cuda())
        loss = loss_fn(a, p, n)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.4f}")
