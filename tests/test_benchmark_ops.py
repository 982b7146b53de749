"""What of benchmarks/ops.py needs no GPU: peers, rows, bars, the picture, and a run at toy sizes."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "docs")]

import draw_ops  # noqa: E402
import op_cross_entropy  # noqa: E402
import op_mlp  # noqa: E402
import op_peers  # noqa: E402
from op_bars import Bar, bars, report  # noqa: E402
from op_rows import Row, merged, read_rows, table, write_rows  # noqa: E402
from op_runs import Case, Contender, Machine, relative_error, run_case  # noqa: E402

import ops  # noqa: E402

CPU = Machine(torch.device("cpu"), "cpu, 1 threads", "none")


def row(contender: str, op: str = "cross_entropy", shape: str = "4096x4096x128256", **values: Any) -> Row:
    known: dict[str, Any] = {"gpu": "NVIDIA H200", "torch": "2.11", "triton": "3.6", "peer": ""}
    return Row(op=op, shape=shape, contender=contender, **(known | values))


def timed(contender: str, milliseconds: float, peak: float, **values: Any) -> Row:
    ratio = milliseconds / 20
    return row(
        contender, median_ms=milliseconds, ratio_to_limit=ratio, peak_mib=peak, floor_mib=1000.0, **values
    )


def bar(rows: list[Row], about: str) -> Bar:
    found = [bar for bar in bars(rows) if about in bar.about]
    assert len(found) == 1, [bar.about for bar in bars(rows)]
    return found[0]


def quadratic(name: str, fails: bool = False) -> Contender:
    def forward(inputs: dict[str, Any]) -> torch.Tensor:
        if fails:
            raise RuntimeError("out of memory\nand a second line")
        return inputs["x"].square().sum()

    return Contender(name, forward)


# -------------------------------------------------------------------------------------------- peers


def test_a_missing_peer_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> str:
        return f"no module named {module!r}"

    monkeypatch.setattr(op_peers, "imported", missing)
    lines = [peer.line() for peer in op_peers.find_peers()]
    assert lines[0] == ("peer liger_kernel: skipped (no module named 'liger_kernel.transformers.functional')")
    assert lines[1].startswith("peer cut_cross_entropy: skipped (")


def test_a_peer_in_a_plain_folder_on_the_path_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "cut_cross_entropy"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import enum\n"
        "__version__ = '99.1'\n"
        "LinearCrossEntropyImpl = enum.Enum('LinearCrossEntropyImpl', 'CCE CCE_EXACT')\n"
        "def linear_cross_entropy(x, weight, target, impl): return impl\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cut_cross_entropy", raising=False)
    monkeypatch.setattr(op_peers, "_version", lambda *names, module=None: module.__version__)
    found = op_peers._cut_cross_entropy()
    monkeypatch.delitem(sys.modules, "cut_cross_entropy", raising=False)
    assert (found.version, [loss.name for loss in found.losses]) == ("99.1", ["cce", "cce_exact"])
    assert [loss.exact for loss in found.losses] == [False, True]
    assert found.losses[1].forward({"x": 0, "weight": 0, "target": 0}) == "cce_exact"


def test_a_torch_without_the_native_loss_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy", raising=False)
    assert "it came with 2.13" in op_peers._torch().line()


# --------------------------------------------------------------------------------------------- runs


def test_a_contender_that_fails_is_a_row_with_its_error_and_the_others_go_on() -> None:
    case = Case(
        "square",
        "8",
        lambda device: {"x": torch.ones(8, device=device, requires_grad=True)},
        [quadratic("one"), quadratic("two", fails=True), quadratic("three")],
        floor=2**20,
        limit="one",
    )
    first, failed, last = run_case(case, CPU, rounds=3)
    assert failed.error == "RuntimeError: out of memory"
    assert failed.median_ms is None
    assert first.ratio_to_limit == 1
    assert last.rounds == 3
    assert last.p20_ms is not None
    assert last.median_ms is not None
    assert last.p20_ms <= last.median_ms
    assert last.floor_mib == 1


def test_the_limit_computes_the_three_products() -> None:
    made = op_cross_entropy.inputs((70, 8, 30), "peaked", torch.float64, CPU.device)
    assert op_cross_entropy.three_products(made) is None


@pytest.mark.parametrize("data", ["peaked", "flat"])
def test_the_reference_gradients_are_those_of_autograd(data: str) -> None:
    made = op_cross_entropy.inputs((1100, 6, 40), data, torch.float64, CPU.device)
    op_cross_entropy.eager(made).backward()
    dx, dw, certainty = op_cross_entropy.reference_gradients(made)
    torch.testing.assert_close(dx, made["x"].grad)
    torch.testing.assert_close(dw, made["weight"].grad)
    assert (0.3 < certainty < 0.9) if data == "peaked" else (certainty < 0.05)


def test_peaked_logits_point_at_their_target_at_the_shapes_of_the_table() -> None:
    made = op_cross_entropy.inputs((64, 1024, 20000), "peaked", torch.float32, CPU.device)
    assert 0.3 < op_cross_entropy.reference_gradients(made)[2] < 0.9


def test_the_reference_of_the_mlp_is_autograds() -> None:
    made = op_mlp.inputs(op_mlp.SwiGLU, (10, 4, 6), torch.float64, CPU.device)
    op_mlp.eager(made).backward(made["grad"])
    right = op_mlp.reference_gradients(made, rows=3)
    for name, param in made["mlp"].named_parameters():
        torch.testing.assert_close(right[name], param.grad)
    assert relative_error(made["x"].grad, right["x"]) == pytest.approx(0, abs=1e-6)


def test_the_relative_error_is_that_of_the_frobenius_norm() -> None:
    right = torch.tensor([[3.0, 4.0]])
    assert relative_error(torch.tensor([[3.0, 4.5]]), right) == pytest.approx(0.1)
    assert relative_error(None, right) is None


# --------------------------------------------------------------------------------------------- rows


def test_rows_survive_the_file_and_replace_only_their_own_op(tmp_path: Path) -> None:
    path = tmp_path / "results" / "ops.csv"
    old = [timed("oomph", 21.5, 1300.0, exact=False), row("oomph", op="mlp", error="out of memory")]
    write_rows(path, old)
    assert read_rows(path) == old
    new = [row("eager", op="mlp errors", dw_error=0.5)]
    assert merged(old, new) == [old[0], *new]
    assert read_rows(tmp_path / "none.csv") == []


def test_the_table_shows_the_columns_that_have_values_and_every_failure() -> None:
    shown = table([timed("oomph", 21.5, 1300.0), row("Liger", error="no driver")])
    assert "| oomph | 21.50 | 1.075 | 1,300 | +300 |  |" in shown
    assert "no driver" in shown
    assert "dX error" not in shown


# --------------------------------------------------------------------------------------------- bars


def test_the_time_bar_depends_on_the_number_of_features() -> None:
    about = "default, time over the 3-GEMM limit"
    assert bar([timed("oomph", 22.4, 1300.0)], about).met is True
    assert bar([timed("oomph", 22.6, 1300.0)], about).met is False
    narrow = [timed("oomph", 24.0, 1300.0, shape="8192x1024x151936")]
    assert bar(narrow, about).at_most == 1.22


def test_the_memory_bars_are_above_the_floor() -> None:
    assert bar([timed("oomph", 21.0, 1512.0)], "default, peak above the floor").met is True
    assert bar([timed("oomph", 21.0, 1513.0)], "default, peak above the floor").met is False
    assert bar([timed("oomph 64MiB", 21.0, 1065.0)], "64MiB, peak above the floor").met is False
    long = [timed("oomph", 21.0, 2000.0, shape="131072x2560x151936")]
    assert bar(long, "default, peak above the floor").met is True


def test_an_exact_peer_that_is_smaller_and_faster_breaks_the_pareto_bar() -> None:
    ours, about = timed("oomph", 22.0, 1300.0), "smaller and faster than oomph"

    def count(other: Row) -> float | None:
        return next(bar.measured for bar in bars([ours, other]) if about in bar.about)

    assert count(timed("Liger", 21.0, 1200.0, peer="liger_kernel 1")) == 1
    assert count(timed("Liger", 23.0, 1200.0, peer="liger_kernel 1")) == 0
    assert count(timed("fla", 21.0, 3000.0, peer="fla 1")) == 0
    assert count(timed("cce", 21.0, 1200.0, peer="cce 1", exact=False)) == 0


def test_errors_are_compared_with_eagers_at_the_same_shape_and_data() -> None:
    rows = [
        row("eager", op="cross_entropy errors", data="flat", dx_error=1.0, dw_error=1.0),
        row("eager", op="cross_entropy errors", data="peaked", dx_error=2.0, dw_error=2.0),
        row("oomph", op="cross_entropy errors", data="peaked", dx_error=2.2, dw_error=2.0),
    ]
    assert bar(rows, "peaked: oomph, dX").measured == pytest.approx(1.1)
    assert bar(rows, "peaked: oomph, dX").met is False
    assert bar(rows, "peaked: oomph, dW").met is True


def test_attention_is_compared_with_the_fastest_fused_backend_of_its_dtype() -> None:
    kind = {"op": "attention", "shape": "B64 H8 N1024 D64"}
    rows = [
        timed("SDPA flash bf16", 2.0, 500.0, **kind),
        timed("SDPA cuDNN bf16", 1.25, 400.0, **kind),
        timed("oomph bf16", 1.26, 400.0, **kind),
        timed("oomph bf16 locality", 3.1, 500.0, **kind),
    ]
    assert bar(rows, "bf16, time over SDPA cuDNN bf16").met is True
    assert bar(rows, "bias function, time over flash").met is False
    assert bar(rows, "bias function, peak over flash's").met is True


def test_a_prediction_off_by_more_than_one_percent_is_missed() -> None:
    rows = [timed("oomph", 22.0, 1000.0, predicted_mib=985.0)]
    assert bar(rows, "prediction off the measured peak").met is False


def test_temporaries_that_grow_with_the_tokens_are_missed() -> None:
    cpu: dict[str, Any] = {"gpu": "cpu, 2 threads", "op": "mlp"}
    once = row("oomph chunked", **cpu, shape="8x8 at 4N", floor_mib=10.0, predicted_mib=15.0)
    flat = row("oomph chunked", **cpu, shape="8x8 at 16N", floor_mib=40.0, predicted_mib=45.5)
    assert bar([once, flat], "growth of temporaries").met is True
    grown = row("oomph chunked", **cpu, shape="8x8 at 16N", floor_mib=40.0, predicted_mib=60.0)
    assert bar([once, grown], "growth of temporaries").measured == pytest.approx(50)
    assert bar([once, grown], "growth of temporaries").met is False


def test_a_bar_without_its_rows_is_not_measured_rather_than_met() -> None:
    assert "not measured" in bar([timed("eager", 22.0, 1000.0)], "default, time over").line()
    assert report([row("oomph", error="failed")]).endswith(" not measured")


# ------------------------------------------------------------------------------ command and picture


def test_without_a_gpu_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ops.main([]) == 2
    assert capsys.readouterr().err == (
        "error: this needs a CUDA GPU and torch sees none; --cpu and --tiny run anywhere\n"
    )


def test_an_unknown_part_is_refused_with_the_valid_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert ops.main(["atention"]) == 2
    assert "no part 'atention'; valid: cross_entropy, mlp" in capsys.readouterr().err


def test_the_bars_can_be_read_off_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "ops.csv", [timed("oomph", 22.0, 1300.0)])
    assert ops.main(["bars", "--csv", str(tmp_path / "ops.csv")]) == 0
    assert "default, time over the 3-GEMM limit" in capsys.readouterr().out
    assert ops.main(["bars"]) == 2


def test_the_picture_has_a_panel_for_each_shape_and_every_contender_by_name(tmp_path: Path) -> None:
    other = "8192x1024x151936"
    rows = [
        timed("3-GEMM limit", 20.0, 3000.0),
        timed("oomph", 22.0, 1300.0),
        timed("Liger <1>", 45.0, 1066.0),
        timed("cce", 73.0, 1000.0, exact=False),
        timed("oomph", 22.0, 1300.0, shape=other),
        timed("eager", 25.0, 8000.0, shape=other),
        timed("oomph", 22.0, 1300.0, shape="131072x2560x151936"),  # nobody to compare with
        row("cce_exact", error="out of memory"),
    ]
    write_rows(tmp_path / "rows.csv", rows)
    draw_ops.main([str(tmp_path / "rows.csv"), str(tmp_path / "ops.svg")])
    text = (tmp_path / "ops.svg").read_text()
    words = [element.text for element in ElementTree.fromstring(text).iter() if element.tag.endswith("}text")]
    assert words.count("oomph") == 2
    assert "Liger <1>" in words
    assert "cce_exact" not in words
    assert "8,192 tokens x 1,024 features x 151,936 classes" in words
    assert "prefers-color-scheme: dark" in text


def test_the_front_holds_the_exact_contenders_that_nothing_exact_beats() -> None:
    dots = draw_ops.dots_of(
        [
            timed("oomph", 22.0, 1300.0),
            timed("oomph 64MiB", 28.0, 1060.0),
            timed("worse", 29.0, 1400.0),
            timed("cce", 21.0, 1001.0, exact=False),
        ]
    )
    assert [dot.name for dot in draw_ops.front(dots)] == ["oomph 64MiB", "oomph"]


def test_no_rows_no_picture(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="run benchmarks"):
        draw_ops.picture([])
