"""Programs under torch.compile: what Inductor's generated program allocates."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from small_programs import in_trace
from torch import distributed as dist, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask

import oomph
from oomph.errors import ProgramError
from oomph.prediction import isolation

WIDTH, ROWS = 64, 2048


class Block(nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        self.up, self.down, self.breaks = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), breaks

    def forward(self, x):
        wide = F.gelu(self.up(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.down(wide)


class Net(nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        self.blocks = nn.ModuleList([Block(breaks), Block(breaks)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(128, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.block, self.head = Block(), nn.Linear(WIDTH, 128, bias=False)
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = (part.view(4, 128, 2, 32).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        logits = self.head(self.norm(self.block(x)))
        return F.cross_entropy(logits.view(-1, 128), tokens.view(-1))


def predict(compile=lambda model: model, **options):
    def setup():
        model = compile(Net(**options).cuda())
        x = torch.randn(ROWS, WIDTH, device="cuda")
        return lambda: model(x).square().sum().backward()

    return oomph.predict(setup, gpu="h200")


@pytest.fixture(scope="module")
def eager():
    return predict()


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """In this process: what the compiler loads at its first use is then in the forks of other predictions."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="ignore"):
        patch.setattr(isolation, "_inside", True)
        prediction = predict(torch.compile)
    torch._dynamo.reset()
    return prediction


def test_a_compiled_model_needs_less_than_the_eager_one(eager, compiled):
    assert compiled.notes == ()
    assert compiled.interval is None
    # Gradients are computed in place of activations that are not needed any more.
    assert eager.peak.allocated - compiled.peak.allocated >= ROWS * WIDTH * 4


def test_allocations_of_a_compiled_model_name_module_line_and_stage(compiled):
    made = [one for one in compiled.allocations if one.module == "blocks.1.up" and one.shape[:1] == (ROWS,)]
    assert {one.stage for one in made} >= {"forward activations"}
    assert all(one.site.file == __file__ and one.site.function == "forward" for one in made)
    assert {one.op for one in made} >= {"aten.addmm"}
    assert any(one.stage == "backward" and one.module.startswith("blocks.0") for one in compiled.allocations)


def test_compiled_blocks_with_graph_breaks_need_about_as_much_as_one_graph(compiled):
    def compile_blocks(model):
        for block in model.blocks:
            block.compile()
        return model

    blocks = predict(compile_blocks, breaks=True)
    assert blocks.notes == ()
    assert blocks.peak.allocated == pytest.approx(compiled.peak.allocated, rel=0.05)
    assert any(one.module == "blocks.1.up" for one in blocks.allocations)


def test_functions_of_torch_that_the_trace_replaces_cause_no_recompilation():
    class Layer(nn.Linear):
        def __call__(self, x):
            return super().__call__(F.pad(x, (0, 1)))  # guards on nn.Module.__call__ and a function of F.pad

    def setup():
        layer = Layer(WIDTH + 1, WIDTH).cuda()
        model = torch.compile(lambda x: layer(x))
        x = torch.randn(ROWS, WIDTH, device="cuda")
        return lambda: model(x).sum().backward()

    with torch._dynamo.config.patch(error_on_recompile=True):
        assert oomph.predict(setup, gpu="h200").notes == ()


def test_types_of_inputs_are_converted_within_one_graph():
    def setup():
        weight = torch.ones(WIDTH, device="cuda", requires_grad=True)
        model = torch.compile(lambda x: (x * weight.type_as(x)).relu().square(), fullgraph=True)
        x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
        return lambda: model(x).sum().backward()

    assert oomph.predict(setup, gpu="h200").notes == ()


def test_tensors_are_moved_to_the_gpu_within_one_graph():
    def setup():
        weight = torch.ones(WIDTH, device="cuda", requires_grad=True)
        model = torch.compile(lambda x: x * weight.cuda() * torch.arange(WIDTH).cuda(0, True), fullgraph=True)
        x = torch.randn(ROWS, WIDTH, device="cuda")
        return lambda: model(x).sum().backward()

    assert oomph.predict(setup, gpu="h200").notes == ()


def test_functions_are_compiled_before_and_after_a_process_group_starts():
    def setup():
        early = torch.compile(lambda x: x.relu().square())
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        model = torch.compile(nn.Linear(WIDTH, WIDTH).cuda())
        dist.destroy_process_group()
        x = torch.randn(ROWS, WIDTH, device="cuda")
        return lambda: early(model(x)).sum().backward()

    assert oomph.predict(setup, gpu="h200").notes == ()


def test_compiled_functions_are_inlined_in_others():
    def setup():
        square = torch.compile(lambda x: x.relu().square())
        model = torch.compile(lambda x: square(x).sum(), fullgraph=True)
        x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
        return lambda: model(x).backward()

    assert oomph.predict(setup, gpu="h200").notes == ()


