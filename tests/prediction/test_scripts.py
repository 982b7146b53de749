"""Whole training scripts, run as they are until their steps repeat."""

import importlib.util
import warnings
from pathlib import Path

import pytest
import torch

import oomph
from oomph import ProgramError, Script, UserError

MODEL = """
import os, sys
import torch
from torch import nn
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).to("cuda")
"""
ENDLESS = (
    MODEL
    + """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=64)
batch = parser.parse_args().batch
optimizer = torch.optim.AdamW(model.parameters())
while True:
    loss = model(torch.randn(batch, 256, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
"""
)


@pytest.fixture
def predicted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def predict(source, *arguments, **options):
        (tmp_path / "train.py").write_text(source)
        return oomph.predict(Script("train.py", arguments, **options))

    return predict


def test_an_endless_loop_ends_after_three_steps_with_the_peak_of_its_step(predicted):
    def step():
        import torch
        from torch import nn

        model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())

        def one():
            loss = model(torch.randn(128, 256, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return one

    script = predicted(ENDLESS, "--batch", "128")
    assert [each.step for each in script.steps] == [1, 2, 3]
    assert script.peak.allocated == pytest.approx(oomph.predict(step).peak.allocated, abs=1024)
    assert "not real" in script.notes[0].text


def test_an_update_in_parts_is_one_step_and_making_the_state_is_none(predicted):
    """As DeepSpeed does: one call of the optimizer per group of parameters, also before training."""
    parts = """
weights, biases = ([p for p in model.parameters() if p.dim() == d] for d in (2, 1))
optimizer = torch.optim.AdamW(weights)
def update():
    for part in (weights, biases):
        optimizer.param_groups[0]["params"] = part
        optimizer.step()
for parameter in model.parameters():
    parameter.grad = torch.zeros_like(parameter)
update()
for _ in range(9):
    model(torch.randn(2048, 256, device="cuda")).square().mean().backward()
    update()
"""
    found = predicted(MODEL + parts)
    first, *later = [step.allocated for step in found.steps]
    assert len(later) == 2
    assert later[0] == later[1] == pytest.approx(first, rel=0.01)
    assert found.interval is None


@pytest.mark.parametrize(("longest", "differ"), [(1, False), (32, True)])
def test_a_note_says_where_steps_need_different_amounts(predicted, longest, differ):
    steps = ENDLESS.replace("while True", f"for times in (1, 1, {longest})").replace("(batch", "(times * 256")
    found = predicted(steps)
    assert any("from step to step" in note.text for note in found.notes) is differ
    assert (found.interval is not None) is differ
    if differ:
        assert found.interval.low.allocated < found.peak.allocated < found.interval.high.allocated


@pytest.mark.parametrize(("rounds", "made"), [(1, "3 steps of each of its 2"), (2, "3 to 6 steps of its 2")])
def test_the_steps_of_a_gan_are_told_by_optimizer(predicted, rounds, made):
    source = f"""
import torch
nets = [torch.nn.Linear(256, 256).cuda() for _ in "ab"]
critic, generator = (torch.optim.Adam(net.parameters()) for net in nets)
while True:
    for optimizer in (*[critic] * {rounds}, generator):
        nets[0](nets[1](torch.randn(64, 256, device="cuda"))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
    (note,) = (each.text for each in predicted(source).notes if "was stopped after" in each.text)
    assert f"after {made} optimizers" in note


def test_the_history_of_lbfgs_is_no_growth(predicted):
    found = predicted("""
import torch
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
def closure():
    optimizer.zero_grad()
    loss = model(torch.randn(64, 1024, device="cuda")).square().mean()
    loss.backward()
    return loss
while True:
    optimizer.step(closure)
""")
    assert found.steps[-1].end > found.steps[-2].end
    assert found.growth is None


def test_workers_are_not_compared_with_the_cores_of_this_machine(predicted):
    loader = "torch.utils.data.DataLoader(range(10), num_workers=999)"
    with warnings.catch_warnings(action="error"):
        assert predicted(ENDLESS.replace("while True", f"for _ in {loader}"))


@pytest.mark.parametrize(
    ("samples", "how"),
    [(100, "--steps 14 includes"), (10**6, "an epoch has 125,000 steps"), (0, "--steps 30")],
)
def test_the_note_on_what_comes_later_says_which_steps_reach_it(predicted, samples, how):
    source = f"""
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.Adam(model.parameters())
data = torch.utils.data.DataLoader(range({samples}), batch_size=4) if {samples} else range(99)
other = iter(torch.utils.data.DataLoader(range(9000)))
next(other)
for number, batch in enumerate(data):
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    if number % 2:
        optimizer.step()
"""
    (note,) = (each.text for each in predicted(source).notes if "stopped after 3 steps" in each.text)
    assert how in note


def test_the_note_on_what_comes_later_leaves_out_an_evaluation_that_was_traced(predicted):
    evaluation = "    model.eval()(torch.randn(64, 256, device='cuda'))\n    model.train()\n"
    for source, expected in ((ENDLESS, True), (ENDLESS + evaluation, False)):
        (note,) = (each.text for each in predicted(source).notes if "stopped after 3 steps" in each.text)
        assert ("evaluation" in note) == expected


def test_a_last_step_that_is_known_to_be_the_same_is_not_run(predicted, capfd):
    traced = predicted(ENDLESS)
    assert capfd.readouterr().out.count("loss") == 2
    repeated = predicted(ENDLESS, repeat_last_step=True)
    assert capfd.readouterr().out.count("loss") == 1
    assert repeated.events == traced.events
    assert repeated.steps == traced.steps
    assert repeated.step_seconds == traced.step_seconds


def test_a_line_of_a_library_names_the_line_that_calls_it(predicted, tmp_path, capfd):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "library.py").write_text("def loss(model, x):\n    return model(x).sum()\n")
    script = predicted(
        MODEL
        + """
sys.path.append("site-packages")
import library
optimizer = torch.optim.SGD(model.parameters())
while True:
    library.loss(model, torch.randn(64, 256, device="cuda")).backward()
    optimizer.step()
    print("\\r|###   |", end="")
"""
    )
    callers = {Path(site.file).name: site.caller for site, _ in script.by_line()}
    assert callers["train.py"] is None
    assert (callers["library.py"].file, callers["library.py"].line) == ("train.py", 11)
    assert capfd.readouterr().out.endswith("|\n")  # what comes next does not begin within its line


def test_a_module_is_run_with_its_arguments(predicted, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(ENDLESS)
    module = oomph.predict(Script("package.train", ("--batch=32",), module=True, steps=2))
    assert [each.step for each in module.steps] == [1, 2]


LOOPS = {
    "without an optimizer": """
w = torch.randn(64, 64, device="cuda", requires_grad=True)
while True:
    (torch.randn(8, 64, device="cuda") @ w).square().sum().backward()
    with torch.no_grad():
        w -= 0.1 * w.grad
    w.grad = None
""",
    "with p.data": """
while True:
    model(torch.randn(8, 256, device="cuda")).sum().backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)
        p.grad = None
""",
    "of which one optimizer steps every fifth time": """
other = nn.Linear(256, 256).cuda(0)
often, seldom = torch.optim.SGD(model.parameters()), torch.optim.SGD(other.parameters())
count = 0
while True:
    other(model(torch.randn(8, 256, device=torch.device(0)))).sum().backward()
    often.step()
    count += 1
    if count % 5 == 0:
        seldom.step()
""",
    "of an optimizer that wraps another, which steps": """
class SAM(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups)
        self.param_groups = self.base.param_groups
optimizer, count = SAM(model.parameters()), 0
while True:
    model(torch.randn(8, 256, device="cuda")).sum().backward()
    assert count < 3
    optimizer.base.step()
    count += 1
""",
    "with an optimizer that gives its settings to an inner loop": """
optimizer, count = torch.optim.SGD(model.parameters()), 0
while True:
    inner = torch.optim.SGD(model.parameters())
    model(torch.randn(8, 256, device="cuda")).sum().backward()
    assert count < 3
    optimizer.step()
    count += 1
""",
    "that catches everything": """
optimizer = torch.optim.SGD(model.parameters())
while True:
    try:
        model(torch.randn(8, 256, device="cuda")).sum().backward()
        optimizer.step()
    except:
        pass
""",
}


@pytest.mark.parametrize("loop", LOOPS)
def test_other_endless_loops_end(predicted, loop):
    assert predicted(MODEL + LOOPS[loop]).peak.allocated > 0


def test_a_script_that_catches_everything_and_stays_on_the_host_is_refused(predicted):
    with pytest.raises(UserError, match="put nothing on the GPU"):
        predicted(
            MODEL.replace('.to("cuda")', "") + LOOPS["that catches everything"].replace('"cuda"', '"cpu"')
        )


def test_a_parameter_that_gets_its_first_value_from_data_is_no_step(predicted):
    """As in ActNorm, between gradients that the forward pass needs."""
    found = predicted(
        MODEL
        + """
scales = [nn.Parameter(torch.ones(256, device="cuda")) for _ in range(5)]
optimizer, started = torch.optim.Adam([*model.parameters(), *scales]), False
while True:
    x = torch.randn(64, 256, device="cuda", requires_grad=True)
    for scale in scales:
        if not started:
            scale.data.copy_(x.detach().std(0))
        x = x * scale
        slope, = torch.autograd.grad(x.sum(), x, create_graph=True)
        x = x + slope
    started = True
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    )
    assert len(found.steps) == 3
    assert any(allocation.kind == "optimizer state" for allocation in found.allocations)


