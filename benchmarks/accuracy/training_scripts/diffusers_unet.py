"""A diffusion model: diffusers' UNet2DModel learns the noise of a DDPM schedule."""

import argparse

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--resolution", type=int, default=64)
parser.add_argument("--train_batch_size", type=int, default=16)
args = parser.parse_args()

model = UNet2DModel(
    sample_size=args.resolution,
    in_channels=3,
    out_channels=3,
    layers_per_block=2,
    block_out_channels=(128, 128, 256, 512),
    down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
).to("cuda")
scheduler = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
rate = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=100)
for step in range(10):
    clean = torch.randn(args.train_batch_size, 3, args.resolution, args.resolution).to("cuda")
    noise = torch.randn(clean.shape, device="cuda")
    timesteps = torch.randint(0, 1000, (args.train_batch_size,), device="cuda", dtype=torch.int64)
    noisy = scheduler.add_noise(clean, noise, timesteps)
    prediction = model(noisy, timesteps, return_dict=False)[0]
    loss = F.mse_loss(prediction, noise)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    rate.step()
    optimizer.zero_grad()
    print({"loss": loss.detach().item(), "lr": rate.get_last_lr()[0], "step": step})
