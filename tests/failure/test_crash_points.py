"""Saves that do not come to their end: training continues, the earlier checkpoint is chosen, and what is damaged is refused by name."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import full_disk, read, save
from support.internals import group_of_one
from support.ranks import run_ranks
from support.toys import LINEAR_BATCHES, Linear, linear_fit
from torch import nn

from callbacks import ModelCheckpoint
from engine import Callback, Engine
from engine.checkpoint.files import DamagedCheckpoint
from engine.checkpoint.local_storage import LocalStorage
from engine.checkpoint.resume import opening

pytestmark = pytest.mark.usefixtures("no_pickle_is_read")


def names(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "checkpoints").iterdir())


class Fails(Callback):
    """``os.fsync`` raises from one step to another: the disk is full."""

    def __init__(self, patch: pytest.MonkeyPatch, first: int, last: int) -> None:
        self.patch, self.first, self.last, self.steps = patch, first, last, 0

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        run.wait_for_checkpoint()
        if run.step == self.first:
            self.patch.setattr(os, "fsync", full_disk)
        if run.step == self.last:
            self.patch.undo()
        self.steps = run.step


@pytest.mark.parametrize("asynchronous", [True, False])
def test_training_goes_on_after_failed_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asynchronous: bool
) -> None:
    checkpoint = ModelCheckpoint(every=1, save_top_k=2, asynchronous=asynchronous)
    with caplog.at_level(logging.ERROR, "engine"):
        result = linear_fit(tmp_path, Fails(monkeypatch, 6, 8), checkpoint).run(Linear(), LINEAR_BATCHES)
    # Steps 6 and 7 are lost; what they would have replaced stayed until 8 and 9 were complete.
    assert [record.message.split(" was")[0] for record in caplog.records] == [
        "checkpoint step=00000006",
        "checkpoint step=00000007",
    ]
    assert "No space left on device" in caplog.records[0].message
    assert (result.step, names(tmp_path)) == (12, ["step=00000011", "step=00000012"])
    assert checkpoint.scores == {11: None, 12: None}
    assert read(tmp_path / "checkpoints" / "step=00000011").manifest["counters"]["step"] == 11


def test_what_a_lost_one_would_have_replaced_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = ModelCheckpoint(every=1, save_top_k=2)
    with pytest.raises(
        RuntimeError, match=r"step=00000005 was not written: OSError: .*No space.* \(3 failure\(s\) in a row\)"
    ):
        linear_fit(tmp_path, Fails(monkeypatch, 3, 99), checkpoint).run(Linear(), LINEAR_BATCHES)
    monkeypatch.undo()
    assert names(tmp_path) == ["step=00000001", "step=00000002"]
    result = linear_fit(tmp_path, ModelCheckpoint()).run(Linear(), LINEAR_BATCHES, resume="auto")
    assert result.step == 12


def test_the_last_save_must_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="No space"):
        linear_fit(tmp_path, Fails(monkeypatch, 12, 99), ModelCheckpoint(every="3 epochs")).run(
            Linear(), LINEAR_BATCHES
        )


@contextmanager
def small_disk(size: str) -> Iterator[Path]:
    """A file system of that size; skipped where mounting is not permitted."""
    place = Path("/dev/shm") / f"small-{os.getpid()}"
    place.mkdir()
    try:
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)],
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {made.stderr.strip()}")
        yield place
        subprocess.run(["umount", str(place)], check=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def test_a_disk_that_fills(caplog: pytest.LogCaptureFixture) -> None:
    """3 MB of parameters and momentum: one checkpoint fits on the disk, the draft of a second one beside it does not."""

    class Wide(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 75_000)  # 1.5 MB, and as much of momentum

    with small_disk("5m") as root, caplog.at_level(logging.ERROR, "engine"):
        with pytest.raises(OSError, match="No space"):
            linear_fit(root, ModelCheckpoint(max_failures=9)).run(Wide(), LINEAR_BATCHES)
        assert "training continues" in caplog.text
        assert names(root) == ["step=00000004"]
        model = Wide()
        result = linear_fit(root, max_epochs=2).run(model, LINEAR_BATCHES, resume="auto")
        assert result.step == 8


class Closes(Callback):
    """The checkpoints' file system becomes read-only after step 5; that of the run's other files, of which one is open, does not."""

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if run.step == 5:
            run.wait_for_checkpoint()
            place = str(run.folder / "checkpoints")
            subprocess.run(["mount", "--bind", place, place], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)


def test_a_place_that_becomes_read_only() -> None:
    with small_disk("5m") as root:
        with pytest.raises(RuntimeError, match=r"OSError: .*Read-only file system.* \(2 failure\(s\) in a row\)"):
            linear_fit(root, Closes(), ModelCheckpoint(every="1 epochs", max_failures=2), max_epochs=4).run(
                Linear(), LINEAR_BATCHES
            )
        assert names(root) == ["step=00000004"]
        assert linear_fit(root, max_epochs=2).run(Linear(), LINEAR_BATCHES, resume="last").step == 8
        subprocess.run(["umount", str(root / "checkpoints")], check=True)


@pytest.mark.usefixtures("checkpoints_in_folders")
def test_damage_is_passed_over_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``"auto"`` and ``"last"`` take the one before it; a path is refused."""
    linear_fit(tmp_path, ModelCheckpoint(every=4, save_top_k=-1)).run(Linear(), LINEAR_BATCHES)
    folder = tmp_path / "checkpoints"
    cut, flipped = (folder / name / "optim" / "rank=00000.safetensors" for name in ("step=00000012", "step=00000008"))
    cut.write_bytes(cut.read_bytes()[:-1])
    content = bytearray(flipped.read_bytes())
    content[-3] ^= 4
    flipped.write_bytes(content)
    for path, reason in ((cut, "bytes"), (flipped, "is not what was written")):
        with pytest.raises(DamagedCheckpoint, match=rf"optim/rank=00000.safetensors .*{reason}"):
            linear_fit(tmp_path).run(Linear(), LINEAR_BATCHES, resume=path.parents[1])
    for wanted in ("auto", "last"):
        caplog.clear()
        with caplog.at_level(logging.ERROR, "engine"):
            result = linear_fit(tmp_path, max_epochs=2).run(Linear(), LINEAR_BATCHES, resume=wanted)
        assert result.last_checkpoint == folder / "step=00000004"
        assert "step=00000008: optim/rank=00000.safetensors is not what was written" in caplog.text
    shutil.rmtree(folder / "step=00000004")
    with pytest.raises(DamagedCheckpoint, match=r"can be used; these exist:\n.*step=00000012: .*\n.*step=00000008: "):
        linear_fit(tmp_path).run(Linear(), LINEAR_BATCHES, resume="auto")


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    path = save(tmp_path / "step=1")
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        content = file.read_bytes()
        for place in {0, 9, len(content) // 2, len(content) - 2, len(content) - 1}:
            if place < len(content):
                changed = bytearray(content)
                changed[place] ^= 1
                file.write_bytes(changed)
                with pytest.raises(DamagedCheckpoint), opening(group_of_one(), LocalStorage(tmp_path), str(path)):
                    pass
        file.write_bytes(content)
    read(path)


RANK_FAILS = """
import os, sys
sys.path[:0] = [sys.argv[1], os.path.dirname(sys.argv[1])]
from pathlib import Path
from support.checkpoints import full_disk
from support.toys import LINEAR_BATCHES, Linear, linear_fit
from callbacks import ModelCheckpoint
from engine import Callback
rank = int(os.environ["RANK"])

class Fails(Callback):
    def on_train_batch_end(self, run, module, outputs, batch, batch_idx):
        run.wait_for_checkpoint()
        if run.step == 2 and rank == 1:
            self.sync, os.fsync = os.fsync, full_disk
        if run.step == 3 and rank == 1:
            os.fsync = self.sync

checkpoint = ModelCheckpoint(every=1, save_top_k=-1)
linear_fit(Path(sys.argv[2]), Fails(), checkpoint, devices=2, max_epochs=2).run(Linear(), LINEAR_BATCHES)
report(sorted(checkpoint.scores))
"""


def test_one_rank_cannot_write(tmp_path: Path) -> None:
    ran = run_ranks(RANK_FAILS, 2, Path(__file__).parent, tmp_path, timeout=300)
    assert [rank.value for rank in ran] == [[1, 3, 4], [1, 3, 4]]
    assert names(tmp_path) == ["step=00000001", "step=00000003", "step=00000004"]
    assert "rank 1 failed with OSError" in ran[0].stderr
    with opening(group_of_one(), LocalStorage(tmp_path / "checkpoints"), "last") as loaded:
        assert loaded.manifest["world_size"] == 2


def test_a_state_that_cannot_be_stored_is_an_error_at_once(tmp_path: Path) -> None:
    class Odd(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"file": object()}

    with pytest.raises(TypeError, match=r"the state\['callbacks'\]\['.*Odd'\]\['file'\] is of type builtins.object"):
        linear_fit(tmp_path, Odd(), ModelCheckpoint(every=1)).run(Linear(), LINEAR_BATCHES)


def test_save_state_replaces_only_when_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    engine = Engine(accelerator="cpu")
    model = engine.prepare(model)
    engine.save_state(tmp_path / "state", facts={"n": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space"):
            engine.save_state(tmp_path / "state", facts={"n": 2})
    assert engine.load_state(tmp_path / "state")["n"] == 1
    assert os.listdir(tmp_path) == ["state"]