def test_triton_kernels_of_a_script_are_not_launched(predicted):
    pytest.importorskip("triton")
    source = """
import triton
def kernel(x, out, rows, BLOCK):
    pass
plain = triton.JITFunction(kernel)  # triton.jit gives one that tests interpret
tuned = triton.autotune([triton.Config({"BLOCK": size}) for size in (128, 256)], key=["rows"])(plain)
optimizer = torch.optim.SGD(model.parameters())
while True:
    x = model(torch.randn(64, 256, device="cuda"))
    out = torch.zeros(2, device="cuda")
    plain[(2,)](x, out[:1], 64, BLOCK=128)
    tuned[lambda options: (64 // options["BLOCK"],)](x, out[1:], 64)
    if out[0] > 0 and out[1] > 0:  # what they write is unknown
        x.sum().backward()
        optimizer.step()
"""
    found = predicted(MODEL + source)
    assert len(found.steps) == 3
    assert [each.bytes for each in found.allocations if each.bytes >= 256 << 20] == [256 << 20]  # to autotune


def test_loaders_saving_loading_and_threads_work_as_in_a_real_run(predicted, tmp_path):
    before = set(tmp_path.iterdir())
    found = predicted(
        MODEL
        + """
from concurrent.futures import ThreadPoolExecutor
from torch.utils.data import DataLoader, TensorDataset
data = DataLoader(TensorDataset(torch.randn(64, 256)), batch_size=16, num_workers=2, pin_memory=True)
model = nn.DataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
assert torch.version.cuda and torch.cuda.device_count() == 1 and torch.backends.cudnn.is_available()
for epoch in range(2):
    for (x,) in data:
        loss = model(x.cuda(non_blocking=True)).square().mean()
        loss.backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
    saved = torch.load("last.pt", map_location="cuda")
    model.load_state_dict(saved["model"])
    with ThreadPoolExecutor(2) as pool:
        assert all(each.is_cuda for each in pool.map(lambda v: v.to("cuda"), [x, x]))
print(f"{loss:.3f}", loss, torch.cuda.FloatTensor(2).fill_(1.0))
""",
        steps=100,
    )
    assert len(found.steps) == 9
    assert set(tmp_path.iterdir()) - before == {tmp_path / "train.py"}


