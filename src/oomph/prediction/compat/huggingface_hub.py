"""huggingface_hub: without a network it asks again for most of a minute. Its offline mode reads its cache."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection

from oomph.prediction.compat.library import Library

_SWITCH = "HF_HUB_OFFLINE"


def _stay_offline(allow: Collection[str]) -> None:
    """A mirror (HF_ENDPOINT) may be on this machine, which can be reached."""
    if "network" in allow or "HF_ENDPOINT" in os.environ or _SWITCH in os.environ:
        return
    os.environ[_SWITCH] = "1"
    if constants := sys.modules.get("huggingface_hub.constants"):  # read the variable already
        vars(constants)[_SWITCH] = True


LIBRARY = Library("huggingface_hub", None, in_process=_stay_offline)
