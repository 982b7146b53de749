"""A small Transformer encoder learns the logits of a larger, frozen one."""

import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    def __init__(self, dim, depth, vocab=8000):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        layer = nn.TransformerEncoderLayer(
            dim, dim // 64, 4 * dim, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocab)

    def forward(self, x):
        return self.head(self.layers(self.embedding(x)))


device = "cuda"
teacher, student = Encoder(1024, 8).to(device).eval(), Encoder(384, 4).to(device)
teacher.requires_grad_(False)
optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4)
temperature = 2.0
for step in range(10):
    tokens, labels = torch.randint(0, 8000, (2, 32, 128), device=device)
    with torch.no_grad():
        wanted = F.softmax(teacher(tokens) / temperature, dim=-1)
    logits = student(tokens)
    soft = (
        F.kl_div(F.log_softmax(logits / temperature, dim=-1), wanted, reduction="batchmean") * temperature**2
    )
    hard = F.cross_entropy(logits.view(-1, 8000), labels.reshape(-1))
    loss = 0.9 * soft / 128 + 0.1 * hard
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} soft {soft.item():.3f} hard {hard.item():.3f}")
