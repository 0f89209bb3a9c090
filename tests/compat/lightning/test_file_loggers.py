"""Loggers of files under both trainers: their folders, versions and files before, in and after a run, and without one."""

from __future__ import annotations

import copy
import csv
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from both import OURS, THEIRS, data, module, quietly, trainer

from engine import Fit

Case = Callable[[Any, Path], Any]


def assert_same(case: Case, tmp_path: Path) -> None:
    theirs, ours = (quietly(case, library, tmp_path / name) for name, library in (("theirs", THEIRS), ("ours", OURS)))
    assert ours == theirs


def short(path: Any, folder: Path) -> str:
    return str(path).replace(str(folder), "")


def files(folder: Path, suffix: str) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob(f"*{suffix}"))


def rows(logger: Any) -> list[dict[str, str]]:
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def folders_before_a_run(L: Any, folder: Path) -> Any:
    logger = L.loggers.CSVLogger(folder)
    named = L.loggers.TensorBoardLogger(folder, name=None, version="mine", sub_dir="part")
    fitted = trainer(L, folder, logger=logger)
    (folder / "lightning_logs" / "version_6").mkdir(parents=True)
    (folder / "lightning_logs" / "version_x").mkdir()
    (folder / "lightning_logs" / "2026").mkdir()
    return [
        (logger.version, logger.name, short(logger.log_dir, folder), short(logger.root_dir, folder)),
        (short(logger.save_dir, folder), short(fitted.log_dir, folder), fitted.logger is logger),
        (named.version, named.name, named.sub_dir, short(named.log_dir, folder), short(named.root_dir, folder)),
        (fitted.default_root_dir == str(folder), fitted.checkpoint_callback),
        trainer(L, folder).log_dir == str(folder),
    ]


def versions_are_numbered_when_they_are_needed(L: Any, folder: Path) -> Any:
    first, second = (trainer(L, folder, max_epochs=1, logger=L.loggers.CSVLogger(folder)) for _ in range(2))
    for fitted in (first, second):
        fitted.fit(module(L), data())
    return first.logger.version, second.logger.version, L.loggers.CSVLogger(folder).version


def checkpoints_beside_the_log(L: Any, folder: Path) -> Any:
    made = []
    for options in (
        {"logger": False},
        {"logger": L.loggers.CSVLogger(folder, name="x")},
        {"logger": L.loggers.TensorBoardLogger(folder, name=None, version=5)},
        {"logger": [L.loggers.CSVLogger(folder, name="u", version="run1"), L.loggers.CSVLogger(folder, name="v")]},
    ):
        fitted = trainer(L, folder, enable_checkpointing=True, max_epochs=1, **options)
        before = fitted.checkpoint_callback.dirpath
        fitted.fit(module(L), data())
        saved = fitted.checkpoint_callback
        made.append((before, short(saved.dirpath, folder), Path(saved.best_model_path).parent == Path(saved.dirpath)))
        made.append([short(logger.log_dir, folder) for logger in fitted.loggers])
    return made


def two_folders_of_checkpoints(L: Any, folder: Path) -> Any:
    best = L.callbacks.ModelCheckpoint(folder / "best", monitor="val", filename="{step}")
    all_of_them = L.callbacks.ModelCheckpoint(save_top_k=-1, filename="all-{step}", every_n_train_steps=5)
    fitted = trainer(L, folder, enable_checkpointing=True, callbacks=[best, all_of_them], max_epochs=1)
    fitted.fit(module(L), data(), data())
    return [short(saves.dirpath, folder) for saves in fitted.checkpoint_callbacks], files(folder, ".ckpt")


def a_checkpoint_folder_from_the_logger(L: Any, folder: Path) -> Any:
    logger = L.loggers.CSVLogger(folder)
    saves = L.callbacks.ModelCheckpoint(dirpath=Path(logger.log_dir) / "best", filename="{step}")
    trainer(L, folder, logger=logger, enable_checkpointing=True, callbacks=[saves], max_epochs=1).fit(module(L), data())
    return files(folder, ".ckpt"), short(saves.dirpath, folder)


