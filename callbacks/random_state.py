"""Python's random numbers stay as they are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def random_kept() -> Iterator[None]:
    """Restore the state of Python's random numbers after this block. The first import of ``rich`` draws some, which would change the training."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