def test_file_of_cuda_tensors_is_loaded(predicted, tmp_path, monkeypatch):
    weight = torch.zeros(256, 256)
    state = {
        "weight": torch.nn.Parameter(weight),
        "rows": weight[2:4],
        "ids": torch.zeros(3, dtype=torch.long),
    }
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        for zipped in (0, 1):
            torch.save(state, tmp_path / f"{zipped}.pt", _use_new_zipfile_serialization=bool(zipped))
    found = predicted(
        MODEL
        + """
locations = "cpu", None, "cuda", {"cuda:0": "cuda"}, lambda s, _: s.cuda(0)
for case in [(zipped, only, where) for zipped in (0, 1) for only in (0, 1) for where in locations]:
    zipped, weights_only, location = case
    saved = None
    before = torch.cuda.memory_allocated()
    saved = torch.load(f"{zipped}.pt", map_location=location, weights_only=bool(weights_only))
    on_gpu = location != "cpu"
    assert torch.cuda.memory_allocated() - before == on_gpu * (256 * 256 * 4 + 24), case
    assert all(each.is_cuda == on_gpu for each in saved.values()), case
    assert saved["weight"].requires_grad and not saved["rows"].requires_grad
    assert saved["rows"].shape == (2, 256) and saved["rows"].storage_offset() == 512
    model(saved["weight"].cuda()).sum().backward()
torch.optim.SGD(model.parameters()).step()
"""
    )
    at_peak = {(one.shape, one.dtype) for _, one in found.at_peak}
    assert at_peak >= {((256, 256), "float32"), ((3,), "int64")}


