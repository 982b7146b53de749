"""`python -m oomph`, and the `oomph` command."""

from oomph.cli.interrupts import handle_interrupts


def main() -> None:
    handle_interrupts()
    from oomph.cli.main import main  # takes a while

    main()


if __name__ == "__main__":
    main()
