"""An out-of-memory error names the command that finds what fits, and plans nothing itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import PATIENCE_S, clean_environment
from torch import Tensor, nn

from engine import Fit, TrainModule
from engine.loop.out_of_memory import device_memory

CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of {} of which 10.00 MiB is free. Of the allocated memory 1.00 MiB "
    "is allocated by PyTorch"
)


class Wide(TrainModule):
    """Its output has four times the host's memory: torch's allocator refuses it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2**18, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TooLarge(Wide):
    """Ends its first step as on a device of this size."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        raise torch.OutOfMemoryError(CUDA.format("79.10 GiB"))


def too_many_rows() -> list[Tensor]:
    """A batch that takes no memory itself."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [torch.zeros(1, 8).expand(1 << (4 * host // 2**20).bit_length(), 8)]


def fit_of_one_step(folder: Any, **settings: Any) -> Fit:
    return Fit(accelerator="cpu", max_steps=1, root_dir=folder, log_every_n_steps=0, **settings)


def test_the_error_names_the_command_and_nothing_is_planned(tmp_path: Path) -> None:
    """In the process of a run that fails, other ranks may wait in a collective: no plan is made there."""
    imported = {name for name in sys.modules if name.startswith("engine.planning.")}
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit_of_one_step(tmp_path).run(TooLarge(), [torch.zeros(2, 8)])
    assert str(caught.value) == CUDA.format("79.10 GiB"), "it is the same error"
    assert caught.value.__notes__ == [
        "To see which settings fit, run in a new process: fit plan TARGET --search --world-size 1 --memory-limit 79.10GiB"
    ]
    assert {name for name in sys.modules if name.startswith("engine.planning.")} == imported


def test_a_host_without_memory(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="allocate memory") as caught:
        fit_of_one_step(tmp_path).run(Wide(), too_many_rows())
    (note,) = caught.value.__notes__
    assert re.search(r": fit plan TARGET --search --world-size 1 --device cpu --memory-limit [\d.]+GiB$", note), note


@pytest.mark.slow
def test_the_ranks_of_a_job_share_the_hosts_memory(tmp_path: Path) -> None:
    done = subprocess.run(  # the job starts its second rank by running this file again
        [sys.executable, __file__, str(tmp_path)],
        env=clean_environment(PYTHONPATH=os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode != 0
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    command = f"fit plan TARGET --search --world-size 2 --device cpu --memory-limit {host / 2 / 2**30:.2f}GiB"
    assert any(line.endswith(command) for line in done.stderr.splitlines()), done.stderr


def test_other_errors_and_fits_that_do_not_ask_have_no_note(tmp_path: Path) -> None:
    class Other(Wide):
        def on_train_batch_start(self, *args: Any) -> None:
            raise RuntimeError("total capacity of 1.00 GiB")

    with pytest.raises(RuntimeError) as caught:
        fit_of_one_step(tmp_path).run(Other(), [torch.zeros(2, 8)])
    assert not hasattr(caught.value, "__notes__")
    fit = fit_of_one_step(tmp_path)
    fit.names_what_fits = False
    with pytest.raises(torch.OutOfMemoryError) as silent:
        fit.run(TooLarge(), [torch.zeros(2, 8)])
    assert not hasattr(silent.value, "__notes__")


def test_the_size_of_the_device_is_read_from_the_error() -> None:
    assert device_memory(CUDA.format("79.10 GiB")) == int(79.10 * 2**30)
    assert device_memory("nothing is said") is None or torch.accelerator.is_available()


if __name__ == "__main__":
    fit_of_one_step(sys.argv[1], devices=2, strategy="ddp").run(Wide(), too_many_rows())
