"""What a module calls on its loggers: ``experiment``, ``log_metrics``, ``log_hyperparams``, and where they write."""

from __future__ import annotations

import contextlib
import csv
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of
from support.toys import Weight, fit, ones

from callbacks import CSVLogger, JSONLLogger
from callbacks.loggers import Logger, Moment
from engine import Fit


class Asks(Weight):
    """Calls ``asks`` in an event."""

    def __init__(self, **asks: Any) -> None:
        super().__init__()
        for event, ask in asks.items():
            setattr(self, event, lambda *args, ask=ask: ask(self))


class Sent(Logger):
    """Keeps what it sends, and what it is told about hyperparameters."""

    rewinds = True

    def __init__(self, threaded: bool = True) -> None:
        super().__init__(retries=0)
        self.threaded = threaded  # type: ignore[misc]
        self.sent: list[Any] = []

    def scalars(self, values: Any, at: Moment) -> None:
        self.sent.append((at.step, dict(values)))

    def describe(self, values: Any) -> None:
        self.sent.append(dict(values))

    def rewind(self, step: int) -> None:
        self.sent.append(f"rewind {step}")

    def tracker(self) -> Any:
        return self.sent


@pytest.mark.parametrize("threaded", [True, False])
def test_own_values_come_in_order_with_the_runs(tmp_path: Path, threaded: bool) -> None:
    logger = Sent(threaded)

    def in_step(module: Any) -> None:
        assert module.logger is logger
        assert module.logger.experiment is logger.sent
        module.log("x", float(module.global_step))
        module.logger.log_metrics({"mine": torch.tensor(module.global_step)}, step=100 + module.global_step)

    module = Asks(
        on_train_batch_start=in_step,
        setup=lambda module: module.logger.log_hyperparams({"net": {"width": 3}}, {"first": 1.0}),
        on_train_end=lambda module: module.logger.log_hyperparams(Namespace(depth=2), more="text"),
    )
    fit(tmp_path, callbacks=logger, log_every_n_steps=1).run(module, ones(2))
    assert logger.sent == [
        "rewind 0",
        {"net/width": 3},
        (0, {"first": 1.0}),
        (100, {"mine": 0.0}),
        (1, {"x": 0.0}),
        (101, {"mine": 1.0}),
        (2, {"x": 1.0}),
        {"depth": 2, "more": "text"},
    ]


def test_a_resumed_run_sends_own_values_once(tmp_path: Path) -> None:
    def in_step(module: Any) -> None:
        module.logger.log_metrics({"mine": module.global_step})
        if module.global_step == 1:
            module.run.save_checkpoint()
        if module.global_step == 3 and stops:
            raise OSError

    class Steady(Sent):
        rewinds = False

    stops, logger = True, Steady()
    with pytest.raises(OSError):
        fit(tmp_path, callbacks=logger).run(Asks(on_train_batch_start=in_step), ones(4))
    stops = False
    fit(tmp_path, callbacks=logger).run(Asks(on_train_batch_start=in_step), ones(4), resume="last")
    assert logger.sent == [(step, {"mine": float(step)}) for step in range(4)]


@pytest.mark.parametrize("steps", [lambda step: 1, lambda step: 1000, lambda step: 10 - step])
def test_a_resumed_run_has_rows_with_a_step_of_their_own_once(tmp_path: Path, steps: Any) -> None:
    """Training: steps 1 to 6; a save at 3, an error at 5."""

    def in_step(module: Any) -> None:
        for logger in module.loggers:
            logger.log_metrics({"mine": module.global_step}, step=steps(module.global_step))
        if module.global_step == 3 and stops:
            module.run.save_checkpoint()
        if module.global_step == 5 and stops:
            raise OSError

    for stops in (True, False):
        loggers = [CSVLogger(), JSONLLogger()]
        one = fit(tmp_path, callbacks=loggers, log_every_n_steps=2)
        with pytest.raises(OSError) if stops else contextlib.nullcontext():
            one.run(Asks(on_train_batch_start=in_step), ones(6), resume="auto")
    expected = [(steps(step), float(step), step) for step in range(6)]
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["mine"]]
    assert [(int(row["step"]), float(row["mine"]), int(row["run_step"])) for row in rows] == expected
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    own = [line for line in lines if "mine" in line.get("values", {})]
    assert [(line["step"], line["values"]["mine"], line["run_step"]) for line in own] == expected


