"""`python -m oomph`: the same as the `oomph` command."""

from oomph.cli.main import main

if __name__ == "__main__":
    main()
