"""Held out: hand-written models that nobody tuned the predictor on.

Shapes: B batch, T tokens, D width, V vocabulary, N nodes, E edges.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.accuracy.workloads.entry import Entry, adamw
from oomph.workload import Workload

Batch = dict[str, torch.Tensor]


class GraphLayer(nn.Module):
    """Messages along edges, weighted by a softmax over each node's incoming edges."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Linear(2 * width, width)
        self.score = nn.Linear(width, 1)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, h_ND: torch.Tensor, source_E: torch.Tensor, target_E: torch.Tensor) -> torch.Tensor:
        m_ED = F.relu(self.message(torch.cat([h_ND[source_E], h_ND.index_select(0, target_E)], dim=1)))
        score_E = self.score(m_ED).squeeze(1)
        top_N = score_E.new_full((len(h_ND),), -math.inf)
        top_N = top_N.scatter_reduce(0, target_E, score_E.detach(), "amax")
        weight_E = (score_E - top_N[target_E]).exp()
        total_N = torch.zeros(len(h_ND), device=h_ND.device).scatter_add_(0, target_E, weight_E)
        weight_E = weight_E / total_N[target_E]
        gathered_ND = torch.zeros_like(h_ND).index_add_(0, target_E, m_ED * weight_E[:, None])
        return h_ND + F.elu(self.norm(gathered_ND))


class GraphNet(nn.Module):
    def __init__(self, features: int = 100, width: int = 96, layers: int = 4, classes: int = 47) -> None:
        super().__init__()
        self.encode = nn.Linear(features, width)
        self.layers = nn.ModuleList(GraphLayer(width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, batch: Batch) -> torch.Tensor:
        h_ND = F.relu(self.encode(batch["features"]))
        for layer in self.layers:
            h_ND = layer(h_ND, batch["source"], batch["target"])
        return self.head(h_ND)


def _graph(device: torch.device) -> Batch:
    nodes, edges = 150_000, 1_100_000
    return {
        "features": torch.randn(nodes, 100, device=device),
        "source": torch.randint(0, nodes, (edges,), device=device),
        "target": torch.randint(0, nodes, (edges,), device=device),
        "train": torch.randperm(nodes, device=device)[:60_000],
        "labels": torch.randint(0, 47, (nodes,), device=device),
    }


def _node_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch)[batch["train"]], batch["labels"][batch["train"]])


_TABLES = (2_500_000, 1_200_000, 900_000, 400_000, 150_000, 60_000, 12_000, 3_000, 700, 24)


class Recommender(nn.Module):
    """Bags of categories and dense features, joined by their pairwise products (DLRM-like)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum" if i % 2 == 0 else "mean")
            for i, rows in enumerate(_TABLES)
        )
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        vectors = len(_TABLES) + 1
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, offset=-1), persistent=False)
        products = vectors * (vectors - 1) // 2
        self.top = nn.Sequential(
            nn.Linear(products + width, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        dense = self.bottom(batch["dense"])
        bags = [bag(batch[f"ids{i}"], batch["offsets"]) for i, bag in enumerate(self.bags)]
        vectors = torch.stack([dense, *bags], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        row, column = self.pairs  # type: ignore[misc]
        return self.top(torch.cat([dense, products[:, row, column]], dim=1)).squeeze(1)


def _clicks(device: torch.device) -> Batch:
    rows, per_bag = 24_000, 5
    batch = {
        "dense": torch.rand(rows, 13, device=device),
        "offsets": torch.arange(0, rows * per_bag, per_bag, device=device),
        "clicked": torch.randint(0, 2, (rows,), device=device).float(),
    }
    for i, table in enumerate(_TABLES):
        batch[f"ids{i}"] = torch.randint(0, table, (rows * per_bag,), device=device)
    return batch


def _click_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(batch), batch["clicked"])


class PackedTranslator(nn.Module):
    """A two-way GRU over packed sequences, and a GRU decoder that attends to it."""

    def __init__(self, vocabulary: int = 16000, width: int = 640) -> None:
        super().__init__()
        self.source = nn.Embedding(vocabulary, width, padding_idx=0)
        self.target = nn.Embedding(vocabulary, width, padding_idx=0)
        self.encoder = nn.GRU(width, width // 2, 2, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(width, width, 1, batch_first=True)
        self.mix = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, batch: Batch) -> torch.Tensor:
        packed = pack_padded_sequence(
            self.source(batch["source"]), batch["lengths"], batch_first=True, enforce_sorted=False
        )
        encoded, state = self.encoder(packed)
        memory, _ = pad_packed_sequence(encoded, batch_first=True)
        start = torch.cat([state[-2], state[-1]], dim=1)[None].contiguous()
        decoded, _ = self.decoder(self.target(batch["target"]), start)
        scores = decoded @ memory.transpose(1, 2) / math.sqrt(decoded.shape[-1])
        scores = scores.masked_fill(batch["padding"][:, None, :], -math.inf)
        mixed = torch.tanh(self.mix(torch.cat([decoded, scores.softmax(-1) @ memory], dim=-1)))
        return self.head(mixed)


def _sentences(device: torch.device) -> Batch:
    size, longest = 112, 90
    lengths = longest - (torch.arange(size) * 7) % 60  # on the host, where packing wants them
    padding = torch.arange(longest)[None, :] >= lengths[:, None]
    source = torch.randint(1, 16000, (size, longest)).masked_fill(padding, 0)
    return {
        "source": source.to(device),
        "padding": padding.to(device),
        "lengths": lengths,
        "target": torch.randint(1, 16000, (size, 70), device=device),
    }


def _translation_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch)[:, :-1]
    return F.cross_entropy(
        logits.flatten(0, 1), batch["target"][:, 1:].flatten(), ignore_index=0, label_smoothing=0.1
    )


class Captioner(nn.Module):
    """torch's own nn.TransformerDecoder: a causal mask over the words, attention to image features."""

    def __init__(self, vocabulary: int = 24000, width: int = 640, layers: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(256, width))
        layer = nn.TransformerDecoderLayer(
            width, 10, 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.decoder = nn.TransformerDecoder(layer, layers, norm=nn.LayerNorm(width))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids_BT: torch.Tensor, memory_BTD: torch.Tensor) -> torch.Tensor:
        length = ids_BT.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids_BT.device)
        x_BTD = self.words(ids_BT) + self.places[:length]
        return self.head(self.decoder(x_BTD, memory_BTD, tgt_mask=mask))