def test_code_that_dynamo_made_has_lines():
    """It may have a dict among its constants, and cannot be hashed then."""

    def step():
        torch.ones(ROWS, WIDTH, device="cuda", requires_grad=True).sum().backward()

    step.__code__ = step.__code__.replace(co_consts=(*step.__code__.co_consts, {}))
    prediction = oomph.predict(lambda: step, gpu="h200")
    assert any(one.site and one.site.file == __file__ for one in prediction.allocations)


def test_a_graph_break_under_fullgraph_is_the_programs_error():
    with pytest.raises(ProgramError, match="graph_break"):
        predict(lambda model: torch.compile(model, fullgraph=True), breaks=True)


def test_what_cannot_be_compiled_is_traced_as_eager_with_an_interval(monkeypatch, eager):
    def fail(*args, **kwargs):
        raise RuntimeError("no such lowering")

    monkeypatch.setattr("oomph.prediction.compiler_internals.compile_fx_inner", fail)
    prediction = predict(torch.compile)
    assert "no such lowering" in prediction.notes[0].text
    assert prediction.peak.allocated == pytest.approx(eager.peak.allocated, rel=0.02)
    assert prediction.interval.low.allocated < prediction.interval.high.allocated == prediction.peak.allocated


def test_a_decoder_with_autocast_in_cuda_graphs():
    def setup():
        model = torch.compile(Decoder().cuda(), mode="reduce-overhead")
        tokens = torch.zeros(4, 128, dtype=torch.long, device="cuda")

        def step():
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens)
            loss.backward()

        return step

    prediction = oomph.predict(setup, gpu="h200")
    assert ["CUDA graphs" in note.text for note in prediction.notes] == [True]
    ops = {one.op for one in prediction.allocations}
    assert any("scaled_dot_product" in op and "for_cpu" not in op for op in ops)
    assert any(one.stage == "loss" for one in prediction.allocations)
    assert any(one.dtype == "bfloat16" and one.module == "block.up" for one in prediction.allocations)
    pool = [one for one in prediction.allocations if one.stream]
    # The graph's input is copied in every step; the copies do not stay.
    copies = [one.dtype for one in pool if one.shape == (4, 128)]
    assert set(copies) == {"int64"}
    assert len(copies) % len(prediction.steps) == 0


def test_timing_a_product_takes_its_factors_twice_and_a_buffer():
    def program():
        model = torch.compile(nn.Linear(4096, 1001, bias=False, device="cuda", dtype=torch.bfloat16))
        with torch.no_grad():
            model(torch.empty(8, 4096, device="cuda", dtype=torch.bfloat16))

    found = oomph.predict(program, gpu="h200")
    weight, padded = 4096 * 1001 * 2, 4096 * 1008 * 2
    timing = [one.bytes for one in found.allocations if one.op == "inductor.benchmark"]
    assert {weight, padded, 60 << 20} < set(timing)
    assert found.peak.allocated > 2 * weight + padded + (60 << 20)


def test_products_with_odd_sizes_are_padded():
    """The gradient of the logits is copied with padding, once for each of two products."""

    def setup():
        head = torch.compile(nn.Linear(1024, 8193, bias=False).cuda().bfloat16())
        x = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        return lambda: head(x).backward(torch.ones(8192, 8193, device="cuda", dtype=torch.bfloat16))

    prediction = oomph.predict(setup, gpu="h200")
    logits = 2 * 8192 * 8193
    assert prediction.peak.allocated > 4 * logits
    assert any("odd sizes" in note.text for note in prediction.notes)


@in_trace()
def test_tensors_are_on_the_gpu_after_a_compiled_block_mask():
    """It enters a torch function mode: the code that Dynamo makes of it sets the modes of the program."""

    def causal(batch, head, query, key):
        return query >= key

    torch.compile(create_block_mask)(causal, None, None, 256, 256)
    x = torch.ones(4, device="cuda", requires_grad=True)
    assert x.is_cuda
    x.sum().backward()


def test_without_triton_the_prediction_is_the_same(compiled, tmp_path):
    """In a fresh interpreter that finds no Triton; the program itself does not find one either."""
    program = tmp_path / "without.py"
    program.write_text(_WITHOUT_TRITON)
    folder = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, program, folder], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == [str(compiled.peak.allocated), str(compiled.peak.reserved)], done.stderr


_WITHOUT_TRITON = """
import importlib.machinery, importlib.util, sys

class WithoutTriton(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "triton" else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = WithoutTriton
sys.path.insert(0, sys.argv[1])
import torch, oomph
from test_compiled import Net, ROWS, WIDTH

def setup():
    model = torch.compile(Net().cuda())
    x = torch.randn(ROWS, WIDTH, device="cuda")
    def step():
        assert importlib.util.find_spec("triton") is None
        model(x).square().sum().backward()
    return step

found = oomph.predict(setup, gpu="h200")
assert found.interval is None and "triton" not in sys.modules
print(found.peak.allocated, found.peak.reserved)
"""
