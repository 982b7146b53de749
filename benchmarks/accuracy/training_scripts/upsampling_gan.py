"""A GAN on 32 x 32 pictures: the generator upsamples and convolves, and both losses come from labels too."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

width, latent, classes, batch_size = 128, 64, 10, 96


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(classes, latent)
        self.first = nn.Linear(latent, width * 8 * 8)
        self.norm = nn.BatchNorm2d(width)
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.last = nn.Conv2d(width, width // 2, 3, padding=1)
        self.picture = nn.Conv2d(width // 2, 1, 3, padding=1)

    def forward(self, noise, labels):
        x = self.norm(self.first(noise * self.embed(labels)).unflatten(1, (width, 8, 8)))
        for conv in (self.middle, self.last):
            x = F.leaky_relu(conv(F.interpolate(x, scale_factor=2)), 0.2)
        return torch.tanh(self.picture(x))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = (1, 16, 32, 64, 128)
        layers = [
            (nn.Conv2d(i, o, 3, 2, 1), nn.LeakyReLU(0.2, inplace=True)) for i, o in zip(sizes, sizes[1:])
        ]
        self.body = nn.Sequential(*itertools.chain(*layers), nn.Flatten())
        self.real, self.label = nn.Linear(512, 1), nn.Linear(512, classes)

    def forward(self, pictures):
        x = self.body(pictures)
        return self.real(x), self.label(x)


def loss(outputs, real, labels):
    target = torch.full_like(outputs[0], float(real))
    return F.binary_cross_entropy_with_logits(outputs[0], target) + F.cross_entropy(outputs[1], labels)


generator, critic = Generator().cuda(), Critic().cuda()
optimizers = [torch.optim.Adam(each.parameters(), 2e-4, (0.5, 0.999)) for each in (generator, critic)]
for step in range(6):
    labels = torch.randint(0, classes, (batch_size,), device="cuda")
    fake = generator(torch.randn(batch_size, latent, device="cuda"), labels)
    optimizers[0].zero_grad()
    generator_loss = loss(critic(fake), True, labels)
    generator_loss.backward()
    optimizers[0].step()
    optimizers[1].zero_grad()
    pictures = torch.rand(batch_size, 1, 32, 32, device="cuda")
    critic_loss = loss(critic(pictures), True, labels) + loss(critic(fake.detach()), False, labels)
    critic_loss.backward()
    optimizers[1].step()
    print(step, generator_loss.item(), critic_loss.item())