def _captions(device: torch.device) -> Batch:
    return {
        "ids": torch.randint(0, 24000, (24, 225), device=device),
        "memory": torch.randn(24, 400, 640, device=device),
    }


def _caption_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch["ids"][:, :-1], batch["memory"])
    return F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten())


class TwoViews(nn.Module):
    """An encoder of vectors with a projection to a small unit sphere."""

    def __init__(self, width: int = 1536, projected: int = 192) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(1000, width)]
        for _ in range(4):
            layers += [nn.LayerNorm(width), nn.SiLU(), nn.Dropout(0.1), nn.Linear(width, width)]
        self.encoder = nn.Sequential(*layers)
        self.projection = nn.Linear(width, projected, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.projection(self.encoder(x)), dim=-1)


def _views(device: torch.device) -> Batch:
    x = torch.randn(9000, 1000, device=device)
    return {"one": x + 0.1 * torch.randn_like(x), "other": x + 0.1 * torch.randn_like(x)}


def _agreement_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Each view must find its partner among all the others: the whole similarity matrix at once."""
    z = torch.cat([model(batch["one"]), model(batch["other"])])
    similarity = z @ z.T * model.log_scale.exp()
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    similarity = similarity.masked_fill(itself, -math.inf)
    partner = torch.arange(len(z), device=z.device).roll(len(z) // 2)
    return F.cross_entropy(similarity, partner)


HELD_OUT_PLAIN = {
    "held-graph-scatter": Entry(
        Workload(
            GraphNet, _graph, _node_loss, lambda params: torch.optim.Adam(params, lr=1e-3, weight_decay=5e-4)
        ),
        "graph net, fp32, gather, scatter and index_add over 1.1 million edges",
    ),
    "held-embedding-bags": Entry(
        Workload(Recommender, _clicks, _click_loss, lambda params: torch.optim.SGD(params, lr=0.1)),
        "recommender, fp32, ten tables of embedding bags, dense gradients, SGD",
    ),
    "held-packed-gru": Entry(
        Workload(PackedTranslator, _sentences, _translation_loss, adamw),
        "GRU translator, fp32, packed sequences both ways, attention, label smoothing",
    ),
    "held-transformer-decoder": Entry(
        Workload(Captioner, _captions, _caption_loss, adamw, autocast="float16"),
        "nn.TransformerDecoder, fp16 autocast, causal mask, cross-attention, dropout",
    ),
    "held-contrastive": Entry(
        Workload(TwoViews, _views, _agreement_loss, adamw, autocast="bfloat16"),
        "two views of 9,000 vectors, bf16 autocast, an 18,000 x 18,000 similarity matrix",
    ),
}
