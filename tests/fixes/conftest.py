"""Small workloads that the fixes are tried on."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
