"""Fixes that change the optimizer."""