def values_without_a_run(L: Any, folder: Path) -> Any:
    logger = L.loggers.CSVLogger(folder)
    logger.log_metrics({"x": 1.0})
    logger.log_metrics({"x": 2.0, "y": 3.0}, step=7)
    logger.log_hyperparams({"lr": 0.1, "nested": {"a": [1, 2]}})
    logger.save()
    again = L.loggers.CSVLogger(folder)
    again.log_metrics({"x": 9.0}, 4)
    again.log_hyperparams()
    again.finalize("success")
    assert Path(again.experiment.metrics_file_path).exists()
    values = [[(row["step"], row["x"], row.get("y", "")) for row in rows(of)] for of in (logger, again)]
    return values, (Path(logger.log_dir) / "hparams.yaml").read_text(), again.version


def values_around_a_run(L: Any, folder: Path) -> Any:
    logger = L.loggers.CSVLogger(folder)
    logger.log_metrics({"before": 1.0}, step=0)
    logger.log_hyperparams({"given": 1})
    fitted = trainer(L, folder, logger=logger, max_epochs=1, log_every_n_steps=5)
    net = module(L)
    fitted.fit(net, data())
    logger.log_metrics({"after": 2.0}, step=99)
    logger.save()
    fitted.test(net, data(), verbose=False)
    found = rows(logger)
    return {
        "kept": [[row["step"] for row in found if row[name]] for name in ("before", "after", "test")],
        "hyperparameters": (Path(logger.log_dir) / "hparams.yaml").read_text(),
        "files": files(folder, "metrics.csv") + files(folder, "hparams.yaml"),
        "version": logger.version,
    }


def events_around_a_run(L: Any, folder: Path) -> Any:
    logger = L.loggers.TensorBoardLogger(folder)
    logger.experiment.add_text("config", "before")
    logger.log_metrics({"before": 1.0}, step=3)
    logger.log_hyperparams({"given": 1})
    trainer(L, folder, logger=logger, max_epochs=1, log_every_n_steps=5).fit(module(L), data())
    logger.log_metrics({"after": 2.0}, step=20)
    logger.experiment.add_scalar("later", 1.0, 21)
    logger.finalize("success")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir)
    events.Reload()
    scalars = {
        name: [(e.step, e.value) for e in events.Scalars(name)]
        for name in ("before", "after", "later")
        if name in events.Tags()["scalars"]
    }
    return scalars, events.Tags()["tensors"], "loss_step" in events.Tags()["scalars"], files(folder, ".yaml")


def what_a_module_sees(L: Any, folder: Path) -> Any:
    seen: list[Any] = []
    net = module(L)

    def on_train_start() -> None:
        seen.append(
            (net.logger is net.trainer.logger, list(net.loggers) == list(net.trainer.loggers), net.logger.version)
        )
        seen.append((short(net.logger.log_dir, folder), short(net.trainer.log_dir, folder)))
        net.logger.log_metrics({"own": 1.0}, step=2)
        net.logger.log_hyperparams({"late": 1})

    net.on_train_start = on_train_start
    logger = L.loggers.CSVLogger(folder)
    loggers = [logger, L.loggers.TensorBoardLogger(folder, name="tb", version="v", sub_dir="s")]
    trainer(L, folder, logger=loggers, max_epochs=1).fit(net, data())
    logger.save()
    own = [(row["step"], row["own"]) for row in rows(logger) if row["own"]]
    return seen, own, (Path(logger.log_dir) / "hparams.yaml").read_text()


def an_evaluation_alone(L: Any, folder: Path) -> Any:
    fitted = trainer(L, folder, logger=L.loggers.CSVLogger(folder))
    fitted.test(module(L), data(), verbose=False)
    return short(fitted.log_dir, folder), files(folder, "metrics.csv")


def no_values_under_fast_dev_run(L: Any, folder: Path) -> Any:
    folder.mkdir()
    net = module(L)

    def on_train_start() -> None:
        logger = net.logger
        logger.experiment.add_image("x", 1)
        logger.experiment.log({"x": 1})
        logger.experiment["a/b"] = 1
        logger.log_metrics({"x": 1})
        logger.log_hyperparams({"x": 1}, {"m": 1.0})
        logger.log_image(key="a", images=[1])
        logger.watch(net)
        logger[0].experiment.add_text("x", "y")

    net.on_train_start = on_train_start
    both = [L.loggers.CSVLogger(folder), L.loggers.CSVLogger(folder, name="b")]
    fitted = trainer(L, folder, logger=both, fast_dev_run=True)
    fitted.fit(net, data(), data())
    plain = trainer(L, folder, logger=False, fast_dev_run=True)
    return [len(fitted.loggers), fitted.logger.name, fitted.logger.version, sorted(folder.iterdir()), plain.logger]


