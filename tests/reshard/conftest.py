"""Makes the fork runner of tests/distributed importable: `from harness import run`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "distributed"))
