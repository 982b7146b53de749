"""Programs may do in a trace what they do on a GPU."""

import copy
import importlib
import random
import sys
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from small_programs import MiB, in_trace, line_of, mean_square, notes_of, predict_step, workload
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

import oomph
from oomph import ProgramError, UserError

pytestmark = pytest.mark.usefixtures("in_process")


def test_zeroed_gradients_stay_allocated_between_steps():
    def ends(set_to_none):
        def train():
            model = nn.Linear(1024, 1024, bias=False).cuda()
            optimizer = torch.optim.SGD(model.parameters())
            x = torch.randn(8, 1024, device="cuda")

            def step():
                mean_square(model, x).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)

            return step

        return [step.end for step in oomph.predict(train).steps]

    kept, dropped = ends(False), ends(True)
    assert [a - b for a, b in zip(kept, dropped, strict=True)] == [4 * MiB] * 3


def test_loaded_state_of_an_optimizer_is_state_and_no_batch():
    def train():
        model = nn.Linear(1024, 1024, bias=False).cuda()
        optimizer = torch.optim.Adam(model.parameters())

        def step():
            mean_square(model, torch.randn(8, 1024).cuda()).backward()
            optimizer.step()
            weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
            saved = optimizer.state_dict()
            saved["state"] = {
                index: {name: value.cpu() for name, value in state.items()}
                for index, state in saved["state"].items()
            }
            model.load_state_dict(weights)
            optimizer.load_state_dict(saved)

        return step

    found = oomph.predict(train)
    assert dict(found.by_stage())["optimizer state"] == 16 * MiB  # loaded, and that of before
    assert [tensor.shape for tensor in found.batch] == [(8, 1024)]


def test_parameters_of_a_model_that_is_called_late_have_its_names():
    def train():
        one, other = (nn.Sequential(nn.Linear(512, 512, bias=False)).cuda() for _ in range(2))
        optimizers = [torch.optim.SGD(each.parameters()) for each in (one, other)]

        def step():
            for model, optimizer in zip((one, other), optimizers, strict=True):
                mean_square(model, torch.randn(8, 512, device="cuda")).backward()
                optimizer.step()

        return step

    parameters = [
        each.allocation for each in oomph.predict(train).at_peak if each.allocation.kind == "parameter"
    ]
    assert len(parameters) == 2
    assert all(each.module for each in parameters)


def test_a_function_compiled_before_the_trace_is_compiled_in_it():
    @torch.compile(backend="eager")  # as a decorator does it, when the program is imported
    def loss(model, batch):
        return mean_square(model, batch)

    prediction = oomph.predict(workload(loss=loss))
    assert prediction.peak.allocated == oomph.predict(workload()).peak.allocated
    assert "torch.compile" not in notes_of(prediction)


@in_trace(lambda found: found.peak.allocated > 64 * 64 * 4)
def test_a_default_device_set_by_the_program_is_the_pretend_gpu():
    torch.set_default_device("cuda")
    model = nn.Linear(64, 64)
    assert model.weight.is_cuda
    assert torch.tensor([1.0]).is_cuda
    assert torch.zeros(2, device="cpu").device.type == "cpu"
    return lambda: mean_square(model, torch.randn(32, 64)).backward()


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_a_default_tensor_type_set_by_the_program_is_of_the_pretend_gpu():
    def train():
        torch.set_default_tensor_type(torch.cuda.FloatTensor)
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
        model = nn.Linear(64, 64)
        assert model.weight.is_cuda
        assert torch.Tensor([1.0]).is_cuda
        assert torch.Tensor(2, 3).is_cuda
        assert torch.LongTensor([1]).device.type == "cpu"
        torch.set_default_tensor_type("torch.FloatTensor")
        assert torch.Tensor([1.0]).device.type == "cpu"
        return lambda: mean_square(model, torch.randn(32, 64, device="cuda")).backward()

    assert oomph.predict(train).peak.allocated > 64 * 64 * 4
    assert torch.Tensor([1.0]).device.type == "cpu"


def test_reading_a_loss_works_and_a_guessed_condition_is_noted():
    def step(model, x):
        loss = mean_square(model, x)
        if loss.isnan() or loss > 100:
            raise RuntimeError("the loss is not a small number")
        loss.backward()
        assert isinstance(loss.item(), float)
        model.zero_grad()

    prediction = predict_step(step)
    assert len(prediction.steps) == 3
    note = next(note for note in prediction.notes if "condition" in note.text)
    assert note.site.line == line_of(step, "isnan")


