"""WGAN with a gradient penalty: five critic steps for each step of the generator."""

import argparse

import torch
from torch import autograd, nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=2048)
parser.add_argument("--n_critic", type=int, default=5)
parser.add_argument("--lambda_gp", type=float, default=10)
opt = parser.parse_args()
cuda = torch.cuda.is_available()
Tensor = torch.cuda.FloatTensor if cuda else torch.FloatTensor

generator = nn.Sequential(
    nn.Linear(128, 1024), nn.LeakyReLU(0.2), nn.Linear(1024, 4096), nn.LayerNorm(4096), nn.LeakyReLU(0.2),
    nn.Linear(4096, 4096), nn.LeakyReLU(0.2), nn.Linear(4096, 3072), nn.Tanh(),
)  # fmt: skip
critic = nn.Sequential(
    nn.Linear(3072, 4096), nn.LeakyReLU(0.2), nn.Linear(4096, 4096), nn.LeakyReLU(0.2), nn.Linear(4096, 1)
)
if cuda:
    generator.cuda()
    critic.cuda()
optimizer_G = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.9))
optimizer_D = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.9))


def gradient_penalty(real, fake):
    alpha = torch.rand(real.size(0), 1, device=real.device)
    between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = critic(between)
    gradients = autograd.grad(
        scores, between, torch.ones_like(scores), create_graph=True, retain_graph=True, only_inputs=True
    )[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


for i in range(100):
    real = torch.randn(opt.batch_size, 3072).type(Tensor)
    optimizer_D.zero_grad()
    fake = generator(Tensor(opt.batch_size, 128).normal_())
    d_loss = -critic(real).mean() + critic(fake).mean()
    d_loss = d_loss + opt.lambda_gp * gradient_penalty(real.data, fake.data)
    d_loss.backward()
    optimizer_D.step()
    if i % opt.n_critic == 0:
        optimizer_G.zero_grad()
        g_loss = -critic(generator(Tensor(opt.batch_size, 128).normal_())).mean()
        g_loss.backward()
        optimizer_G.step()
        print(f"[batch {i}] [D loss: {d_loss.item():f}] [G loss: {g_loss.item():f}]")
