"""The report in the terminal: its first line, its sections and its chart."""

import io
from dataclasses import replace

import pytest
from rich.console import Console
from sample_prediction import CONTEXT, LOSS, GiB, MiB, allocation, prediction

from oomph.records import Alive, BatchTensor, Growth, Interval, Note, Peak, Site
from oomph.report.terminal import PLAIN_WIDTH, assumptions, report_console, report_text, verdict

# ------------------------------------------------------------------------------------------- verdict


def _peak(reserved, **changes):
    values = {"step": 2, "stage": "backward", "site": LOSS, **changes}
    return Peak(reserved, reserved, reserved + CONTEXT, **values)


def _on_a_card(capacity, reserved, verdict, **changes):
    values = {"capacity": capacity, "limit": capacity - CONTEXT, "peak": _peak(reserved), "refused": None}
    return prediction(verdict=verdict, **{**values, **changes})


NO_CARD = {"gpu": None, "gpu_title": "", "capacity": None, "refused": None}
BY_SIZE = {"gpu": "24GiB", "gpu_title": "24 GiB"}


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (
            prediction(),
            ["does not fit: needs 31.5 GiB", "RTX 3090 has 23.6 GiB", "backward of step 2", "loss.py:41"],
        ),
        (
            _on_a_card(24 * GiB, 10 * GiB, "fits"),
            ["fits with 13.5 GiB to spare: needs 10.5 GiB", "has 24.0 GiB"],
        ),
        (
            _on_a_card(24 * GiB, 30 * GiB, "does not fit", **BY_SIZE),
            ["needs 30.5 GiB", "the GPU has 24.0 GiB"],
        ),
        (prediction(**NO_CARD, limit=None, verdict=None), ["needs 31.5 GiB; peak in backward of step 2"]),
        (
            prediction(**NO_CARD, limit=40 * GiB, verdict="fits"),
            ["fits with 9.00 GiB to spare: needs 31.0 GiB", "limit is 40.0 GiB"],
        ),
        (
            prediction(capacity=80 * GiB, limit=20 * GiB, refused=None),
            ["does not fit: needs 31.0 GiB reserved", "limit is 20.0 GiB"],
        ),
        (
            prediction(capacity=24 * GiB, limit=80 * GiB, verdict="fits", refused=None),
            ["needs 31.0 GiB", "limit is 80.0 GiB"],
        ),
        (
            _on_a_card(24 * GiB, 23 * GiB, "fits", margin=100 * MiB),
            ["fits with 512 MiB to spare, margin 100 MiB: needs 23.5 GiB"],
        ),
        (
            _on_a_card(24 * GiB, 23 * GiB, "fits", margin=600 * MiB),
            ["512 MiB to spare, margin 600 MiB, since cached memory can be released: needs 23.5 GiB"],
        ),
        (
            _on_a_card(24 * GiB, 23 * GiB, "too close to call", margin=600 * MiB),
            ["too close to call: needs 23.5 GiB, margin 600 MiB; the RTX 3090 has 24.0 GiB"],
        ),
        (
            _on_a_card(24 * GiB, 27 * GiB, "too close to call", refused=allocation(0, GiB)),
            ["needs 27.5 GiB; the RTX 3090 has 24.0 GiB, which may be enough if cached memory is released"],
        ),
        (
            _on_a_card(24 * GiB, 25 * GiB, "fits"),
            ["fits, but only by releasing cached memory: needs 25.5 GiB without releasing it"],
        ),
        (
            _on_a_card(24 * GiB, 23 * GiB, "fits", without_search=_peak(5 * GiB)),
            ["fits with 18.5 GiB to spare: needs 5.50 GiB; the RTX 3090 has 24.0 GiB"],
        ),
        (
            _on_a_card(24 * GiB, 23 * GiB, "does not fit"),
            ["needs 23.5 GiB", "24.0 GiB, but its free blocks are too small"],
        ),
        (
            _on_a_card(24 * GiB, 24 * GiB - CONTEXT + 10 * MiB, "does not fit"),
            ["needs 24.01 GiB; the RTX 3090 has 24.00 GiB"],
        ),
        (
            prediction(peak=_peak(30 * GiB, step=0, stage="parameters", site=None), verdict=None),
            ["needs 30.5 GiB; peak in loading the model, before the first step"],
        ),
        (
            prediction(peak=_peak(30 * GiB, stage=None, site=None), verdict=None),
            ["needs 30.5 GiB; peak in step 2"],
        ),
    ],
)
def test_the_first_line_gives_the_verdict_the_figures_and_the_place_of_the_peak(given, parts):
    line = verdict(given).line
    assert [part for part in parts if part not in line] == []
    assert ("to spare" in line) == (given.fits is True and "releasing" not in line)


