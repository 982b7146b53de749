"""A physics-informed network fitted with L-BFGS; its loss holds second derivatives."""

import torch
from torch import nn

torch.manual_seed(0)
device = torch.device("cuda")
net = nn.Sequential(
    nn.Linear(2, 512),
    nn.Tanh(),
    nn.Linear(512, 512),
    nn.Tanh(),
    nn.Linear(512, 512),
    nn.Tanh(),
    nn.Linear(512, 1),
).to(device)
inside = torch.rand(40000, 2, device=device, requires_grad=True)
boundary = torch.rand(4000, 2, device=device)
optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4, history_size=20)


def closure():
    optimizer.zero_grad()
    u = net(inside)
    du = torch.autograd.grad(u.sum(), inside, create_graph=True)[0]
    d2u = torch.autograd.grad(du[:, 0].sum(), inside, create_graph=True)[0][:, 0]
    residual = du[:, 1] - 0.1 * d2u + u[:, 0] * du[:, 0]
    loss = residual.pow(2).mean() + net(boundary).pow(2).mean()
    loss.backward()
    return loss


for step in range(8):
    loss = optimizer.step(closure)
    print(step, loss.item())