def test_small_data_on_the_host_stays_real():
    data = TensorDataset(torch.arange(64.0).view(8, 8), torch.arange(8))

    def train():
        model = nn.Linear(8, 8).cuda()

        def step():
            order = list(range(8))
            random.shuffle(order)
            assert sorted(order) == list(range(8))
            labels = []
            for x, y in DataLoader(data, batch_size=4, shuffle=True):
                assert not isinstance(x, FakeTensor)
                assert x[0, 0].item() == 8 * y[0].item()
                doubled = torch.from_numpy(numpy.asarray(x.numpy()) * 2)
                assert torch.equal(doubled, x * 2)
                labels += y.tolist()
                F.cross_entropy(model(x.to("cuda")), y.to("cuda")).backward()
            assert sorted(labels) == list(range(8))

        return step

    assert len(oomph.predict(train).steps) == 3


def test_generators_say_their_device():
    def step(model, x):
        assert isinstance(torch.manual_seed(7), torch.Generator)
        generator = torch.Generator("cuda").manual_seed(7)
        assert isinstance(generator, torch.Generator)
        assert generator.device == torch.device("cuda")  # without an index, as with CUDA
        assert torch.Generator(0).device == x.device
        assert torch.Generator().device.type == "cpu"
        assert torch.rand(4, device="cuda", generator=generator).is_cuda

    predict_step(step)


def test_questions_of_logs_about_the_gpu_have_answers():
    def step(model, x):
        card = torch.cuda.get_device_properties(0)
        assert card.shared_memory_per_block_optin > card.shared_memory_per_block
        assert card.L2_cache_size > 0
        assert card.memory_bus_width * card.memory_clock_rate > 0
        assert card.uuid
        assert torch.cuda.temperature() == torch.cuda.power_draw() == torch.cuda.get_sync_debug_mode() == 0
        assert (
            sum(each["total_size"] for each in torch.cuda.memory_snapshot()) == torch.cuda.memory_reserved()
        )
        assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == 0
        assert torch.accelerator.max_memory_allocated() >= torch.accelerator.memory_reserved() > 0
        assert torch.accelerator.memory_stats()["num_ooms"] == 0

    predict_step(step)


def test_tensors_say_the_device_the_program_put_them_on():
    def step(model, x):
        assert x.device == torch.device("cuda", 0)
        assert x.is_cuda
        assert x.cpu().device.type == "cpu"
        assert model.weight.device.type == "cuda"
        assert torch.zeros(2).device.type == "cpu"
        assert torch.zeros_like(x).device == x.new_ones(3).device == x.device
        assert nn.Linear(4, 4).to(0).weight.is_cuda
        assert torch.zeros(8).to(device=0).get_device() == torch.randn(8, device=0).get_device() == 0
        assert torch.zeros(8).type_as(x).is_cuda
        assert x.type_as(torch.zeros(1, dtype=torch.float64)).device.type == "cpu"
        assert torch.cuda.is_available()

    assert predict_step(step).notes == ()


def peak_of(program):
    return oomph.predict(program).peak.allocated / MiB


def test_a_storage_that_grows_is_counted_at_its_new_size():
    assert peak_of(lambda: torch.empty(0, device="cuda").resize_(64 * MiB)) == 256


@pytest.mark.parametrize(
    ("write", "workspace"),
    [(torch.add, 0), (torch.mm, 32), (lambda a, b, out: torch.addmm(a, a, b, out=out), 32)],
)
@pytest.mark.parametrize(("rows", "total"), [(0, 8), (1024, 8), (2048, 12)])
def test_a_result_is_written_into_a_given_tensor_which_grows_if_it_has_to(write, workspace, rows, total):
    def program():
        square = torch.randn(1024, 1024, device="cuda")
        write(square, square, out=torch.empty(rows, 1024, device="cuda")[:1024])

    assert peak_of(program) == total + workspace


def test_a_storage_resized_to_nothing_is_free():
    def program():
        first = torch.empty(64 * MiB, device="cuda")
        first.untyped_storage().resize_(0)
        torch.empty(64 * MiB, device="cuda")

    assert peak_of(program) == 256


@in_trace(lambda found: "taken as true" in notes_of(found))
def test_known_values_are_forgotten_when_a_view_of_them_is_written():
    mask = torch.zeros(64, 64, device="cuda")
    assert not mask.any()
    mask[:, 32:] = torch.randn(64, 32, device="cuda")
    if not mask.any():
        torch.empty(1, device="cuda")


