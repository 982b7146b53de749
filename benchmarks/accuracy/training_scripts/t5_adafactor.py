"""T5 from a config, trained with Adafactor; the script continues from its own checkpoint."""

import torch
from transformers import Adafactor, T5Config, T5ForConditionalGeneration

config = T5Config(d_model=768, d_ff=2048, d_kv=64, num_layers=8, num_heads=12, decoder_start_token_id=0)
model = T5ForConditionalGeneration(config).to("cuda")
model.save_pretrained("t5")
model = T5ForConditionalGeneration.from_pretrained("t5").to("cuda")
optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True, lr=None)
model.train()
for step in range(10):
    source = torch.randint(2, 32000, (8, 512), device="cuda")
    target = torch.randint(2, 32000, (8, 128), device="cuda")
    loss = model(input_ids=source, labels=target).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
