"""Checkpoints on the disk: what is written comes back, damage is found, and a crash at any point loses nothing."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.files import DamagedCheckpoint
from engine.checkpoint.store import FORMAT, latest, list_checkpoints, read, read_manifest, remove, sweep, write
from engine.errors import RankError

ROOT = Path(__file__).parents[2]


def save(directory: Path, value: float = 1.0, **changes: Any) -> Path:
    tied = torch.full((2, 3), value)
    arguments: dict[str, Any] = {
        "model": {"head.weight": tied, "body.weight": tied, "body.bias": torch.zeros(2)},
        "optim": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"betas": (0.9, 0.999)}]},
        "shared_state": {"scheduler": {"best": math.inf}},
        "rank_state": {"rng": torch.arange(4)},
        "rank": 0,
        "world_size": 1,
        "manifest": {"step": 3, "metrics": {"loss": math.nan}},
    }
    write(directory, **arguments | changes)
    return directory


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints" / "step=00000003")
    found = read(path, 0, 1)
    assert torch.equal(found.model["head.weight"], torch.ones(2, 3))
    assert found.model["body.weight"] is found.model["head.weight"]
    assert found.optim["state"][0]["step"].item() == 3
    assert found.optim["param_groups"] == [{"betas": (0.9, 0.999)}]
    assert found.shared_state == {"scheduler": {"best": math.inf}}
    assert found.rank_state["rng"].tolist() == [0, 1, 2, 3]
    assert found.manifest["step"] == 3
    assert math.isnan(found.manifest["metrics"]["loss"])
    assert found.manifest["format"] == FORMAT
    assert os.listdir(path.parent) == ["step=00000003"]


def test_the_files_are_those_of_the_page(tmp_path: Path) -> None:
    path = save(tmp_path / "step=1")
    names = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    assert names == [
        *("manifest.json", "model/model.safetensors", "optim/optim.json", "optim/optim.safetensors"),
        *("state/rank=00000.json", "state/rank=00000.safetensors", "state/shared.json"),
    ]
    manifest = json.loads((path / "manifest.json").read_text())
    assert sorted(manifest["files"]) == names[1:]
    # 2 x 3 + 2 numbers of 4 bytes: the tied weight is stored once.
    from safetensors.torch import load_file

    assert sum(tensor.nbytes for tensor in load_file(path / "model" / "model.safetensors").values()) == 32


def test_what_is_read_is_independent_of_the_files(tmp_path: Path) -> None:
    path = save(tmp_path / "step=1")
    found = read(path, 0, 1)
    found.model["head.weight"].add_(1)
    assert torch.equal(read(path, 0, 1).model["head.weight"], torch.ones(2, 3))
    remove(path)
    assert torch.equal(found.model["head.weight"], torch.full((2, 3), 2.0))


def test_views_of_one_memory(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    model = {"all": base, "part": base[2:4], "transposed": base.reshape(2, 3).t(), "empty": base[:0], "empty2": base[:0]}
    found = read(save(tmp_path / "step=1", model=model), 0, 1).model
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())


def test_another_world_size_has_no_state_of_ranks(tmp_path: Path) -> None:
    found = read(save(tmp_path / "step=1"), 1, 2)
    assert found.rank_state is None
    assert found.shared_state == {"scheduler": {"best": math.inf}}


class Meeting:
    """Ranks as threads that share their errors."""

    def __init__(self, world_size: int) -> None:
        self.errors: list[Exception | None] = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=20)

    def agree(self, rank: int) -> Callable[[Exception | None], Exception | None]:
        def run(error: Exception | None) -> Exception | None:
            self.errors[rank] = error
            self.barrier.wait()
            found = next((each for each in self.errors if each is not None), None)
            self.barrier.wait()
            return found

        return run


def save_by_ranks(directory: Path, rank_states: list[Any]) -> list[Exception | None]:
    meeting = Meeting(len(rank_states))
    outcome: list[Exception | None] = [None] * len(rank_states)

    def run(rank: int) -> None:
        try:
            save(directory, rank=rank, world_size=len(rank_states), rank_state=rank_states[rank], agree=meeting.agree(rank))
        except Exception as error:
            outcome[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(rank_states))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome


def test_every_rank_gets_its_own_state(tmp_path: Path) -> None:
    path = tmp_path / "step=1"
    assert save_by_ranks(path, [{"seen": 10}, {"seen": 11}, {"seen": torch.tensor(12)}]) == [None] * 3
    assert [int(read(path, rank, 3).rank_state["seen"]) for rank in range(3)] == [10, 11, 12]
    assert "state/rank=00002.safetensors" in read_manifest(path)["files"]


def test_an_error_on_one_rank_reaches_all_and_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path / "step=1")
    outcome = save_by_ranks(tmp_path / "step=2", [{}, {"bad": object()}])
    assert isinstance(outcome[1], TypeError)
    assert isinstance(outcome[0], RankError)
    assert "the state['bad']" in str(outcome[0])
    assert os.listdir(tmp_path) == ["step=1"]


def test_several_ranks_need_to_agree(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs agree"):
        save(tmp_path / "step=1", world_size=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"w": torch.zeros(1, device="meta")}}, "the model's 'w'"),
        ({"model": {"w": "text"}}, r"the model's 'w' \(str\)"),
        ({"optim": {"a": object()}}, r"the state\['a'\]"),
        ({"manifest": {"a": torch.zeros(1)}}, "manifest"),
        ({"manifest": {1: 1}}, "manifest"),
        ({"manifest": {"files": {}}}, r"\['files'\] are the store's own"),
    ],
)
def test_an_error_leaves_the_earlier_checkpoint(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = save(tmp_path / "step=1", 5.0)
    with pytest.raises((TypeError, ValueError), match=message):
        save(path, 6.0, **changes)
    assert os.listdir(tmp_path) == ["step=1"]
    assert read(path, 0, 1).model["head.weight"][0, 0] == 5


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "step=1", 5.0)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.checkpoint.store.write_json", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "step=2")
    assert os.listdir(tmp_path) == ["step=1"]
    assert latest(tmp_path) == path


def test_an_older_one_at_the_same_place_is_replaced(tmp_path: Path) -> None:
    path = save(tmp_path / "step=1", 1.0)
    save(path, 2.0)
    assert read(path, 0, 1).model["head.weight"][0, 0] == 2
    assert os.listdir(tmp_path) == ["step=1"]


def test_a_directory_of_others_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="no checkpoint"):
        save(tmp_path / "data")
    with pytest.raises(ValueError, match="no checkpoint"):
        remove(tmp_path / "data")
    sweep(tmp_path)
    assert (tmp_path / "data" / "mine.txt").exists()


def damaged(path: Path, name: str, change: Callable[[bytes], bytes | None]) -> None:
    file = path / name
    content = change(file.read_bytes())
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)


def flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


FILES = ("model/model.safetensors", "optim/optim.json", "optim/optim.safetensors", "state/shared.json", "state/rank=00000.json")


@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_and_named(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "step=1")
    for change, reason in ((flip, "not what was written"), (lambda content: content[:-1], "bytes"), (lambda content: None, "missing")):
        broken = Path(shutil.copytree(path, tmp_path / reason.replace(" ", "")))
        damaged(broken, name, change)
        with pytest.raises(DamagedCheckpoint, match=reason) as caught:
            read(broken, 0, 1)
        assert name in str(caught.value)
        assert str(broken) in str(caught.value)


def rewritten(path: Path, **changes: Any) -> Path:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | changes))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": FORMAT + 1}, "newer one"),
        ({"format": None}, "no format version"),
        ({"files": []}, "no usable 'files'"),
        ({"files": {}}, "does not list model/model.safetensors"),
        ({"world_size": "1"}, "no usable 'world_size'"),
        ({"saved_at": None}, "no usable 'saved_at'"),
        ({"files": {"../secret": {"bytes": 6}}}, "leads out"),
        ({"files": {"/etc/hostname": {"bytes": 1}}}, "leads out"),
        ({"files": {"a\0b": {"bytes": 1}}}, "leads out"),
        ({"files": {"\ud800": {"bytes": 1}}}, "leads out"),
        ({"files": {"model": 3}}, "missing"),
        ({"step": {"$": "object"}}, "unknown kind"),
    ],
)
def test_a_wrong_manifest_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "secret").write_text("secret")
    path = rewritten(save(tmp_path / "step=1"), **changes)
    with pytest.raises(DamagedCheckpoint, match=message):
        read(path, 0, 1)


@pytest.mark.parametrize("text", ["", "{", "[]", "NaN", "[" * 100_000, '{"format": NaN}'])
def test_an_unreadable_manifest_is_refused(tmp_path: Path, text: str) -> None:
    path = save(tmp_path / "step=1")
    (path / "manifest.json").write_text(text)
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json"):
        read(path, 0, 1)
    assert list_checkpoints(tmp_path) == []


def test_a_link_out_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "step=1")
    file = path / "state" / "shared.json"
    file.rename(tmp_path / "elsewhere.json")
    file.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(DamagedCheckpoint, match="leads out"):
        read(path, 0, 1)


def test_nothing_there(tmp_path: Path) -> None:
    save(tmp_path / "step=1")
    with pytest.raises(FileNotFoundError, match=r"complete ones beside it: .*step=1"):
        read(tmp_path / "step=2", 0, 1)
    assert list_checkpoints(tmp_path / "no") == []
    assert latest(tmp_path / "no") is None


def test_the_list_has_complete_ones_in_the_order_of_writing(tmp_path: Path) -> None:
    first, second, third = (save(tmp_path / name) for name in ("step=50", "step=30", "step=100"))
    (third / "optim" / "optim.json").unlink()
    shutil.copytree(first, tmp_path / ".step=200.partial")
    (tmp_path / "step=300").mkdir()
    assert list_checkpoints(tmp_path) == [first, second]
    assert latest(tmp_path) == second


def test_remove_takes_the_manifest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "step=1")

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove(path)
    assert path.exists()
    assert list_checkpoints(tmp_path) == []
    sweep(tmp_path)
    assert not path.exists()
    remove(path)


KILLED = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_store import save
from engine.checkpoint.store import latest, read, sweep

root, again = Path(sys.argv[1]), sys.argv[3] == "again"
for n in range(1, 1000):
    place = root / str(n)
    save(place / "step=1", 1.0)
    child = os.fork()
    if child == 0:
        left = n
        def hook(event, arguments):
            global left
            # Writes, renames, deletions: those of Python's, and the one open that follows each of safetensors' files.
            if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        save(place / ("step=1" if again else "step=2"), 2.0)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    for _ in range(2):
        found = latest(place)
        value = read(found, 0, 1).model["head.weight"][0, 0].item()
        assert value in (1.0, 2.0), (n, found)
        sweep(place)
        assert len(os.listdir(place)) <= (1 if again else 2), (n, os.listdir(place))
    if status == 0:
        assert value == 2.0
        break
    # What was left behind is in nobody's way.
    save(place / "step=1", 3.0)
    assert read(place / "step=1", 0, 1).model["head.weight"][0, 0].item() == 3.0
print("killed", n - 1)
"""


@pytest.mark.parametrize("place", ["again", "beside"])
def test_a_kill_at_any_operation_loses_no_earlier_checkpoint(tmp_path: Path, place: str) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parent), place]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= 20


def test_there_are_only_files_that_hold_no_code(tmp_path: Path) -> None:
    path = save(tmp_path / "step=1", shared_state={"x": b"cos\nsystem\n(S'exit 1'\ntR."})
    assert {file.suffix for file in path.rglob("*") if file.is_file()} == {".json", ".safetensors"}
    assert read(path, 0, 1).shared_state["x"].startswith(b"cos")
