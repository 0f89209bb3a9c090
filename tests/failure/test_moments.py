"""A checkpoint is of one moment, and a run that continues from it does what it had not done yet."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import read
from support.ranks import run_ranks
from support.toys import LINEAR_BATCHES, Linear, linear_fit
from torch import nn

from callbacks import EarlyStopping, ModelCheckpoint
from engine import Callback, Resume

pytestmark = pytest.mark.usefixtures("no_pickle_is_read")

LARGE = 5_000_000
"""Numbers whose copy takes longer than a step."""


class Teacher(Linear):
    """A large parameter that no optimizer has, and a large one that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Parameter(torch.zeros(LARGE), requires_grad=False)
        self.student = nn.Parameter(torch.zeros(LARGE))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.teacher.data.add_(1)
        return self.net(batch).mean() + self.student[0]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", 1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Changes(Callback):
    """Puts other weights in place at one event."""

    def __init__(self, event: str) -> None:
        def change(run: Any, module: Any, *_: Any) -> None:
            module.student.data.fill_(-7.0)

        setattr(self, event, change)


@pytest.mark.parametrize(
    "event",
    [
        *("on_train_epoch_start", "on_train_epoch_end", "on_train_end", "on_validation_start", "on_train_batch_start"),
        "on_before_optimizer_step",
    ],
)
@pytest.mark.parametrize(("every", "monitor"), [(2, None), (2, "val"), ("1 epochs", None)])
def test_weights_are_those_of_the_moment(tmp_path: Path, event: str, every: Any, monitor: str | None) -> None:
    for name, asynchronous in (("one", True), ("two", False)):
        checkpoint = ModelCheckpoint(every=every, monitor=monitor, save_top_k=-1, asynchronous=asynchronous)
        linear_fit(tmp_path / name, Changes(event), checkpoint, max_epochs=2, num_sanity_val_steps=0).run(
            Teacher(), LINEAR_BATCHES[:2], LINEAR_BATCHES[:1]
        )
    names = sorted(path.name for path in (tmp_path / "one" / "checkpoints").iterdir())
    assert len(names) == 2
    for name in names:
        one, two = (read(tmp_path / run / "checkpoints" / name).model for run in ("one", "two"))
        for key in ("teacher", "student"):
            assert torch.equal(one[key], two[key]), (name, key)