@pytest.mark.parametrize(("most", "depends"), [(20, False), (30, True)])
def test_a_fitting_verdict_depends_on_steps_that_may_allocate_more_than_the_limit(most, depends):
    interval = Interval(_peak(5 * GiB), _peak(most * GiB), "steps differ")
    text = "\n".join(assumptions(_on_a_card(24 * GiB, 10 * GiB, "fits", interval=interval)))
    assert f"steps differ: from 5.50 GiB to {most}.5 GiB" in text
    assert ("the verdict depends on them" in text) == depends


def test_the_refused_request_is_named_with_its_line_or_its_operator():
    assert verdict(prediction()).out_of_memory == (
        "out of memory at loss.py:41 in step 2: tried to allocate 6.00 GiB"
    )
    refused = allocation(0, GiB, site=None, op="cublas workspace", step=0)
    assert (
        "in cublas workspace: tried to allocate 1.00 GiB"
        in verdict(prediction(refused=refused)).out_of_memory
    )


def test_what_grows_with_every_step_is_part_of_the_line():
    growth = Growth(100 * MiB, None)
    held = replace(_on_a_card(24 * GiB, 10 * GiB, "fits"), growth=growth)
    assert verdict(held).line.startswith("fits for now with 13.5 GiB to spare: needs 10.5 GiB; the")
    assert verdict(held).line.endswith("; grows by 100 MiB per step: out of memory after about 141 steps")
    refused = replace(_on_a_card(24 * GiB, 30 * GiB, "does not fit"), growth=growth)
    assert verdict(refused).line == verdict(replace(refused, growth=None)).line
    endless = prediction(**NO_CARD, limit=None, verdict=None, growth=growth)
    assert verdict(endless).line.endswith("; grows by 100 MiB per step")


# ------------------------------------------------------------------------------------------- report


def _plain(given):
    return report_text(given, report_console(io.StringIO()))


def _on_terminal(given, width=100, color="256"):
    console = Console(
        file=io.TextIOWrapper(io.BytesIO(), "utf-8"), force_terminal=True, width=width, color_system=color
    )
    return report_text(given, console)


def test_off_a_terminal_the_report_is_ascii_of_fixed_width_without_colour():
    text = _plain(prediction())
    assert text.isascii()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines()[1:])) <= PLAIN_WIDTH
    assert all(line == line.rstrip() for line in text.splitlines())


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


def test_repeated_layers_are_one_row_with_line_and_collapsed_modules():
    lines = _plain(prediction()).splitlines()
    row = next(i for i, line in enumerate(lines) if "12 x [8, 12, 2048, 2048] float32" in line)
    assert lines[row].split()[:2] == ["18.0", "GiB"]
    assert lines[row].endswith("forward activations")
    assert lines[row + 1].strip() == (
        "transformers/models/gpt2/modeling_gpt2.py:123 forward  in transformer.h.{0..11}.attn"
    )


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
    section = text.split("Source lines with the most memory at the peak")[1]
    assert "model.py:2 attend" in section
    assert "scores = q @ k  # the whole square" in section


def test_the_timeline_marks_steps_peak_and_limit():
    chart = _plain(prediction()).split("Allocated memory over the run")[1]
    assert "v peak 29.6 GiB" in chart
    assert "limit 23.1 GiB |--" in chart
    assert "step 1: 28.6 GiB" in chart
    assert "step 3: 29.6 GiB" in chart


def test_the_shapes_of_the_batch_are_stated():
    ids = BatchTensor("input_ids", (8, 1024), "int64")
    assert "\nbatch: input_ids [8, 1024] int64\n" in _plain(prediction(batch=(ids,)))
    many = tuple(BatchTensor("", (8, length), "int64") for length in range(100, 110))
    line = next(line for line in _plain(prediction(batch=many)).splitlines() if line.startswith("batch"))
    assert line.startswith("batch: [B=8, T=104] int64, [B=8, T=105]")
    assert line.endswith("[B=8, T=109] int64 and 4 more")


def test_what_looks_like_markup_is_printed_as_it_is():
    text = _plain(prediction(notes=(Note("[bold]shape [3][/bold] :smile:"),)))
    assert "[bold]shape [3][/bold] :smile:" in text


def test_an_empty_prediction_is_still_a_report():
    empty = prediction(at_peak=(), timeline=(), events=(), notes=(), steps=(), verdict=None, refused=None)
    assert _plain(empty).splitlines()[0].startswith("needs 31.5 GiB")
