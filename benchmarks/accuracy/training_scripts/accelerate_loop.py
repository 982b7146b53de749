"""An accelerate loop: bf16, accumulation, clipping, evaluation and a saved state."""

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, get_cosine_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=2)
args = parser.parse_args()
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=args.accumulate)
config = GPTNeoXConfig(hidden_size=768, num_hidden_layers=8, num_attention_heads=12, intermediate_size=3072)
model = GPTNeoXForCausalLM(config)
data = TensorDataset(torch.randint(0, config.vocab_size, (160, 512)))
loader = DataLoader(data, batch_size=args.batch_size, shuffle=True)
evaluation = DataLoader(data, batch_size=args.batch_size)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
scheduler = get_cosine_schedule_with_warmup(optimizer, 10, 100)
model, optimizer, loader, evaluation, scheduler = accelerator.prepare(
    model, optimizer, loader, evaluation, scheduler
)
for epoch in range(2):
    model.train()
    for (tokens,) in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    losses = []
    for (tokens,) in evaluation:
        with torch.no_grad():
            loss = model(input_ids=tokens, labels=tokens).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(args.batch_size)))
    accelerator.print(epoch, torch.cat(losses).mean().item())
    accelerator.save_state("state")
