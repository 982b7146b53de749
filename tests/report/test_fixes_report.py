"""The table of fixes: which make it fit, which hold on a condition, and what the figures are."""

from dataclasses import replace

from rich.console import Console
from sample_prediction import CONTEXT, GiB, prediction

from oomph.records import Peak, Proposal
from oomph.report.fixes import proposals_text, proposals_to_json


def offer(fix, reserved, **fields):
    peak = None if reserved is None else Peak(reserved, reserved, reserved + CONTEXT)
    saving = None if reserved is None else 31 * GiB - reserved
    return Proposal(fix, "exact", f"What {fix} does.", ("blocks",), {}, peak=peak, saving=saving, **fields)


OFFERS = (
    offer("small", 20 * GiB, verdict="fits"),
    offer("large", 30 * GiB, verdict="does not fit"),
    offer("unknown", None),
    replace(offer("parts", 10 * GiB, verdict="fits", condition="rows count alike"), options={"parts": 4}),
    replace(offer("parts", 22 * GiB, verdict="fits", condition="rows count alike"), options={"parts": 2}),
)


def text(found, offers=OFFERS, target="train.py:w", width=100):
    console = Console(width=width, highlight=False, markup=False, emoji=False, color_system=None)
    return proposals_text(found, offers, ("exact",), console, target, f"oomph fit {target} --gpu rtx3090")


def row(shown, name):
    (line,) = (line for line in shown.splitlines() if line.startswith(f"  {name} ") and "GiB" in line)
    return line.split()


def test_where_it_does_not_fit_each_row_tells_whether_it_would():
    shown = text(prediction())
    assert row(shown, "small")[5] == "yes"
    assert row(shown, "large")[5] == "no"
    assert "3 of 5 rows make it fit." in shown
    assert "oomph fit train.py:w --gpu rtx3090" in shown
    assert "No row makes it fit by itself." in text(prediction(), OFFERS[1:3])
    close = offer("near", 21 * GiB, verdict="too close to call")
    only_just = offer("over", 40 * GiB, verdict="fits")
    shown = text(prediction(), (*OFFERS, close, only_just))
    assert (row(shown, "near")[5], row(shown, "over")[5]) == ("close", "just")
    assert "3 of 7 rows make it fit, 1 just, 1 close." in shown


def test_where_it_fits_or_no_card_is_named_there_is_nothing_to_mark():
    for found in (prediction(verdict="fits"), prediction(verdict=None, limit=None, capacity=None, gpu=None)):
        shown = text(found)
        assert "make it fit" not in shown
        assert "yes" not in shown


def test_words_break_after_marks_where_a_terminal_is_narrow():
    given = replace(OFFERS[0], fix="allocator", options={"segments": False, "max_split_size_mb": 1024})
    shown = [line.strip() for line in text(prediction(), [given], width=80).splitlines()]
    row = next(number for number, line in enumerate(shown) if line.startswith("allocator:"))
    assert shown[row].split()[0] == "allocator:segments=false,"
    assert shown[row + 1] == "max_split_size_mb=1024"


def test_a_note_on_a_fix_is_shown_once():
    shown = text(prediction(), [replace(one, note="drops differ") for one in OFFERS])
    assert shown.count("drops differ") == 4
    assert "parts: drops differ" in shown


def test_what_holds_on_a_condition_is_marked_with_the_command_that_checks_it():
    shown = text(prediction())
    assert "parts:parts=2 (?)" in shown
    flowing = " ".join(shown.split())
    assert "(?) exact only if rows count alike. To check, on a small version of it:" in flowing
    assert "oomph verify train.py:w parts:parts=2" in flowing
    assert flowing.index("exact small:") < flowing.index("exact, on a condition (?) parts:")
    assert "(?)" not in text(prediction(), OFFERS[:3])


def test_notes_are_those_of_a_row_and_modules_are_shown_whole():
    blocks = tuple(f"transformer.blocks.{index}" for index in range(6))
    keep = replace(offer("checkpoint", 20 * GiB, note="keeps products"), options={"keep": "x"}, where=blocks)
    half = replace(offer("checkpoint", 22 * GiB, note="every second"), options={"blocks": [*blocks[::2]]})
    wide = replace(offer("allocator", 22 * GiB), options={"expandable_segments": False, "max_split": 128})
    shown = text(prediction(), (keep, half, wide))
    assert "checkpoint:keep=x: keeps products" in shown
    assert "checkpoint:blocks=[3 names]: every second" in shown
    assert "transformer.blocks.{0..5}" in "".join(shown.split())


def test_programs_are_told_the_same():
    found = proposals_to_json(prediction(), OFFERS)
    assert found["fits"] is False
    assert found["limit"] == prediction().limit
    assert found["peak"]["device"] == found["peak"]["reserved"] + CONTEXT
    assert [each["fits"] for each in found["fixes"]] == [True, False, None, True, True]
    assert [each["condition"] for each in found["fixes"]] == ["", "", "", *["rows count alike"] * 2]
    assert found["fixes"][0]["peak"]["device"] == 20 * GiB + CONTEXT
    assert found["fixes"][2]["peak"] is None


def test_with_a_limit_of_the_allocator_no_figure_includes_the_context():
    found = prediction()
    assert row(text(found), "small")[3:5] != ["20.0", "GiB"]
    limited = text(replace(found, limit=found.limit - GiB))
    assert row(limited, "small")[3:5] == ["20.0", "GiB"]
    assert "CUDA context" not in limited
