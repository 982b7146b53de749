"""What oomph-lab adds to the command line of oomph: `train`, `systems`, and configs as targets."""

from oomph.cli import extensions

# As in pyproject.toml.
COMMANDS = {"train": "oomph_lab.cli.train:app", "systems": "oomph_lab.cli.systems:app"}
TARGETS = dict.fromkeys(("yaml", "yml"), "oomph_lab.cli.targets:ConfigTarget")


def register() -> None:
    """For where the package is on the path without being installed."""
    extensions.register(extensions.COMMANDS, COMMANDS)
    extensions.register(extensions.TARGETS, TARGETS)
