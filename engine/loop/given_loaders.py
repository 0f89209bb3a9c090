"""Which of the objects that a user gives are loaders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from engine.data.prepared_loader import PreparedLoader


def is_loader(item: Any) -> bool:
    """Whether an entry of a list is a loader rather than a batch. Containers are batches, however deeply nested."""
    if isinstance(item, (DataLoader, PreparedLoader)):
        return True
    batch = (
        isinstance(item, (Tensor, Mapping, str, list, tuple))
        or hasattr(item, "shape")
        or callable(getattr(item, "to", None))
    )
    return not batch and isinstance(item, Iterable)
