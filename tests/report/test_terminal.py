from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from sample_prediction import CONTEXT, GiB, MiB, allocation, prediction

from oomph.records import Alive, Growth, Note, Peak, Site, StepPeak
from oomph.report.terminal import PLAIN_WIDTH, report_console, report_text


def _plain(given) -> str:
    return report_text(given, report_console(io.StringIO()))


def _on_terminal(given, width: int = 100, color: str | None = "256") -> str:
    console = Console(
        file=io.TextIOWrapper(io.BytesIO(), "utf-8"), force_terminal=True, width=width, color_system=color
    )
    return report_text(given, console)


def test_the_verdict_comes_first_and_the_refused_request_second():
    first, second, *_ = _plain(prediction()).splitlines()
    assert first.startswith("does not fit: needs 31.5 GiB of the RTX 3090's 23.6 GiB; peak in backward")
    assert second == "the allocator would fail at loss.py:41 asking for 6.00 GiB, step 2"


def test_off_a_terminal_the_report_is_ascii_of_fixed_width_without_colour():
    text = _plain(prediction())
    assert text.isascii()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines()[1:])) <= PLAIN_WIDTH
    assert all(line == line.rstrip() for line in text.splitlines())


def test_columns_in_the_environment_do_not_change_the_plain_report(monkeypatch):
    usual = _plain(prediction())
    monkeypatch.setenv("COLUMNS", "40")
    assert _plain(prediction()) == usual


def test_on_a_terminal_the_verdict_is_coloured_and_charts_use_blocks():
    text = _on_terminal(prediction())
    assert text.startswith("\x1b[1;31mdoes not fit\x1b[0m")
    assert "█" in text
    assert "▼ peak 29.6 GiB" in text


def test_a_terminal_that_is_not_utf8_gets_ascii():
    console = Console(file=io.TextIOWrapper(io.BytesIO(), "latin-1"), force_terminal=True, color_system=None)
    assert report_text(prediction(), console).isascii()


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_keeps_every_stage_name_and_stays_within_its_width(width):
    lines = _on_terminal(prediction(), width, color=None).splitlines()
    assert any("optimizer state" in line for line in lines)
    # The verdict and the figures are left in one piece, for the terminal to wrap.
    assert max(map(len, lines[3:])) <= width


def test_each_stage_has_a_bar_in_proportion():
    drawn = [line for line in _plain(prediction()).splitlines() if "%  #" in line]
    lengths = {line.split("  ")[1]: line.count("#") for line in drawn}
    assert lengths["forward activations"] == 40
    assert lengths["backward"] == 13
    assert lengths["workspace"] == 1


def test_repeated_layers_are_one_row_with_line_and_collapsed_modules():
    lines = _plain(prediction()).splitlines()
    row = next(i for i, line in enumerate(lines) if "12 x [8, 12, 2048, 2048] float32" in line)
    assert lines[row].split()[:2] == ["18.0", "GiB"]
    assert lines[row].endswith("forward activations")
    assert lines[row + 1].strip() == (
        "transformers/models/gpt2/modeling_gpt2.py:123 forward  in transformer.h.{0..11}.attn"
    )


def test_many_operators_of_one_line_are_counted_where_they_do_not_fit():
    def shown(*ops: str) -> str:
        return _plain(prediction(at_peak=tuple(Alive(GiB, allocation(op=op)) for op in ops)))

    assert "  nll_loss_backward, +2  " in shown("aten.nll_loss_backward", "aten._log_softmax_backward", "mul")
    assert "  mul, add  " in shown("aten.mul", "aten.add")


def test_ten_groups_are_shown_and_the_rest_is_summed_up():
    many = tuple(Alive(GiB, allocation(i, GiB, shape=(i + 1,))) for i in range(13))
    text = _plain(prediction(at_peak=many))
    assert text.count("_softmax") == 10
    assert "3.00 GiB  in 3 more" in text


