"""A rule of ours that raises is never the program's error: the prediction goes on, and a note says so."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from small_programs import line_of, notes_of, predict_step, workload
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import oomph
from oomph import ProgramError
from oomph.prediction.ops.registry import FACTS, entered
from oomph.prediction.ops.rules import RuleGuard, op_name
from oomph.prediction.tracer import values, work
from oomph.prediction.tracer.attribution import ModuleStack
from oomph.prediction.tracer.dispatch import DispatchMode
from oomph.prediction.tracer.tracer import Tracer

pytestmark = pytest.mark.usefixtures("in_process")

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _as_for_users(monkeypatch):
    monkeypatch.setattr(RuleGuard, "strict", False)


def failing(*args, **kwargs):
    raise ZeroDivisionError("injected")


def break_every_rule(monkeypatch, table, **others):
    """The ops whose rules are broken: those of a table, or those that an entry has such a fact of."""
    if not isinstance(table, str):
        for op in table:
            monkeypatch.setitem(table, op, failing)
        return list(table)
    ops = list(entered(table))
    for op in ops:
        monkeypatch.setitem(FACTS, op, replace(FACTS[op], **others, **{table: failing}))
    return ops


def names_of(ops):
    return [op_name(op) if hasattr(op, "_schema") else str(op) for op in ops]


def any_value(argument, tensor):
    """Any value of an argument's or a result's type: no kernel looks at it."""
    kind = str(argument.type).replace("Optional[", "").replace("List[", "").replace("]", "")
    plain = {"int": 1, "float": 0.5, "bool": False, "number": 1, "str": "sum"}
    value = tensor() if kind == "Tensor" else plain.get(kind)
    return [value] * (argument.N or 1) if "List[" in str(argument.type) else value


def call_with_any_arguments(op, x):
    factory = {"layout": None, "device": torch.device("cuda")}
    given = {
        each.name: factory[each.name] if each.name in factory else any_value(each, lambda: x)
        for each in op._schema.arguments
    }
    keywords = {each.name: given.pop(each.name) for each in op._schema.arguments if each.kwarg_only}
    op(*given.values(), **keywords)


@pytest.mark.parametrize(
    "table",
    ["temporaries", "host_outputs", "same_dtype", "nondeterministic", "flops"],
    ids=["temporaries", "host results", "dtype checks", "determinism checks", "flops"],
)
def test_every_rule_beside_an_ops_results_may_fail(monkeypatch, table):
    ops = break_every_rule(monkeypatch, table, **({} if table == "host_outputs" else {"results": None}))

    def results(self, func, args, kwargs):
        returned = [
            any_value(each, lambda: self.fast_path.wrap(torch.empty(8, device="meta")))
            for each in func._schema.returns
        ]
        return returned[0] if len(returned) == 1 else tuple(returned)

    def program():
        torch.use_deterministic_algorithms(table == "nondeterministic")
        x = torch.empty(4, 4, device="cuda")
        with torch.no_grad(), monkeypatch.context() as patched:
            patched.setattr(DispatchMode, "_fake", results)
            for op in ops:
                call_with_any_arguments(op, x)

    notes = notes_of(oomph.predict(program, gpu="h200"))
    assert [name for name in names_of(ops) if f"{name}: " not in notes] == []
    # The rows of the dtype checks are names, which a function cannot replace.
    reason = "not iterable" if table == "same_dtype" else "ZeroDivisionError: injected"
    assert reason in notes


def results_of_kernels():
    x = torch.randn(4, 8, device="cuda", requires_grad=True)
    torch.where(torch.ones(4, 8, device="cuda") > 0, 1.0, torch.zeros(4, 8, device="cuda"))
    image = torch.randn(2, 4, 8, 8, device="cuda", requires_grad=True)
    F.layer_norm(x, (8,)), F.group_norm(x, 2), x.softmax(-1), x.log_softmax(-1), x.roll(1, 0), x.histc(4)
    F.conv2d(image, torch.randn(4, 4, 3, 3, device="cuda")).sum().backward()
    target = torch.rand(4, 8, device="cuda")
    F.mse_loss(x, target), F.smooth_l1_loss(x, target), F.binary_cross_entropy(x.sigmoid(), target)
    F.soft_margin_loss(x, target), F.logsigmoid(x), F.batch_norm(x, None, None, training=True)
    F.group_norm(x, 2).sum().backward()
    F.fold(F.unfold(image, 3), (8, 8), 3)
    nn.LSTMCell(8, 8).cuda()(x)[0].sum().backward(), nn.GRUCell(8, 8).cuda()(x).sum().backward()
    nn.EmbeddingBag(8, 8).cuda()(torch.zeros(2, 3, dtype=torch.long, device="cuda"))
    pack_padded_sequence(torch.randn(4, 2, 8, device="cuda"), torch.tensor([4, 2]))
    half, wide = torch.randn(8, 8, device="cuda", dtype=BF16), torch.randn(8, 8, device="cuda")
    for out in (None, wide):
        torch.mm(half, half, out_dtype=torch.float32, out=out)
        torch.addmm(wide, half, half, out_dtype=torch.float32, out=out)
    halves, wides = half[None], wide[None]
    F.grouped_mm(half, halves, offs=torch.tensor([8], device="cuda", dtype=torch.int32))
    for out in (None, wides):
        torch.bmm(halves, halves, out_dtype=torch.float32, out=out)
        torch.baddbmm(wides, halves, halves, out_dtype=torch.float32, out=out)
    weight, counts = torch.ones(4, device="cuda"), torch.ones(2, device="cuda", dtype=torch.int32)
    torch.batch_norm_stats(image, 1e-5)  # this and the next are those of SyncBatchNorm
    mean, inverse = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
    gathered = (mean.expand(2, 4), inverse.expand(2, 4), None, None, 0.1, 1e-5)
    torch.batch_norm_gather_stats(image, *gathered, 8)
    torch.batch_norm_gather_stats_with_counts(image, *gathered, counts.float())
    out = torch.batch_norm_elemt(image, weight, None, mean, inverse, 1e-5)
    torch.batch_norm_backward_reduce(out, image, mean, inverse, weight, True, True, True)
    torch.batch_norm_backward_elemt(out, image, mean, inverse, weight, mean, mean, counts)


def composites():
    x = torch.randn(4, 8, device="cuda", requires_grad=True)
    half = torch.randn(4, 8, device="cuda", dtype=torch.float16)
    F.dropout(x, 0.5), F.rms_norm(x, (8,)), half.softmax(-1, dtype=torch.float32)
    half.log_softmax(-1, dtype=torch.float32), F.one_hot(x.argmax(-1), 8)
    heads = torch.randn(2, 4, 16, 8, device="cuda")
    F.scaled_dot_product_attention(heads, heads, heads)
    x.cumprod(0).sum().backward()
    nn.BatchNorm1d(8).cuda()(x)
    sequence = torch.randn(4, 2, 8, device="cuda")
    packed = pack_padded_sequence(sequence, torch.tensor([4, 2]))
    for network in (nn.LSTM(8, 8), nn.GRU(8, 8), nn.RNN(8, 8), nn.RNN(8, 8, nonlinearity="relu")):
        network.cuda()(sequence)[0].sum().backward()
    nn.LSTMCell(8, 8).cuda()(x), nn.GRUCell(8, 8).cuda()(x)
    pad_packed_sequence(packed)


def results_of_unknown_size():
    x = torch.randn(4, 8, device="cuda")
    mask = x > 0
    mask.nonzero(), x[mask], x.masked_select(mask), x.unique(), x.unique(dim=0), x.unique_consecutive()
    x.cpu()[mask.cpu()], x.cpu().masked_select(mask.cpu())
    torch.ops.aten._unique(x), torch.ops.aten.unique_dim_consecutive(x, 0), torch.linalg.lstsq(x, x)
    counts = torch.randint(1, 3, (4,), device="cuda")
    torch.repeat_interleave(counts), torch.bincount(counts)
    lengths = torch.randint(1, 3, (2,), device="cuda")
    targets = torch.randint(1, 5, (2, 3), device="cuda")
    torch.ops.aten._ctc_loss.Tensor(torch.randn(6, 2, 5, device="cuda"), targets, lengths, lengths)


@pytest.mark.parametrize(
    ("table", "program", "not_called"),
    [
        ("results", results_of_kernels, ()),
        ("composite", composites, ("data",)),
        (values.DATA_DEPENDENT_RESULTS, results_of_unknown_size, ()),
    ],
    ids=["results", "composites", "results of unknown size"],
)
def test_every_rule_for_an_ops_results_may_fail(monkeypatch, table, program, not_called):
    names = names_of(break_every_rule(monkeypatch, table))
    names = [name for name in names if not name.endswith(not_called or "?")]
    notes = notes_of(oomph.predict(program, gpu="h200"))
    assert [name for name in names if name not in notes] == []


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (Tracer, "_attribution"),
        (Tracer, "record_autograd_node"),
        (Tracer, "mark_gradient"),
        (Tracer, "_label_parameters"),
        (ModuleStack, "name"),
        (values.Values, "propagate"),
        (work.KernelCounter, "op"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_attribution_values_and_work_may_fail(monkeypatch, owner, method):
    expected = oomph.predict(workload(), gpu="h200").peak.allocated
    monkeypatch.setattr(owner, method, failing)
    prediction = oomph.predict(lambda: workload(), gpu="h200")
    assert prediction.peak.allocated == expected
    assert "injected" in notes_of(prediction)


def test_the_note_has_the_programs_line(monkeypatch):
    op = torch.ops.aten.sum.default
    monkeypatch.setitem(FACTS, op, replace(FACTS[op], temporaries=failing))

    def step(model, x):
        model(x).sum()

    (note,) = predict_step(step).notes
    assert note.site.line == line_of(step, ".sum()")


MISTAKES = {
    "layer_norm": lambda x: F.layer_norm(x, (7,)),
    "conv2d": lambda x: F.conv2d(x[None, None], torch.ones(1, 2, 3, 3, device="cuda")),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None, :, :4], x[None]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_the_programs_is_still_the_programs(name):
    def program():
        MISTAKES[name](torch.randn(4, 8, device="cuda"))

    with pytest.raises(ProgramError):
        oomph.predict(program, gpu="h200")


@pytest.mark.parametrize("padding", ["valid", "same", 1, (1, 0)])
def test_a_convolution_takes_every_form_of_padding(padding):
    layer = workload(
        lambda: nn.Conv2d(4, 4, 3, padding=padding),
        batch=lambda device: torch.randn(2, 4, 16, 16, device=device),
    )
    assert "rule" not in notes_of(oomph.predict(layer, gpu="h200"))


def test_a_list_of_modules_may_hold_none():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(64, 64), None, nn.Linear(64, 64)])

        def forward(self, x):
            return self.layers[2](self.layers[0](x))

    assert notes_of(oomph.predict(workload(Model), gpu="h200")) == ""
