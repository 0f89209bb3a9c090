"""An out-of-memory error names the first way to train that fits, by a plan."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from engine import planning
from engine.config.file_size import size_in_bytes
from engine.distributed.environment import detect
from engine.planning.devices import Hardware, hardware
from engine.planning.plan_text import size

SECONDS = 60.0
"""No further plan begins after so many."""
_HOST = ("can't allocate memory", "not enough memory")
"""In the messages of torch's allocator for the host, whose errors are plain ``RuntimeError`` objects."""


@contextmanager
def naming_what_fits(fit: Any, module: Any, train_loader: Any, datamodule: Any) -> Iterator[None]:
    """An out-of-memory error that leaves the block has a note with the first candidate that fits. It stays the same error.

    In a job each rank that runs out of memory plans for itself: the others wait for it in a collective, and end with it.

    Args:
        fit: an :class:`engine.Fit`; its ``names_what_fits`` turns notes off.
        module, train_loader, datamodule: of its run.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if fit.names_what_fits and (device := _device(error)) is not None:
            error.add_note(_note(fit, module, {"train_loader": train_loader, "datamodule": datamodule}, device))
        raise


def _device(error: BaseException) -> Hardware | None:
    """The device whose memory is full; ``None``: the error is another one, or the size is not known."""
    if isinstance(error, torch.OutOfMemoryError):
        memory = device_memory(str(error))
        return None if memory is None else replace(hardware("h100"), memory=memory)
    if isinstance(error, MemoryError) or any(text in str(error) for text in _HOST):
        return replace(hardware("cpu"), memory=_host_memory())
    return None


def _ranks() -> tuple[int, int]:
    """Of the job, and of this machine. Processes that a ``Fit`` has started are on one, and their variables do not name them."""
    environment = detect(os.environ)
    if environment.world_size == 1 and torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), torch.distributed.get_world_size()
    return environment.world_size, environment.local_world_size


def _host_memory() -> int:
    """Bytes that a rank may have: its share of the host's, or the process's limit (``ulimit -v``)."""
    share = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _ranks()[1]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return share if limit == resource.RLIM_INFINITY else min(share, limit)


def device_memory(message: str = "") -> int | None:
    """Bytes of the device that an out-of-memory error's message names, else of the current accelerator; ``None``: there is none."""
    named = re.search(r"total capacity of ([\d.]+) ?([KMGT]iB)", message)
    if named is not None:
        return size_in_bytes(f"{named[1]}{named[2]}")
    with suppress(RuntimeError, AttributeError, NotImplementedError):
        if torch.accelerator.is_available():
            return int(torch.accelerator.get_memory_info()[1])
    return None


def _note(fit: Any, module: Any, data: dict[str, Any], device: Hardware) -> str:
    ranks, here = _ranks()
    memory = device.memory
    command = f"fit plan TARGET --search --world-size {ranks} --device {device.name},{memory / 2**30:.2f}GiB"
    where = {"world_size": ranks, "nodes": ranks // here}
    if any(hasattr(parameter, "placements") for parameter in module.parameters()):
        return f"The strategy has divided the module among the ranks, so this process cannot plan what would fit; in one of its own: {command}"
    try:
        with planning.job_set_aside() if torch.distributed.is_initialized() else nullcontext():
            # Later micro-batches may be larger than the planned one: what fails needs more than its plan, and so may the others.
            needed = fit.plan(module, **data, **where, device=device).peak_bytes
            less = replace(device, memory=min(memory, needed - 1))
            found = fit.search_plans(module, **data, **where, device=less, seconds=SECONDS, first=True)
    except (Exception, KeyboardInterrupt) as failed:
        return f"What would fit could not be planned ({type(failed).__name__}: {failed}); {command} plans it in a process of its own"
    best = found.best
    if not found.planned:
        reason = found.tried[0].reason if found.tried else "no strategy is possible"
        return f"What would fit could not be planned ({reason}); {command} plans it in a process of its own"
    if best is None:
        if any(each.verdict == "not planned" for each in found.tried):
            return f"None of the {found.planned} plans made in {SECONDS:g} s fits; {command} makes them all"
        return f"Nothing fits by a plan: {command} shows what it needs"
    assert best.plan is not None
    settings = ", ".join(f"{name}={value!r}" for name, value in best.candidate.settings.items() if value is not None)
    return (
        f"What fits by a plan: Fit({settings}) with micro-batches of {best.candidate.micro_batch} samples; it needs {size(best.plan.peak_bytes)} "
        f"of {size(memory)}, this run {size(needed)}. What else does: {command}"
    )