@in_trace()
def test_peak_counters_that_the_program_reads_make_sense():
    torch.empty(MiB, device="cuda")
    assert torch.cuda.max_memory_allocated() >= 4 * MiB
    assert torch.cuda.memory_stats().get("active_bytes.all.peak", 0) >= 4 * MiB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() == 0
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0


def _grouped_products():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.randn(32, 64, device="cuda", dtype=dtype, requires_grad=True)
        experts = torch.randn(4, 64, 16, device="cuda", dtype=dtype, requires_grad=True)
        ends = torch.tensor([8, 16, 24, 32], device="cuda", dtype=torch.int32)
        F.grouped_mm(x, experts, offs=ends).square().sum().backward()


def _tensor_of_gpu_numbers():
    x = torch.ones(3, device="cuda", requires_grad=True)
    assert torch.tensor([[x[0], 2.0]], device="cuda").shape == (1, 2)
    sizes = torch.tensor([[4, 6]], device="cuda")
    assert torch.tensor([sizes[0, 0], sizes[0, 1]]).tolist() == [4, 6]
    assert sizes.new_tensor([7]).item() == 7
    x.sum().backward()


def _orthogonal():
    model = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)).cuda()
    model(torch.randn(2, 8, device="cuda")).sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides it from users
def test_gradients_of_what_is_written_into_a_host_tensor_come_back_to_the_gpu():
    def step():
        layer = nn.Linear(1, 32).cuda()
        x = torch.randn(256, 10, device="cuda")
        rows, copied = torch.empty(256, 10, 32), torch.empty(256, 32)
        for column in range(10):
            rows[:, column, :] = layer(x[:, column : column + 1])
        copied.copy_(layer(x[:, :1]))
        (rows.cuda().sum() + copied.cuda().sum()).backward()
        assert layer.weight.grad.is_cuda

    oomph.predict(step, gpu="h200")


def test_numbers_of_the_gpu_in_a_list_make_a_tensor_of_the_host():
    def step():
        number = torch.Tensor([0.5]).cuda()
        made = torch.Tensor([number, 2.0])
        assert not made.is_cuda
        assert made.shape == (2,)
        (torch.ones(2, device="cuda", requires_grad=True) * made.cuda()).sum().backward()

    oomph.predict(step, gpu="h200")


def test_modules_whose_methods_are_scripted_are_traced_as_eager():
    def step():
        class Scripted(torch.jit.ScriptModule):
            def __init__(self):
                super().__init__()
                self.activation = torch.nn.functional.relu
                self.linear = nn.Linear(64, 64)

            @torch.jit.script_method
            def forward(self, x):
                return self.activation(self.linear(x))

        model = Scripted().cuda()
        assert isinstance(model, torch.jit.ScriptModule)
        assert not isinstance(model.linear, torch.jit.ScriptModule)
        model(torch.randn(8, 64, device="cuda")).sum().backward()

    prediction = oomph.predict(step, gpu="h200")
    assert any("torch.jit" in note.text for note in prediction.notes)


def _scripted():
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))).cuda()
    model(torch.randn(2, 4, device="cuda")).sum().backward()


def _scripted_by_torch():
    sys.modules.pop("torch.distributed.optim.functional_sgd", None)
    importlib.import_module("torch.distributed.optim.functional_sgd")
    nn.Linear(4, 4).cuda()(torch.randn(2, 4, device="cuda")).sum().backward()


def _forward_mode():
    x = torch.randn(3, device="cuda", requires_grad=True)
    torch.func.jvp(torch.sin, (x,), (torch.ones(3, device="cuda"),))[0].sum().backward()


def _cuda_graph():
    model, x = nn.Linear(4, 4).cuda(), torch.randn(2, 4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).sum().backward()
    graph.replay()


def _lengths_on_the_host():
    x = torch.randn(50, 2, 20, device="cuda", requires_grad=True)
    labels = torch.randint(1, 20, (2, 10), device="cuda")
    F.ctc_loss(x.log_softmax(2), labels, torch.full((2,), 50), torch.full((2,), 10)).backward()


def _flex_attention():
    q = torch.randn(1, 2, 128, 16, device="cuda", requires_grad=True)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cuda")
    out = torch.compile(flex_attention)(q, q, q, block_mask=mask)
    out.sum().backward()
    assert out.shape == q.grad.shape


def _einsum_of_a_graph():
    graph = torch.fx.Graph()
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    a, b = (torch.fx.Proxy(graph.placeholder(name), tracer) for name in "ab")
    graph.output(torch.einsum("ij,jk->ik", [a, b]).node)  # a list, as opt_einsum gives it
    x = torch.randn(4, 4, device="cuda", requires_grad=True)
    torch.fx.GraphModule(nn.Module(), graph)(x, x).sum().backward()


