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


class Twice(Weight):
    """Logs ``x`` in its steps, with the options given, and again at each epoch's end."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def on_train_epoch_start(self) -> None:
        self.log("start", float(self.current_epoch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("x", batch_idx + 10.0 * self.global_rank, **self.options)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("x", 100.0 + self.current_epoch + 2 * self.global_rank)
        self.log("ends", 1.0, reduce="sum")


class Rows(Callback):
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def on_log(self, run: Any, module: Any, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, dict(metrics)))


@pytest.mark.parametrize(
    ("options", "of_step", "of_epoch"),
    [
        ({}, ["x"], {}),
        ({"on_epoch": True}, ["x_step"], {"x_epoch": 1.0}),
        ({"on_step": False, "on_epoch": True, "prog_bar": True}, [], {}),
        ({"reduce": "max", "on_epoch": True}, ["x_step"], {"x_epoch": 2.0}),
    ],
)
def test_a_name_of_steps_that_a_hook_logs_again(tmp_path: Path, options: Any, of_step: Any, of_epoch: Any) -> None:
    """As in Lightning: the values of steps are those of steps, and the epoch has the value of the hook."""
    rows, module = Rows(), Twice(**options)
    result = fit(tmp_path, max_epochs=2, log_every_n_steps=1, callbacks=rows).run(module, ones(3))
    steps = [(step, dict.fromkeys(of_step, (step - 1) % 3 * 1.0)) for step in range(1, 7)] if of_step else []
    ends = [(3 + 3 * epoch, {"start": epoch, "ends": 1.0, **of_epoch, "x": 100.0 + epoch}) for epoch in (0, 1)]
    assert sorted(rows.rows, key=lambda row: row[0]) == sorted([*steps, *ends], key=lambda row: row[0])
    assert result.metrics["x"] == 101.0


def test_a_resumed_epoch_reports_its_hooks_once(tmp_path: Path) -> None:
    """The end of an epoch that was cut off has logged already; its start is not called again."""
    rows = Rows()
    cut = fit(tmp_path, max_steps=2, callbacks=[ModelCheckpoint(), rows]).run(Twice(), ones(3))
    assert cut.metrics == {"start": 0.0, "x": 100.0, "ends": 1.0}
    fit(tmp_path, max_epochs=1, callbacks=rows).run(Twice(), ones(3), resume="last")
    assert [values for _, values in rows.rows if "ends" in values] == 2 * [{"start": 0.0, "x": 100.0, "ends": 1.0}]


class Reads(Callback):
    """``metrics`` at the end of the epoch, before it has values."""

    def on_train_epoch_end(self, run: Any, module: Any) -> None:
        self.values = {name: run.metrics[name] for name in ("loss", "turn", "mine")}


def ranks_alternate(root: str) -> list[Any]:
    reads, saves = Reads(), ModelCheckpoint("2 steps", "loss", save_top_k=-1, filename="{step}-{turn:.0f}")
    result = fit(root, devices="auto", callbacks=[reads, saves], max_epochs=1).run(Alternates(), ones(10))
    last = {name: result.metrics[name] for name in reads.values}
    twice = fit(f"{root}/twice", devices="auto", max_epochs=2).run(Twice(on_epoch=True), ones(8)).metrics
    return [saves.scores, list(saves.names.values()), reads.values, last, str(result.best_checkpoint), twice]


def test_two_ranks_know_the_same_of_the_latest_steps(tmp_path: Path) -> None:
    first, second = ranks_of(ranks_alternate, 2, tmp_path)
    assert first == second
    scores, names, read, last, best, twice = first
    assert list(scores.values()) == [11.0, 9.0, 8.0]
    assert names == ["2-1", "4-3", "5-4"]
    assert read == last == {"loss": 8.0, "turn": 4.0, "mine": 5.0}
    assert Path(best).name == "5-4"
    # Rank 0 logs 0, ..., 3 in its steps and 101 at the second epoch's end, rank 1 10 and 2 more.
    assert twice == {"x": 102.0, "x_step": 8.0, "x_epoch": 6.5, "start": 1.0, "ends": 2.0}


def test_a_module_whose_run_could_not_be_made_logs_nowhere(tmp_path: Path) -> None:
    class TakesTooLittle(Callback):
        def on_train_start(self) -> None:  # type: ignore[override]
            pass

    module = Weight()
    with pytest.raises(TypeError, match="on_train_start"):
        fit(tmp_path, callbacks=TakesTooLittle()).run(module, ones(1))
    with pytest.warns(UserWarning, match="outside a Fit run records nothing"):
        module.log("x", 1.0)
