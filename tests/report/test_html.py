"""The HTML report: what its data says, that no string of a program can act in it, its use in a browser."""

import json
from dataclasses import replace

import pytest
from benchmarks.report.browser import Browser, find_chromium
from benchmarks.report.traces import FORWARD, MiB, data_of, hostile, page, trained

from oomph.records import Diagnosis, Finding, FixUse, Measurement, OpDifference, Plan, PredictedFixes, Site
from oomph.report.diagnosis import diagnosis_text
from oomph.report.html import MOMENTS, Page, html_report
from oomph.report.measurement import Comparison
from oomph.report.terminal import report_console, report_text


def test_what_is_alive_at_each_moment_equals_the_replayed_events():
    run = trained(steps=6)
    (found,) = data_of(html_report(page(run)))["runs"]
    assert len(found["moments"]) == MOMENTS < len(run.timeline)
    allocated = {moment.event: moment.allocated for moment in run.timeline}
    bytes_of = {}
    highest = (0, {})
    for event, _, _, changes in found["moments"]:
        for group, _, size in zip(*[iter(changes)] * 3, strict=True):
            bytes_of[group] = bytes_of.get(group, 0) + size
        total = sum(bytes_of.values())
        assert total == allocated[event]
        if total > highest[0]:
            highest = total, dict(bytes_of)
    assert highest[0] == run.peak.allocated
    by_module, ops = {}, set()
    for group, size in highest[1].items():
        _, module_index, op = found["groups"][group]
        module = found["modules"][module_index]
        by_module[module] = by_module.get(module, 0) + size
        ops |= {found["ops"][op]} if size else set()
    assert {name: size for name, size in by_module.items() if size} == dict(run.by_module())
    assert ops == {alive.allocation.op.removeprefix("aten.") for alive in run.at_peak}


def test_a_plan_has_its_host_memory_and_the_command_that_applies_it():
    run = trained()
    before = PredictedFixes((), run.peak, False, 1.0, 1.0)
    after = PredictedFixes((FixUse("activation_offloading"),), run.peak, True, 1.3, 1.3, host_bytes=3 << 30)
    plan = Plan(after.fixes, True, "tiny", "Tiny", 1 << 29, before, after, ("exact",))
    shown = Page("train.py --lr 1", [("as it is", run)], plan=plan, plan_file="plan.json")
    found = data_of(html_report(shown))["plan"]
    assert found["host"] == 3 << 30
    assert found["commands"] == ["oomph run --plan plan.json train.py --lr 1"]
    ranks = replace(shown, run_line=lambda *options: f"torchrun -m oomph run {' '.join(options)} train.py")
    found = data_of(html_report(ranks))["plan"]
    assert found["commands"] == ["torchrun -m oomph run --plan plan.json train.py"]


def test_strings_cannot_break_the_file():
    html = html_report(hostile())
    assert len(html) < 3 * 2**20
    assert html.count("</script>") == 3
    text = json.dumps(data_of(html))
    assert "\\u001b" not in text
    assert "\\u0000" not in text


def test_strings_are_inert_in_a_terminal():
    run = hostile().runs[0][1]
    diagnosis = Diagnosis(run, tuple(hostile().findings))
    for shown in (report_text(run, report_console()), diagnosis_text(diagnosis, report_console())):
        assert "\x1b" not in shown
        assert len(shown) < 20_000


# ---------------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser():
    if find_chromium() is None:
        pytest.skip("Chromium is not installed (apt install chromium)")
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    """A page with every section."""
    run = trained()
    before = PredictedFixes((), run.peak, False, 1.0, 1.0)
    after = PredictedFixes(
        (FixUse("activation_checkpointing"),), replace(run.peak, device=1 << 28), True, 1.3, 1.3, 3 << 30
    )
    plan = Plan(after.fixes, True, "tiny", "Tiny", 1 << 29, before, after, ("exact",), front=(before, after))
    finding = Finding(
        "logits", 256 * MiB, "B*T*V", "x2", (FORWARD,), ("fused_linear_cross_entropy",), "use less"
    )
    measured = Measurement("H200", "2.13", run.peak, (), 0, 0.5)
    difference = OpDifference("aten.mm", "workspace", 3, 512)
    both = [("as it is", run), ("with the plan", trained(layers=20))]
    sections = {
        "findings": [finding],
        "plan": plan,
        "plan_file": "plan.json",
        "measured": [Comparison("run", run, measured, (difference,))],
    }
    file = tmp_path_factory.mktemp("html") / "report.html"
    file.write_text(html_report(replace(page(run, **sections), runs=both)))
    browser.open(file)
    return browser


def text(browser, selector):
    return str(browser.value(f"document.querySelector({json.dumps(selector)}).innerText"))


