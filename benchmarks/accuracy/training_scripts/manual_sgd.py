"""Gradient descent written out, without an optimizer object."""

import torch
import torch.nn.functional as F

sizes, lr = [2048, 8192, 8192, 1000], 1e-3
weights = [torch.randn(o, i, device="cuda").mul_(i**-0.5).requires_grad_() for i, o in zip(sizes, sizes[1:])]
biases = [torch.zeros(o, device="cuda", requires_grad=True) for o in sizes[1:]]
for step in range(6):
    x, y = torch.randn(4096, sizes[0]).cuda(), torch.randint(0, sizes[-1], (4096,)).cuda()
    for i, (w, b) in enumerate(zip(weights, biases)):
        x = F.linear(x, w, b)
        if i < len(weights) - 1:
            x = torch.relu(x)
    loss = F.cross_entropy(x, y)
    loss.backward()
    with torch.no_grad():
        for p in weights + biases:
            p -= lr * p.grad
            p.grad = None
    print(step, loss.item())
