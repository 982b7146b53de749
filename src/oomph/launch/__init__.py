"""Launch lines, as typed in a shell: which program they start, with what arguments and environment."""

from oomph.launch.launchers import follow, is_launcher, nearest
from oomph.launch.lines import Launch

__all__ = ["Launch", "follow", "is_launcher", "nearest"]
