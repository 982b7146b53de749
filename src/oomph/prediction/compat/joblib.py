"""joblib: its processes would not see the fake GPU. Jobs run in the program's own."""

from __future__ import annotations

import sys
from collections.abc import Collection

from oomph.prediction.compat.library import Library


def _stay_in_process(allow: Collection[str]) -> None:
    for name in ("joblib.parallel", "joblib._parallel_backends"):  # read the variable when imported
        if name in sys.modules:
            vars(sys.modules[name])["mp"] = None


LIBRARY = Library(
    "joblib", "joblib", in_process=_stay_in_process, environment={"JOBLIB_MULTIPROCESSING": "0"}
)
