"""DistilBERT classification in a plain loop with a learning-rate schedule and padded batches."""

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    get_linear_schedule_with_warmup,
)

torch.manual_seed(0)
samples = [(torch.randint(1000, 30000, (128 + 2 * (i % 64),)), i % 4) for i in range(640)]


def collate(batch):
    tokens = pad_sequence([sample[0] for sample in batch], batch_first=True)
    return {
        "input_ids": tokens,
        "attention_mask": (tokens != 0).long(),
        "labels": torch.tensor([sample[1] for sample in batch]),
    }


device = torch.device("cuda")
model = DistilBertForSequenceClassification(DistilBertConfig(num_labels=4)).to(device)
loader = DataLoader(samples, batch_size=64, collate_fn=collate)  # every batch has a longest sample of 254
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
scheduler = get_linear_schedule_with_warmup(optimizer, 2, len(loader))
model.train()
for step, batch in enumerate(loader):
    batch = {key: value.to(device) for key, value in batch.items()}
    outputs = model(**batch)
    outputs.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    accuracy = (outputs.logits.argmax(-1) == batch["labels"]).float().mean().item()
    print(step, outputs.loss.item(), accuracy)
