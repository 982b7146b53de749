"""Optimizers that fixes turn a workload's own into, and how they are turned."""
