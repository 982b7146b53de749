"""The folder of oomph-lab: a package only so that `python -m lab.benchmarks.NAME` runs."""
