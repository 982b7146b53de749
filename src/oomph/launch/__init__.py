"""Launch lines, as typed in a shell: which program they start, with what arguments and environment."""

from oomph.launch.launchers import follow, is_launcher, nearest, starts_program
from oomph.launch.lines import Launch
from oomph.launch.shell import commands

__all__ = ["Launch", "commands", "follow", "is_launcher", "nearest", "starts_program"]
