"""QLoRA: LoRA adapters on a Qwen3 in 4 bits, with bitsandbytes' paged optimizer."""

import bitsandbytes as bnb
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3Config

config = Qwen3Config(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=8,
    vocab_size=32000,
    tie_word_embeddings=True,
)
AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained("base")
quantization = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)
model = AutoModelForCausalLM.from_pretrained(
    "base", quantization_config=quantization, device_map={"": 0}, dtype=torch.bfloat16
)
model = prepare_model_for_kbit_training(model)
lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
model = get_peft_model(model, lora)
model.print_trainable_parameters()
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = bnb.optim.PagedAdamW8bit(trained, lr=2e-4)
for step in range(5):
    tokens = torch.randint(0, config.vocab_size, (8, 512), device="cuda")
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
