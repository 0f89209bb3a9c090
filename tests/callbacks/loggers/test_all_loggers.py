"""Every logger: a run that is killed, resumed (the slow test: on two ranks), and then evaluated, is read back with the tracker's own reader."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from logged_run import Logs, train
from readers import PACKAGES, READERS, Entry
from support.ranks import run_ranks
from support.toys import ones

from callbacks import ModelCheckpoint, TensorBoardLogger
from engine import Fit

SCRIPT = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[2])]!r}
from pathlib import Path
from logged_run import train
report(train(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:], strategy="auto", devices="auto"))
"""

QUICK = ("CSVLogger", "JSONLLogger", *(["TensorBoardLogger"] if find_spec("tensorboard") else []))

TRAINED = sorted(
    [("train/loss", step, (step - 1) / 8) for step in range(1, 9)] + [("val/loss", step, 0.5) for step in (2, 4, 6, 8)]
)
EVALUATED = [("test/loss", 8, 0.25), ("val/loss", 8, 0.5)]


def killed(names: tuple[str, ...], root: Path, server: str) -> None:
    ran = run_ranks(SCRIPT, 1, root, 5, ",".join(names), server, check=False)[0]
    assert ran.returncode == -signal.SIGKILL, ran


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("quick")
    killed(QUICK, root, "")
    return Path(train(root, -1, ",".join(QUICK), "", devices=1))


def check(entries: list[Entry], evaluated: list[Entry] = EVALUATED) -> list[tuple[int, float]]:
    """``entries``: name, step, value of everything in the tracker. Returns the steps and values of ``epoch``."""
    wanted = [entry for entry in entries if entry[0] in ("train/loss", "val/loss", "test/loss")]
    assert sorted(wanted) == sorted([*TRAINED, *evaluated])
    epochs = [(step, value) for name, step, value in entries if name == "epoch"]
    assert set(epochs) == {(step, 0) for step in range(1, 9)}
    return epochs


@pytest.mark.parametrize("name", QUICK)
def test_nothing_twice_and_nothing_missing(quick: Path, name: str) -> None:
    epochs = check(READERS[name](quick, ""))
    if name == "TensorBoardLogger":
        assert len(epochs) == 8  # also where a step has values of the training and of validations


def test_tensorboard_reads_the_writers_of_one_second_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of its files count the writers of a process, and 10 comes before 9 there: a cut would be read after what follows it."""
    writers = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    for step, count in (
        (1, 9),
        (2, 99),
        (3, 999),
    ):  # a process never has a count twice, and two files of one name would be one
        monkeypatch.setattr(writers, "_global_uid", writers.AtomicCounter(count))
        saves = ModelCheckpoint(every="1 step", asynchronous=False)
        fit = Fit(accelerator="cpu", root_dir=tmp_path, max_steps=step, callbacks=[TensorBoardLogger(), saves])
        result = fit.run(module := Logs(), ones(32), resume="auto")
        fit.test(module, ones(2), checkpoint=result.last_checkpoint)
    entries = READERS["TensorBoardLogger"](result.folder, "")
    assert [step for name, step, _ in entries if name == "test/loss"] == [1, 2, 3]


@pytest.fixture(scope="module")
def trackers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = tuple(name for name in READERS if find_spec(PACKAGES.get(name, "json")))
    root = tmp_path_factory.mktemp("trackers")
    server = f"sqlite:///{root}/mlflow.db"
    killed(names, root, server)
    return Path(run_ranks(SCRIPT, 2, root, -1, ",".join(names), server)[0].value)  # two ranks continue


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the trackers' packages
@pytest.mark.parametrize("name", READERS)
def test_nothing_twice_and_nothing_missing_in_a_tracker(trackers: Path, name: str) -> None:
    pytest.importorskip(PACKAGES.get(name, "json"))
    # Of several values of one name at one step, Aim keeps the last.
    epochs = check(
        READERS[name](trackers, f"sqlite:///{trackers}/mlflow.db"), EVALUATED[: 1 if name == "AimLogger" else 2]
    )
    if name in ("TensorBoardLogger", "MLflowLogger"):
        assert len(epochs) == 8
