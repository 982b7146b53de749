"""Op logs: what a row says of an op."""

import torch

from oomph.measurement.oplog import Counters, describe, record_ops, short_name


class ScriptedCounters:
    """Pretends that every op asks for 100 bytes and keeps 512, with 512 more in passing."""

    def __init__(self):
        self.reads = 0

    def reset_high(self):
        pass

    def read(self):
        done = (self.reads + 1) // 2
        self.reads += 1
        return Counters(512 * done, 512 * done + 512, done, 100 * done)


def test_an_overload_and_a_namespace_do_not_make_another_op():
    assert short_name("aten.mm.default") == short_name("aten::mm") == short_name("aten.mm") == "mm"
    assert short_name("aten.cudnn_convolution.default") == short_name("aten.convolution.default")
    assert short_name("mylib.scan.default") == "mylib.scan"


def test_outputs_are_described_by_dtype_and_shape():
    assert describe(torch.empty(8, 512)) == "f32[8,512]"
    assert describe(torch.empty((), dtype=torch.bfloat16)) == "bf16[]"
    assert describe((torch.empty(1), None, torch.empty(2, dtype=torch.int64))) == "(f32[1], , i64[2])"
    assert describe(None) == ""


def test_long_lists_of_outputs_are_cut_short():
    assert describe([torch.empty(1)] * 6) == "(f32[1], f32[1], f32[1], f32[1], +2)"


def test_ops_of_forward_and_backward_are_logged_in_order_with_their_phase():
    x = torch.ones(2, 2, requires_grad=True)
    with record_ops(ScriptedCounters()) as log:
        log.phase = "forward"
        loss = (x @ x).sum()
        log.phase = "backward"
        loss.backward()
    ops = [(row.phase, row.op) for row in log.rows]
    assert ops[:2] == [("forward", "aten.mm.default"), ("forward", "aten.sum.default")]
    assert ("backward", "aten.mm.default") in ops
    assert log.rows[0].outputs == "f32[2,2]"


def test_ops_that_only_call_others_are_logged_as_those_without_gradients_too():
    x, weight = torch.ones(1, 1, 4), torch.ones(1, 1, 3)
    with torch.inference_mode(), record_ops(ScriptedCounters()) as log:
        torch.conv1d(x, weight)
        torch.ops.aten.silu_backward(x, x)  # has a kernel of its own, and is composed of others elsewhere
    assert [short_name(row.op) for row in log.rows] == ["convolution", "silu_backward"]


def test_each_row_carries_its_own_requests():
    with record_ops(ScriptedCounters()) as log:
        torch.ones(2).add(1).mul(2)
    row = log.rows[-1]
    assert (row.n_allocs, row.requested) == (1, 100)
    assert (row.after - row.before, row.high - row.before) == (512, 1024)