def _rows_written_on_the_host():
    x = torch.randn(4, 3, device="cuda", requires_grad=True)
    table = torch.zeros(4, 4)
    for row in range(4):
        table[numpy.array([0, 1]), row] = x.cpu()[:2].sum(1)
    table.sum().backward()
    assert x.grad.is_cuda


def _clamped_on_the_host():
    x, weight = torch.ones(4, device="cuda"), torch.ones(4, requires_grad=True)
    weight.clamp(min=0.5).sum().backward()  # autograd makes a zero
    assert x.is_cuda
    assert not weight.grad.is_cuda


def _shared_by_processes():
    model = nn.Linear(4, 4).cuda().share_memory()
    model(torch.randn(2, 4, device="cuda")).sum().backward()


def _legacy_types():
    x = torch.cuda.FloatTensor(torch.Size([2, 3])).zero_()
    assert x.shape == torch.cuda.HalfTensor(2, 3).shape
    assert torch.cuda.LongTensor([2, 3]).tolist() == [2, 3]
    x.requires_grad_().sum().backward()


def _indices_one_by_one():
    rows, columns = zip(*torch.tensor([[0, 1], [2, 3]], device="cuda"), strict=True)
    x = torch.zeros(4, 4, device="cuda", requires_grad=True)
    x[rows, columns].sum().backward()
    mask = torch.ones(4, 4, device="cuda").bool()
    mask[rows, columns] = False
    assert len(x[mask]) == 14


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*without torch.compile")  # of torch itself
@pytest.mark.parametrize(
    "program",
    [
        _grouped_products,
        _tensor_of_gpu_numbers,
        _orthogonal,
        _scripted,
        _scripted_by_torch,
        _forward_mode,
        _cuda_graph,
        _lengths_on_the_host,
        _flex_attention,
        _einsum_of_a_graph,
        _rows_written_on_the_host,
        _clamped_on_the_host,
        _shared_by_processes,
        _legacy_types,
        _indices_one_by_one,
    ],
)
def test_what_runs_on_a_gpu_is_traced(program):
    assert oomph.predict(program).peak.allocated > 0


@pytest.mark.parametrize("called", [False, True])
def test_a_scripted_function_is_noted_where_it_is_called(called):
    def program():
        scripted = torch.jit.script(lambda x: x * x)
        x = torch.ones(4, device="cuda", requires_grad=True)
        (scripted(x) if called else x).sum().backward()

    notes = [note.text for note in oomph.predict(program).notes]
    assert any("torch.jit" in note for note in notes) is called


def _twice(x):
    return 2 * x


@in_trace()
def test_a_scripted_function_keeps_the_functions_that_it_was_compiled_with(monkeypatch):
    scripted = torch.jit.script(_calls_twice)
    monkeypatch.setitem(globals(), "_twice", None)
    scripted(torch.ones(4, device="cuda", requires_grad=True)).sum().backward()


def _calls_twice(x):
    return _twice(x)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_stay_on_the_host():
    def program(blocks):
        rows, columns = torch.tensor([0, 1, 2]), torch.tensor([0, 1])
        matrix = torch.sparse_csr_tensor(rows, columns, torch.ones(2), size=(2, 2))
        dense = matrix @ torch.ones(2, 4) + torch.eye(2).to_sparse() @ torch.ones(2, 4)
        assert dense.sum() == 16
        dense.cuda()
        edges = torch.zeros(2, 1 << 19, dtype=torch.int64)  # too many to be made
        graph = torch.sparse_coo_tensor(edges, torch.ones(1 << 19), (9, 9)).coalesce()
        assert graph.indices().device == graph.values().device == torch.device("cpu")
        if blocks:
            torch.ones(4, 4, device="cuda").to_sparse_bsr((2, 2))

    oomph.predict(partial(program, False))
    with pytest.raises(UserError, match="sparse_bsr"):
        oomph.predict(partial(program, True))