def test_repeated_passes_are_not_traced_again(predicted):
    source = (
        MODEL
        + """
count = int(sys.argv[1])
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model.eval()
    with torch.no_grad():
        for _ in range(count):
            y = model(torch.randn(512, 256, device="cuda"))
    model.train()
    for _ in range(count):
        loss = model(torch.randn(64, 256, device="cuda")).square().mean() / count
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    )
    few, many = predicted(source, "4"), predicted(source, "40")
    assert many.peak == few.peak
    assert [each.allocated for each in many.steps] == [each.allocated for each in few.steps]
    assert len(many.events) < 6 * len(few.events)  # of 10 times the passes
    assert many.step_seconds > 6 * few.step_seconds


def test_the_allocators_settings_are_those_of_the_environment(predicted, monkeypatch):
    source = """
import os
import sys
if len(sys.argv) > 1:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = sys.argv[1]
import torch
model = torch.nn.Linear(8, 8, device="cuda")
for size in (40, 60, 100):  # MiB: no free segment is large enough for the next one
    y = torch.empty(size << 20, dtype=torch.uint8, device="cuda")
    del y
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    model.weight.data.sub_(model.weight.grad)
"""
    plain = predicted(source)
    by_script = predicted(source, "expandable_segments:True")
    refused = predicted(source, "roundup_power2_divisions:4")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    by_shell = predicted(source)
    assert by_script.peak.reserved == by_shell.peak.reserved < plain.peak.reserved - 50 * 2**20
    assert any("PYTORCH_ALLOC_CONF=expandable_segments:True" in note.text for note in by_shell.notes)
    by_both = predicted(source, "max_split_size_mb:64")
    assert any(
        "instead of PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64" in note.text for note in by_both.notes
    )
    assert refused.peak == plain.peak
    assert any("PYTORCH_CUDA_ALLOC_CONF is not applied" in note.text for note in refused.notes)


def test_the_time_of_a_step_is_without_an_evaluation_in_some_steps(predicted):
    source = (
        MODEL
        + """
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    if step % 2 == int(sys.argv[1]):
        with torch.no_grad():
            for _ in range(9):
                model(torch.randn(64, 256, device="cuda"))
    model(torch.randn(64, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    )
    never, even, odd = (predicted(source, which).step_seconds for which in ("2", "0", "1"))
    assert even == odd == pytest.approx(never)


def test_the_time_of_a_step_is_that_of_all_its_accumulated_batches(predicted):
    source = (
        MODEL
        + """
optimizer = torch.optim.AdamW(model.parameters())
batches = int(sys.argv[1])
while True:
    for i in range(batches):
        model(torch.randn(64, 256, device="cuda")).square().mean().backward()
        if i % 4 == 3 or i + 1 == batches:
            optimizer.step()
            optimizer.zero_grad()
"""
    )
    whole, with_a_rest = (predicted(source, batches).step_seconds for batches in ("4", "5"))
    assert with_a_rest == pytest.approx(whole)


STEPS = """
optimizer = torch.optim.AdamW(model.parameters())
def train(batch):
    for _ in range(3):
        model(torch.randn(batch, 256, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


WORKS = {
    "saved weights are loaded to any device": """
torch.save(nn.Linear(256, 8192), "last.pt")
for location in ("cuda", {"cpu": "cuda:0"}, lambda storage, _: storage.cuda(0)):
    loaded = torch.load("last.pt", map_location=location, weights_only=False)
    assert loaded.weight.is_cuda and loaded.bias.is_cuda, location
loaded = torch.load("last.pt", map_location=lambda storage, _: storage, weights_only=False)
assert not loaded.weight.is_cuda and not loaded.bias.is_cuda
train(8)
""",
    "an object that is no tensor makes one when an op takes it, as in Lightning": """
class Lazy:
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        storage = torch.UntypedStorage(256 * 256 * 4)
        loaded = torch.empty(0, device=storage.device).set_(storage, 0, (256, 256), (256, 1))
        moved = torch.ones(256, 256, device="cuda")
        assert not loaded.is_cuda and moved.is_cuda
        return func(*(loaded if isinstance(arg, Lazy) else arg for arg in args), **kwargs or {})

opt = torch.optim.SGD(model.parameters(), 0.1)
with torch.no_grad():
    model[0].weight[:256, :256].copy_(Lazy())
model(torch.randn(8, 256, device="cuda")).sum().backward()
opt.step()
""",
    "datasets are loaded from a file, by native code": """
import json, torch
from datasets import load_dataset
with open("rows.json", "w") as file:
    file.write("\\n".join(json.dumps({"x": [float(i)] * 8}) for i in range(16)))
rows = load_dataset("json", data_files="rows.json", split="train", cache_dir="cache")
rows = rows.map(lambda batch: {"y": batch["x"]}, batched=True)
model = torch.nn.Linear(8, 1).cuda()
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.tensor(rows[:16]["y"]).cuda()).sum().backward()
    opt.step()
""",
    "tokenizers are saved and loaded, by native code": """
import importlib.util, os
assert importlib.util.find_spec("tokenizers") is not None  # as transformers asks before it imports it
from tokenizers import Tokenizer, models
os.mkdir("saved")
Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save("saved/tokenizer.json")
assert Tokenizer.from_file("saved/tokenizer.json").get_vocab_size() == 2
model(torch.randn(8, 256, device="cuda")).sum().backward()
""",
    "a parameter is made by the class of another, as in accelerate": """
for part in model.modules():
    for name, old in [*part.named_parameters(recurse=False)]:
        new = type(old)(torch.zeros(old.shape), requires_grad=old.requires_grad).to("cuda")
        assert isinstance(new, nn.Parameter) or new.grad_fn is not None
        part._parameters[name] = type(old)(new.detach(), requires_grad=True)
        assert isinstance(part._parameters[name], nn.Parameter)
model(torch.ones(4, 256).cuda()).sum().backward()
torch.optim.SGD(model.parameters()).step()
""",
    "TensorBoard draws the graph of the model, which is empty": """
from torch.utils.tensorboard import SummaryWriter
with SummaryWriter("logs") as writer:
    writer.add_graph(model, torch.ones(4, 256).cuda())
model(torch.ones(4, 256).cuda()).sum().backward()
torch.optim.SGD(model.parameters()).step()
""",
    "safetensors are read back, and tied weights found": """
from safetensors.torch import load_file, save_model
tied = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
tied[2].weight = tied[1].weight
save_model(tied, "model.safetensors")
assert len(load_file("model.safetensors")) == 5
assert len({p.data_ptr() for p in tied.parameters()}) == 5
torch.cuda.random.get_rng_state()
with torch.inference_mode():
    assert torch.softmax(model(torch.ones(4, 256).type(torch.cuda.FloatTensor)), -1).mean().item() == 1.0
optimizer = torch.optim.SGD(model.parameters())
model(torch.ones(4, 256).cuda()).sum().backward()
optimizer.step()
""",
    "the management library answers for the GPU, as to pynvml": """
import ctypes
from ctypes import byref
class Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]
library = ctypes.CDLL("libnvidia-ml.so.1")
memory, count, handle = Memory(), ctypes.c_uint(), ctypes.c_void_p()
name = ctypes.create_string_buffer(96)
assert library.nvmlInit_v2() == library.nvmlDeviceGetHandleByIndex_v2(0, byref(handle)) == 0
assert library.nvmlDeviceGetCount_v2(byref(count)) == 0 and count.value == 1
library.nvmlDeviceGetName(handle, name, 96)
assert name.value.decode() == torch.cuda.get_device_name()
train(8)
assert library.nvmlDeviceGetMemoryInfo(handle, byref(memory)) == 0
assert memory.total == torch.cuda.mem_get_info()[1] and memory.used >= torch.cuda.memory_allocated() > 0
optimizer.step()
""",
    "the profiler finds modules in its stacks": """
