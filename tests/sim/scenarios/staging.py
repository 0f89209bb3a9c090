"""Copies for checkpoints from the simulated device: complete, without races and waits, in pinned memory that is given back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import simulated
import torch

from engine.checkpoint.staging import Staging
from engine.utils import device_copies

DEVICE = torch.device("sim", 1)


@contextlib.contextmanager
def _finishing(staging: Staging) -> Iterator[dict[str, torch.Tensor]]:
    """The writing thread, which ends with the block."""
    found: dict[str, torch.Tensor] = {}
    errors: list[BaseException] = []

    def write() -> None:
        try:
            found.update(device_copies.call_on_device(DEVICE, staging.complete))
            assert torch.accelerator.current_device_index() == 1
            staging.verify(last=True)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield found
    finally:
        thread.join()
        if errors:
            raise errors[0]


def copies_are_those_of_the_save() -> None:
    torch.accelerator.set_device_index(1)
    weight, buffer = torch.ones(1000, device=DEVICE), torch.ones(10, device=DEVICE)
    offloaded = torch.ones(5)
    staging = Staging(DEVICE)
    for number in range(3):
        weight.fill_(number)
        buffer.fill_(number)
        offloaded.fill_(number)
        simulated.clear()
        staging.start({"w": weight, "b": buffer, "o": offloaded}, {"w", "o"})
        buffer.fill_(9)
        with _finishing(staging) as copies:
            staging.hold()
            weight.fill_(9)
            offloaded.fill_(9)
        assert [copies[name].unique().tolist() for name in "wbo"] == [[number]] * 3
        assert all(copy.is_pinned() for copy in copies.values())
        assert simulated.races() == []
        assert simulated.training_waits() == []
    del copies
    assert simulated.pinned_bytes() > 0
    staging.close()
    assert simulated.pinned_bytes() == 0


def weights_that_change_before_the_hold_are_an_error() -> None:
    torch.accelerator.set_device_index(1)
    weight = torch.ones(1000, device=DEVICE)
    staging = Staging(DEVICE)
    for first in (True, False):  # the copy is started by the writing thread, later by the training
        staging.start({"w": weight}, {"w"})
        weight.add_(1)
        if not first:
            staging.hold()
        with pytest.raises(RuntimeError, match="changed by something other than an optimizer"), _finishing(staging):
            pass
