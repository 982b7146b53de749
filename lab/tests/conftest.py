"""The lab's commands and targets are known also where it is on the path without being installed."""

from oomph_lab.cli import register

register()
