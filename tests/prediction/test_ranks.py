"""The memory of one rank of several: Workloads that are spread over ranks, and scripts for torchrun."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import oomph
from oomph import ProgramError, Script, Workload
from oomph.errors import OomphError
from oomph.parallel import parse_parallel
from oomph.planning import ranks_needed

WIDTH, LAYERS = 256, 4
PARAMETERS = 4 * LAYERS * (8 * WIDTH * WIDTH + 5 * WIDTH)  # bytes
BLOCK = PARAMETERS // LAYERS


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


WORKLOAD = Workload(
    model=lambda: nn.Sequential(*(Block() for _ in range(LAYERS))),
    batch=lambda device: torch.randn(8, WIDTH, device=device),
    loss=lambda model, batch: model(batch).square().mean(),
)


def on_ranks(text, ranks):
    return oomph.predict(replace(WORKLOAD, parallel=parse_parallel(text, ranks)), gpu="h100-80gb")


@pytest.fixture(scope="module")
def fsdp2():
    return on_ranks("fsdp2", 64)


@pytest.mark.usefixtures("in_process")
def test_fsdp2_holds_a_shard_of_everything_and_gathers_blocks(fsdp2):
    held = dict(fsdp2.by_stage())
    assert held["optimizer state"] < 2 * PARAMETERS / 64 * 1.2
    # The gathered block, the prefetched one and its copy from the all-gather buffer; not the whole model.
    assert BLOCK < held["parameters"] < PARAMETERS
    whole = on_ranks("fsdp2:reshard_after_forward=false", 64)
    assert dict(whole.by_stage())["parameters"] > PARAMETERS
    offloaded = on_ranks("fsdp2:cpu_offload=true", 64)
    assert "optimizer state" not in dict(offloaded.by_stage())


@pytest.mark.usefixtures("in_process")
def test_a_thousand_ranks(fsdp2):
    many = on_ranks("fsdp2", 1024)
    assert many.ranks == 1024
    # FSDP2 gives every rank a row: gathered weights of 256 rows are padded to 1024.
    assert fsdp2.peak.allocated < many.peak.allocated < fsdp2.peak.allocated + 2 * 4 * BLOCK
    assert many.step_seconds > fsdp2.work.sent / 50e9  # beyond a node, over the network


def test_what_a_rank_sends_and_nccl_are_listed_apart(fsdp2):
    # Parameters are gathered in forward and, except of the last block, in backward; gradients are reduced.
    assert 2.6 * PARAMETERS < fsdp2.work.sent < 3 * PARAMETERS
    assert fsdp2.nccl > 0
    assert fsdp2.peak.device == fsdp2.peak.reserved + fsdp2.nccl + oomph.gpus.find("h100-80gb").context
    assert any("NCCL" in note.text for note in fsdp2.notes)
    assert any("the first of 64 ranks" in note.text for note in fsdp2.notes)


@pytest.mark.usefixtures("in_process")
def test_nccl_takes_its_buffers_from_a_budget_too(fsdp2):
    workload = replace(WORKLOAD, parallel=parse_parallel("fsdp2", 64))
    plan = oomph.fit(workload, gpu="h100-80gb", budget=fsdp2.peak.device + fsdp2.margin)
    assert (plan.limit, plan.fits) == (fsdp2.peak.reserved + fsdp2.margin, True)


@pytest.mark.usefixtures("in_process")
def test_ddp_holds_buckets_and_reduces_gradients():
    # The peak is in the loss, before any gradient.
    workload = replace(WORKLOAD, loss=lambda model, batch: model(batch).repeat(4096, 1).square().mean())
    found = oomph.predict(replace(workload, parallel=parse_parallel("ddp", 4)), gpu="h100-80gb")
    single = oomph.predict(workload, gpu="h100-80gb")
    assert single.ranks == 1
    more = [a.allocated - b.allocated for a, b in zip(found.steps, single.steps, strict=True)]
    # The second step makes its buckets again while NCCL holds the old ones.
    assert more == pytest.approx([PARAMETERS, 2 * PARAMETERS, PARAMETERS], rel=0.1)
    assert found.work.sent == pytest.approx(2 * 3 / 4 * PARAMETERS, rel=0.01)


DDP = """
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
dist.init_process_group("nccl")
model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))).cuda()
model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view={})
model._set_static_graph()
optimizer = torch.optim.SGD(model.parameters())
for x in DataLoader(torch.randn(12, 1024), batch_size=4, num_workers={}):
    model(x.cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_gradients_that_are_views_of_buckets_are_held_once(tmp_path):
    peaks, size = {}, 4 * 1024 * 1024
    for view in (False, True):
        (tmp_path / "train.py").write_text(DDP.format(view, 2 * view))
        prediction = oomph.predict(Script(tmp_path / "train.py", torchrun=True), gpu="h100-80gb")
        # Batches of workers come at once, perhaps before NCCL has released the first buckets.
        assert (prediction.margin >= 4 * size) == view
        peaks[view] = [step.allocated for step in prediction.steps]
    # One gradient at a time is beside its bucket, instead of eight.
    for separate, views in zip(peaks[False], peaks[True], strict=True):
        assert separate - views == pytest.approx(7 * size, rel=0.02)
    assert max(peaks[True]) == peaks[True][0]  # loading a batch gives NCCL time to release old buckets


SCRIPT = """
import os, torch, torch.distributed as dist, torch.distributed.checkpoint
from torch import nn
from torch.distributed.fsdp import fully_shard
dist.init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))  # makes the process group
rank, ranks = dist.get_rank(), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.cuda.get_rng_state().to("cuda")  # as DTensor does before random ops
model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id="saved")
assert torch.cuda.device_count() == 8 and ranks == 16
while True:
    loss = model(torch.randn(8, 512, device="cuda")).sum()
    loss.backward()
    dist.all_reduce(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_for_torchrun(tmp_path, capfd):
    (tmp_path / "train.py").write_text(SCRIPT)
    path = str(tmp_path / "train.py")
    found = oomph.predict(Script(path, torchrun=True, ranks=16))
    assert found.ranks == 16
    assert dict(found.by_stage())["optimizer state"] < 2 * 4 * 4 * 512 * 513 / 16 * 1.2
    assert (found.assumptions, found.batch) == ((), ())
    assert capfd.readouterr().err == ""  # no warnings of parts of other ranks that are missing
    with pytest.raises(ProgramError, match="AssertionError"):
        oomph.predict(Script(path, torchrun=True))
    (tmp_path / "alone.py").write_text(
        "import torch\ntorch.ones(8, 8, device='cuda', requires_grad=True).sum().backward()"
    )
    (assumed,) = oomph.predict(Script(str(tmp_path / "alone.py"), torchrun=True, ranks=2)).assumptions
    assert "init_process_group" in assumed.text


GROUPS = """
import datetime, random, torch, torch.distributed as dist
from torch import nn
from torch.distributed import _coalescing_manager
state = random.getstate()
dist.init_process_group("nccl", timeout=datetime.timedelta(minutes=5))
ranks = dist.get_world_size()
for backend in ("nccl", "gloo", "cpu:gloo,cuda:nccl"):
    group = dist.new_group(backend=backend)
    assert (dist.get_backend(group), group.size()) == (backend, ranks)
    dist.barrier(group)
options = dist.ProcessGroupNCCL.Options()
options.config.cga_cluster_size = 4
assert dist.new_group([0], pg_options=options).size() == 1
dist.monitored_barrier(dist.new_group(backend="gloo"))
a, b = torch.ones(8).cuda(), torch.ones(8).cuda()
with _coalescing_manager(async_ops=True) as manager:
    dist.all_reduce(a)
    dist.all_reduce(b)
manager.wait()
sizes = [torch.empty(1, dtype=torch.int64, device="cuda") for _ in range(ranks)]
dist.all_gather(sizes, torch.tensor([3], device="cuda"))
assert [each.item() for each in sizes] == [3] * ranks
objects = [None] * ranks
dist.all_gather_object(objects, {"a": 1}, group=dist.new_group(backend="gloo"))
assert objects == [{"a": 1}] * ranks
store = dist.TCPStore("localhost", 29500, ranks, is_master=True)
store.set("key", "value")
assert store.get("key") == b"value"
assert len(torch.cuda.default_generators) == torch.cuda.device_count() == ranks
assert random.getstate() == state
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 3)).cuda()
model = nn.parallel.DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model), device_ids=[0])
for _ in range(3):
    model(torch.randn(4, 3, 16, 16).cuda()).mean().backward()
