"""A convolutional autoencoder for denoising, trained with NAdam."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(
    nn.Conv2d(1, 64, 3, stride=2, padding=1), nn.ELU(), nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.ELU(),
    nn.Conv2d(128, 256, 3, stride=2, padding=1), nn.ELU(),
    nn.Upsample(scale_factor=2), nn.Conv2d(256, 128, 3, padding=1), nn.ELU(),
    nn.Upsample(scale_factor=2), nn.Conv2d(128, 64, 3, padding=1), nn.ELU(),
    nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(64, 1, 3, padding=1), nn.Sigmoid(),
).to(device)  # fmt: skip
optimizer = torch.optim.NAdam(model.parameters(), lr=2e-3)
images = torch.rand(256, 1, 128, 128)
for epoch in range(3):
    for batch in images.split(64):
        clean = batch.to(device)
        noisy = (clean + 0.2 * torch.randn_like(clean)).clamp(0, 1)
        loss = nn.functional.mse_loss(model(noisy), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, float(loss))
