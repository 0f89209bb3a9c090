"""An out-of-memory error names what fits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from llama import SHAPES, Llama, tokens
from support.ranks import PATIENCE_S, clean_environment
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from engine import Fit, TrainModule
from engine.planning import out_of_memory
from engine.planning.out_of_memory import device_memory

CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of {} of which 10.00 MiB is free. Of the allocated memory 1.00 MiB "
    "is allocated by PyTorch"
)


class TooLarge(Llama):
    """Ends its first step as on a device of this size."""

    def __init__(self, capacity: str) -> None:
        super().__init__(SHAPES["tiny"])
        self.capacity = capacity

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if not isinstance(self.norm.weight, FakeTensor):  # a plan has no tensors that could be too large
            raise torch.OutOfMemoryError(CUDA.format(self.capacity))
        return super().training_step(batch, batch_idx)


def failure(module: Llama, tmp_path: Any, loader: Any = None, **settings: Any) -> torch.OutOfMemoryError:
    fit = Fit(accelerator="cpu", max_steps=2, root_dir=tmp_path, log_every_n_steps=0, **settings)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit.run(module, loader or tokens(64, 128))
    return caught.value


def micro_batch(note: str) -> int:
    return int(note.split("micro-batches of ")[1].split()[0])


def window(note: str) -> int:
    return int(note.split("grad_batches=")[1].split()[0].strip(",)"))


def test_the_error_names_a_smaller_micro_batch_that_keeps_the_global_batch(tmp_path: Any) -> None:
    module = TooLarge("0.65 GiB")
    error = failure(module, tmp_path)
    (note,) = error.__notes__
    assert str(error) == CUDA.format("0.65 GiB"), "it is the same error"
    assert note.startswith("What fits by a plan: Fit(strategy='single', precision='32-true', ")
    assert micro_batch(note) * window(note) == 64
    assert micro_batch(note) < 64
    assert "fit plan TARGET --search --world-size 1" in note


def test_nothing_fits_and_the_error_says_so(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "SECONDS", 2.0)
    (note,) = failure(TooLarge("0.501 GiB"), tmp_path, tokens(2, 128)).__notes__
    assert re.match(r"Nothing fits by a plan: |None of the \d+ plans made in 2 s fits; ", note), note


def test_a_plan_that_fails_hides_nothing(tmp_path: Any) -> None:
    module = TooLarge("1.00 GiB")
    error = failure(module, tmp_path, loader=iter(tokens(4, 16)))
    (note,) = error.__notes__
    assert "could not be planned (ValueError: the training data is a list_iterator" in note


class Wide(TrainModule):
    """Its output has four times the host's memory: torch's allocator refuses it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2**18, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def too_many_rows() -> list[Tensor]:
    """A batch that takes no memory itself."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [torch.zeros(1, 8).expand(1 << (4 * host // 2**20).bit_length(), 8)]


def test_a_host_without_memory(tmp_path: Any) -> None:
    rows = too_many_rows()
    fit = Fit(accelerator="cpu", max_steps=1, root_dir=tmp_path, log_every_n_steps=0)
    with pytest.raises(RuntimeError, match="allocate memory") as caught:
        fit.run(Wide(), rows)
    (note,) = caught.value.__notes__
    assert note.startswith("What fits by a plan: Fit(strategy='single', precision='32-true', "), note
    assert micro_batch(note) * window(note) == len(rows[0])
    assert re.search(r"it needs [\d.]+ GiB of [\d.]+ GiB, this run [\d.]+ [GT]iB", note), note
    assert re.search(r"fit plan TARGET --search --world-size 1 --device cpu,[\d.]+GiB$", note), note


def note_of_two_ranks(strategy: str, folder: Any) -> str:
    """Of a job that starts its second rank by running this file again."""
    done = subprocess.run(
        [sys.executable, __file__, strategy, str(folder)],
        env=clean_environment(PYTHONPATH=os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode != 0
    return next(line for line in done.stderr.splitlines() if "fit plan TARGET --search --world-size 2 --device" in line)


@pytest.mark.slow
def test_the_ranks_of_a_job_name_what_fits_on_all_of_them(tmp_path: Any) -> None:
    note = note_of_two_ranks("ddp", tmp_path)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert "What fits by a plan: Fit(strategy='ddp', precision='32-true', " in note
    assert note.endswith(f"--device cpu,{host / 2 / 2**30:.2f}GiB")
    assert micro_batch(note) * window(note) == len(too_many_rows()[0])


@pytest.mark.slow
def test_a_divided_module_is_planned_elsewhere(tmp_path: Any) -> None:
    note = note_of_two_ranks("fsdp", tmp_path)
    assert "The strategy has divided the module among the ranks" in note
    assert note.endswith("--device h100,1.00GiB")


def test_other_errors_and_fits_that_do_not_ask_have_no_note(tmp_path: Any) -> None:
    class Other(Llama):
        def on_train_batch_start(self, *args: Any) -> None:
            raise RuntimeError("total capacity of 1.00 GiB")

    with pytest.raises(RuntimeError) as caught:
        Fit(accelerator="cpu", max_steps=1, root_dir=tmp_path).run(Other(SHAPES["tiny"]), tokens(4, 16))
    assert not hasattr(caught.value, "__notes__")
    fit = Fit(accelerator="cpu", max_steps=1, root_dir=tmp_path)
    fit.names_what_fits = False
    with pytest.raises(torch.OutOfMemoryError) as silent:
        fit.run(TooLarge("1.00 GiB"), tokens(4, 16))
    assert not hasattr(silent.value, "__notes__")


def test_the_size_of_the_device_is_read_from_the_error() -> None:
    assert device_memory(CUDA.format("79.10 GiB")) == int(79.10 * 2**30)
    assert device_memory("nothing is said") is None or torch.accelerator.is_available()


if __name__ == "__main__":
    strategy, folder = sys.argv[1:]
    fit = Fit(accelerator="cpu", devices=2, strategy=strategy, max_steps=1, root_dir=folder)
    if strategy == "ddp":
        fit.run(Wide(), too_many_rows())
    else:
        fit.run(TooLarge("1.00 GiB"), tokens(2, 16))
