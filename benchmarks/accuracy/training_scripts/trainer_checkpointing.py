"""A Llama of 200M parameters with Trainer: bf16, gradient checkpointing, fused AdamW."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator


def dataset(size, length):
    rows = torch.randint(0, 32000, (size, length))
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


config = LlamaConfig(
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=10,
    num_attention_heads=16,
    num_key_value_heads=4,
)
model = LlamaForCausalLM(config)
model.config.use_cache = False
args = TrainingArguments(
    output_dir="llama",
    per_device_train_batch_size=2,
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False},
    bf16=True,
    optim="adamw_torch_fused",
    lr_scheduler_type="cosine",
    max_grad_norm=1.0,
    max_steps=8,
    save_strategy="no",
    report_to="none",
)
trainer = Trainer(
    model=model, args=args, train_dataset=dataset(64, 2048), data_collator=default_data_collator
)
result = trainer.train()
print(result.metrics)
