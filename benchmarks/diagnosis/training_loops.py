"""Planted programs: training loops with one mistake each. `# cause:` marks the line and names the pattern."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


def mlp(width=1024, layers=4, outputs=16):
    hidden = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, outputs)).cuda()


def pairwise_distances():
    model = mlp(outputs=128)
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        z = model(torch.randn(1024, 1024, device="cuda"))
        distances = ((z[:, None, :] - z[None, :, :]) ** 2).sum(-1)  # cause: broadcast product
        loss = torch.exp(-distances).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def matmul_by_broadcasting():
    weight = nn.Parameter(torch.randn(512, 2048, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step():
        x = torch.randn(256, 512, device="cuda")
        y = (x.unsqueeze(2) * weight.unsqueeze(0)).sum(1)  # cause: broadcast product
        y.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def data_set_on_gpu():
    images = torch.randn(60_000, 3, 32, 32).cuda()  # cause: data set on the GPU
    labels = torch.randint(10, (60_000,)).cuda()
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 30 * 30, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        index = torch.randint(60_000, (64,), device="cuda")
        F.cross_entropy(model(images[index]), labels[index]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def all_batches_moved_first():
    batches = [torch.randn(128, 1024).to("cuda") for _ in range(500)]  # cause: data set on the GPU
    model = mlp(layers=2)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches[:4]:
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def outputs_kept_for_metrics():
    model = mlp(outputs=4096)
    optimizer = torch.optim.AdamW(model.parameters())
    outputs = []

    def step():
        out = model(torch.randn(8192, 1024, device="cuda"))
        loss = out.pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(out)  # cause: growing list

    return step


def predictions_concatenated():
    model = mlp(outputs=4096)
    optimizer = torch.optim.AdamW(model.parameters())
    seen = torch.empty(0, 4096, device="cuda")

    def step():
        nonlocal seen
        out = model(torch.randn(8192, 1024, device="cuda"))
        out.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen = torch.cat([seen, out.detach()])  # cause: growing list

    return step


class Meter:
    def __init__(self):
        self.history = {"features": []}

    def update(self, features):
        self.history["features"].append(features.detach())  # cause: growing list


def meter_that_keeps_features():
    model, meter = mlp(outputs=4096), Meter()
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        out = model(torch.randn(8192, 1024, device="cuda"))
        out.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.update(out)

    return step


def loss_summed_over_batches():
    model = mlp(layers=6)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        total = 0
        for _ in range(16):
            x = torch.randn(4096, 1024, device="cuda")
            total += model(x).pow(2).mean()  # cause: retained graph
        total.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def running_loss_with_retain_graph():
    model = mlp(layers=6)
    optimizer = torch.optim.AdamW(model.parameters())
    running = torch.zeros((), device="cuda")

    def step():
        nonlocal running
        loss = model(torch.randn(8192, 1024, device="cuda")).pow(2).mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        running = running + loss  # cause: retained graph

    return step


def evaluation_with_gradients():
    model = mlp(layers=12)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(256, 1024, device="cuda")).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        correct = 0
        for _ in range(4):
            out = model(torch.randn(16_384, 1024, device="cuda"))  # cause: evaluation without no_grad
            correct += (out.argmax(-1) == 0).sum()
        model.train()


def validation_loss_accumulated():
    model = mlp(layers=8)
    total = 0.0
    for _ in range(5):
        x = torch.randn(8192, 1024, device="cuda")
        total = total + model(x).pow(2).mean()  # cause: evaluation without no_grad


def recurrence_by_hand():
    cell, head = nn.GRUCell(256, 512).cuda(), nn.Linear(512, 1).cuda()
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()])

    def step():
        x = torch.randn(256, 60, 256, device="cuda")
        state = torch.zeros(256, 512, device="cuda")
        for t in range(60):
            state = cell(x[:, t], state)  # cause: loop kept by autograd
        head(state).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def simulation_unrolled():
    drag = nn.Parameter(torch.zeros(1, device="cuda"))
    optimizer = torch.optim.Adam([drag])

    def step():
        position = torch.randn(1_000_000, 3, device="cuda")
        velocity = torch.randn(1_000_000, 3, device="cuda")
        for _ in range(50):
            velocity = velocity - 0.01 * drag.exp() * velocity  # cause: loop kept by autograd
            position = position + 0.01 * velocity
        position.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def average_of_the_weights():
    model = mlp(width=4096, layers=4)
    average = copy.deepcopy(model).requires_grad_(False)  # cause: second copy of the weights
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    def step():
        model(torch.randn(64, 4096, device="cuda")).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.01)

    return step


def reference_model():
    policy = mlp(width=4096, layers=4)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)  # cause: second copy of the weights
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1, fused=True)

    def step():
        x = torch.randn(64, 4096, device="cuda")
        with torch.no_grad():
            wanted = reference(x)
        F.mse_loss(policy(x), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def best_weights_snapshot():
    model = mlp(width=4096, layers=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    best = {
        name: value.clone() for name, value in model.state_dict().items()
    }  # cause: second copy of the weights

    def step():
        model(torch.randn(64, 4096, device="cuda")).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return best

    return step


def gradients_accumulated_by_hand():
    model = mlp(width=4096, layers=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    sums = [torch.zeros_like(p) for p in model.parameters()]  # cause: second gradient buffer

    def step():
        for _ in range(2):
            model(torch.randn(64, 4096, device="cuda")).pow(2).mean().backward()
            for total, p in zip(sums, model.parameters(), strict=True):
                total += p.grad
        for total, p in zip(sums, model.parameters(), strict=True):
            p.grad.copy_(total)
            total.zero_()
        optimizer.step()

    return step


def sgd_with_weight_decay():
    model = mlp(width=8192, layers=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)

    def step():
        model(torch.randn(16, 8192, device="cuda")).pow(2).mean().backward()
        optimizer.step()  # cause: foreach optimizer temporaries
        optimizer.zero_grad()

    return step


def plain_sgd():
    model = mlp(width=8192, layers=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    def step():
        model(torch.randn(16, 8192, device="cuda")).pow(2).mean().backward()  # cause: gradients
        optimizer.step()
        optimizer.zero_grad()

    return step


class HostTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(256, 256)
        self.table = torch.randn(200_000, 256)  # not a buffer: it stays on the host

    def forward(self, ids):
        table = self.table.to(ids.device)  # cause: wrong device
        return self.linear(table[ids])


def table_copied_in_every_forward():
    model = HostTable().cuda()
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        model(torch.randint(200_000, (512,), device="cuda")).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def replay_buffer_on_gpu():
    states = torch.zeros(500_000, 512, device="cuda")  # cause: wrong device
    model = mlp(width=512, layers=2)
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        states[:64] = torch.randn(64, 512, device="cuda")
        model(states[torch.randint(500_000, (64,), device="cuda")]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def segmentation_logits():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 150, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        images = torch.randn(8, 3, 512, 512, device="cuda")
        labels = torch.randint(150, (8, 512, 512), device="cuda")
        F.cross_entropy(model(images), labels).backward()  # cause: logits
        optimizer.step()
        optimizer.zero_grad()

    return step
