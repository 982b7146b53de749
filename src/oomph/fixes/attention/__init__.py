"""Attention that a program writes out: found, followed call by call without being computed, and fused."""
