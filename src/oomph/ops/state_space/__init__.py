"""The selective scan of Mamba, in one or both directions, without the states of every token."""

from oomph.ops.state_space.api import selective_scan

__all__ = ["selective_scan"]
