"""The claims of the reports."""

import pytest
from lab.benchmarks.systems.claims import NO_FIGURE, VERDICTS, claim_rows

from oomph.errors import UserError
from oomph_lab.systems import SYSTEMS, find_system


def test_the_claims_of_the_package_are_those_of_the_committed_rows():
    """Run python -m lab.benchmarks.systems figures."""
    assert [row for system in SYSTEMS.values() for row in system.claims] == [
        {key: value for key, value in row.items() if key != "report"} for row in claim_rows()
    ]


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=list(SYSTEMS))
def test_every_claim_has_a_figure_a_verdict_and_a_reason(system):
    assert len(system.claims) >= 5
    for claim in system.claims:
        assert claim["verdict"] in VERDICTS
        assert claim["derived"]
        assert claim["predicted"] != NO_FIGURE
        assert claim["why"]
        assert claim["claimed"]


def test_a_system_is_found_by_its_name_and_by_its_report():
    assert find_system("longctx") is find_system("002")
    with pytest.raises(UserError, match="no system 'mamba'; choose from hatchling, pythia"):
        find_system("mamba")