from torch.profiler import ProfilerActivity, profile
train(8)  # torch reads names of code that was freed meanwhile, such as that of a module imported here
with profile(activities=[ProfilerActivity.CPU], with_stack=True, acc_events=True) as profiler:
    model(torch.ones(8, 256, device="cuda"))
names = [event.name for event in profiler.events()]  # without calls of Python before torch 2.13
assert any("nn.Module: Linear" in name for name in names) or torch.__version__ < "2.13"
optimizer.step()
""",
    "a counter of FLOPs gets a graph without ops": """
graph, out = torch.jit._get_trace_graph(model, (torch.randn(2, 256, device="cuda"),))
assert not list(graph.nodes()) and out.shape[0] == 2
train(8)
""",
    "NCCL and bfloat16 are there": """
import torch.distributed as dist
from torch.cuda import nccl
assert torch.cuda.is_bf16_supported() and dist.is_nccl_available() and nccl.version() >= (2, 10)
train(8)
""",
    "datasets are mapped by two processes": """
import datasets
rows = datasets.Dataset.from_dict({"size": [8, 16]}).map(lambda row: row, num_proc=2)
train(rows[1]["size"])
""",
}


@pytest.mark.parametrize("name", WORKS)
def test_what_works_on_a_gpu_works(predicted, name):
    if name.startswith(("datasets", "tokenizers", "TensorBoard")):
        pytest.importorskip(name.split()[0].lower())
    assert predicted(MODEL + STEPS + WORKS[name], steps=9).peak.allocated


@pytest.mark.parametrize("imported_before", [False, True])
def test_joblib_trains_in_the_process(predicted, imported_before):
    if imported_before or importlib.util.find_spec("joblib") is None:
        pytest.importorskip("joblib")
    source = "import joblib\njoblib.Parallel(n_jobs=2)(joblib.delayed(train)(b) for b in (8, 16))"
    assert predicted(MODEL + STEPS + source).peak.allocated


def test_wandb_is_disabled_whatever_mode_the_program_asks_for(predicted, tmp_path):
    (tmp_path / "wandb.py").write_text("def init(project, mode=None):\n    return mode\n")
    source = "import wandb\nassert wandb.init(project='a', mode='offline') == 'disabled'\ntrain(8)"
    assert predicted(MODEL + STEPS + source).peak.allocated


def test_the_profiler_records_no_events_of_a_gpu(predicted, capfd):
    source = """
