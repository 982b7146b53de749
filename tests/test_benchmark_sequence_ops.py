"""What of the benchmarks of kda, nsa, selective_scan and lif_gate needs no GPU: inputs, bars, the picture."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "docs")]

import draw_sequence_ops  # noqa: E402
import op_bars_sequence  # noqa: E402
import op_compile  # noqa: E402
import op_kda  # noqa: E402
import op_lif  # noqa: E402
import op_nsa  # noqa: E402
import op_selective_scan  # noqa: E402
from op_bars import Bar, bars  # noqa: E402
from op_errors import gradient_errors  # noqa: E402
from op_peers import Peer, fla_of  # noqa: E402
from op_rows import Row, read_rows, write_rows  # noqa: E402
from op_runs import Case, Contender, Inputs, Machine, leaves, run_case, step_of  # noqa: E402

import ops  # noqa: E402

CPU = Machine(torch.device("cpu"), "cpu, 1 threads", "none")
FLA = [Peer("fla", "0.6.0")]
REPORT = "B16 T256 H8 D64"
LARGE = "B4 T8192 H32 D128"


def row(
    op: str, shape: str, contender: str, ms: float | None = None, peak: float | None = None, **values: Any
) -> Row:
    known: dict[str, Any] = {"gpu": "NVIDIA H200", "torch": "2.11", "triton": "3.6", "peer": ""}
    return Row(op=op, shape=shape, contender=contender, median_ms=ms, peak_mib=peak, **(known | values))


def bar(rows: list[Row], about: str) -> Bar:
    found = [bar for bar in bars(rows) if about in bar.about]
    assert len(found) == 1, [bar.about for bar in bars(rows)]
    return found[0]


# ------------------------------------------------------------------------------------------- cases


def test_a_case_says_how_many_rounds_its_slow_steps_may_take() -> None:
    calls = []

    def forward(inputs: Inputs) -> None:
        calls.append(1)

    case = Case("slow", "1", lambda device: {}, [Contender("one", forward)], floor=0, rounds=2)
    (measured,) = run_case(case, CPU, rounds=10)
    assert measured.rounds == 2
    assert len(calls) == 4  # two to warm up


def test_the_fused_gate_of_fla_is_given_what_the_log_decay_is_made_of() -> None:
    made = op_kda.inputs((1, 8, 2, 16), torch.float64, CPU.device)
    torch.testing.assert_close(made["log_alpha"], -torch.nn.functional.softplus(made["raw"]))
    assert made["log_alpha"].max() <= 0
    torch.testing.assert_close(made["k"].norm(dim=-1), torch.ones(1, 8, 2, dtype=torch.float64))


def test_fla_runs_in_kda_everywhere_and_in_nsa_for_large_groups_only() -> None:
    assert fla_of([Peer("fla", missing="no module named 'fla'")]) == ""
    assert [case.contenders[0].peer for case in op_kda.cases(FLA, tiny=False)] == ["fla 0.6.0"] * len(
        op_kda.cases([], tiny=False)
    )
    groups = {case.shape: [each.name for each in case.contenders] for case in op_nsa.cases(FLA, tiny=False)}
    assert "fla, no window" in groups["B1 T8192 HQ64 H4 D128"]
    assert "fla, no window" not in groups["B1 T131072 HQ32 H8 D128"]


def test_a_tight_budget_leaves_a_quarter_of_flas_peak() -> None:
    """fla was measured at 7192 MiB where results and gradients take 1282."""
    floor = op_kda.floor_bytes((4, 8192, 32, 128), torch.bfloat16)
    assert floor + op_kda.tight_budget((4, 8192, 32, 128)) < 7192 / 4 * 2**20
    assert op_kda.floor_bytes(op_kda.REPORT, torch.bfloat16) + op_kda.tight_budget(op_kda.REPORT) < 40 * 2**20


@pytest.mark.parametrize("name", ["kda", "nsa", "selective_scan", "lif_gate"])
def test_every_case_has_a_shape_of_its_own_and_ours_among_its_contenders(name: str) -> None:
    cases = ops.CASES[name]([], False)
    assert len({case.shape for case in cases}) == len(cases)
    assert {case.op for case in cases} == {name}
    assert all(any(contender.name == "oomph" for contender in case.contenders) for case in cases)


@pytest.mark.parametrize("both", [False, True])
def test_the_floors_are_the_bytes_of_the_result_and_of_every_gradient(both: bool) -> None:
    made = {
        op_kda.floor_bytes((2, 6, 3, 8), torch.float32): (
            op_kda.inputs((2, 6, 3, 8), torch.float32, CPU.device),
            op_kda.ours,
        ),
        op_nsa.floor_bytes((1, 40, 4, 2, 8), torch.float32): (
            op_nsa.inputs((1, 40, 4, 2, 8), False, torch.float32, CPU.device),
            op_nsa.ours,
        ),
        op_lif.floor_bytes((1, 5, 2, 4), torch.float32): (
            op_lif.inputs((1, 5, 2, 4), torch.float32, CPU.device),
            op_lif.ours,
        ),
        op_selective_scan.floor_bytes((2, 7, 4, 3), torch.float32, both): (
            op_selective_scan.inputs((2, 7, 4, 3), torch.float32, both, CPU.device),
            lambda i: op_selective_scan.ours(i, direction="both" if both else "forward"),
        ),
    }
    for floor, (inputs, forward) in made.items():
        step_of(Contender("one", forward, "grad"), inputs)()
        gradients = sum(leaf.grad.nbytes for leaf in leaves(inputs) if leaf.grad is not None)
        assert gradients + inputs["grad"].nbytes == floor


def test_what_ours_is_compared_with_computes_the_same() -> None:
    made = op_kda.inputs((2, 9, 2, 8), torch.float32, CPU.device)
    torch.testing.assert_close(op_kda.loop(made), op_kda.ours(made), atol=1e-5, rtol=1e-4)
    scanned = op_selective_scan.inputs((2, 11, 4, 3), torch.float32, False, CPU.device)
    torch.testing.assert_close(
        op_selective_scan.dense(scanned), op_selective_scan.ours(scanned), atol=1e-5, rtol=1e-4
    )


def test_every_gradient_has_a_row_of_its_own_and_a_wrong_one_stands_out() -> None:
    def forward(i: Inputs, slope: float = 2.0) -> torch.Tensor:
        return slope * i["x"] + 3 * i["y"]

    case = Case(
        "sum",
        "4",
        lambda device: {
            name: torch.ones(4, device=device).requires_grad_(name != "grad") for name in ("x", "y", "grad")
        },
        [Contender("oomph", lambda i: forward(i, 2.5), "grad")],
        floor=0,
    )
    rows = gradient_errors(case, CPU, ("x", "y"), forward, "grad")
    assert [(each.op, each.data, each.dx_error) for each in rows] == [
        ("sum errors", "dx", 0.25),
        ("sum errors", "dy", 0.0),
    ]


def test_the_workers_together_compile_every_configuration_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = pytest.importorskip("triton.runtime.autotuner")
    monkeypatch.setattr(tuning.Autotuner, "run", tuning.Autotuner.run)  # put back when this ends
    compiled = []
    tuner = SimpleNamespace(
        arg_names=["x"],
        base_fn=SimpleNamespace(__name__="kernel"),
        prune_configs=lambda kwargs: [tuning.Config({"BLOCK": size}) for size in (16, 32, 64, 128)],
        fn=SimpleNamespace(run=lambda x, **given: compiled.append((given["BLOCK"], given["warmup"]))),
    )
    for index in range(3):
        op_compile._compile_instead_of_tuning(index, workers=3)
        tuning.Autotuner.run(tuner, "x", grid=(1,), warmup=False)
    assert sorted(compiled) == [(16, True), (32, True), (64, True), (128, True)]


def test_a_run_at_toy_sizes_stores_its_rows_and_leaves_other_peers_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.csv"
    assert ops.main(["lif_gate", "--tiny", "--rounds", "1", "--csv", str(path)]) == 0
    assert {each.contender for each in read_rows(path)} == {"loop over time", "oomph", "oomph chunked"}
    assert not any(each.error for each in read_rows(path))
    assert "liger" not in capsys.readouterr().out


# -------------------------------------------------------------------------------------------- bars


def test_kda_may_be_no_slower_than_fla_and_take_half_its_memory() -> None:
    rows = [row("kda", LARGE, "fla", 19.2, 7192.0), row("kda", LARGE, "oomph", 19.3, 3700.0)]
    assert bar(rows, f"kda {LARGE}: time over fla's").met is True
    assert bar(rows, f"kda {LARGE}: peak over fla's").met is False


def test_a_tight_budget_is_asked_for_where_fla_takes_more_than_a_gibibyte() -> None:
    rows = [
        row("kda", LARGE, "fla", 19.2, 7192.0),
        row("kda", LARGE, "oomph tight", 29.0, 1790.0),
        row("kda", REPORT, "fla", 2.47, 117.0),
        row("kda", REPORT, "oomph tight", 2.47, 39.0),
    ]
    assert bar(rows, "tight budget, peak over fla's").met is True
    assert bar(rows, "tight budget, time over fla's").met is False
    assert bar(rows, f"kda {REPORT}: tight budget, peak").met is True


def test_the_reports_layer_is_set_against_the_dense_scan() -> None:
    rows = [
        row("kda", REPORT, "oomph", 2.0, 55.0),
        row("kda", REPORT, "dense scan, forward alone", 9.0, 2056.0),
    ]
    assert bar(rows, f"kda {REPORT}: peak over the dense scan's").met is True
    assert bar(rows, f"kda {REPORT}: tight budget, peak").met is None


def test_on_the_cpu_kda_must_be_ten_times_faster_than_the_loop_and_has_no_other_bar_of_time() -> None:
    cpu = {"gpu": "cpu, 2 threads"}
    rows = [row("kda", "B1 T4096 H4 D64", "oomph chunked", 90.0, ratio_to_limit=0.09, **cpu)]
    assert bar(rows, "on the CPU").met is True
    assert bar(rows, "on the CPU").at_most == pytest.approx(0.1)


def test_sparse_attention_must_beat_dense_attention_at_length_and_three_times_at_the_longest() -> None:
    def rows(shape: str, ours: float) -> list[Row]:
        return [row("nsa", shape, "SDPA cuDNN dense", 90.0, 100.0), row("nsa", shape, "oomph", ours, 119.0)]

    assert bar(rows("B1 T32768 HQ64 H4 D128", 91.0), "oomph, time over dense").met is False
    assert bar(rows("B1 T131072 HQ32 H8 D128", 31.0), "oomph, time over dense").met is False
    assert bar(rows("B1 T131072 HQ32 H8 D128", 29.0), "oomph, time over dense").met is True
    assert not [bar for bar in bars(rows("B1 T8192 HQ64 H4 D128", 91.0)) if "time over dense" in bar.about]
    assert bar(rows("B1 T8192 HQ64 H4 D128", 91.0), "oomph, peak over dense").met is True


def test_sparse_attention_must_beat_fla_where_that_runs() -> None:
    shape = "B1 T8192 HQ64 H4 D128"
    rows = [row("nsa", shape, "fla, no window", 21.8, 906.0), row("nsa", shape, "oomph", 21.9, 743.0)]
    assert bar(rows, "oomph, time over fla's").met is False


def test_memory_that_grows_faster_than_the_tokens_is_missed() -> None:
    def rows(last: float) -> list[Row]:
        return [
            row("nsa", "B1 T4096 HQ32 H8 D128", "oomph", 1.0, 100.0),
            row("nsa", "B1 T8192 HQ32 H8 D128", "oomph", 1.0, 200.0),
            row("nsa", "B1 T131072 HQ32 H8 D128", "oomph", 1.0, last),
        ]

    assert bar(rows(3200.0), "growth of the peak").met is True
    assert bar(rows(3500.0), "growth of the peak").met is False


def test_the_selective_scan_may_take_twice_its_inputs_and_gradients() -> None:
    shape = "B64 L512 d512 n16 bf16"
    assert op_bars_sequence.scan_inputs_mib(shape) == 66.0
    assert op_bars_sequence.scan_inputs_mib("B64 L512 d512 n16 fp32 both ways") == 2 * (66.0 + 34.0)
    assert bar([row("selective_scan", shape, "oomph", 2.0, 198.0)], "memory over").met is True
    assert bar([row("selective_scan", shape, "oomph", 2.0, 199.0)], "memory over").met is False


def test_a_gradient_that_is_off_by_more_than_rounding_is_missed() -> None:
    rows = [row("kda errors", "B1 T512 H4 D128", "oomph", data="dk", dx_error=0.02)]
    assert bar(rows, "oomph, dk off by").met is False


# ----------------------------------------------------------------------------------------- picture


def test_the_picture_has_time_and_memory_of_every_layer_that_was_run_at_several_lengths(
    tmp_path: Path,
) -> None:
    rows = [row("kda", REPORT, "oomph", 1.0, 50.0)]  # one length: no curve
    for tokens in (4096, 8192, 16384):
        shape = f"B1 T{tokens} H32 D128"
        rows.append(row("kda", shape, "fla", tokens / 1000, tokens / 5))
        rows.append(row("kda", shape, "oomph", tokens / 1100, tokens / 12))
        rows.append(row("kda", shape, "oomph tight", tokens / 900, tokens / 24))
        shape = f"B1 T{tokens} HQ32 H8 D128"
        rows.append(row("nsa", shape, "SDPA cuDNN dense", tokens**2 / 1e6, tokens / 10))
        rows.append(row("nsa", shape, "oomph", tokens / 500, tokens / 11))
    write_rows(tmp_path / "rows.csv", rows)
    draw_sequence_ops.main([str(tmp_path / "rows.csv"), str(tmp_path / "ops.svg")])
    text = (tmp_path / "ops.svg").read_text()
    words = [element.text for element in ElementTree.fromstring(text).iter() if element.tag.endswith("}text")]
    assert "Delta attention, B1 H32 D128: milliseconds" in words
    assert "Native sparse attention, B1 HQ32 H8 D128: MiB" in words
    assert words.count("oomph") == 4
    assert words.count("oomph, tight") == 2
    assert words.count("fla, no window") == 0
    assert "16k" in words
    assert "prefers-color-scheme: dark" in text


def test_names_at_the_ends_of_lines_do_not_touch() -> None:
    assert draw_sequence_ops.apart([50.0, 20.0, 25.0]) == [50.0, 20.0, 34.0]


def test_rows_at_one_length_make_no_picture() -> None:
    with pytest.raises(SystemExit, match="run benchmarks"):
        draw_sequence_ops.picture([row("kda", REPORT, "oomph", 1.0, 50.0)])
