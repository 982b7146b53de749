"""`oomph systems`: the five reference systems, and the derived figures behind the claims of their reports."""

from __future__ import annotations

import json
from typing import Any

from oomph.cli.output import stdout_to_stderr, write_stdout
from oomph.errors import ExitStatus, UserError
from oomph.report.systems import ClaimLine, SystemLines, claims_text, systems_text
from oomph.report.terminal import report_console
from oomph.systems import SYSTEMS, System, find_system
from oomph.systems.claims import Claim

# The keys of `oomph cases --json`, which this command replaces.
_OLD_KEYS = {"systems": "cases", "system": "case", "naive": "sick", "model": "healthy"}


def run_systems(name: str | None, as_json: bool, old_keys: bool = False) -> ExitStatus:
    """List all systems, or check the claims of one."""
    if name is None:
        rows = [_lines(system) for system in SYSTEMS.values()]
        if as_json:
            _write_json({"systems": [row._asdict() for row in rows]}, old_keys)
        else:
            write_stdout(systems_text(rows, report_console()))
        return ExitStatus.FITS
    system = find_system(name)
    with stdout_to_stderr():  # libraries may print while they are imported
        claims = [_claim(claim) for claim in system.claims]
    if as_json:
        _write_json(
            {"system": _lines(system)._asdict(), "claims": [claim._asdict() for claim in claims]}, old_keys
        )
    else:
        write_stdout(claims_text(_lines(system), claims, report_console()))
    return ExitStatus.FITS


def run_check(name: str | None) -> ExitStatus:
    """Run the check that a system's report came with."""
    names = ("longctx", "npt")
    system = find_system(name) if name is not None else None
    if system is None or system.name not in names:
        raise UserError(f"--check is for the systems that came with one; give {' or '.join(names)}")
    with stdout_to_stderr():
        from oomph.cli import system_checks

    check = {"longctx": system_checks.check_longctx, "npt": system_checks.check_npt}[system.name]
    agree = check(lambda line: write_stdout(line + "\n"))
    return ExitStatus.FITS if agree else ExitStatus.DOES_NOT_FIT


def _lines(system: System) -> SystemLines:
    return SystemLines(system.name, system.report, system.title, system.naive, system.model)


def _claim(claim: Claim) -> ClaimLine:
    return ClaimLine(claim.text, claim.claimed, claim.derive(), claim.verdict, claim.why)


def _write_json(content: dict[str, Any], old_keys: bool) -> None:
    if old_keys:
        content = _renamed(content)
    write_stdout(json.dumps({"schema": 1, **content}) + "\n")


def _renamed(content: Any) -> Any:
    if isinstance(content, dict):
        return {_OLD_KEYS.get(key, key): _renamed(value) for key, value in content.items()}
    return [_renamed(each) for each in content] if isinstance(content, list) else content
