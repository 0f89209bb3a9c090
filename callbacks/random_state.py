"""Python's random numbers stay as they are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def random_kept() -> Iterator[None]:
    """What happens in this block draws no number of the training. Importing ``rich`` draws some, and only where it is imported first."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
