"""An LSTM language model with truncated back-propagation through time."""

import torch
from torch import nn

vocab, width, layers, batch_size, bptt = 33278, 1024, 2, 64, 70
device = torch.device("cuda")


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.encoder = nn.Embedding(vocab, width)
        self.rnn = nn.LSTM(width, width, layers, dropout=0.5)
        self.decoder = nn.Linear(width, vocab)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return self.decoder(self.drop(output)).view(-1, vocab), hidden


corpus = torch.randint(0, vocab, (1500, batch_size)).to(device)
model = RNNModel().to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
hidden = (
    torch.zeros(layers, batch_size, width, device=device),
    torch.zeros(layers, batch_size, width, device=device),
)
for i in range(0, corpus.size(0) - 1, bptt):
    length = min(bptt, len(corpus) - 1 - i)
    tokens, targets = corpus[i : i + length], corpus[i + 1 : i + 1 + length].view(-1)
    hidden = tuple(h.detach() for h in hidden)
    optimizer.zero_grad()
    output, hidden = model(tokens, hidden)
    loss = criterion(output, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    if i % (5 * bptt) == 0:
        print(i // bptt, loss.item())
