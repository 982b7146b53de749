"""The divergence finder, on scripted logs."""

from __future__ import annotations

import time

from oomph.measurement.divergence import AlignedRows, align, compare, render, short_name
from oomph.measurement.oplog import OpRow


def log(*ops: tuple[str, int], phase: str = "step 1 forward", start: int = 0) -> list[OpRow]:
    """Rows of ops that keep the given bytes each, one after the other."""
    rows, at = [], start
    for op, size in ops:
        rows.append(OpRow(op, f"f32[{size // 4}]", at, at + size, at + size, phase, 1, size))
        at += size
    return rows


LAYER = (("aten.mm.default", 1024), ("aten.add.Tensor", 2048), ("aten.gelu.default", 512))


def test_two_equal_logs_have_no_differences() -> None:
    report = compare(log(*LAYER * 4), log(*LAYER * 4))
    assert report.differences == report.totals == report.drift == ()
    assert report.n_aligned == 12
    assert "no differences" in render(report)


def test_an_overload_and_a_namespace_do_not_make_another_op() -> None:
    assert short_name("aten.mm.default") == short_name("aten::mm") == short_name("aten.mm") == "mm"
    assert short_name("aten.cudnn_convolution.default") == short_name("aten.convolution.default")
    assert short_name("mylib.scan.default") == "mylib.scan"


def test_views_are_left_out() -> None:
    view = OpRow("aten.view.default", "f32[1]", 0, 0, 0, "step 1 forward")
    assert compare([view, *log(*LAYER)], log(*LAYER)).differences == ()


def test_an_op_that_ran_on_the_gpu_alone_is_listed_with_its_bytes() -> None:
    extra = (*LAYER, ("aten.clone.default", 4096), *LAYER)
    report = compare(log(*extra), log(*LAYER, *LAYER))
    (difference,) = [d for d in report.differences if d.aspect == "only measured"]
    assert (difference.op, difference.bytes, difference.row) == ("clone", 4096, 3)
    assert report.n_aligned == 6


def test_an_op_that_was_predicted_alone_counts_against_the_prediction() -> None:
    report = compare(log(*LAYER), log(LAYER[0], ("aten.zeros.default", 256), *LAYER[1:]))
    (total,) = [t for t in report.totals if t.aspect == "only predicted"]
    assert (total.op, total.times, total.bytes) == ("zeros", 1, -256)


def test_the_same_op_with_another_dtype_stays_a_pair() -> None:
    measured = log(*LAYER)
    predicted = [measured[0], measured[1]._replace(outputs="bf16[512]"), measured[2]]
    report = compare(measured, predicted)
    assert [(d.aspect, d.op) for d in report.differences] == [("outputs", "add")]
    assert report.n_aligned == 3


def test_net_requested_and_highest_bytes_are_compared_each() -> None:
    measured = [OpRow("aten.mm", "f32[4]", 0, 512, 4096, "", 2, 1000)]
    predicted = [OpRow("aten.mm", "f32[4]", 0, 1024, 1024, "", 1, 600)]
    found = {d.aspect: d.bytes for d in compare(measured, predicted).differences}
    assert found == {"net": -512, "requested": 400, "high": 3072}


def test_memory_freed_between_two_ops_on_one_side_is_found() -> None:
    measured = log(*LAYER)
    late = [measured[0], *log(*LAYER[1:], start=1024 - 512)]
    (difference,) = compare(measured, late).differences
    assert (difference.aspect, difference.op, difference.bytes) == ("between ops", "add", 512)


def test_totals_are_summed_by_op_with_the_most_bytes_first() -> None:
    measured = log(("aten.mm", 1024), ("aten.add", 4096), ("aten.mm", 1024))
    predicted = log(("aten.mm", 1024), ("aten.add", 4096), ("aten.mm", 1024))
    measured[1] = measured[1]._replace(requested=9096)
    predicted[0], predicted[2] = (predicted[i]._replace(requested=1000) for i in (0, 2))
    totals = compare(measured, predicted).totals
    assert [(t.op, t.times, t.bytes) for t in totals] == [("add", 1, 5000), ("mm", 2, 48)]
    assert totals[1].first.row == 0


def test_the_running_difference_is_given_where_it_changes() -> None:
    report = compare(log(*LAYER, start=100), log(*LAYER))
    assert [(drift.row, drift.difference, drift.change) for drift in report.drift] == [(0, 100, 100)]


def test_a_difference_in_one_layer_does_not_slip_a_whole_layer() -> None:
    layers = list(LAYER * 50)
    changed = layers.copy()
    changed[75:75] = [("aten.clone.default", 64), ("aten.copy_.default", 128)]
    pairs = align(log(*changed), log(*layers))
    assert [pair for pair in pairs if None in pair] == [AlignedRows(75, None), AlignedRows(76, None)]


def test_each_phase_is_aligned_on_its_own() -> None:
    forward, backward = log(*LAYER), log(*LAYER, phase="step 1 backward")
    pairs = align([*forward, *backward], [*forward[:1], *backward])
    assert pairs[-3:] == [AlignedRows(3, 1), AlignedRows(4, 2), AlignedRows(5, 3)]


def test_every_row_appears_once_however_different_the_logs_are() -> None:
    measured = log(*((f"aten.op{i % 7}", 4 * (i % 5 + 1)) for i in range(500)))
    predicted = log(*((f"aten.op{i % 11}", 4 * (i % 3 + 1)) for i in range(700)))
    pairs = align(measured, predicted)
    assert [p.measured for p in pairs if p.measured is not None] == list(range(500))
    assert [p.predicted for p in pairs if p.predicted is not None] == list(range(700))


def test_twenty_thousand_rows_are_compared_in_seconds() -> None:
    layers = list(LAYER * 7000)
    changed = [op for i, op in enumerate(layers) if i % 100 != 1]
    started = time.process_time()
    report = compare(log(*layers), log(*changed))
    assert time.process_time() - started < 20
    assert sum(1 for d in report.differences if d.aspect == "only measured") == 210


def test_an_empty_log_is_compared_too() -> None:
    report = compare([], log(*LAYER))
    assert report.measured_high is None
    assert "measured: no ops" in render(report)


def test_the_text_begins_with_the_peaks_and_the_first_differences() -> None:
    text = render(compare(log(*LAYER, ("aten.clone.default", 4096)), log(*LAYER)))
    lines = text.splitlines()
    assert lines[0] == "4 measured ops, 3 predicted, 3 aligned (views left out)"
    assert "measured highest: 7,680 B at row 3 [step 1 forward] clone" in lines[1]
    assert text.index("first differences") < text.index("by op, most bytes first")
