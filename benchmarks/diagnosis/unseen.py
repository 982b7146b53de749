"""Planted programs that were written after the patterns: 12 of 13 were right at their first run.

The rules were then corrected for the miss, cosine_similarity_of_all_pairs, which was taken for logits, and
residual_network was first run with the corrected rules. The rows of this file are no blind test any more.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn


def gpt2_with_eager_attention():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=1000, n_positions=2048, n_layer=6, n_head=12, n_embd=384)
    config._attn_implementation = "eager"
    model = GPT2LMHeadModel(config).to("cuda")  # cause, on no single line: attention matrices
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        ids = torch.randint(0, 1000, (4, 2048), device="cuda")
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def llama_with_a_large_vocabulary():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        ids = torch.randint(0, 128_256, (4, 2048), device="cuda")
        loss = model(input_ids=ids, labels=ids).loss  # cause, on no single line: logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def cosine_similarity_of_all_pairs():
    encoder = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512)).cuda()
    optimizer = torch.optim.Adam(encoder.parameters())

    def step():
        a = encoder(torch.randn(2048, 256, device="cuda"))
        b = encoder(torch.randn(2048, 256, device="cuda"))
        similarity = F.cosine_similarity(a.unsqueeze(1), b.unsqueeze(0), dim=-1)  # cause: broadcast product
        loss = F.cross_entropy(similarity / 0.07, torch.arange(2048, device="cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def features_of_the_validation_set():
    model = nn.Sequential(nn.Conv2d(3, 64, 3, stride=2), nn.ReLU(), nn.Conv2d(64, 128, 3, stride=2)).cuda()
    features = []
    with torch.no_grad():
        for _ in range(20):
            images = torch.randn(128, 3, 128, 128).cuda()
            features.append(model(images))  # cause: growing list
    return torch.cat(features).mean().item()


def hidden_state_not_detached():
    lstm, head = nn.LSTM(512, 1024, batch_first=True).cuda(), nn.Linear(1024, 10).cuda()
    optimizer = torch.optim.SGD([*lstm.parameters(), *head.parameters()], lr=0.1)
    hidden = None

    def step():
        nonlocal hidden
        x = torch.randn(256, 128, 512, device="cuda")
        out, hidden = lstm(x, hidden)  # cause: retained graph
        loss = head(out).pow(2).mean()
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()

    return step


class Distillation(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))
        self.teacher = copy.deepcopy(self.student)  # cause: second copy of the weights
        for p in self.teacher.parameters():
            p.requires_grad = False

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x)
        return F.mse_loss(self.student(x), target)


def teacher_inside_the_model():
    model = Distillation().to("cuda")
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1e-3)

    def step():
        model(torch.randn(32, 4096, device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def big_mlp_with_adam():
    model = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(6))).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 8192, device="cuda")).mean()
        loss.backward()
        optimizer.step()  # cause: optimizer state


class BiasedAttention(nn.Module):
    def __init__(self, d=256, heads=8, tokens=1024):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(d, 3 * d), nn.Linear(d, d)
        distance = (torch.arange(tokens)[:, None] - torch.arange(tokens)).abs().float()
        slopes = 2.0 ** -torch.arange(1, heads + 1)
        self.register_buffer("bias", -slopes[:, None, None] * distance)  # cause: duplicate buffers

    def forward(self, x):
        B, T, d = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias[:, :T, :T])
        return x + self.out(y.transpose(1, 2).reshape(B, T, d))


def alibi_bias_in_every_layer():
    model = nn.Sequential(*(BiasedAttention() for _ in range(12))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.randn(1, 128, 256, device="cuda")).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class MemoryNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head, self.memory = nn.Linear(1024, 2048), nn.Linear(2048, 10), []

    def forward(self, x):
        h = torch.relu(self.encoder(x))
        self.memory.append(h.detach())  # cause: growing list
        return self.head(h)


def module_that_remembers():
    model = MemoryNet().cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        x, y = torch.randn(8192, 1024, device="cuda"), torch.randint(10, (8192,), device="cuda")
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def gradients_cloned():
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    previous = None

    def step():
        nonlocal previous
        model(torch.randn(16, 4096, device="cuda")).mean().backward()
        previous = [p.grad.clone() for p in model.parameters()]  # cause: second gradient buffer
        optimizer.step()
        optimizer.zero_grad()

    return step


def tokens_of_the_whole_corpus():
    corpus = torch.randint(0, 64, (50_000_000,)).to("cuda")  # cause: data set on the GPU
    embed, head = nn.Embedding(64, 128).cuda(), nn.Linear(128, 64).cuda()
    optimizer = torch.optim.AdamW([*embed.parameters(), *head.parameters()])

    def step():
        starts = torch.randint(0, 49_000_000, (32,))
        x = torch.stack([corpus[i : i + 256] for i in starts.tolist()])
        F.cross_entropy(head(embed(x)).flatten(0, 1), x.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def guided_sampling_with_gradients():
    net = nn.Sequential(nn.Conv2d(4, 64, 3, padding=1), nn.SiLU(), nn.Conv2d(64, 4, 3, padding=1)).cuda()
    prompt = nn.Parameter(torch.zeros(8, 4, 64, 64, device="cuda"))
    optimizer = torch.optim.Adam([prompt])

    def step():
        x = torch.randn(8, 4, 64, 64, device="cuda")
        for _ in range(25):
            x = x - 0.1 * net(x + prompt)  # cause: loop kept by autograd
        x.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def residual_network():
    layers = []
    for _ in range(10):
        layers += [nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *layers).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():  # cause, on no single line: activations across layers
        model(torch.randn(32, 3, 224, 224, device="cuda")).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