def _on_gpu(form, rows, count):
    """A sparse matrix with `count` elements in each of its rows."""
    if form == "from dense":
        return torch.ones(rows, count, device="cuda").to_sparse_csr()
    if form == "coo":
        return torch.sparse_coo_tensor(
            torch.randint(rows, (2, rows * count)), torch.ones(rows * count), (rows, rows)
        ).cuda()
    crow = torch.arange(rows + 1) * count
    columns, values = torch.randint(rows, (rows * count,)), torch.ones(rows * count)
    if form == "moved":
        return torch.sparse_csr_tensor(crow, columns, values, (rows, rows)).cuda()
    return torch.sparse_csr_tensor(crow.cuda(), columns.cuda(), values.cuda(), (rows, rows))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("form", "indices"), [("made", 0.5), ("moved", 0.5), ("from dense", 0.5), ("coo", 1)]
)
def test_sparse_matrices_hold_their_indices_and_values(form, indices):
    def training():
        matrix = _on_gpu(form, 2048, 512)
        assert matrix.is_cuda
        assert matrix._nnz() == 2048 * 512
        if form in ("made", "moved"):  # as graph libraries count the edges of nodes
            edges = matrix.crow_indices().diff()
            assert len(torch.arange(2048, device="cuda").repeat_interleave(edges)) == 2048 * 512
        weight = torch.randn(matrix.shape[1], 256, device="cuda", requires_grad=True)

        def step():
            product = matrix @ weight
            assert product.shape == (2048, 256)
            assert product.is_cuda
            product.square().sum().backward()
            assert weight.grad is not None
            weight.grad = None

        return step

    found = oomph.predict(training, gpu="h200")
    bytes_of = dict.fromkeys(("int64", "float32"), 0)
    for one in found.at_peak:
        if len(one.allocation.shape) == 1 or one.allocation.dtype == "int64":
            bytes_of[one.allocation.dtype] += one.bytes
    assert bytes_of["int64"] >= 2048 * 512 * 16 * indices
    assert bytes_of["float32"] >= 2048 * 512 * 4


def test_sparse_gradients_hold_the_rows_that_were_used():
    def predicted(sparse, optimizer):
        def train():
            model = nn.Embedding(4096, 256, sparse=sparse).cuda()
            updates = optimizer(list(model.parameters()), lr=0.1)
            ids = torch.randint(0, 4096, (32,), device="cuda")

            def step():
                model(ids).sum().backward()
                updates.step()
                updates.zero_grad()

            return step

        return oomph.predict(train)

    states = predicted(True, torch.optim.SparseAdam)
    assert 12 * MiB < states.peak.allocated < 13 * MiB  # weights and two states of 4 MiB
    assert predicted(True, torch.optim.SGD).peak.allocated < 5 * MiB
    assert predicted(False, torch.optim.SGD).peak.allocated >= 8 * MiB


def test_equal_rows_of_a_sparse_gradient_become_one_where_it_is_coalesced():
    def train():
        model = nn.Embedding(64, 4096, sparse=True).cuda()
        updates = torch.optim.SparseAdam(list(model.parameters()))
        ids = torch.randint(0, 64, (4096,)).cuda()

        def step():
            model(ids).sum().backward()
            assert not model.weight.grad.is_coalesced()
            gradient = model.weight.grad.coalesce()
            assert gradient._nnz() <= 64
            updates.step()
            updates.zero_grad()

        return step

    found = oomph.predict(train)
    in_step = [one for one in found.allocations if one.stage == "optimizer step" and one.shape]
    assert max(one.bytes for one in in_step) <= 64 * 4096 * 4


@pytest.mark.parametrize(
    ("rows", "columns", "count", "width", "coalesced", "forward", "backward"),
    [  # bytes requested on an H200, torch 2.11
        (30000, 30000, 600000, 256, True, 94688567, 118680407),
        (30000, 30000, 600000, 64, False, 41756000, 53756000),
        (1000, 50000, 100000, 128, True, 1941159, 81396999),
        (50000, 1000, 100000, 128, False, 79398911, 7421780),
    ],
)
def test_products_of_a_sparse_matrix_sort_and_copy(rows, columns, count, width, coalesced, forward, backward):
    def taken(run):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made = run()
        return made, torch.cuda.max_memory_allocated() - before

    def program():
        indices = torch.stack([torch.randint(size, (count,), device="cuda") for size in (rows, columns)])
        matrix = torch.sparse_coo_tensor(indices, torch.rand(count, device="cuda"), (rows, columns))
        matrix = matrix.coalesce() if coalesced else matrix
        dense = torch.rand(columns, width, device="cuda", requires_grad=True)
        out, peak = taken(lambda: torch.sparse.mm(matrix, dense))
        assert peak == pytest.approx(forward, rel=0.01)
        gradient = torch.rand_like(out)
        assert taken(lambda: out.backward(gradient))[1] == pytest.approx(backward, rel=0.01)

    oomph.predict(program, gpu="h200")


