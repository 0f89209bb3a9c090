"""Finds a batch size that fits into memory, for the user's own loops; with ``Fit`` use ``callbacks.find_batch_size``."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch

_MESSAGES = ("out of memory", "cudnn_status_not_supported", "can't allocate memory", "not enough memory")
"""Parts of the messages of out-of-memory errors that are not a ``torch.OutOfMemoryError``."""


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorate ``function(batch_size, ...)``: call it with ever smaller batch sizes until it does not run out of memory.

    Args:
        reduce_batch_size_fn: returns the next batch size; by default it is nine tenths of the last.

    Raises:
        RuntimeError: even a batch of size 1 does not fit.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        size = starting_batch_size
        while size > 0:
            release_memory()
            try:
                return function(size, *args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                size = size * 9 // 10 if reduce_batch_size_fn is None else reduce_batch_size_fn()
        raise RuntimeError(
            f"no batch size fits into memory: {getattr(function, '__name__', function)} was tried from {starting_batch_size} down to 1"
        )

    return run


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that the device or the host ran out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in _MESSAGES)


should_reduce_batch_size = is_out_of_memory


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Free cached device memory; with ``garbage_collection``, collect garbage before."""
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Collect garbage and free cached device memory; return ``None`` for each object, to assign to the caller's names."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    return [None] * len(objects)
