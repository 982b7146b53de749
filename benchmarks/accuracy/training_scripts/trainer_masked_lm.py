"""BERT from a config with Trainer in bf16; a collator masks the tokens."""

import argparse

import torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments


def collate(samples):
    labels = torch.stack(samples)
    chosen = torch.rand(labels.shape) < 0.15
    inputs = labels.masked_fill(chosen, 103)
    return {
        "input_ids": inputs,
        "attention_mask": torch.ones_like(inputs),
        "labels": labels.masked_fill(~chosen, -100),
    }


parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--length", type=int, default=256)
given = parser.parse_args()
data = [torch.randint(1000, 30000, (given.length,)) for _ in range(16 * given.batch_size)]
arguments = TrainingArguments(
    "mlm",
    per_device_train_batch_size=given.batch_size,
    num_train_epochs=1,
    bf16=True,
    learning_rate=1e-4,
    warmup_steps=5,
    report_to=[],
    save_steps=2,
    dataloader_num_workers=2,
    remove_unused_columns=False,
)
model = BertForMaskedLM(BertConfig())
Trainer(model=model, args=arguments, train_dataset=data, data_collator=collate).train()
