"""A bidirectional GRU that classifies sequences, batch first, with RMSprop."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=512)
parser.add_argument("--length", type=int, default=400)
args = parser.parse_args()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20000, 300)
        self.gru = nn.GRU(300, args.hidden, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(4 * args.hidden, 2)

    def forward(self, x):
        states, _ = self.gru(self.embed(x))
        return self.out(torch.cat([states.mean(1), states.max(1).values], dim=1))


model = Classifier().to("cuda")
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
for step in range(20):
    x = torch.randint(0, 20000, (128, args.length)).cuda()
    y = torch.randint(0, 2, (128,)).cuda()
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
    print(step, loss.item())
