"""`oomph cases`: the five reference systems, and the claims of their reports worked out."""

from __future__ import annotations

import json
from typing import Any

from oomph.cases.catalogue import CASES, Case, find
from oomph.cases.claims import Claim
from oomph.cli.streams import stdout_to_stderr, write_stdout
from oomph.report.cases import CaseLines, ClaimLine, cases_text, claims_text
from oomph.report.terminal import report_console


def run_cases(name: str | None, as_json: bool) -> int:
    """List them all, or check the claims of one; returns the exit status."""
    if name is None:
        rows = [_lines(case) for case in CASES.values()]
        if as_json:
            _write_json({"cases": [row._asdict() for row in rows]})
        else:
            write_stdout(cases_text(rows, report_console()))
        return 0
    case = find(name)
    with stdout_to_stderr():  # what libraries say while they are imported
        claims = [_claim(claim) for claim in case.claims]
    if as_json:
        _write_json({"case": _lines(case)._asdict(), "claims": [claim._asdict() for claim in claims]})
    else:
        write_stdout(claims_text(_lines(case), claims, report_console()))
    return 0


def _lines(case: Case) -> CaseLines:
    return CaseLines(case.name, case.report, case.title, case.sick, case.healthy)


def _claim(claim: Claim) -> ClaimLine:
    return ClaimLine(claim.text, claim.claimed, claim.derive(), claim.verdict, claim.why)


def _write_json(content: dict[str, Any]) -> None:
    write_stdout(json.dumps({"schema": 1, **content}) + "\n")
