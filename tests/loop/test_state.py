"""A result as text; ``run.samples``, ``run.tokens`` and ``run.example_batch``: counts over all ranks that survive resumes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from callbacks import ModelCheckpoint
from engine import Callback, Fit, Loss, Result, Run, TrainModule
from engine.loop.state import MANY, Tally, TrainState


def test_a_result_as_text():
    result = Result("completed", "max_steps=20 reached", 2, 20, {"train/loss": 0.12345678, "val/accuracy": 1.0})
    assert str(result).splitlines() == [
        "completed (max_steps=20 reached): 2 epochs, 20 steps",
        "train/loss 0.123457",
        "val/accuracy 1",
    ]
    result = Result("interrupted", "", 0, 3, {}, best_checkpoint="s3://bucket/best", last_checkpoint=Path("runs/last"))
    assert (
        str(result) == "interrupted: 0 epochs, 3 steps\nlast checkpoint: runs/last\nbest checkpoint: s3://bucket/best"
    )


class Tokens(TrainModule):
    """Each sample is its number of tokens."""

    def __init__(self, weighted: bool = True, tensors: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.weighted, self.tensors = weighted, tensors
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (counts,) = batch
        self.seen.append(counts.tolist())
        total = counts.sum() if self.tensors else float(counts.sum())
        loss = self.weight * counts.sum()
        return Loss(loss, total) if self.weighted else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Reader(Callback):
    def __init__(self) -> None:
        self.rows: list[tuple[int, int, float | None]] = []

    def on_before_log(self, run: Run, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, run.samples, run.tokens))


def data(batch_size: int = 3, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(1.0, 9.0)), batch_size, **options)  # 8 samples: 3, 3, 2; 36 tokens


@pytest.mark.parametrize("tensors", [True, False])
def test_counts_are_those_of_the_data(tmp_path: Path, tensors: bool) -> None:
    reader = Reader()
    fit = Fit(max_epochs=2, log_every_n_steps=1, root_dir=tmp_path, callbacks=reader)
    fit.run(Tokens(tensors=tensors), data())
    # 1+2+3, 4+5+6, 7+8
    assert sorted(set(reader.rows)) == [(1, 3, 6), (2, 6, 21), (3, 8, 36), (4, 11, 42), (5, 14, 57), (6, 16, 72)]


def test_a_scalar_loss_counts_no_tokens_and_ready_batches_count_their_samples(tmp_path: Path) -> None:
    reader = Reader()
    batches = [(torch.ones(n),) for n in (4, 1)]
    Fit(max_epochs=1, log_every_n_steps=1, root_dir=tmp_path, callbacks=reader).run(Tokens(weighted=False), batches)
    assert sorted(set(reader.rows)) == [(1, 4, None), (2, 5, None)]


def test_a_window_of_several_micro_batches_counts_when_it_is_whole(tmp_path: Path) -> None:
    reader = Reader()
    fit = Fit(max_epochs=1, log_every_n_steps=1, accumulate_grad_batches=2, root_dir=tmp_path, callbacks=reader)
    fit.run(Tokens(), data(2))  # 1+2, 3+4 | 5+6, 7+8
    assert sorted(set(reader.rows)) == [(1, 4, 10), (2, 8, 36)]


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    Fit(max_steps=2, root_dir=tmp_path, callbacks=ModelCheckpoint(every=2)).run(Tokens(), data())
    reader = Reader()
    fit = Fit(max_epochs=2, log_every_n_steps=1, root_dir=tmp_path, callbacks=reader)
    fit.run(Tokens(), data(), resume="last")
    assert sorted(set(reader.rows))[0] == (3, 8, 36)
    assert sorted(set(reader.rows))[-1] == (6, 16, 72)


def test_a_long_sum_is_added_up_now_and_then() -> None:
    tally = Tally()
    assert tally.total() is None
    for _ in range(2 * MANY + 3):
        tally.add(torch.tensor(2, dtype=torch.int32))
    tally.add(0.5)
    assert len(tally._waiting) < MANY
    assert tally.total() == 2 * (2 * MANY + 3) + 0.5


class Example(Callback):
    def __init__(self) -> None:
        self.batch: Any = None

    def on_fit_start(self, run: Run, module: nn.Module) -> None:
        self.batch = run.example_batch
        assert run.example_batch is self.batch

    def on_validation_start(self, run: Run, module: nn.Module) -> None:
        self.batch = run.example_batch


@pytest.mark.parametrize("workers", [0, 1])
def test_an_example_batch_is_the_first_and_takes_none(tmp_path: Path, workers: int) -> None:
    seen = []
    for callbacks in ([], [Example()]):
        module = Tokens()
        fit = Fit(max_epochs=2, seed=5, root_dir=tmp_path, callbacks=callbacks)
        fit.run(module, data(shuffle=True, num_workers=workers))
        seen.append((module.seen, torch.rand(1).item()))
    assert seen[0] == seen[1]
    assert [callback.batch[0].tolist() for callback in callbacks] == [module.seen[0]]


def test_a_stream_gives_no_example(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from [(torch.tensor(1.0),), (torch.tensor(2.0),)]

    example, module = Example(), Tokens()
    Fit(max_epochs=1, root_dir=tmp_path, callbacks=example).run(module, DataLoader(Stream(), 1))
    assert example.batch is None
    assert module.seen == [[1.0], [2.0]]


RANKS = """
import torch
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from engine import Callback, Fit, Loss, TrainModule

class Tokens(TrainModule):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0].tolist())
        return Loss((self.weight * batch[0].sum()).sum(), batch[0].sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Reader(Callback):
    def __init__(self):
        self.rows, self.example = [], None

    def on_fit_start(self, run, module):
        self.example = run.example_batch[0].tolist()

    def on_train_batch_end(self, run, module, outputs, batch, batch_idx):
        self.rows.append([run.samples, run.tokens])

found = {}
for strategy in ("ddp", "fsdp"):
    reader, module = Reader(), Tokens()
    Fit(strategy=strategy, max_epochs=1, callbacks=reader, root_dir=Path(report_folder) / strategy).run(
        module, DataLoader(TensorDataset(torch.arange(1.0, 8.0)), 2))
    found[strategy] = [reader.rows, reader.example, module.seen[0]]
report(found)
"""


def test_two_ranks_count_both_and_each_sees_its_own_example(tmp_path: Path) -> None:
    ran = run_ranks(RANKS.replace("report_folder", repr(str(tmp_path))), 2)
    for rank, each in enumerate(ran):
        for rows, example, first in each.value.values():
            assert rows == [[4, 10.0], [7, 28.0]]  # 1+2 and 3+4, then 5+6 and 7
            assert example == first == [[1.0, 2.0], [3.0, 4.0]][rank]


def test_counters_are_restored_in_place_at_the_start_of_a_cut_window() -> None:
    state = TrainState(epoch=7, validated_step=3)
    state.restore(
        {"epoch": 1, "step": 4, "batch_idx": 5, "batches": 9, "position": 16, "whole_batches": 4, "samples": 40}
    )
    assert state == TrainState(epoch=1, step=4, batch_idx=4, batches=8, position=16, whole_batches=4, samples=40)
    assert (state.in_window, state.resume_point()) == (False, (4, 1, 4, -1))
    state.epoch_done = True
    assert (state.finished_epochs, state.resume_point()) == (2, (4, 2, 0, -1))
    state.next_epoch()
    assert state == TrainState(epoch=2, step=4, batches=8, samples=40)
    with pytest.raises(TypeError, match="'steps'"):
        state.restore({"steps": 1})
