"""Deep Q-learning on frames, with a replay memory on the host and a target network."""

import copy
import random
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

device = torch.device("cuda")
policy = nn.Sequential(
    nn.Conv2d(4, 32, 8, stride=4), nn.ReLU(), nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
    nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, 6),
).to(device)  # fmt: skip
target = copy.deepcopy(policy).eval()
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, amsgrad=True)
memory = deque(maxlen=4000)
epsilon, state, batch_size = 1.0, torch.rand(4, 84, 84), 2048
for frame in range(2400):
    if random.random() < epsilon:
        action = random.randrange(6)
    else:
        with torch.no_grad():
            action = policy(state.unsqueeze(0).to(device)).argmax(1).item()
    following, reward = torch.rand(4, 84, 84), random.random()
    memory.append((state, action, reward, following))
    state, epsilon = following, max(0.05, epsilon * 0.999)
    if len(memory) < batch_size or frame % 16:
        continue
    states, actions, rewards, followings = zip(*random.sample(memory, batch_size))
    states, followings = torch.stack(states).to(device), torch.stack(followings).to(device)
    actions = torch.tensor(actions, device=device).unsqueeze(1)
    values = policy(states).gather(1, actions).squeeze(1)
    with torch.no_grad():
        expected = torch.tensor(rewards, device=device) + 0.99 * target(followings).max(1).values
    loss = F.smooth_l1_loss(values, expected)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(policy.parameters(), 100)
    optimizer.step()
    for old, new in zip(target.parameters(), policy.parameters()):
        old.data.lerp_(new.data, 0.005)
    print(frame, loss.item())
