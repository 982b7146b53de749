"""Tensors that wait for backward in host memory, copied there and back beside the computation."""

from oomph.fixes.host_copies.visits import HostCopies, Visit

__all__ = ["HostCopies", "Visit"]