class HalfStep(torch.optim.SGD):
    """Fails in the middle of its third step."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 3:
            self.param_groups[0]["params"][0].data.sub_(100.0)
            raise RuntimeError("out of memory")
        return super().step(closure)


class Fragile(Linear):
    def configure_optimizers(self) -> Any:
        return HalfStep(self.parameters(), lr=0.1)


class FailsAfter(Callback):
    def on_before_zero_grad(self, run: Any, module: Any, optimizer: Any) -> None:
        if run.step == 3:
            raise RuntimeError("late")


@pytest.mark.parametrize(
    ("module", "callback", "error"), [(Fragile(), Callback(), "out of memory"), (Linear(), FailsAfter(), "late")]
)
def test_half_a_step_is_not_saved(tmp_path: Path, module: Linear, callback: Callback, error: str) -> None:
    with pytest.raises(RuntimeError, match=error):
        linear_fit(tmp_path, callback, ModelCheckpoint(every="2 steps")).run(module, LINEAR_BATCHES)
    assert os.listdir(tmp_path / "checkpoints") == ["step=00000002"]


class Killed(BaseException):
    pass


class Validates(Linear):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", 1.0)


class Steps(Callback):
    """At which steps validation ran; it may end like a kill at one."""

    def __init__(self, die: int = -1) -> None:
        self.die, self.steps = die, []

    def on_validation_start(self, run: Any, module: Any) -> None:
        if run.step == self.die:
            run.wait_for_checkpoint()
            raise Killed
        self.steps.append(run.step)


class NoLastWord(ModelCheckpoint):
    """As after a kill."""

    def on_exception(self, run: Any, module: Any, exception: BaseException) -> None: ...


def test_a_validation_that_was_due_is_made_up_for(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"val_every": "2 steps", "max_epochs": 2, "num_sanity_val_steps": 0}
    before, after = Steps(die=6), Steps()
    with pytest.raises(Killed):
        linear_fit(tmp_path, before, NoLastWord(every="2 steps"), **settings).run(
            Validates(), LINEAR_BATCHES, LINEAR_BATCHES
        )
    linear_fit(tmp_path, after, ModelCheckpoint(every="2 steps"), **settings).run(
        Validates(), LINEAR_BATCHES, LINEAR_BATCHES, resume="last"
    )
    assert before.steps + after.steps == [2, 4, 6, 8]


def test_a_score_that_comes_later_is_saved(tmp_path: Path) -> None:
    """Two ModelCheckpoints, the one without a monitor saves first."""
    settings: dict[str, Any] = {"val_every": "2 steps", "max_epochs": 1, "num_sanity_val_steps": 0}
    pair = ModelCheckpoint(every="2 steps", save_top_k=3), ModelCheckpoint(every="2 steps", monitor="val")
    linear_fit(tmp_path, *pair, **settings).run(Validates(), LINEAR_BATCHES, LINEAR_BATCHES)
    scores = [read(path).manifest.get("score") for path in sorted((tmp_path / "checkpoints").iterdir())]
    assert scores == [{"monitor": "val", "mode": "min", "value": 1.0}] * 2
    linear_fit(tmp_path, **settings).run(Validates(), LINEAR_BATCHES, LINEAR_BATCHES, resume="best")


class Reads(Callback):
    """Another job reads the checkpoint ``model`` from step 3 on."""

    def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if run.step == 3:
            run.wait_for_checkpoint()
            self.content = (run.folder / "checkpoints" / "model" / "manifest.json").read_bytes()
            self.lock = os.open(run.folder / "checkpoints" / "model" / "manifest.json", os.O_RDONLY)
            fcntl.flock(self.lock, fcntl.LOCK_SH)
        if run.step == 7:
            run.wait_for_checkpoint()
            self.names = sorted(os.listdir(run.folder / "checkpoints"))
            self.same = (run.folder / "checkpoints" / "model" / "manifest.json").read_bytes() == self.content
            os.close(self.lock)


def test_one_that_is_read_is_not_replaced_by_its_name(tmp_path: Path) -> None:
    reads = Reads()
    linear_fit(tmp_path, reads, ModelCheckpoint(every="2 steps", filename="model"), max_epochs=2).run(
        Linear(), LINEAR_BATCHES
    )
    assert reads.names == ["model", "model-v1"]
    assert reads.same
    assert len(os.listdir(tmp_path / "checkpoints")) == 1


class Empties(Callback):
    """Someone empties an old checkpoint, whose directory stays."""

    def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if run.step == 3:
            run.wait_for_checkpoint()
            (run.folder / "checkpoints" / "step=00000002" / "manifest.json").unlink()


def test_a_removal_that_fails_is_no_failed_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "engine"):
        result = linear_fit(tmp_path, Empties(), ModelCheckpoint(every="2 steps")).run(Linear(), LINEAR_BATCHES)
    assert result.step == 12
    assert "step=00000002 could not be removed: ValueError" in caplog.text
    assert "was not written" not in caplog.text
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step=00000002", "step=00000012"]


class Copies(Callback):
    """Keeps a copy of the first checkpoint."""

    def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if run.step == 3:
            run.wait_for_checkpoint()
            shutil.copytree(run.folder / "checkpoints" / "step=00000002", run.folder / "copy")


@pytest.mark.parametrize("steps", [4, 6])
def test_what_a_killed_job_had_still_to_remove_is_removed_by_the_next(tmp_path: Path, steps: int) -> None:
    """The last checkpoint is complete, the one before is still there, an earlier one in part. What a job continues from stays.

    With 4 steps there is nothing left to train.
    """
    linear_fit(tmp_path, Copies(), ModelCheckpoint(every="2 steps"), max_steps=4, max_epochs=None).run(
        Linear(), LINEAR_BATCHES
    )
    (tmp_path / "copy").rename(tmp_path / "checkpoints" / "step=00000002")
    (tmp_path / "checkpoints" / ".step=00000001.removed" / "model").mkdir(parents=True)
    linear_fit(tmp_path, ModelCheckpoint(every="2 steps"), max_steps=steps, max_epochs=None).run(
        Linear(), LINEAR_BATCHES, resume="last"
    )
    assert sorted(os.listdir(tmp_path / "checkpoints")) == sorted({"step=00000004", f"step={steps:08d}"})


def test_what_weights_were_taken_from_stays(tmp_path: Path) -> None:
    linear_fit(tmp_path, ModelCheckpoint(), max_epochs=1).run(Linear(), LINEAR_BATCHES)
    linear_fit(tmp_path, ModelCheckpoint(every=2), max_epochs=2).run(
        Linear(), LINEAR_BATCHES, resume=Resume("last", weights_only=True)
    )
    assert os.listdir(tmp_path / "checkpoints") == ["step=00000004"]
    assert os.listdir(tmp_path / "version_1" / "checkpoints") == ["step=00000008"]


@pytest.mark.parametrize("filename", [".{step}", "{word}"])
def test_hidden_names_are_refused(tmp_path: Path, filename: str) -> None:
    class Word(Callback):
        def on_train_start(self, run: Any, module: Any) -> None:
            run.metrics["word"] = ""

    with pytest.raises(ValueError, match="must not be empty, start with a dot"):
        linear_fit(tmp_path, Word(), ModelCheckpoint(filename=filename)).run(Linear(), LINEAR_BATCHES)


def test_a_changed_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Moves(Callback):
        def on_train_start(self, run: Any, module: Any) -> None:
            monkeypatch.chdir(tmp_path / "sub")

    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    linear_fit(Path("run"), Moves(), ModelCheckpoint(), max_epochs=1).run(Linear(), LINEAR_BATCHES)
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step=00000004"]


def test_a_run_that_was_stopped_early_stays_so(tmp_path: Path) -> None:
    def run() -> int:
        stopping = EarlyStopping("val", patience=2)
        return (
            linear_fit(tmp_path, stopping, ModelCheckpoint(), max_epochs=9)
            .run(Validates(), LINEAR_BATCHES, LINEAR_BATCHES, resume="auto")
            .step
        )

    assert run() == 12
    assert run() == run() == 12


BUFFERS = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch
from torch import nn
from callbacks import ModelCheckpoint
from support.toys import Linear, linear_fit

class Norm(Linear):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))

data = [torch.randn(2, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]
module = Norm()
linear_fit(sys.argv[2], ModelCheckpoint(), devices=2, max_epochs=1, strategy="ddp").run(module, data)
report([module.net[0].running_mean.tolist(), module.net[0].running_var.tolist()])
"""


def test_buffers_are_rank_0s(tmp_path: Path) -> None:
    ran = run_ranks(BUFFERS, 2, Path(__file__).parents[1], tmp_path, timeout=300)
    assert ran[0].value != ran[1].value
    found = read(next((tmp_path / "checkpoints").iterdir())).model
    assert [found["net.0.running_mean"].tolist(), found["net.0.running_var"].tolist()] == ran[0].value


LATE = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from callbacks import ModelCheckpoint
from engine import Callback
from support.toys import LINEAR_BATCHES, Linear, linear_fit

class Late(Callback):
    def on_train_end(self, run, module):
        if run.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

linear_fit(sys.argv[2], Late(), ModelCheckpoint(), devices=2, max_epochs=1).run(Linear(), LINEAR_BATCHES)
"""


def test_sigterm_after_the_last_step(tmp_path: Path) -> None:
    ran = run_ranks(LATE, 2, Path(__file__).parents[1], tmp_path, timeout=300, check=False)
    assert [rank.returncode for rank in ran] == [143, 143], ran[1].stderr[-2000:]