from torch.profiler import ProfilerActivity, profile
gpu_too = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
with profile(activities=gpu_too, acc_events=True) as profiler:
    train(8)
assert "addmm" in profiler.key_averages().table(sort_by="cuda_time_total")
optimizer.step()
"""
    assert predicted(MODEL + STEPS + source, steps=4).peak.allocated
    assert "Failed to record" not in capfd.readouterr().err


def test_gradients_of_autograd_grad_train_a_model(predicted):
    source = """
optimizer = torch.optim.Adam(model.parameters())
for _ in range(2):
    loss = model(torch.randn(8, 256, device="cuda")).sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    for parameter, gradient in zip(model.parameters(), gradients):
        parameter.grad = gradient.detach()
    optimizer.step()
"""
    found = predicted(MODEL + source)
    assert found.steps[1].allocated > 4 * 4 * (256 * 1024 * 2)
    assert not any("inference" in note.text for note in found.assumptions)


def test_a_script_that_infers_may_end_with_status_0(predicted):
    found = predicted(MODEL + "model(torch.randn(8, 256, device='cuda'))\nsys.exit(0)\n")
    assert any("no backward pass ran" in note.text for note in found.assumptions)


def test_where_a_library_may_not_write_the_option_that_allows_it_is_named(predicted, tmp_path):
    """h5py.File(path, "r+") opens the file in C, which Landlock refuses."""
    (tmp_path / "data.h5").touch()
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.open(b"data.h5", os.O_RDWR) < 0:
    raise PermissionError(ctypes.get_errno(), "unable to open file", "data.h5")
raise SystemExit("opened")
"""
    with pytest.raises(ProgramError, match=r"data\.h5|opened") as caught:
        predicted(source)
    assert caught.value.line == 5 or "opened" in str(caught.value)  # a kernel without Landlock


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sys, torch\ntorch.ones(3).cuda()\nsys.exit()\n", "without a training step"),
        ("import torch\ntorch.ones(3, device='cuda:1')\n", "one GPU is traced"),
    ],
)
def test_scripts_that_fail(predicted, source, message):
    with pytest.raises(ProgramError, match=message):
        predicted(source, "--unknown")


