"""A progress bar that only one process of each machine shows."""

from __future__ import annotations

from typing import Any

from engine.compat.accelerate.state import PartialState


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Make a bar of ``tqdm.auto``; with ``main_process_only``, it is disabled on other processes than the first of a machine.

    Raises:
        ValueError: the first argument is a bool, which was ``main_process_only`` in earlier versions.
    """
    from tqdm.auto import tqdm as make  # only where a script shows a bar

    if args and isinstance(args[0], bool):
        raise ValueError("tqdm: give main_process_only=... by name")
    disable = kwargs.pop("disable", False) or (main_process_only and PartialState().local_process_index != 0)
    return make(*args, **kwargs, disable=disable)
