"""Several gloo ranks on the CPU compute what one process does: losses, and weights after two steps."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from oomph import fixes
from oomph.errors import UserError
from oomph.parallel import parse_parallel
from oomph_lab.systems.hatchling import PRESETS as HATCHLING
from oomph_lab.systems.longctx import PRESETS as LONGCTX
from oomph_lab.systems.pythia import PRESETS as PYTHIA

ROWS, TOKENS = 4, 32
# A layer of each kind.
SMALL_HATCHLING = replace(HATCHLING["tiny"], n_layers=2, attention_every=2, token_drop=0.0)
SYSTEMS = {
    "longctx": LONGCTX["tiny"],
    "tied": replace(LONGCTX["tiny"], tie_word_embeddings=True, qk_norm=True, vocab_size=101),
    "nsa": replace(LONGCTX["tiny"], attention="nsa"),
    "hatchling": SMALL_HATCHLING,
    "kda": replace(SMALL_HATCHLING, gate="kimi"),
    "pythia": replace(
        PYTHIA["pythia"],
        num_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        vocab_size=99,
        dropout=0.0,
    ),
}
FIRST_PAIR = (
    ("longctx", "fsdp2:reshard_after_forward=false"),
    ("tied", "tp"),
    ("hatchling", "tp"),
    ("pythia", "tp"),
)
SECOND_PAIR = (("pythia", "ddp"), ("hatchling", "fsdp2:cpu_offload=true"), ("nsa", "cp"), ("kda", "cp"))
FOUR_RANKS = (
    *(("longctx", "fsdp2:cp=2"), ("longctx", "fsdp2:tp=2"), ("longctx", "cp"), ("hatchling", "ddp:cp=2")),
)


def run_all(rank, port):
    """Two pairs of ranks, then all four: to start a process takes long."""
    pair = rank // 2
    run(rank % 2, port + 1 + pair, 2, SECOND_PAIR if pair else FIRST_PAIR)
    run(rank, port, 4, FOUR_RANKS)


def run(rank, port, ranks, cases):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    try:
        for system, text in cases:
            compare(system, text, rank, ranks)
        if cases is FIRST_PAIR:
            mixed_precision_keeps_rope_tables_in_float32()
            a_rank_that_cannot_take_its_part_is_refused()
            the_fix_shards_a_model_and_cannot_be_undone()
    finally:
        dist.destroy_process_group()


def compare(system, text, rank, ranks):
    parallel = parse_parallel(text, ranks)
    model, ids = build(system)
    # Checkpoints recompute inside of the exchange between ranks.
    fixes.apply("activation_checkpointing", model)
    called = parallel.apply(model, "cpu")
    own = ids[parallel.rows(ROWS, rank)]
    losses = []
    for loss in train(model, lambda: called(own, labels=own).loss):
        dist.all_reduce(loss)
        losses.append(loss / ranks)
    weights = {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each.clone()
        for name, each in model.state_dict().items()
    }
    if rank == 0:
        expected_losses, expected = trained_in_one_process(system)
        torch.testing.assert_close(losses, expected_losses, rtol=1e-9, atol=0, msg=text)
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-9, msg=f"{system} {text}")


@functools.cache
def trained_in_one_process(system):
    model, ids = build(system)
    return list(train(model, lambda: model(ids, labels=ids).loss)), model.state_dict()


def build(system):
    config = SYSTEMS[system]
    ids = torch.randint(0, config.vocab_size, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    return config.build().double(), ids


def train(model, compute_loss):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # AdamW would hide a gradient's wrong scale
    for _ in range(2):
        loss = compute_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def mixed_precision_keeps_rope_tables_in_float32():
    ids = torch.randint(0, LONGCTX["tiny"].vocab_size, (2, TOKENS))
    model = LONGCTX["tiny"].build()
    expected = model(ids, labels=ids).loss.detach()
    called = parse_parallel("fsdp2:param_dtype=bfloat16", 2).apply(model, "cpu")
    torch.testing.assert_close(called(ids, labels=ids).loss.float(), expected, rtol=0.02, atol=0)


def a_rank_that_cannot_take_its_part_is_refused():
    model = LONGCTX["tiny"].build()
    called = parse_parallel("cp", 2).apply(model, "cpu")
    with pytest.raises(UserError, match="33 tokens cannot be divided over cp=2"):
        called(torch.zeros(1, 33, dtype=torch.long), labels=torch.zeros(1, 33, dtype=torch.long))
    assert called(torch.zeros(1, 33, dtype=torch.long)).logits.shape[:2] == (1, 33)  # padded, to generate
    with pytest.raises(UserError, match=r"context parallelism .* Linear is not one of them"):
        parse_parallel("cp", 2).apply(torch.nn.Linear(2, 2), "cpu")
    with pytest.raises(UserError, match=r"tensor parallelism .* Linear is not one of them"):
        parse_parallel("tp", 2).apply(torch.nn.Linear(2, 2), "cpu")


def the_fix_shards_a_model_and_cannot_be_undone():
    model, ids = build("longctx")
    whole = sum(each.numel() for each in model.parameters())
    expected = model(ids, labels=ids).loss.detach()
    changed = fixes.apply("fsdp2:ranks=2,reshard_after_forward=false", model)
    assert [change.where for change in changed] == ["", "layers.0", "layers.1"]
    assert sum(each.to_local().numel() for each in model.parameters()) < 0.55 * whole
    torch.testing.assert_close(model(ids, labels=ids).loss.detach(), expected)
    with pytest.raises(UserError, match="'fsdp2' cannot be undone in a model; build the model again"):
        fixes.undo(model)


def test_two_and_four_ranks(run_ranks):
    run_ranks(run_all, 4)


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("zero3", 8, "'zero3' is not valid; choose from fsdp2, ddp, tp, cp"),
        ("fsdp2:cp=3", 8, "8 ranks cannot be divided into groups of tp=1 x cp=3"),
        ("fsdp2:shards=2", 8, "'shards=2' is not valid; give tp=..., cp=..."),
        ("ddp:cpu_offload=true", 8, "options of fsdp2, not of ddp"),
        ("ddp:tp=2", 8, "combined with fsdp2"),
        ("fsdp2:param_dtype=int8", 8, "param_dtype='int8' is not a float dtype"),
        ("fsdp2:tp=x", 8, "tp='x' is not valid; give a whole number"),
        ("fsdp2", 0, "ranks=0 is not valid"),
    ],
)
def test_bad_input(text, ranks, message):
    with pytest.raises(UserError) as error:
        parse_parallel(text, ranks)
    assert message in str(error.value)
