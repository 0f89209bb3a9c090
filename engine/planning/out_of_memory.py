"""An out-of-memory error names the first way to train that fits, by a plan."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from engine.config.file_size import size_in_bytes
from engine.distributed.environment import detect
from engine.planning.devices import hardware
from engine.planning.plan_text import size

SECONDS = 20.0
"""No further plan begins after so many."""


@contextmanager
def naming_what_fits(search: Callable[..., Any] | None) -> Iterator[None]:
    """A ``torch.OutOfMemoryError`` that leaves the block has a note with the first candidate that fits. It stays the same error.

    Args:
        search: :meth:`engine.Fit.search_plans` of the run, without world size and device; ``None``: no note.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        if search is not None and (memory := device_memory(str(error))) is not None:
            error.add_note(_note(search, memory))
        raise


def device_memory(message: str = "") -> int | None:
    """Bytes of the device that an out-of-memory error's message names, else of the current accelerator; ``None``: there is none."""
    named = re.search(r"total capacity of ([\d.]+) ?([KMGT]iB)", message)
    if named is not None:
        return size_in_bytes(f"{named[1]}{named[2]}")
    with suppress(RuntimeError, AttributeError, NotImplementedError):
        if torch.accelerator.is_available():
            return int(torch.accelerator.get_memory_info()[1])
    return None


def _note(search: Callable[..., Any], memory: int) -> str:
    environment = detect(os.environ)
    ranks = environment.world_size
    command = f"fit plan TARGET --search --world-size {ranks} --device h100,{memory / 2**30:.1f}GiB"
    if torch.distributed.is_initialized():
        # The other ranks wait for this one, and end with it: it has no time to plan.
        return f"What would fit on these {ranks} ranks: {command}"
    try:
        device = replace(hardware("h100"), memory=memory, name=f"a device of {size(memory)}")
        found = search(world_size=ranks, nodes=environment.num_nodes, device=device, seconds=SECONDS, first=True)
    except (Exception, KeyboardInterrupt) as failed:
        return f"What would fit could not be planned ({type(failed).__name__}: {failed}); {command} plans it in a process of its own"
    best = found.best
    if not found.planned:
        reason = found.tried[0].reason if found.tried else "no strategy is possible"
        return f"What would fit could not be planned ({reason}); {command} plans it in a process of its own"
    if best is None:
        late = any(each.verdict == "not planned" for each in found.tried)
        return f"Nothing fits by a plan{f' of {SECONDS:g} s' if late else ''}: {command} shows what it needs"
    assert best.plan is not None
    settings = ", ".join(f"{name}={value!r}" for name, value in best.candidate.settings.items() if value is not None)
    return (
        f"What fits by a plan: Fit({settings}) with micro-batches of {best.candidate.micro_batch} samples; it needs {size(best.plan.peak_bytes)} "
        f"of {size(memory)}. What else does: {command}"
    )