def test_all_sections_are_there(opened):
    sections = opened.value("[...document.querySelectorAll('section')].map(one => one.id)")
    assert sections == ["verdict", "findings", "plan", "measured", "changes", "memory", "alive", "notes"]
    assert "Does not fit" in opened.value("document.querySelector('h1').innerText.replace('does', 'Does')")
    assert "def forward" in text(opened, "#findings")
    assert "activation_checkpointing" in text(opened, "#plan")
    assert "--plan plan.json" in text(opened, "#plan .commands")
    assert "3.0 GiB of host memory" in text(opened, "#plan")
    assert "0.00 %" in text(opened, "#measured")


def test_a_click_in_the_chart_shows_what_is_alive_then(opened):
    opened.click("#to-peak")
    assert "this is the peak" in text(opened, "#moment")
    at_peak = text(opened, "#moment").split()[0]
    opened.click("#memory-chart", x=0.08)
    assert "before the first step" in text(opened, "#moment")
    assert " of layers.{0.." in text(opened, "#table")  # the parameters of the first layers
    assert text(opened, "#moment").split()[0] != at_peak
    opened.value("document.getElementById('memory-chart').focus()")
    before = opened.value("document.getElementById('memory-chart').getAttribute('aria-valuenow')")
    opened.key("ArrowRight")
    after = opened.value("document.getElementById('memory-chart').getAttribute('aria-valuenow')")
    assert int(after) == int(before) + 1
    opened.key("p")
    assert text(opened, "#moment").split()[0] == at_peak


def test_the_table_filters_and_sorts(opened):
    rows = "document.querySelectorAll('#table tbody tr').length"
    everything = opened.value(rows)
    opened.value("document.body.focus()")
    opened.key("/")
    opened.type("token_loss")
    assert opened.value(rows) == 1 < everything
    assert "match" in text(opened, "#moment")
    opened.value("search.value = ''; search.dispatchEvent(new Event('input'))")
    sizes = "[...document.querySelectorAll('#table tbody tr td:first-child b')].map(one => one.innerText)"
    first = opened.value(sizes)
    opened.click('[data-sort="bytes"]')
    assert opened.value(sizes) == first[::-1]
    opened.click('[data-sort="bytes"]')
    opened.click('[data-stage="6"]')  # the loss
    assert opened.value(rows) == everything - 1
    opened.click('[data-stage="6"]')


def test_views_runs_limits_and_theme(opened):
    for view in ("modules", "lines"):
        opened.click(f'[data-value="{view}"]')
        assert opened.value("document.querySelector('#map canvas') !== null")
    opened.click('[data-value="tensors"]')
    opened.click('[data-value="0"]')
    opened.value("gpu.value = '1'; gpu.dispatchEvent(new Event('change'))")
    assert "too much" in text(opened, "#limit-answer")
    opened.value("gpu.value = '0'; gpu.dispatchEvent(new Event('change'))")
    assert "to spare" in text(opened, "#limit-answer")
    theme = opened.value("document.documentElement.dataset.theme")
    opened.click("#theme")
    assert opened.value("document.documentElement.dataset.theme") != theme
    assert opened.errors == []
    assert all(address.startswith(("file:", "data:")) for address in opened.requests)


def test_hostile_strings_are_inert(browser, tmp_path):
    file = tmp_path / "hostile.html"
    file.write_text(html_report(hostile()))
    before = len(browser.errors)
    browser.open(file)
    for view in ("modules", "lines", "tensors"):
        browser.click(f'[data-value="{view}"]')
        browser.click("#map" if view != "tensors" else "#table")
    assert browser.value("window.hacked === undefined && document.querySelector('main img') === null")
    assert browser.errors[before:] == []


def test_a_step_that_fits_by_releasing_memory_is_not_called_too_large(browser, tmp_path):
    run = trained()
    limit = run.peak.reserved - MiB
    context = run.peak.device - run.peak.reserved
    file = tmp_path / "released.html"
    fits = replace(run, verdict="fits", refused=None, limit=limit, capacity=limit + context)
    file.write_text(html_report(page(fits)))
    browser.open(file)
    assert "releasing cached memory" in text(browser, "h1")
    assert "needed" not in text(browser, ".figures")
    assert "too much" not in text(browser, "#limit-answer")


def test_the_caller_of_a_library_has_a_line_of_its_own(browser, tmp_path):
    run = trained(layers=2)
    site = replace(FORWARD, line=1, caller=Site("/a/train.py", 7, "<module>"))
    made = tuple(one._replace(site=site) for one in run.allocations)
    (tmp_path / "report.html").write_text(html_report(page(replace(run, allocations=made))))
    browser.open(tmp_path / "report.html")
    codes = "document.querySelectorAll('#table tbody tr:first-child small.code')"
    lines = browser.value(f"[...{codes}].map(one => one.innerText)")
    assert [line.split(":")[0] for line in lines] == [
        '"""Scripted predictions for the report',
        "called from /a/train.py",
    ]
