"""Which folder a run has: new ones never meet another run's files, resumed ones continue in their own."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from support.ranks import clean_environment, run_ranks

from callbacks import CSVLogger, JSONLLogger, ModelCheckpoint, Report, SimpleProfiler
from engine import Callback, Fit, FolderInUse, Resume, TrainModule
from engine.checkpoint.runs import RunRecord, run_root_of

DATA = [torch.ones(1, 1)] * 4


class Net(TrainModule):
    """Its weight is minus the number of its steps, times ``rate``; ``val`` is 1, 2, 3, ... times ``score``."""

    def __init__(self, rate: float = 1.0, score: float = 1.0) -> None:
        super().__init__()
        self.rate, self.score = rate, score
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.weight * batch).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.score * (self.current_epoch + 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def fit(root: Path | str, *callbacks: Callback, epochs: int = 2) -> Fit:
    return Fit(
        accelerator="cpu", devices=1, max_epochs=epochs, root_dir=root, num_sanity_val_steps=0, log_every_n_steps=1, seed=1,
        callbacks=callbacks or [CSVLogger(), keeping()],
    )  # fmt: skip


def keeping(**arguments: Any) -> ModelCheckpoint:
    return ModelCheckpoint(monitor="val", save_top_k=-1, **arguments)


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def weight(trainer: Fit, checkpoint: Any) -> float:
    module = Net()
    trainer.validate(module, DATA, checkpoint=checkpoint)
    return module.weight.item()


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Two runs, one after the other: the second one's best score is worse than the first one's worst."""
    fit(tmp_path).run(Net(), DATA, DATA)
    fit(tmp_path).run(Net(rate=10.0, score=100.0), DATA, DATA)
    return tmp_path


def test_a_new_run_has_a_folder_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = fit(tmp_path).run(Net(), DATA, DATA)
    before = files(tmp_path)
    assert first.folder == tmp_path
    assert "writes into" not in caplog.text
    trainer = fit(tmp_path)
    second = trainer.run(Net(rate=10.0), DATA, DATA)
    assert second.folder == tmp_path / "version_1"
    assert f"{tmp_path} belongs to another run: this one writes into {second.folder}" in caplog.text
    assert second.last_checkpoint == tmp_path / "version_1" / "checkpoints" / "step=00000008"
    assert trainer.run(Net(), DATA, DATA).folder == tmp_path / "version_2"  # of the same Fit, too
    after = files(tmp_path)
    assert {name: after[name] for name in before} == before
    assert {name.partition("/")[0] for name in after.keys() - before.keys()} == {"version_1", "version_2"}
    assert {"run.json", "metrics.csv", "config.yaml"} <= {path.name for path in second.folder.iterdir()}


def test_names_mean_the_newest_run(two: Path) -> None:
    assert weight(fit(two), "last") == -80.0
    assert weight(fit(two), "best") == -40.0  # the lowest score of all is the first run's
    before = files(two)
    for wanted in ("auto", "last"):
        result = fit(two, epochs=3).run(Net(rate=10.0), DATA, DATA, resume=wanted)
        assert (result.folder, result.step) == (two / "version_1", 12)
    assert fit(two, epochs=3).run(Net(), DATA, DATA, resume="best").folder == two / "version_1"
    after = files(two)
    assert all(after[name] == text for name, text in before.items() if not name.startswith("version_"))
    assert {name.partition("/")[0] for name in after.keys() - before.keys()} == {"version_1"}


def test_a_run_that_is_named(two: Path) -> None:
    before = files(two / "version_1")
    for wanted in (two / "checkpoints" / "step=00000008", two / "checkpoints"):
        result = fit(two, epochs=3).run(Net(), DATA, DATA, resume=wanted)
        assert (result.folder, result.step) == (two, 12)
    assert files(two / "version_1") == before
    result = fit(two, epochs=3).run(Net(rate=10.0), DATA, DATA, resume=two / "version_1")
    assert (result.folder, result.step) == (two / "version_1", 12)
    result = fit(two / "version_1", epochs=4).run(Net(rate=10.0), DATA, DATA, resume="auto")
    assert (result.folder, result.step) == (two / "version_1", 16)