def test_files_of_rows(tmp_path: Path) -> None:
    def before(module: Any) -> None:
        for logger in module.loggers:
            assert logger.experiment is logger
            assert logger.log_dir == logger.save_dir == str(module.run.folder)
            assert logger.version == module.run.id
            logger.log_metrics({"early": 1})
            logger.log_hyperparams({"lr": 0.5, "layers": [1, 2]})
            logger.save()

    result = fit(tmp_path, callbacks=[CSVLogger(), JSONLLogger()]).run(Asks(on_fit_start=before), ones(1))
    assert result.folder is not None
    with (result.folder / "metrics.csv").open() as file:
        assert [row["early"] for row in csv.DictReader(file)] == ["1.0"]
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["values"] for line in lines if "values" in line] == [{"early": 1.0}]
    assert lines[2]["settings"] == json.loads((result.folder / "hparams.json").read_text())
    assert lines[2]["settings"] == {"lr": 0.5, "layers": "[1, 2]"}


def test_tensorboards_writer_is_the_modules_too(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from callbacks import TensorBoardLogger

    def before(module: Any) -> None:
        module.logger.experiment.add_scalar("before", 5.0, 0)
        assert module.logger.log_dir == module.logger.experiment.log_dir == str(module.run.folder / "tensorboard")
        assert module.logger.name == module.run.folder.name

    def in_step(module: Any) -> None:
        module.log("x", 1.0)
        module.log_image("late", torch.zeros(1, 2, 2))  # by the logger's thread
        module.logger.experiment.add_image("own", torch.zeros(3, 2, 2), module.global_step)
        module.logger.experiment.add_histogram("spread", torch.arange(4.0), module.global_step)

    one = fit(tmp_path, callbacks=TensorBoardLogger(), log_every_n_steps=1)
    result = one.run(Asks(on_fit_start=before, on_train_batch_start=in_step), ones(3))
    assert result.folder is not None
    events = EventAccumulator(str(result.folder / "tensorboard"), {"images": 0, "histograms": 0})
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("before")] == [(0, 5.0)]
    assert [e.step for e in events.Scalars("x")] == [1, 2, 3]
    assert [e.step for e in events.Images("own")] == [0, 1, 2]
    assert len(events.Images("late")) == 3
    assert len(events.Histograms("spread")) == 3


def test_outside_of_a_run() -> None:
    logger = CSVLogger()
    for name in ("experiment", "version", "save_dir", "log_dir"):
        with pytest.raises(AttributeError, match=rf"CSVLogger.{name} is available only during a run"):
            getattr(logger, name)
    with pytest.raises(AttributeError, match=r"CSVLogger.log_metrics is available only during a run"):
        logger.log_metrics({"x": 1})


def test_a_prediction_logs_what_it_is_asked_to(tmp_path: Path) -> None:
    logger = Sent()
    module = Asks(on_predict_start=lambda module: module.logger.log_metrics({"x": 1}))
    fit(tmp_path, callbacks=logger).predict(module, ones(1))
    assert logger.sent == [(0, {"x": 1.0})]


def other_ranks(folder: str) -> list[str]:
    def ask(module: Any) -> None:
        tracker = module.logger.experiment
        if module.global_rank:
            tracker.add_image("x", 1).close()
            tracker["a"] = tracker["b"][0]
            tracker.config.lr = 3
            with tracker.start() as opened:
                assert not opened
        module.logger.log_metrics({"rank": module.global_rank})
        module.logger.log_hyperparams({"rank": module.global_rank})
        assert module.logger.log_dir == str(module.run.folder)

    module = Asks(on_train_start=ask)
    Fit(strategy="ddp", accelerator="cpu", num_sanity_val_steps=0, root_dir=folder, callbacks=CSVLogger()).run(
        module, ones(2)
    )
    return (Path(folder) / "metrics.csv").read_text().splitlines()


def test_other_ranks_do_nothing(tmp_path: Path) -> None:
    first, _ = ranks_of(other_ranks, 2, tmp_path)
    assert first == ["step,epoch,samples,rank", "0,0,0,0.0"]