def test_source_lines_show_their_share_and_their_code(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("import torch\nscores = q @ k  # the whole square\n")
    at_peak = (Alive(3 * GiB, allocation(0, 3 * GiB, site=Site(str(file), 2, "attend"))),)
    text = _plain(prediction(at_peak=at_peak))
    section = text.split("Source lines that own the most")[1]
    assert "model.py:2 attend" in section
    assert "scores = q @ k  # the whole square" in section


def test_a_very_long_source_line_is_cut(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("x = " + "1 + " * 100 + "1\n")
    at_peak = (Alive(GiB, allocation(0, GiB, site=Site(str(file), 1, "f"))),)
    cut = next(line for line in _plain(prediction(at_peak=at_peak)).splitlines() if "x = 1 + 1" in line)
    assert cut.endswith("...")
    assert len(cut) <= PLAIN_WIDTH


def test_the_timeline_marks_steps_peak_and_limit():
    chart = _plain(prediction()).split("Allocated over the run")[1]
    assert "v peak 29.6 GiB" in chart
    assert "limit 23.1 GiB |--" in chart
    assert "step 1: 28.6 GiB" in chart
    assert "step 3: 29.6 GiB" in chart


def test_a_limit_far_above_the_peak_is_not_drawn():
    assert "limit" not in _plain(prediction(limit=100 * GiB, fits=True)).split("Allocated over the run")[1]


def test_a_peak_at_the_very_end_keeps_its_label_inside():
    given = prediction()
    rising = tuple(moment._replace(allocated=i + 1) for i, moment in enumerate(given.timeline))
    chart = _plain(prediction(timeline=rising)).split("Allocated over the run")[1]
    marker = chart.splitlines()[1]
    assert marker.endswith("peak 29.6 GiB v")
    assert len(marker) == PLAIN_WIDTH


def test_notes_come_with_their_place():
    assert "-  torch.compile is traced as eager  loss.py:7" in _plain(prediction())


def test_what_looks_like_markup_is_printed_as_it_is():
    text = _plain(prediction(notes=(Note("[bold]shape [3][/bold] :smile:"),)))
    assert "[bold]shape [3][/bold] :smile:" in text


def test_an_empty_prediction_is_still_a_report():
    empty = prediction(at_peak=(), timeline=(), events=(), notes=(), steps=(), fits=None, refused=None)
    assert _plain(empty).splitlines()[0].startswith("needs 31.5 GiB")


def test_a_share_below_one_percent_is_not_called_zero():
    at_peak = (Alive(100 * GiB, allocation(0)), Alive(MiB, allocation(1, stage="workspace")))
    assert "<1 %" in _plain(prediction(at_peak=at_peak))


def _growing(size: int):
    steps = tuple(StepPeak(number, 2 * GiB, 2 * GiB, GiB + number * size) for number in (1, 2, 3))
    peak = Peak(2 * GiB, 2 * GiB, 2 * GiB + CONTEXT, step=3, stage="backward")
    return prediction(fits=True, refused=None, peak=peak, steps=steps, growth=Growth(size, None))


def test_memory_that_grows_with_every_step_is_told_in_the_verdict_with_how_long_it_lasts():
    first = _plain(_growing(144 * MiB)).splitlines()[0]
    assert first.startswith("fits for now: needs 2.50 GiB of the RTX 3090's 23.6 GiB; 21.1 GiB to spare")
    assert first.endswith("; grows by 144 MiB with every step, out of memory after about 152")
    coloured = _on_terminal(_growing(144 * MiB))
    assert coloured.startswith("\x1b[1;33mfits for now\x1b[0m")


def test_growth_without_a_limit_is_told_without_an_end():
    given = _growing(MiB)
    first = _plain(replace(given, gpu=None, capacity=None, limit=None, fits=None)).splitlines()[0]
    assert first.startswith("needs 2.50 GiB")
    assert first.endswith("; grows by 1.0 MiB with every step")
