"""One-file checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.checkpoint.convert import convert


@contextmanager
def readable(path: Any) -> Iterator[Any]:
    """A path that checkpoints are read from: ``path`` itself, or a one-file checkpoint as a folder, which is removed afterwards."""
    if path is None or "://" in str(path) or not Path(path).is_file():
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        yield convert(path, Path(folder) / "step=00000000", trust_pickle=True).path