@in_trace()
def test_a_sparse_tensor_with_dense_dimensions_holds_the_rows_that_are_not_zero():
    x = torch.zeros(256, 256, device="cuda")
    x[:16] = 1
    rows = x.to_sparse(1)
    assert (rows.indices().shape, rows.values().shape) == ((1, 16), (16, 256))
    assert torch.randn(64, 256, device="cuda").to_sparse(1).values().shape == (64, 256)
    matrix = torch.ones(4, 5, 6, device="cuda").to_sparse_csr(dense_dim=1)
    assert (matrix.crow_indices().shape, matrix.values().shape) == ((5,), (20, 6))
    assert rows.to_sparse() is rows


@pytest.mark.parametrize(
    ("op", "bytes"),
    [
        (lambda m: m * 0.5, 20_000),  # indices of 2 x 8 bytes an element, and values of 4
        (lambda m: m / 0.5, 4_096),  # the same indices
        (lambda m: m + m, 40_000),
        (lambda m: m.sqrt(), 20_000),
    ],
)
@in_trace()
def test_elementwise_results_of_sparse_tensors_hold_indices_and_values(op, bytes):
    indices = torch.randint(0, 100, (2, 1000), device="cuda")
    matrix = torch.sparse_coo_tensor(indices, torch.rand(1000, device="cuda"), (100, 100))
    before = torch.cuda.memory_allocated()
    result = op(matrix)
    assert torch.cuda.memory_allocated() - before == pytest.approx(bytes, abs=1024)
    del result


def test_sparse_products_of_the_wrong_shape_fail():
    def program():
        torch.eye(64, device="cuda").to_sparse() @ torch.ones(7, 4, device="cuda")

    with pytest.raises(ProgramError, match="64, got 7"):
        oomph.predict(program)


