"""GPT-2 from a config with Trainer: accumulation, evaluation and the default saving."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset):
    def __init__(self, size):
        self.tokens = torch.randint(0, 50257, (size, 512))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main():
    model = GPT2LMHeadModel(GPT2Config(n_layer=8))
    args = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=10,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        report_to="none",
    )
    trainer = Trainer(model=model, args=args, train_dataset=Tokens(128), eval_dataset=Tokens(16))
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
