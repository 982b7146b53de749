"""Training steps written by hand: functions that set up and return the step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.accuracy.workloads.blocks import LanguageModel, next_token_loss
from benchmarks.accuracy.workloads.entry import Entry

Step = Callable[[], None]


def scaled_fp16() -> Step:
    """fp16 autocast with a GradScaler, unscaled for clipping."""
    model = LanguageModel().to("cuda")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    batch = {"ids": torch.randint(0, 32000, (8, 1024), device="cuda")}

    def step() -> None:
        with torch.autocast("cuda", torch.float16):
            loss = next_token_loss(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def _generator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.ReLU(inplace=True),
        nn.Linear(1024, 2048), nn.BatchNorm1d(2048), nn.ReLU(inplace=True),
        nn.Linear(2048, 3072), nn.Tanh(),
    )  # fmt: skip


def _critic() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3072, 2048), nn.LeakyReLU(0.2), nn.Dropout(0.3),
        nn.Linear(2048, 1024), nn.LeakyReLU(0.2), nn.Dropout(0.3),
        nn.Linear(1024, 1),
    )  # fmt: skip


def adversarial() -> Step:
    """Two networks and two optimizers in one step."""
    generator, critic = _generator().cuda().train(), _critic().cuda().train()
    for_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for_critic = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    real = torch.randn(16384, 3072, device="cuda")

    def step() -> None:
        made = generator(torch.randn(len(real), 256, device="cuda"))
        for_critic.zero_grad()
        on_real, on_made = critic(real), critic(made.detach())
        critic_loss = F.binary_cross_entropy_with_logits(on_real, torch.ones_like(on_real))
        critic_loss = critic_loss + F.binary_cross_entropy_with_logits(on_made, torch.zeros_like(on_made))
        critic_loss.backward()
        for_critic.step()
        for_generator.zero_grad()
        verdict = critic(made)
        F.binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict)).backward()
        for_generator.step()

    return step


def decayed_groups() -> Step:
    """Two parameter groups, micro-batches made anew, an averaged copy of the weights, a schedule."""
    model = LanguageModel().to("cuda", torch.bfloat16)
    model.train()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-4
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
    averaged = [p.detach().clone() for p in model.parameters()]

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for _ in range(2):
            batch = {"ids": torch.randint(0, 32000, (4, 1024)).to("cuda", non_blocking=True)}
            (next_token_loss(model, batch) / 2).backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for kept, now in zip(averaged, model.parameters(), strict=True):
                kept.lerp_(now, 0.01)

    return step


class SignDescent(torch.optim.Optimizer):
    """A user's own optimizer: the sign of a running mean of the gradient."""

    def __init__(self, params: object, lr: float = 1e-4, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                mean = state["mean"]
                update = mean * group["beta"] + p.grad * (1 - group["beta"])
                p.add_(update.sign(), alpha=-group["lr"])
                mean.copy_(update)


def own_optimizer() -> Step:
    """A hand-written optimizer, with the gradients clipped by value."""
    model = LanguageModel(layers=4).to("cuda").train()
    optimizer = SignDescent(model.parameters())
    batch = {"ids": torch.randint(0, 32000, (2, 256), device="cuda")}

    def step() -> None:
        next_token_loss(model, batch).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    return step


FUNCTIONS = {
    "gradscaler-fp16": Entry(scaled_fp16, "small GPT, fp16 autocast, GradScaler, clipped gradients"),
    "adversarial": Entry(adversarial, "two MLPs, two Adam optimizers, one step"),
    "parameter-groups": Entry(decayed_groups, "small GPT, bf16, two groups, averaged weights, a schedule"),
    "own-optimizer": Entry(own_optimizer, "small GPT, fp32, hand-written optimizer"),
}
