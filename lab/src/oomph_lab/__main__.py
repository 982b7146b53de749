"""`python -m oomph_lab`: `oomph` with the lab's commands and targets, also where it is not installed."""

from oomph.cli.main import main
from oomph_lab.cli import register

if __name__ == "__main__":
    register()
    main()
