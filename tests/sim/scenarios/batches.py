"""Batches on the simulated device: their memory, their streams, and objects that move themselves."""

from __future__ import annotations

import tempfile
from typing import Any

import simulated
import torch
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding

from engine import Engine, Fit, TrainModule

DEVICE = torch.device("sim", 0)
BATCH = 4096 * 256 * 4


class _Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(256, 4)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", self.layer(batch).sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def a_run_holds_two_batches_whatever_its_length() -> None:
    data = [torch.ones(4096, 256) for _ in range(5)]
    reserved = []
    for epochs in (1, 4, 1):
        torch.accelerator.reset_peak_memory_stats()
        run = Fit(accelerator="sim", devices=1, max_epochs=epochs, root_dir=tempfile.mkdtemp())
        run.run(_Net(), data, data[:3])
        assert torch.accelerator.max_memory_allocated() < 2.1 * BATCH
        reserved.append(torch.accelerator.memory_reserved())
    assert max(reserved) < 1.01 * reserved[0]
    assert simulated.races() == []


def objects_are_pinned_and_moved_without_a_wait() -> None:
    loader = Engine(accelerator="sim").prepare_data_loader(
        [
            (
                pack_sequence([torch.ones(3), torch.ones(1)]),
                BatchEncoding({"ids": torch.ones(2, 5)}),
                {"n": None},
                "text",
            )
            for _ in range(4)
        ]
    )
    simulated.clear()
    for sequence, encoding, nothing, text in loader:
        assert (sequence.data.device, sequence.batch_sizes.device.type) == (DEVICE, "cpu")
        assert encoding["ids"].device == DEVICE
        assert (nothing, text) == ({"n": None}, "text")
    assert simulated.training_waits() == []
    assert simulated.races() == []


def a_batch_on_the_device_stays_there() -> None:
    sequence = pack_sequence([torch.ones(3)]).to(DEVICE)
    (found,) = Engine(accelerator="sim").prepare_data_loader([sequence])
    assert found.data.data_ptr() == sequence.data.data_ptr()