def test_from_elsewhere_and_weights_alone_begin_a_new_run(two: Path, tmp_path: Path) -> None:
    before = files(two)
    result = fit(tmp_path / "other", epochs=3).run(Net(), DATA, DATA, resume=two / "checkpoints" / "step=00000004")
    assert (result.folder, result.step) == (tmp_path / "other", 12)
    module = Net()
    result = fit(two, epochs=1).run(module, DATA, DATA, resume=Resume("last", weights_only=True))
    assert (result.folder, result.step, module.weight.item()) == (two / "version_2", 4, -84.0)
    after = files(two)
    assert {name: after[name] for name in before} == before


def test_names_mean_the_run_of_the_same_fit(two: Path) -> None:
    trainer = fit(two, epochs=3)
    trainer.run(Net(), DATA, DATA, resume=two / "checkpoints" / "step=00000008")
    assert weight(trainer, "last") == -12.0  # not the newest run's
    saves_nothing = fit(two, CSVLogger())
    saves_nothing.run(Net(), DATA, DATA)
    with pytest.raises(
        FileNotFoundError, match=r"checkpoint='last': no complete checkpoint in .*version_2/checkpoints"
    ):
        weight(saves_nothing, "last")


def test_an_evaluation_writes_into_no_other_run(two: Path) -> None:
    before = files(two)
    weight(fit(two), "last")
    after = files(two)
    assert {name: after[name] for name in before} == before
    assert "version_2/metrics.csv" in after
    assert weight(fit(two), "auto") == -80.0  # an evaluation's folder is not a run to continue
    trainer = fit(two)
    folder = trainer.run(Net(), DATA, DATA).folder
    rows = (folder / "metrics.csv").read_text().count("\n")
    weight(trainer, "last")
    assert (folder / "metrics.csv").read_text().count("\n") == rows + 1


def test_a_run_that_writes_nothing_leaves_nothing(tmp_path: Path) -> None:
    class Nothing(Callback):
        pass

    assert fit(tmp_path / "a" / "b", Nothing()).run(Net(), DATA).step == 8
    fit(tmp_path / "a" / "b", Nothing()).validate(Net(), DATA)
    assert os.listdir(tmp_path) == []
    fit(tmp_path).run(Net(), DATA, DATA)
    before = files(tmp_path)
    fit(tmp_path, Nothing()).run(Net(), DATA)
    assert files(tmp_path) == before