"""


def test_process_groups_of_a_script_have_the_backends_that_it_names(tmp_path):
    (tmp_path / "train.py").write_text(GROUPS)
    found = oomph.predict(Script(str(tmp_path / "train.py"), torchrun=True, ranks=4))
    assert found.ranks == 4
    # What SyncBatchNorm keeps of the 8 channels and sends: mean, 1/std and a count.
    assert any(each.shape == (1, 4 * (2 * 8 + 1)) for each in found.allocations)
    beside = found.peak.device - found.peak.reserved  # the context and NCCL's buffers
    ends = found.interval and (found.interval.low, found.interval.high)
    assert [end.device - end.reserved for end in ends or ()] == [beside] * len(ends or ())


def test_an_op_that_only_cuda_has_is_not_the_error_of_the_program():
    def program():
        torch.ops.aten._cslt_compress(torch.ones(8, 8, device="cuda"))

    with pytest.raises(OomphError, match=r"_cslt_compress at .*test_ranks\.py:\d+") as raised:
        oomph.predict(program)
    assert not isinstance(raised.value, ProgramError)
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("in_process")
def test_how_many_cards_are_needed():
    (alone,) = ranks_needed(WORKLOAD, "24GiB", None, lambda text, fraction: None)
    assert (alone.ranks, alone.fits, alone.sent) == (1, True, 0)
    trials = ranks_needed(WORKLOAD, "24GiB", "48MiB", lambda text, fraction: None)
    # Workspaces and gathered blocks are not divided: the search ends where more ranks change nothing.
    assert [one.ranks for one in trials[:3]] == [1, 2, 4]
    assert not any(one.fits for one in trials)
    assert len(trials) < 8


PROCESSES = """
import multiprocessing
import sys
import torch

def prepare():
    torch.ones(128, device="cuda")

def main(rank, sizes):
    seen = multiprocessing.Value("i", rank)
    model = torch.nn.Linear(*sizes).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        model(torch.randn(8, sizes[0], device="cuda")).sum().backward()
        optimizer.step()
    assert seen.value == 0
    sys.exit()

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    assert multiprocessing.get_start_method() == "spawn"
    first = multiprocessing.Process(target=prepare)
    first.start()
    first.join()
    processes = [multiprocessing.Process(target=main, args=(rank, [512, 512])) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.pid is not None and process.exitcode == 0
        process.terminate()
        process.close()
"""


def test_a_process_that_a_script_spawns_for_each_gpu_is_traced(tmp_path):
    (tmp_path / "train.py").write_text(PROCESSES)
    prediction = oomph.predict(Script(tmp_path / "train.py"), gpu="h100-80gb")
    assert len(prediction.steps) == 3
