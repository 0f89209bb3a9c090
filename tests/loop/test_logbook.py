"""What is known of logged values between log boundaries: over all ranks where checkpoints are saved, and at an epoch's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.ranks import ranks_of
from support.toys import Weight, fit, ones

from callbacks import ModelCheckpoint
from engine import Callback


class Alternates(Weight):
    """Each rank logs ``turn`` in its own steps, and one of them alone logs ``mine``."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", 10.0 - batch_idx + 4.0 * self.global_rank)
        if batch_idx % 2 == self.global_rank:
            self.log("turn", float(batch_idx))
        if batch_idx == 2 and self.global_rank == 1:
            self.log("mine", 5.0)
        return super().training_step(batch, batch_idx)


class Reads(Callback):
    """``metrics`` at the end of the epoch, before it has values."""

    def on_train_epoch_end(self, run: Any, module: Any) -> None:
        self.values = {name: run.metrics[name] for name in ("loss", "turn", "mine")}


def ranks_alternate(root: str) -> list[Any]:
    reads, saves = Reads(), ModelCheckpoint("2 steps", "loss", save_top_k=-1, filename="{step}-{turn:.0f}")
    result = fit(root, devices="auto", callbacks=[reads, saves], max_epochs=1).run(Alternates(), ones(10))
    last = {name: result.metrics[name] for name in reads.values}
    return [saves.scores, list(saves.names.values()), reads.values, last, str(result.best_checkpoint)]


def test_two_ranks_know_the_same_of_the_latest_steps(tmp_path: Path) -> None:
    first, second = ranks_of(ranks_alternate, 2, tmp_path)
    assert first == second
    scores, names, read, last, best = first
    assert list(scores.values()) == [11.0, 9.0, 8.0]
    assert names == ["2-1", "4-3", "5-4"]
    assert read == last == {"loss": 8.0, "turn": 4.0, "mine": 5.0}
    assert Path(best).name == "5-4"


def test_a_module_whose_run_could_not_be_made_logs_nowhere(tmp_path: Path) -> None:
    class TakesTooLittle(Callback):
        def on_train_start(self) -> None:  # type: ignore[override]
            pass

    module = Weight()
    with pytest.raises(TypeError, match="on_train_start"):
        fit(tmp_path, callbacks=TakesTooLittle()).run(module, ones(1))
    with pytest.warns(UserWarning, match="outside a Fit run records nothing"):
        module.log("x", 1.0)
