"""A reference to an object of a run, which does not keep it in memory."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class WeakLink(Generic[T]):
    """A weak reference to an object of a run, or to none. A copy or a pickle of the link refers to none."""

    def __init__(self, target: T | None = None) -> None:
        self._reference = None if target is None else weakref.ref(target)

    def __call__(self) -> T | None:
        return None if self._reference is None else self._reference()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()
