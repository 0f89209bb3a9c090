"""Memory of the host that was freed, and that the C library keeps."""

from __future__ import annotations

import ctypes

_KEPT = 64 << 20
"""The maximum number of bytes that a :class:`ReturnOfFreed` leaves with the C library."""


def return_freed() -> None:
    """Return the C library's free memory to the system; otherwise it keeps the gaps that freed tensors have left between those that stay."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class ReturnOfFreed:
    """Returns free memory now and then while many tensors are made and freed one after another.

    glibc aligns a tensor within a larger piece, and gives what is left over to small objects. Then the next tensor of the same size does not fit in
    the gap of the one before: a process that has never more than one of a model's tensors grows to the size of the model.
    """

    def __init__(self) -> None:
        self._allocated = 0

    def count(self, nbytes: int) -> None:
        """Count the bytes of a new tensor that will be freed soon."""
        self._allocated += nbytes
        if self._allocated > _KEPT:
            self._allocated = 0
            return_freed()
