"""The log of torch's launcher, in a file."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def torch_log(path: Path) -> Iterator[None]:
    """Send torch's agent's log to a file: the terminal is for the ranks and our own messages."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(handler)
        handler.close()
