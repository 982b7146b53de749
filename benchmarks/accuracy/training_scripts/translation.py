"""A sequence-to-sequence model from nn.Transformer, with padding masks and a warm-up schedule."""

import math

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

SRC_VOCAB, TGT_VOCAB, EMB, PAD, BATCH = 19000, 11000, 512, 1, 64
DEVICE = torch.device("cuda")


class PositionalEncoding(nn.Module):
    def __init__(self, size, length=5000):
        super().__init__()
        den = torch.exp(-torch.arange(0, size, 2) * math.log(10000) / size)
        pos = torch.arange(0, length).reshape(length, 1)
        table = torch.zeros((length, size))
        table[:, 0::2], table[:, 1::2] = torch.sin(pos * den), torch.cos(pos * den)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("table", table.unsqueeze(-2))

    def forward(self, x):
        return self.dropout(x + self.table[: x.size(0), :])


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.Transformer(EMB, 8, 6, 6, 2048, 0.1)
        self.generator = nn.Linear(EMB, TGT_VOCAB)
        self.src_emb, self.tgt_emb = nn.Embedding(SRC_VOCAB, EMB), nn.Embedding(TGT_VOCAB, EMB)
        self.positions = PositionalEncoding(EMB)

    def forward(self, src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(0), device=tgt.device).isinf()
        src_pad, tgt_pad = (src == PAD).transpose(0, 1), (tgt == PAD).transpose(0, 1)
        out = self.transformer(
            self.positions(self.src_emb(src) * math.sqrt(EMB)), self.positions(self.tgt_emb(tgt) * math.sqrt(EMB)),
            tgt_mask=mask, src_key_padding_mask=src_pad, tgt_key_padding_mask=tgt_pad, memory_key_padding_mask=src_pad,
        )  # fmt: skip
        return self.generator(out)


def batch():
    lengths = [96 - i % 40 for i in range(BATCH)]
    return pad_sequence([torch.randint(4, TGT_VOCAB, (n,)) for n in lengths], padding_value=PAD)


model = Seq2Seq()
for p in model.parameters():
    if p.dim() > 1:
        nn.init.xavier_uniform_(p)
model = model.to(DEVICE)
loss_fn = nn.CrossEntropyLoss(ignore_index=PAD)
optimizer = torch.optim.Adam(model.parameters(), lr=1, betas=(0.9, 0.98), eps=1e-9)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: EMB**-0.5 * min((step + 1) ** -0.5, (step + 1) * 4000**-1.5)
)
for step in range(30):
    src, tgt = batch().to(DEVICE), batch().to(DEVICE)
    logits = model(src, tgt[:-1, :])
    optimizer.zero_grad()
    loss = loss_fn(logits.reshape(-1, TGT_VOCAB), tgt[1:, :].reshape(-1))
    loss.backward()
    optimizer.step()
    schedule.step()
    print(step, loss.item())
