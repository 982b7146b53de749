"""Predictions beside measurements."""

import os

# The packages that a prediction stands in for were not installed where steps were measured.
os.environ.setdefault("OOMPH_STAND_INS", "0")
