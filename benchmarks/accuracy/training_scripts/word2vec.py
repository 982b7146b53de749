"""Skip-gram word vectors with negative samples."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class SkipGram(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.center = nn.Embedding(vocab, dim)
        self.context = nn.Embedding(vocab, dim)
        nn.init.uniform_(self.center.weight, -0.5 / dim, 0.5 / dim)
        nn.init.zeros_(self.context.weight)

    def forward(self, center, positive, negative):
        v = self.center(center)
        good = F.logsigmoid((v * self.context(positive)).sum(-1))
        bad = F.logsigmoid(-torch.bmm(self.context(negative), v.unsqueeze(-1)).squeeze(-1)).sum(-1)
        return -(good + bad).mean()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocab", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=300)
    parser.add_argument("--negatives", type=int, default=15)
    args = parser.parse_args()
    frequencies = torch.arange(1, args.vocab + 1).float().pow(-0.75)
    model = SkipGram(args.vocab, args.dim).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for step in range(50):
        center, positive = torch.randint(args.vocab, (2, 16384)).cuda()
        negative = (
            torch.multinomial(frequencies, 16384 * args.negatives, replacement=True).view(16384, -1).cuda()
        )
        loss = model(center, positive, negative)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(step, loss.item())
