"""Random trainings, each by the library and by a plain float64 loop over the whole global batch: they must agree.

``python -m tests.parity.differential --help`` runs many of them. ``test_differential.py`` beside this folder runs a few in the suite.
"""

import sys
from pathlib import Path

# Where ``support`` is: pytest knows, a command and a rank do not.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from .cases import Case, cases
from .compare import differences
from .pool import Pools
from .runner import check, run_case

__all__ = ["Case", "Pools", "cases", "check", "differences", "run_case"]