def test_modules_have_their_own_names_inside_of_wrappers(predicted):
    source = """
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
model = nn.Sequential(checkpoint_wrapper(nn.Linear(256, 256)), nn.Linear(256, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(64, 256, device="cuda")).sum().backward()
    optimizer.step()
"""
    found = predicted("import torch\nfrom torch import nn\n" + source)
    assert {one.module for one in found.allocations if one.kind == "parameter"} == {"0", "1"}


def test_data_are_in_the_order_that_the_seed_gives_after_parameters_are_initialised(predicted):
    seeded = """
import torch
from torch import nn
torch.manual_seed(0)
built = nn.Sequential(nn.Linear(300, 100), nn.Embedding(50, 33), nn.TransformerEncoderLayer(32, 4)).half()
nn.init.orthogonal_(nn.Linear(9, 9).weight)
nn.init.trunc_normal_(built[0].weight, std=0.02)
order = [batch.tolist() for batch in torch.utils.data.DataLoader(range(64), 16, shuffle=True)]
"""
    real = {}
    steps = MODEL + STEPS + "train(8)\n"
    with torch.random.fork_rng(devices=()):
        exec(seeded, real)
        assert predicted(f"{seeded}\nassert order == {real['order']}\n{steps}").peak.allocated


def test_what_comes_after_the_last_step_is_no_step_that_differs(predicted):
    found = predicted(ENDLESS.replace("while True", "for _ in range(5)"), steps=8)
    assert found.interval is None
    assert not any("from step to step" in note.text for note in found.notes)