@in_trace(lambda found: "dropout" not in notes_of(found))
def test_recomputation_may_end_inside_a_dropout():
    """Checkpointing stops its recomputation with an exception from the op that saves the last tensor."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)).to("cuda")
    x = torch.randn(8, 64, device="cuda", requires_grad=True)
    checkpoint(model, x, use_reentrant=False).sum().backward()


@in_trace()
def test_a_model_may_be_built_on_the_meta_device():
    with torch.device("meta"):
        ids = torch.cat([torch.tensor([[1, 5]]), torch.arange(4).view(2, 2)])
        model = nn.Linear(64, 64)
    assert ids.is_meta
    assert model.weight.is_meta
    model.to_empty(device="cuda")(torch.randn(8, 64, device="cuda")).sum().backward()


def test_accumulated_passes_that_leave_tensors_behind_are_all_counted():
    kept = []

    def loss(model, batch):
        out = model(batch)
        kept.append(out.detach() * 2)
        return out.mean()

    def growth(accumulate):
        kept.clear()
        step = oomph.Workload(
            lambda: nn.Linear(512, 512),
            lambda device: torch.randn(2048, 512, device=device),
            loss,
            accumulate=accumulate,
        )
        found = oomph.predict(step).growth
        return found.bytes

    assert [growth(accumulate) for accumulate in (1, 8)] == [4 * MiB, 32 * MiB]


def test_a_memory_that_is_replaced_by_a_longer_one_is_no_growth():
    memory, losses = [None], []

    def loss(model, batch):
        out = model(batch)
        kept = out.detach()
        memory[0] = kept if memory[0] is None else torch.cat([memory[0], kept])
        losses.append(out.mean())
        return losses[-1]

    step = oomph.Workload(
        lambda: nn.Linear(512, 512), lambda device: torch.randn(2048, 512, device=device), loss
    )
    assert oomph.predict(step).growth is None


def test_many_small_tensors_that_stay_are_growth():
    """The allocator rounds each up to 512 bytes."""
    kept = []

    def loss(model, batch):
        out = model(batch).mean()
        kept.extend(out.detach() + 1 for _ in range(4096))
        return out

    step = oomph.Workload(lambda: nn.Linear(8, 8), lambda device: torch.randn(4, 8, device=device), loss)
    assert oomph.predict(step).growth.bytes == 2 * MiB


@in_trace()
def test_repeated_calls_leave_gradients_and_no_tensors():
    """Gradients dropped between forward and backward come back; locals of a function are not kept alive."""
    model = nn.Linear(512, 512).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    allocated = []
    for _ in range(8):
        x = torch.randn(2048, 512, device="cuda")
        loss = model(x).mean()
        optimizer.zero_grad()
        loss.backward()
        assert model.weight.grad is not None
        optimizer.step()
        allocated.append(torch.cuda.memory_allocated())
    assert len(set(allocated[1:])) == 1, allocated


def test_a_bias_is_added_in_place_to_the_product_of_a_transposed_input():
    def forward():
        model = nn.Linear(1024, 1024, device="cuda")
        model(torch.empty(256, 8, 1024, device="cuda").transpose(0, 1))

    made = [each.bytes for each in oomph.predict(forward).allocations if each.kind != "workspace"]
    assert made.count(8 * MiB) == 3  # the input, its contiguous copy and the product


def test_a_graph_made_by_backward_runs_after_the_forward_pass_of_the_caller():
    """On a GPU, backward makes the nodes of its graph in a thread whose numbers start at 0."""

    def step():
        weight = torch.ones(512, 512, device="cuda", requires_grad=True)
        model = nn.Linear(1024, 1024, bias=False, device="cuda")
        score = model(torch.ones(8, 1024, device="cuda")).sum()
        slope = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)[0]
        (score + (slope**2).sum()).backward()

    made = [(one.op, one.bytes) for one in oomph.predict(step).allocations]
    last_of_graph = max(index for index, found in enumerate(made) if found == ("aten.mul.Tensor", MiB))
    assert made.index(("aten.mm", 4 * MiB)) < last_of_graph


def test_lbfgs_takes_all_of_its_iterations_although_losses_do_not_change():
    calls = []

    def train():
        model = nn.Linear(64, 64).cuda()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

        def closure():
            calls.append(1)
            optimizer.zero_grad()
            loss = mean_square(model, torch.ones(8, 64, device="cuda"))
            loss.backward()
            return loss

        optimizer.step(closure)

    oomph.predict(train)
    assert len(calls) == 4


class _Images(Dataset[Any]):
    transform = nn.Sequential(nn.Flatten(0), nn.ReLU(), nn.Threshold(0.1, 0.0))

    def __init__(self, device="cpu"):
        self.device = device

    def __len__(self):
        return 1 << 21

    def __getitem__(self, index):
        image = torch.full((1, 8, 8), index).to(torch.float32).div(255)
        return self.transform(image).to(self.device), index % 10


@in_trace(lambda found: found.peak.allocated >= 2 * 64 * 64 * 4)
def test_a_data_set_may_use_the_gpu():
    images, _ = next(iter(DataLoader(_Images("cuda"), batch_size=64)))
    nn.Linear(64, 64, device="cuda")(images).sum().backward()


class _Counted(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class _Sampler(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        for _ in range(100):
            x = x + self.model(x)
        return x


class _Keeping(nn.Linear):
    def forward(self, x):
        self.kept = [*getattr(self, "kept", []), x.sum(0)]
        return super().forward(x)


@in_trace()
def test_calls_that_keep_tensors_are_all_traced():
    model = _Keeping(256, 256).cuda()
    with torch.no_grad():
        _Sampler(model)(torch.randn(64, 256, device="cuda"))
    assert len(model.kept) == 100
    model(torch.stack(model.kept)).sum().backward()


@in_trace()
def test_a_model_that_is_called_in_a_loop_is_traced_a_few_times():
    model = _Counted(256, 256).cuda()
    x = torch.randn(64, 256, device="cuda")
    with torch.no_grad():
        _Sampler(model)(x)
        assert model.calls < 20
        generated = [model(x)[:, :1].clone() for _ in range(100)]
        assert model.calls < 40
    model(torch.cat(generated, 1)[:, :1].expand(-1, 256)).sum().backward()


@in_trace()
def test_a_model_that_the_program_drops_is_freed():
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8))).cuda()
    after = []
    for _ in range(3):
        tuned = copy.deepcopy(model)
        tuned(torch.randn(4, 256, device="cuda")).sum().backward()
        del tuned
        after.append(torch.cuda.memory_allocated())
    assert len({*after}) == 1


@pytest.mark.parametrize("move", [lambda model: model.cuda(), lambda model: model.to("cuda").half(), None])
def test_lazy_modules_get_their_parameters_on_the_gpu_they_were_moved_to(move):
    def train(lazy):
        device = None if move else "cuda"
        first = nn.LazyLinear(1024, device=device) if lazy else nn.Linear(2048, 1024, device=device)
        norm = nn.LazyBatchNorm1d(device=device) if lazy else nn.BatchNorm1d(1024, device=device)
        model = nn.Sequential(first, norm)
        model = move(model) if move else model
        x = torch.randn(8, 2048, device="cuda", dtype=next(model.parameters()).data.dtype)
        model(x)
        assert model[0].weight.device.type == model[1].running_mean.device.type == "cuda"
        optimizer = torch.optim.Adam(model.parameters())

        def step():
            mean_square(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    lazy, usual = (oomph.predict(partial(train, lazy)) for lazy in (True, False))
    assert lazy.peak.allocated == usual.peak.allocated > 4 * MiB


@in_trace(lambda found: found.peak.allocated)
def test_gradients_of_each_of_many_calls_are_given_to_the_program():
    """As in meta-learning, where every task adapts the weights before its backward pass."""
    model = nn.Linear(512, 512).cuda()
    x = torch.randn(8, 512, device="cuda")

    def step():
        for _ in range(6):
            gradients = torch.autograd.grad(
                mean_square(model, x), list(model.parameters()), create_graph=True
            )
            adapted = [
                each - 0.1 * gradient for each, gradient in zip(model.parameters(), gradients, strict=True)
            ]
            nn.functional.linear(x, *adapted).sum().backward()

    return step


def test_a_buffer_gets_the_data_of_its_copy_on_the_gpu():
    """FSDP moves buffers so."""

    def train():
        layer = nn.BatchNorm1d(512)
        layer.register_buffer("table", torch.randn(64, 512))
        for tensor in (*layer.buffers(), *layer.parameters()):
            tensor.data = tensor.to("cuda")
        assert {tensor.device.type for tensor in layer.state_dict().values()} == {"cuda"}
        return lambda: mean_square(layer, layer.table + torch.randn(64, 512, device="cuda")).backward()

    made = oomph.predict(train).allocations
    assert sum(each.kind == "buffer" for each in made) == 4


@in_trace(lambda found: found.peak.allocated > 2 * 512 * 512 * 2)
def test_a_module_is_moved_to_the_device_and_dtype_of_a_tensor():
    x = torch.randn(8, 512, device="cuda", dtype=torch.bfloat16)
    by_position, by_name = nn.Linear(512, 512).to(x), nn.Linear(512, 512).to(tensor=x)
    for tensor in (by_position.weight, by_name.weight, torch.zeros(2).to(x, True, True)):
        assert (tensor.device.type, tensor.dtype) == ("cuda", torch.bfloat16)
    return lambda: mean_square(by_position, by_name(x)).backward()


def test_a_seeded_program_sees_its_own_random_numbers():
    expected = torch.rand(4, generator=torch.Generator().manual_seed(7))

    def step(model, x):
        torch.manual_seed(7)
        assert torch.equal(torch.rand(4), expected)

    predict_step(step)


def test_lazy_modules_are_copied_and_loaded_before_their_first_call():
    def train():
        model = nn.LazyLinear(1024).cuda()
        average = copy.deepcopy(model)
        average.load_state_dict(model.state_dict())
        x = torch.randn(8, 2048, device="cuda")
        return lambda: mean_square(model, x + average(x).mean()).backward()

    found = oomph.predict(train)
    assert sum(each.kind == "parameter" for each in found.allocations) == 4
    assert not found.batch


@in_trace()
def test_remembered_results_are_those_of_the_same_layouts_and_kinds_of_numbers():
    x, whole = torch.randn(64, 32, device="cuda"), torch.ones(64, 32, dtype=torch.long, device="cuda")
    for _ in range(2):
        assert (whole + 1).dtype == torch.long  # not that of `whole + 1.0`, although 1 == 1.0
        assert (whole + 1.0).dtype == torch.float32
        assert (whole + True).dtype == (whole * True).dtype == torch.long
        assert (x + x.t().contiguous().t()).stride() == x.cumsum(0).stride() == (32, 1)
        assert x.t().cumsum(0).shape == (32, 64)
        assert (x.t() + 1).stride() == (1, 32)
        assert (x.bfloat16() + 1).dtype == torch.bfloat16
        assert x.add_(1) is x
        assert torch.add(x, 1, out=whole.float()).data_ptr() != x.data_ptr()
    torch.set_default_dtype(torch.float64)
    assert (whole + 1.0).dtype == torch.float64
    torch.set_default_dtype(torch.float32)


@in_trace()
def test_casts_of_weights_that_are_gone_stay_until_autocast_ends():
    x, allocated = torch.randn(8, 1024, device="cuda"), []
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.no_grad():
        for _ in range(5):
            F.linear(x, torch.zeros(1024, 1024, device="cuda", requires_grad=True))
            allocated.append(torch.cuda.memory_allocated())
    assert allocated[-1] - allocated[0] == 4 * 2 * MiB
    assert allocated[-1] - torch.cuda.memory_allocated() >= 5 * 2 * MiB
