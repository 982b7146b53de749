"""LoRA adapters on a frozen bf16 Qwen3 with peft."""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config

parser = argparse.ArgumentParser()
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--batch", type=int, default=4)
args = parser.parse_args()
config = Qwen3Config(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=args.layers,
    num_attention_heads=16,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda")
lora = LoraConfig(
    r=args.rank,
    lora_alpha=32,
    lora_dropout=0.05,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    task_type="CAUSAL_LM",
)
model = get_peft_model(model, lora)
model.print_trainable_parameters()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
for step in range(10):
    tokens = torch.randint(0, config.vocab_size, (args.batch, 512)).cuda()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
model.save_pretrained("adapter")
