"""The five reference systems of oomph, and a trainer for them: `oomph train`, `oomph systems`, configs."""

from oomph.errors import add_own_package

__version__ = "0.1.0"

add_own_package(__file__)  # an error in it is not the program's