@pytest.mark.parametrize("kind", ["directory", "url"])
def test_a_place_of_the_users_own(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    place = str(tmp_path / "kept") if kind == "directory" else f"memory://{uuid.uuid4().hex}/kept"
    system, inner = fsspec.core.url_to_fs(place)

    def there() -> dict[str, bytes]:
        return {
            path.removeprefix(inner): system.cat_file(path)
            for path in system.find(inner)
            if not path.endswith(f"{inner}/run.json")
        }

    def trained(*more: Callback, rate: float = 1.0, epochs: int = 2, resume: Any = None) -> Any:
        callbacks = [CSVLogger(), *(more or [keeping(dirpath=place)])]
        return fit(tmp_path / "runs", *callbacks, epochs=epochs).run(Net(rate), DATA, DATA, resume=resume)

    first = trained()
    before, logs = there(), (tmp_path / "runs" / "metrics.csv").read_bytes()
    assert str(first.last_checkpoint) == f"{place}/step=00000008"
    second = trained(rate=10.0)
    assert (
        f"{place} belongs to another run: this one writes into {tmp_path}/runs/version_1, its checkpoints into {place}/version_1"
        in caplog.text
    )
    assert str(second.last_checkpoint) == f"{place}/version_1/step=00000008"
    assert second.folder == tmp_path / "runs" / "version_1"
    trained(keeping())  # keeps its own in runs/version_2
    third = trained(rate=10.0, epochs=3, resume="auto")
    assert (str(third.last_checkpoint), third.folder) == (f"{place}/version_1/step=00000012", second.folder)
    assert weight(fit(tmp_path / "runs", keeping(dirpath=place)), "last") == -120.0
    after = there()
    assert {name: after[name] for name in before} == before
    assert (tmp_path / "runs" / "metrics.csv").read_bytes() == logs


def test_checkpoints_beside_everything_else(tmp_path: Path) -> None:
    runs, link = tmp_path / "runs", tmp_path / "link"
    link.symlink_to(runs)

    def trained(kept: Path, epochs: int = 2, resume: Any = None) -> Any:
        result = fit(runs, CSVLogger(), keeping(dirpath=kept), epochs=epochs).run(Net(), DATA, DATA, resume=resume)
        return result.folder, Path(os.path.realpath(result.last_checkpoint)), result.step

    assert trained(runs) == (runs, runs / "step=00000008", 8)
    before = files(runs)
    assert trained(link) == (runs / "version_1", runs / "version_1" / "step=00000008", 8)
    assert trained(runs, 3, "auto") == (runs / "version_1", runs / "version_1" / "step=00000012", 12)
    assert trained(runs, 3, runs) == (runs / "version_1", runs / "version_1" / "step=00000012", 12)
    assert trained(runs / "version_1", 4, "auto") == (runs / "version_1", runs / "version_1" / "step=00000016", 16)
    after = files(runs)
    assert {name: after[name] for name in before} == before


def test_a_full_disk_takes_no_name(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    name = json.loads((two / "version_1" / "run.json").read_text())["id"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            fit(two, epochs=3).run(Net(), DATA, DATA, resume="auto")
    assert json.loads((two / "version_1" / "run.json").read_text())["id"] == name
    assert fit(two, epochs=3).run(Net(), DATA, DATA, resume="auto").folder == two / "version_1"  # nothing holds it


def test_a_place_that_cannot_be_written_to_is_an_error_before_the_first_step(two: Path) -> None:
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        shutil.copytree(two, place, dirs_exist_ok=True)
        (place / "checkpoints").chmod(0o555)
        place.chmod(0o555)
        module = Net()
        try:
            if not user:
                os.seteuid(65534)  # whom permissions concern
            with pytest.raises(
                PermissionError,
                match=rf"kept in {place}/version_2/checkpoints, and {place} may not be written to by this user",
            ):
                fit(place).run(module, DATA, DATA)
            with pytest.raises(
                PermissionError, match=rf"kept in {place}/checkpoints, and {place}/checkpoints may not be written to"
            ):
                fit(place, epochs=3).run(module, DATA, DATA, resume=place / "checkpoints")
            assert module.weight.item() == 0.0
            assert fit(place, Callback()).run(module, DATA, DATA).step == 8  # writes nothing
        finally:
            os.seteuid(user)
            place.chmod(0o755)
            (place / "checkpoints").chmod(0o755)


def test_a_run_within_a_run(tmp_path: Path) -> None:
    class Inner(Callback):
        def on_train_epoch_start(self, run: Any, module: Any) -> None:
            if run.epoch:
                run.wait_for_checkpoint()
                with pytest.raises(
                    FolderInUse, match=f"{tmp_path} is in use by process {os.getpid()} on {socket.gethostname()} "
                ):
                    fit(tmp_path).run(Net(), DATA, resume="auto")
                self.result = fit(tmp_path, epochs=3).run(Net(), DATA, DATA)

    watch = Inner()
    result = fit(tmp_path, watch, keeping()).run(Net(), DATA, DATA)
    assert (result.folder, result.step) == (tmp_path, 8)
    assert (watch.result.folder, watch.result.step) == (tmp_path / "version_1", 12)


def test_one_that_was_cut_short_begins_again_in_its_folder(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_start(self, run: Any, module: Any) -> None:
            (run.folder / "mine.txt").write_text("something")
            raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        fit(tmp_path, Fails(), keeping()).run(Net(), DATA, resume="auto")
    assert fit(tmp_path).run(Net(), DATA, DATA, resume="auto").folder == tmp_path
    with pytest.raises(OSError, match="no more"):
        fit(tmp_path, Fails(), keeping()).run(Net(), DATA)
    assert (tmp_path / "version_1" / "mine.txt").exists()
    assert fit(tmp_path).run(Net(), DATA, DATA, resume="auto").folder == tmp_path  # that one has checkpoints


def test_checkpoints_from_before_there_were_marks(two: Path) -> None:
    for path in two.rglob("run.json"):
        path.unlink()
    assert fit(two, epochs=3).run(Net(), DATA, DATA).folder == two / "version_2"
    (two / "version_7").mkdir()  # somebody else's
    assert fit(two, epochs=3).run(Net(), DATA, DATA).folder == two / "version_8"
    assert os.listdir(two / "version_7") == []


DEEP = "[" * 100_000
HOSTILE: dict[str, Any] = {
    "nothing": "", "text": "{", "deep": DEEP, "list": "[]", "types": json.dumps({"id": 7, "pid": "x", "job": 3, "stage": [], "status": {}}),
    "name": json.dumps({"id": "../../../etc", "stage": "fit", "job": [], "pid": -1, "host": "\x1b[2J", "status": "running"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", [*HOSTILE, "pipe", "link"])
def test_a_mark_is_somebodys_input(two: Path, kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    target = tmp_path_factory.mktemp("target") / "file"
    target.write_text("precious")
    mark = two / "version_1" / "run.json"
    mark.unlink()
    if kind == "pipe":
        os.mkfifo(mark)
    elif kind == "link":
        mark.symlink_to(target)
    else:
        mark.write_text(HOSTILE[kind])
    assert weight(fit(two), "last") == -80.0
    if kind in ("link", "pipe"):
        with pytest.raises(OSError, match=r"version_1/run\.json"):
            fit(two, epochs=3).run(Net(), DATA, DATA, resume="auto")
    else:
        assert fit(two, epochs=3).run(Net(), DATA, DATA, resume="auto").folder == two / "version_1"
    assert target.read_text() == "precious"


HERE = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

WAITS = """
import sys
from pathlib import Path
sys.path[:0] = {tests!r}
from test_run_folder import *

class Waits(Callback):
    def on_train_epoch_start(self, run, module):
        if run.epoch == 1:
            run.wait_for_checkpoint()
            child = os.fork()  # outlives its parent, and does not keep the lock
            if not child:
                sys.stdin.read()
                os._exit(0)
            print("ready", os.getpid(), flush=True)
            while True:
                sys.stdin.read()
                import time
                time.sleep(1)

fit(Path(sys.argv[1]), Waits(), keeping()).run(Net(), DATA, DATA)
"""


def test_a_run_of_another_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WAITS.format(tests=HERE))
    root = tmp_path / "runs"
    hanging, writing = os.pipe()
    environment = clean_environment()
    other = subprocess.Popen(
        [sys.executable, str(script), str(root)], stdin=hanging, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == f"ready {other.pid}\n"
        for wanted in ("auto", "last", root / "checkpoints" / "step=00000004"):
            with pytest.raises(
                FolderInUse,
                match=rf"runs is in use by process {other.pid} on \S+ \(since 20\d\d-.*two runs cannot write",
            ):
                fit(root).run(Net(), DATA, DATA, resume=wanted)
        assert weight(fit(root), "last") == -4.0  # reading is possible
        assert fit(root).run(Net(), DATA, DATA).folder != root
        other.kill()
        other.wait()
        result = fit(root, epochs=3).run(Net(), DATA, DATA, resume=root / "checkpoints")
        assert (result.folder, result.step) == (root, 12)
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
        os.close(hanging)
        os.close(writing)


RANKS = """
import json, os, sys
sys.path[:0] = {tests!r}
from test_run_folder import *

root, found = Path(sys.argv[1]), {{}}

def train(epochs, resume=None, job="none", restarts=0, at=None, name=None, **arguments):
    os.environ.update(TORCHELASTIC_RUN_ID=job, TORCHELASTIC_RESTART_COUNT=str(restarts))
    callbacks = [CSVLogger(), keeping(**arguments)]
    trainer = Fit(
        accelerator="cpu", max_epochs=epochs, root_dir=at or root, num_sanity_val_steps=0, callbacks=callbacks, strategy="ddp", seed=1, name=name,
    )
    result = trainer.run(Net(), DATA, DATA, resume=resume)
    return [str(result.folder.relative_to(root)), str(result.last_checkpoint.relative_to(root)), result.step]

found["first"] = train(1, job="a")
found["second"] = train(1, job="b")
found["newest"] = train(2, "auto")
found["the job's own"] = train(2, "auto", "a")
found["restarted"] = train(3, "auto", "a", 1)
found["at once, first"] = train(1, at=root / "other", dirpath=root / "kept")
found["at once, second"] = train(1, at=root / "other", dirpath=root / "kept")
for resume in (None, "auto"):  # a name with a clock in it may differ between ranks
    found["named"] = train(1 if resume is None else 2, resume, name="rank " + os.environ["RANK"])

held = None
if os.environ["RANK"] == "0":
    from engine.checkpoint.runs import RunRecord, run_root_of
    held = run_root_of(root / "other", "checkpoints").hold(1, RunRecord.of_this_process("x", "fit", []))
try:
    train(2, "auto", at=root / "other", dirpath=root / "kept")
except Exception as error:
    found["error"] = type(error).__name__ + ": " + str(error)
report(found)
"""


def test_all_ranks_are_in_one_folder(tmp_path: Path) -> None:
    one, two = (each.value for each in run_ranks(RANKS.format(tests=HERE), 2, tmp_path))
    errors = one.pop("error"), two.pop("error")
    assert one.pop("named") == two.pop("named") == ["rank 0", "rank 0/checkpoints/step=00000004", 4]
    assert one == two
    assert one == {
        "first": [".", "checkpoints/step=00000002", 2],
        "second": ["version_1", "version_1/checkpoints/step=00000002", 2],
        "newest": ["version_1", "version_1/checkpoints/step=00000004", 4],
        "the job's own": [".", "checkpoints/step=00000004", 4],
        "restarted": [".", "checkpoints/step=00000006", 6],
        "at once, first": ["other", "kept/step=00000002", 2],
        "at once, second": ["other/version_1", "kept/version_1/step=00000002", 2],
    }
    assert errors[0].startswith(f"FolderInUse: {tmp_path}/other/version_1 is in use by process")
    assert errors[1].startswith(
        f"RankError: rank 0 failed with FolderInUse: {tmp_path}/other/version_1 is in use by process"
    )


def named(root: Path | str, name: str | None, *callbacks: Callback, epochs: int = 2) -> Fit:
    return Fit(
        accelerator="cpu", devices=1, max_epochs=epochs, root_dir=root, num_sanity_val_steps=0, log_every_n_steps=1, seed=1, name=name,
        callbacks=callbacks or [keeping()],
    )  # fmt: skip


def test_named_runs_are_siblings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sweep = [named(tmp_path, f"lr={lr}").run(Net(rate=lr), DATA, DATA).folder for lr in (1.0, 2.0)]
    assert sweep == [tmp_path / "lr=1.0", tmp_path / "lr=2.0"]
    assert "belongs to another run" not in caplog.text
    before = files(tmp_path)
    again = named(tmp_path, "lr=1.0").run(Net(), DATA, DATA)
    assert again.folder == tmp_path / "lr=1.0_version_1"
    assert f"{tmp_path}/lr=1.0 belongs to another run: this one writes into {again.folder}" in caplog.text
    assert again.last_checkpoint == again.folder / "checkpoints" / "step=00000008"
    assert fit(tmp_path).run(Net(), DATA, DATA).folder == tmp_path  # the first run without a name
    assert fit(tmp_path).run(Net(), DATA, DATA).folder == tmp_path / "version_1"
    assert {name: text for name, text in files(tmp_path).items() if name in before} == before


@pytest.mark.parametrize("kind", ["directory", "url"])
def test_a_name_means_the_newest_run_of_that_name(tmp_path: Path, kind: str) -> None:
    dirpath = f"memory://{uuid.uuid4().hex}" if kind == "url" else str(tmp_path / "kept")
    for name, rate in (("a", 1.0), ("b", 2.0), (None, 3.0), ("a", 4.0), ("b_version", 5.0)):
        named(tmp_path, name, CSVLogger(), keeping(dirpath=dirpath)).run(Net(rate=rate), DATA, DATA)
    for name, folder, end in (("a", "a_version_1", -48.0), ("b", "b", -24.0), (None, ".", -36.0)):
        module = Net(rate=-end / 12)
        result = named(tmp_path, name, CSVLogger(), keeping(dirpath=dirpath), epochs=3).run(
            module, DATA, DATA, resume="auto"
        )
        assert (result.folder, result.step, module.weight.item()) == (tmp_path / folder, 12, end)
        assert str(result.last_checkpoint).startswith(f"{dirpath}/{folder}/".replace("/./", "/"))
        assert weight(named(tmp_path, name, CSVLogger(), keeping(dirpath=dirpath)), "last") == end
    assert named(tmp_path, "c").run(Net(), DATA, DATA, resume="auto").folder == tmp_path / "c"
    (tmp_path / "file").write_text("")
    with pytest.raises(
        NotADirectoryError, match="file is a file, and a run needs a folder there: move it away, or give another"
    ):
        named(tmp_path, "file").run(Net(), DATA, DATA)
    named(tmp_path / "only", "a").run(Net(), DATA, DATA)
    with pytest.raises(FileNotFoundError, match=r"only holds no complete checkpoint .*: it has a;"):
        fit(tmp_path).run(Net(), DATA, DATA, resume=tmp_path / "only")
    with pytest.raises(
        FileNotFoundError, match=r"no complete checkpoint in .*/d/checkpoints, which does not exist\. .*another name"
    ):
        named(tmp_path, "d").run(Net(), DATA, DATA, resume="last")


def test_a_named_run_is_continued_by_its_path_and_by_its_fit(tmp_path: Path) -> None:
    trainer = named(tmp_path, "a", CSVLogger(), keeping())
    first = trainer.run(Net(), DATA, DATA)
    result = fit(tmp_path, epochs=3).run(Net(), DATA, DATA, resume=first.folder)
    assert (result.folder, result.step) == (first.folder, 12)
    nameless = fit(tmp_path, epochs=4)
    assert nameless.run(Net(), DATA, DATA, resume=first.folder).folder == first.folder
    before = {path.name for path in tmp_path.iterdir()}
    nameless.validate(Net(), DATA, checkpoint="last")  # into the run's folder
    trainer.validate(Net(), DATA, checkpoint="best")
    assert {path.name for path in tmp_path.iterdir()} == before == {"a"}
    other = named(tmp_path, "b", epochs=5).run(Net(), DATA, DATA, resume=first.folder)  # a new run, which begins there
    assert (other.folder, other.step) == (tmp_path / "b", 20)
    assert json.loads((tmp_path / "b" / "run.json").read_text())["began_with"].endswith("a/checkpoints/step=00000016")


def test_folders_from_before_there_were_names(two: Path) -> None:
    """A sweep's runs had a ``root_dir`` each, and a ``root_dir`` its numbered runs."""
    assert named(two, None, epochs=3).run(Net(), DATA, DATA, resume="auto").folder == two / "version_1"
    fit(two / "lr=1").run(Net(), DATA, DATA)
    result = named(two, "lr=1", epochs=3).run(Net(), DATA, DATA, resume="auto")
    assert (result.folder, result.step) == (two / "lr=1", 12)
    new = named(two, "new", epochs=4).run(Net(), DATA, DATA, resume=two / "version_1")
    assert (new.folder, new.step) == (two / "new", 16)
    fit(two / "lr=1").run(Net(), DATA, DATA)  # without a name, within the first
    for wanted in ("auto", "last", "best"):
        with pytest.raises(
            ValueError, match=r"name='lr=1' does not say which run .*lr=1/version_1\), .*root_dir='.*lr=1'\. Give"
        ):
            named(two, "lr=1").run(Net(), DATA, DATA, resume=wanted)
    assert named(two, "lr=1").run(Net(), DATA, DATA).folder == two / "lr=1_version_1"


def test_a_message_names_only_folders_that_exist(two: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first runs were removed: the message names the newest that is left."""
    for name in (None, "a"):
        root = two if name is None else two / "a"
        later = two / ("version_{}" if name is None else "a_version_{}").format(1)
        if name is not None:
            named(two, name).run(Net(), DATA, DATA)
            named(two, name).run(Net(), DATA, DATA)
            shutil.rmtree(root)
        else:
            (root / "run.json").unlink()
            shutil.rmtree(root / "checkpoints")
        caplog.clear()
        folder = named(two, name).run(Net(), DATA, DATA).folder
        assert folder.name.endswith("version_2")
        assert f"{later} belongs to another run: this one writes into {folder}" in caplog.text


def test_the_folder_is_said_when_it_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "engine")
    fit(tmp_path, Callback()).run(Net(), DATA)
    assert "writes into" not in caplog.text
    fit(tmp_path).run(Net(), DATA, DATA)
    assert caplog.text.count(f"this run writes into {tmp_path}\n") == 1


def test_a_run_that_writes_nothing_leaves_nothing_beside_other_files(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    fit(tmp_path, Callback()).run(Net(), DATA)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize("resume", ["last", None])
def test_a_backup_that_shares_its_files_stays_as_it_is(tmp_path: Path, resume: str | None) -> None:
    """``cp -al`` makes a backup of hard links: nothing of it changes when the run goes on, nor when the backup is trained further."""
    root, backup = tmp_path / "runs", tmp_path / "backup"
    callbacks = [CSVLogger(), JSONLLogger(), Report(), keeping()]
    fit(root, *callbacks, epochs=1).run(Net(), DATA, DATA)
    subprocess.run(["cp", "-al", root, backup], check=True)
    before = files(backup)
    fit(root, *callbacks).run(Net(), DATA, DATA, resume=resume)
    fit(root, SimpleProfiler(filename="times")).validate(Net(), DATA)
    assert files(backup) == before
    after = files(root)
    result = fit(backup, *callbacks).run(Net(), DATA, DATA, resume="last")
    assert (result.folder, result.step) == (backup, 8)
    assert files(root) == after


def test_a_file_from_elsewhere_in_the_place_of_a_record_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "notes").write_text("mine")
    os.link(tmp_path / "notes", tmp_path / "runs" / "run.json")
    result = fit(tmp_path / "runs").run(Net(), DATA, DATA)
    assert (tmp_path / "notes").read_text() == "mine"
    assert json.loads((result.folder / "run.json").read_text())["id"]


def test_a_folder_whose_record_another_process_replaces_is_still_held(tmp_path: Path) -> None:
    """The lock is that of the file at the path, not of a file that was there when it was opened."""
    root = run_root_of(tmp_path)
    claim = root.claim(RunRecord.of_this_process("one", "fit", ()))
    os.link(tmp_path / "run.json", tmp_path / "backup.json")
    with pytest.raises(FolderInUse):
        root.hold(0, RunRecord.of_this_process("two", "fit", ()))
    (tmp_path / "file").touch()
    claim.close()
    second = root.hold(0, RunRecord.of_this_process("two", "fit", ()))
    assert (tmp_path / "backup.json").stat().st_nlink == 1
    with pytest.raises(FolderInUse):
        root.hold(0, RunRecord.of_this_process("three", "fit", ()))
    second.close()