def own_logger(L: Any, version: Any, save_dir: Any = None) -> Any:
    """A user's logger, which remembers the checkpoints of which it was told."""
    from lightning.pytorch.loggers.logger import Logger

    class Own(Logger if L is THEIRS else L.loggers.Logger):  # type: ignore[misc]
        name = property(lambda self: "mine")
        version = property(lambda self: self.given)
        save_dir = property(lambda self: self.place)

        def __init__(self) -> None:
            super().__init__()
            self.given, self.place, self.told = version, save_dir, []

        def log_metrics(self, metrics: Any, step: Any = None) -> None: ...

        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            self.told.append(Path(checkpoint_callback.best_model_path).name)

    return Own()


def loggers_of_ones_own(L: Any, folder: Path) -> Any:
    found = []
    for logger in (own_logger(L, 3), own_logger(L, "abc"), own_logger(L, 1, folder / "other")):
        saves = L.callbacks.ModelCheckpoint(save_top_k=-1, filename="{step}")
        fitted = trainer(L, folder, logger=logger, enable_checkpointing=True, max_epochs=2, callbacks=[saves])
        fitted.fit(module(L), data(), data())
        found.append((short(saves.dirpath, folder), logger.told, fitted.logger is logger))
    return found


CASES: tuple[Case, ...] = (
    folders_before_a_run,
    versions_are_numbered_when_they_are_needed,
    checkpoints_beside_the_log,
    two_folders_of_checkpoints,
    a_checkpoint_folder_from_the_logger,
    values_without_a_run,
    values_around_a_run,
    events_around_a_run,
    what_a_module_sees,
    an_evaluation_alone,
    no_values_under_fast_dev_run,
    loggers_of_ones_own,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.__name__))
def test_files_and_folders_are_lightnings(case: Case, tmp_path: Path) -> None:
    assert_same(case, tmp_path)


def test_a_second_training_takes_the_next_version_and_last_the_newest(tmp_path: Path) -> None:
    def fitted(**options: Any) -> Any:
        made = trainer(OURS, tmp_path, logger=OURS.loggers.CSVLogger(tmp_path), enable_checkpointing=True, max_epochs=1)
        made.fit(module(OURS), data(), **options)
        return made

    once = fitted()
    once.fit_loop.max_epochs = 2
    once.fit(module(OURS), data())
    assert once.logger.log_dir == str(tmp_path / "lightning_logs" / "version_1")
    assert once.checkpoint_callback.dirpath == str(tmp_path / "lightning_logs" / "version_1" / "checkpoints")
    resumed = trainer(OURS, tmp_path, logger=OURS.loggers.CSVLogger(tmp_path), enable_checkpointing=True, max_epochs=3)
    resumed.fit(module(OURS), data(), ckpt_path="last")
    assert (resumed.logger.version, resumed.current_epoch, resumed.global_step) == (1, 3, 30)
    assert fitted(ckpt_path=once.checkpoint_callback.best_model_path).logger.version == 2


def test_an_error_in_after_save_checkpoint_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = own_logger(OURS, 0)
    logger.after_save_checkpoint = lambda callback: 1 / 0
    with caplog.at_level(logging.ERROR, "engine"):
        trainer(OURS, tmp_path, logger=logger, enable_checkpointing=True, max_epochs=1).fit(module(OURS), data())
    assert "Own.after_save_checkpoint failed" in caplog.text


def test_a_logger_of_the_drop_in_writes_in_fit(tmp_path: Path) -> None:
    logger = OURS.loggers.CSVLogger(tmp_path, version="one")
    Fit(max_epochs=1, root_dir=tmp_path / "runs", callbacks=[logger]).run(module(OURS), data())
    assert [row["step"] for row in rows(logger)][-1] == "10"


@pytest.mark.parametrize("kind", ["CSVLogger", "TensorBoardLogger"])
def test_a_copy_of_a_logger_writes_into_the_same_folder(kind: str, tmp_path: Path) -> None:
    logger = getattr(OURS.loggers, kind)(tmp_path)
    trainer(OURS, tmp_path, logger=logger, max_epochs=1).fit(module(OURS), data())
    for copied in (copy.deepcopy(logger), pickle.loads(pickle.dumps(logger))):
        copied.log_metrics({"after": 1.0}, 30)
        copied.finalize("success")
        assert (copied.version, copied.log_dir) == (logger.version, logger.log_dir)
