"""A variational autoencoder with a wide linear encoder and decoder."""

import argparse

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description="VAE example")
parser.add_argument("--batch-size", type=int, default=4096)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--log-interval", type=int, default=2)
args = parser.parse_args()
torch.manual_seed(1)
device = torch.device("cuda")


class VAE(nn.Module):
    def __init__(self, pixels=3072, hidden=4096, latent=256):
        super().__init__()
        self.fc1 = nn.Linear(pixels, hidden)
        self.fc21 = nn.Linear(hidden, latent)
        self.fc22 = nn.Linear(hidden, latent)
        self.fc3 = nn.Linear(latent, hidden)
        self.fc4 = nn.Linear(hidden, pixels)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def forward(self, x):
        mu, logvar = self.encode(x)
        z = self.reparameterize(mu, logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x, reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(torch.rand(12288, 3072), batch_size=args.batch_size, shuffle=True)
for epoch in range(args.epochs):
    for i, batch in enumerate(loader):
        batch = batch.to(device)
        optimizer.zero_grad()
        recon, mu, logvar = model(batch)
        loss = loss_function(recon, batch, mu, logvar)
        loss.backward()
        optimizer.step()
        if i % args.log_interval == 0:
            print(f"epoch {epoch} batch {i}: {loss.item() / len(batch):.2f}")
    with torch.no_grad():
        sample = model.fc4(F.relu(model.fc3(torch.randn(64, 256, device=device)))).cpu()
