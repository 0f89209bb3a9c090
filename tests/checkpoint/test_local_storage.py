"""Checkpoints on the disk: what is written comes back, damage is found, and a crash at any point loses nothing."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from cProfile import Profile
from pathlib import Path
from pstats import Stats
from typing import Any

import pytest
import torch
from support.checkpoints import read, resummed, save
from support.internals import new_content, new_folder, new_writer, save_request
from support.toys import Weight, fit, ones

from callbacks import ModelCheckpoint
from engine.checkpoint import local_storage
from engine.checkpoint.files import DamagedCheckpoint
from engine.checkpoint.local_storage import LocalStorage, Opened, reason_for_absence
from engine.checkpoint.manifest import FORMAT

ROOT = Path(__file__).parents[2]


def complete(root: Path) -> list[str]:
    """The names of the complete checkpoints, oldest first."""
    return list(LocalStorage(root).manifests())


def remove(path: Path) -> bool:
    return LocalStorage(path.parent).remove(path.name)


def sweep(root: Path) -> None:
    LocalStorage(root).sweep()


@pytest.mark.parametrize(("limit", "version"), [(-1, FORMAT), (4 << 20, FORMAT + 1)])
def test_what_is_written_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, version: int) -> None:
    """In both forms."""
    monkeypatch.setattr("engine.checkpoint.manifest.JOINED_BYTES", limit)
    path = save(tmp_path / "checkpoints" / "step=00000003")
    found = read(path)
    assert torch.equal(found.model["head.weight"], torch.ones(2, 3))
    assert found.model["body.weight"] is found.model["head.weight"]
    assert found.optim["0"]["state"]["w"]["step"].item() == 3
    assert found.optim["0"]["param_groups"] == [{"betas": (0.9, 0.999), "params": ["w"]}]
    assert found.shared == {"scheduler": {"best": math.inf}}
    assert found.own["rng"].tolist() == [0, 1, 2, 3]
    assert found.manifest["step"] == 3
    assert math.isnan(found.manifest["metrics"]["loss"])
    assert found.manifest["format"] == version
    assert "$trees" not in found.manifest
    assert os.listdir(path.parent) == ["step=00000003"]


@pytest.mark.usefixtures("checkpoints_in_folders")
def test_the_files_are_those_of_the_page(tmp_path: Path) -> None:
    path = save(tmp_path / "step=1")
    names = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    assert names == [
        *(
            "manifest.json",
            "model/model.json",
            "model/rank=00000.safetensors",
            "optim/optim.json",
            "optim/rank=00000.safetensors",
        ),
        *("state/rank=00000.json", "state/rank=00000.safetensors", "state/shared.json"),
    ]
    manifest = json.loads((path / "manifest.json").read_text())
    assert sorted(manifest["files"]) == names[1:]
    # 2 x 3 + 2 numbers of 4 bytes: the tied weight is stored once.
    from safetensors.torch import load_file

    assert sum(tensor.nbytes for tensor in load_file(path / "model" / "rank=00000.safetensors").values()) == 32


def test_a_small_one_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files, without folders; and each of them, the draft and the place of its name are synced once."""
    from safetensors.torch import load_file

    save(tmp_path / "step=1")
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), fsync(descriptor)))
    writer, folder = new_writer(), new_folder(tmp_path)
    for name in ("step=2", "step=3"):
        synced.clear()
        path = Path(writer.save(folder, new_content(), save_request(name)))
    assert len(synced) == 4
    assert sorted(os.listdir(path)) == ["manifest.json", "rank=00000.safetensors"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert list(manifest["files"]) == ["rank=00000.safetensors"]
    assert sorted(manifest["$trees"]) == ["model/model", "optim/optim", "state/rank=00000", "state/shared"]
    assert sorted(load_file(path / "rank=00000.safetensors")) == [
        "model/body.bias",
        "model/head.weight",
        "optim/0.state.w.step",
        "state/rank=00000/rng",
    ]


def test_large_ones_are_not_joined(tmp_path: Path) -> None:
    """Neither with many bytes of tensors nor of JSON: whoever lists checkpoints reads the manifests."""
    names = {
        "tensors": {"model": {"w": torch.zeros(1 << 20), "b": torch.zeros(1)}},
        "json": {"shared": {"text": "x" * (1 << 16)}},
    }
    for name, changes in names.items():
        path = save(tmp_path / name, **changes)
        assert (path / "state" / "shared.json").is_file()
        assert read(path).manifest["format"] == FORMAT


def test_damage_of_a_joined_one_is_found(tmp_path: Path) -> None:
    path = save(tmp_path / "step=1")
    manifest, tensors = path / "manifest.json", path / "rank=00000.safetensors"
    text, content = manifest.read_text(), tensors.read_bytes()
    manifest.write_text(text.replace('"body.weight"', '"body.w"'))  # in a tree
    with pytest.raises(DamagedCheckpoint, match=r"manifest.json is not what was written"):
        Opened(path)
    manifest.write_text(text)
    for change, message in (
        (content[:-1], r"rank=00000.safetensors has \d+ bytes, and had"),
        (content[:-1] + b"\xff", r"rank=00000.safetensors is not what was written"),
    ):
        tensors.write_bytes(change)
        with pytest.raises(DamagedCheckpoint, match=message):
            Opened(path)
    tensors.write_bytes(content)
    Opened(path).close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"$trees": trees}, r"no usable '\$trees'") for trees in (None, [], {}, 3, {"../x": 1}, {"model/../x": 1})),
        ({"format": 3}, r"names the file 'rank=00000.safetensors'"),
        ({"files": {"model/rank=00000.safetensors": {"bytes": 0, "crc32": ["00000000"]}}}, "is not part of one"),
        ({"$trees": {"state/shared": {"$": "eval"}}}, r"manifest.json, state/shared: not a packed tree"),
        ({"$trees": {"state/shared": {"$": "tensor", "name": "x"}}}, r"manifest.json, state/shared: not a packed tree"),
    ],
)
def test_a_wrong_manifest_of_a_joined_one_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = save(tmp_path / "step=1")
    manifest = json.loads((path / "manifest.json").read_text()) | changes
    (path / "manifest.json").write_text(json.dumps(resummed(manifest)))
    with pytest.raises(DamagedCheckpoint, match=message):
        Opened(path).tree("state/shared")


def test_what_is_read_is_independent_of_the_files(tmp_path: Path) -> None:
    path = save(tmp_path / "step=1")
    found = read(path)
    found.model["head.weight"].add_(1)
    assert torch.equal(read(path).model["head.weight"], torch.ones(2, 3))
    remove(path)
    assert torch.equal(found.model["head.weight"], torch.full((2, 3), 2.0))


def test_views_of_one_memory(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    model = {
        "all": base,
        "part": base[2:4],
        "transposed": base.reshape(2, 3).t(),
        "empty": base[:0],
        "empty2": base[:0],
    }
    found = read(save(tmp_path / "step=1", model=model)).model
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"w": torch.zeros(1, device="meta")}}, "the model's 'w'"),
        ({"model": {"w": object()}}, r"the state\['w'\]"),
        ({"optimizers": {"a": object()}}, r"the state\['a'\]"),
        ({"facts": {"a": torch.zeros(1)}}, "manifest"),
        ({"facts": {1: 1}}, "manifest"),
        ({"facts": {"files": {}}}, r"\['files'\] are reserved"),
    ],
)
def test_an_error_leaves_the_earlier_checkpoint(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = save(tmp_path / "step=1", 5.0)
    with pytest.raises((TypeError, ValueError), match=message):
        save(path, 6.0, **changes)
    assert os.listdir(tmp_path) == ["step=1"]
    assert read(path).model["head.weight"][0, 0] == 5


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "step=1", 5.0)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "step=2")
    assert os.listdir(tmp_path) == ["step=1"]
    assert complete(tmp_path) == ["step=1"]


def test_an_older_one_at_the_same_place_is_replaced(tmp_path: Path) -> None:
    path = save(tmp_path / "step=1", 1.0)
    save(path, 2.0)
    assert read(path).model["head.weight"][0, 0] == 2
    assert os.listdir(tmp_path) == ["step=1"]


def test_a_directory_of_others_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not a checkpoint"):
        save(tmp_path / "data")
    with pytest.raises(ValueError, match="not a checkpoint"):
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


FILES = (
    *("model/rank=00000.safetensors", "model/model.json", "optim/optim.json", "optim/rank=00000.safetensors"),
    *("state/shared.json", "state/rank=00000.json"),
)


@pytest.mark.usefixtures("checkpoints_in_folders")
@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_and_named(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "step=1")
    for change, reason in (
        (flip, "not what was written"),
        (lambda content: content[:-1], "bytes"),
        (lambda content: None, "missing"),
    ):
        broken = Path(shutil.copytree(path, tmp_path / reason.replace(" ", "")))
        damaged(broken, name, change)
        with pytest.raises(DamagedCheckpoint, match=reason) as caught:
            read(broken)
        assert name in str(caught.value)
        assert str(broken) in str(caught.value)


def rewritten(path: Path, **changes: Any) -> Path:
    """With another manifest, whose own checksum is right."""
    manifest = json.loads((path / "manifest.json").read_text()) | changes
    (path / "manifest.json").write_text(json.dumps(resummed(manifest)))
    return path


@pytest.mark.usefixtures("checkpoints_in_folders")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": FORMAT + 2}, "version that wrote it"),
        ({"format": None}, "no format version"),
        ({"files": []}, "no usable 'files'"),
        ({"files": {}}, "model/rank=00000.safetensors is not in the manifest"),
        ({"world_size": "1"}, "no usable 'world_size'"),
        ({"saved_at": None}, "no usable 'saved_at'"),
        ({"files": {"../secret": {"bytes": 6, "crc32": [""]}}}, "leads out"),
        ({"files": {"/etc/hostname": {"bytes": 1, "crc32": [""]}}}, "leads out"),
        ({"files": {"a\0b": {"bytes": 1, "crc32": [""]}}}, "leads out"),
        ({"files": {"\ud800": {"bytes": 1, "crc32": [""]}}}, "leads out"),
        ({"files": {"model/a": 3}}, "no usable entry"),
        ({"files": {"model": 3}}, "is not part of one"),
        ({"files": {"other/a": {"bytes": 1, "crc32": [""]}}}, "is not part of one"),
        ({"files": {"model/\x1b[2J": {"bytes": 1, "crc32": [""]}}}, "is not part of one"),
        ({"world_size": 10**12}, "world_size 1000000000000, which is not possible"),
        ({"world_size": 0}, "world_size 0, which is not possible"),
        ({"saved_at": 1e300}, r"saved_at 1e\+300, which is not possible"),
        ({"serial": -1}, "serial -1, which is not possible"),
        ({"serial": 10**30}, "serial 1000000000000000000000000000000, which is not possible"),
        ({"step": {"$": "object"}}, "unknown kind"),
    ],
)
def test_a_wrong_manifest_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "secret").write_text("secret")
    path = rewritten(save(tmp_path / "step=1"), **changes)
    with pytest.raises(DamagedCheckpoint, match=message):
        read(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "NaN", "[" * 100_000, '{"format": NaN}'])
def test_an_unreadable_manifest_is_refused(tmp_path: Path, text: str) -> None:
    path = save(tmp_path / "step=1")
    (path / "manifest.json").write_text(text)
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json"):
        read(path)
    assert complete(tmp_path) == []


@pytest.mark.usefixtures("checkpoints_in_folders")
@pytest.mark.parametrize("name", ["state/shared.json", "state"])
def test_a_link_out_of_the_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "step=1")
    entry = path / name
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedCheckpoint, match="leads out"):
        read(path)


def test_nothing_there(tmp_path: Path) -> None:
    save(tmp_path / "step=1")
    with pytest.raises(FileNotFoundError, match=r"complete ones beside it: .*step=1"):
        read(tmp_path / "step=2")
    assert complete(tmp_path / "no") == []


@pytest.mark.usefixtures("checkpoints_in_folders")
def test_the_list_has_complete_ones_in_the_order_of_writing(tmp_path: Path) -> None:
    first, second, third = (save(tmp_path / name) for name in ("step=50", "step=30", "step=100"))
    (third / "optim" / "optim.json").unlink()
    shutil.copytree(first, tmp_path / ".step=200.partial")
    (tmp_path / "step=300").mkdir()
    assert complete(tmp_path) == [first.name, second.name]


def _with_serial(path: Path, serial: int) -> None:
    """Change the serial number in a manifest, whose checksum is then wrong."""
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(re.sub(r'"serial": \d+', f'"serial": {serial}', text))


def test_serial_numbers_rise_with_all_writers_and_whatever_is_damaged(tmp_path: Path) -> None:
    one, other = LocalStorage(tmp_path), LocalStorage(tmp_path)
    for number, place in enumerate((one, other, other, one, other)):
        place.begin(f"{9 - number}").seal(1, {}, {})
        if number == 2:
            _with_serial(tmp_path / "7", 1000)
    assert {name: manifest["serial"] for name, manifest in one.manifests().items()} == {"9": 1, "8": 2, "6": 3, "5": 4}
    assert one.newest_first() == ["7", "5", "6", "8", "9"]  # who opens the damaged one says so
    other.begin("5").seal(1, {}, {})  # in its own place
    assert one.next_serial() == 6
    save(tmp_path / "old")
    (tmp_path / "old" / "manifest.json").write_text("{")
    assert {"7", "old"} <= one.written_names()
    assert not one.is_complete("7")
    assert one.is_complete("5")


def test_equal_serial_numbers_are_ordered_as_in_the_list(tmp_path: Path) -> None:
    place = LocalStorage(tmp_path)
    for step in (20, 30, 10, 80, 50, 70, 40, 60):
        LocalStorage(tmp_path / "other").begin(f"{step}").seal(1, {"counters": {"step": step}}, {})
        shutil.move(tmp_path / "other" / f"{step}", tmp_path / f"{step}")
    assert place.newest_first() == list(place.manifests())[::-1] == ["80", "70", "60", "50", "40", "30", "20", "10"]


def test_the_calls_of_a_save_and_of_a_resume_do_not_grow_with_what_is_kept(tmp_path: Path) -> None:
    saves, resumes, callback = [], [], ModelCheckpoint(every=1, save_top_k=-1)
    for kept in (10, 60):
        options: dict[str, Any] = {"root": tmp_path / str(kept), "callbacks": [callback], "max_steps": kept}
        fit(**options).run(Weight(), ones(kept))
        place = LocalStorage(tmp_path / str(kept) / "checkpoints")
        for storage in (place, LocalStorage(place.directory)):  # one that has looked at the folder, and a new one
            storage.begin("caches").seal(1, {}, {})
        for name, storage in (("later", place), ("first", LocalStorage(place.directory))):
            with Profile() as profile:
                storage.begin(name).seal(1, {}, {})
            saves.append(Stats(profile).total_calls)  # type: ignore[attr-defined]
        with Profile() as profile:
            fit(**options).run(Weight(), ones(kept), resume="auto")
        resumes.append(Stats(profile).total_calls)  # type: ignore[attr-defined]
    # An entry is one of a set, and has the head of its manifest read once: a manifest that is read whole is a thousand calls.
    assert saves[2] - saves[0] < 50 * 4, saves
    assert saves[3] - saves[1] < 50 * 120, saves
    assert resumes[1] - resumes[0] < 50 * 120, resumes


def test_a_kill_while_removing_leaves_nothing_that_looks_like_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "step=1")
    save(tmp_path / "step=2")

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            remove(path)
    assert complete(tmp_path) == ["step=2"]
    sweep(tmp_path)
    assert os.listdir(tmp_path) == ["step=2"]
    assert remove(path)


def test_a_removal_reads_one_other_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "0")
    for number in range(1, 20):
        shutil.copytree(tmp_path / "0", tmp_path / str(number))
    reads: list[Path] = []
    read_json = local_storage.read_json
    monkeypatch.setattr(local_storage, "read_json", lambda path: (reads.append(path), read_json(path))[1])
    for number in range(10):
        assert remove(tmp_path / str(number))
    assert len(reads) == 10


def test_the_calls_of_a_removal_do_not_grow_with_what_is_kept(tmp_path: Path) -> None:
    counts = []
    for kept in (10, 200):
        place = LocalStorage(tmp_path / str(kept))
        place.begin("new").seal(1, {}, {})
        for name in map(str, range(kept)):
            shutil.copytree(place.path("new"), place.path(name))
        for name in ("0", "1"):
            with Profile() as profile:
                assert place.remove(name)
        counts.append(Stats(profile).total_calls)  # type: ignore[attr-defined]  # the first fills caches
    assert counts[0] == counts[1] < 600, counts


@pytest.mark.usefixtures("checkpoints_in_folders")
def test_a_removal_that_fails_in_the_middle_is_completed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a")
    save(tmp_path / "b")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as with a file that another NFS client has open
        with pytest.raises(OSError, match="not all of its files"):
            remove(tmp_path / "a")
    assert complete(tmp_path) == ["b"]
    assert remove(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_drafts_of_living_jobs_are_not_swept(tmp_path: Path) -> None:
    draft = LocalStorage(tmp_path).begin("step=1")
    sweep(tmp_path)
    assert os.listdir(tmp_path) == [".step=1.partial"]
    draft.unlock()
    sweep(tmp_path)
    assert os.listdir(tmp_path) == []


def test_the_only_one_and_one_that_is_read_are_not_removed(tmp_path: Path) -> None:
    path = save(tmp_path / "step=1")
    assert not remove(path)
    save(tmp_path / "step=2")
    with Opened(path):
        assert not remove(path)
    assert remove(path)
    assert os.listdir(tmp_path) == ["step=2"]


KILLED = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from support.checkpoints import read, resummed, save
from engine.checkpoint import manifest
from engine.checkpoint.local_storage import LocalStorage

root, again = Path(sys.argv[1]), sys.argv[3] == "again"
manifest.JOINED_BYTES = int(sys.argv[4])
for n in range(1, 1000):
    place = root / str(n)
    save(place / "step=1", 1.0)
    child = os.fork()
    if child == 0:
        left = n
        def hook(event, arguments):
            global left
            if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        for name in ("write", "fsync", "close"):  # these are not audited
            def counted(*arguments, _call=getattr(os, name)):
                hook("open", None)
                return _call(*arguments)
            setattr(os, name, counted)
        save(place / ("step=1" if again else "step=2"), 2.0)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    for _ in range(2):
        found = place / list(LocalStorage(place).manifests())[-1]
        value = read(found).model["head.weight"][0, 0].item()
        assert value in (1.0, 2.0), (n, found)
        LocalStorage(place).sweep()
        assert len(os.listdir(place)) <= (1 if again else 2), (n, os.listdir(place))
    if status == 0:
        assert value == 2.0
        break
    # What was left behind is in nobody's way.
    save(place / "step=1", 3.0)
    assert read(place / "step=1").model["head.weight"][0, 0].item() == 3.0
print("killed", n - 1)
"""


@pytest.mark.parametrize("place", ["again", pytest.param("beside", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("limit", "least"), [(-1, 60), (4 << 20, 25)])
def test_a_kill_at_any_operation_loses_no_earlier_checkpoint(
    tmp_path: Path, place: str, limit: int, least: int
) -> None:
    """In both forms."""
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parents[1]), place, str(limit)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= least


def test_there_are_only_files_that_hold_no_code(tmp_path: Path) -> None:
    path = save(tmp_path / "step=1", shared={"x": b"cos\nsystem\n(S'exit 1'\ntR."})
    assert {file.suffix for file in path.rglob("*") if file.is_file()} == {".json", ".safetensors"}
    assert read(path).shared["x"].startswith(b"cos")


@pytest.mark.usefixtures("checkpoints_in_folders")
@pytest.mark.parametrize("name", ["manifest.json", "state/shared.json"])
def test_a_file_that_is_larger_than_any_that_is_written(tmp_path: Path, name: str) -> None:
    checkpoint = save(tmp_path / "step=1")
    with (checkpoint / name).open("ab") as file:
        file.truncate(20 << 30)  # a hole, which takes no space
    with pytest.raises(DamagedCheckpoint, match=r"has 21,?474,?836,?480 bytes"):
        Opened(checkpoint)
    with pytest.raises(
        DamagedCheckpoint, match=r"has 21,474,836,480 bytes, and a JSON file of a checkpoint has at most"
    ):
        local_storage.read_json(checkpoint / name)


# -- what an error says about a path at which there is no checkpoint ---------------------------------------------------------------------


def empty_folder(path: Path) -> None:
    path.mkdir()


def half_copied(path: Path) -> None:
    (path / "model").mkdir(parents=True)
    (path / "model" / "rank=00000.safetensors").touch()


def of_accelerate(path: Path) -> None:
    path.mkdir()
    (path / "model.safetensors").touch()
    (path / "random_states_0.pkl").touch()


def of_deepspeed(path: Path) -> None:
    (path / "global_step1").mkdir(parents=True)
    (path / "latest").write_text("global_step1")


def linked(path: Path) -> None:
    path.symlink_to("nowhere")


def other_files(path: Path) -> None:
    path.mkdir()
    for name in "abcdefg":
        (path / name).touch()


REASONS: dict[str, tuple[Callable[[Path], None], str]] = {
    "nothing": (lambda path: None, "{} does not exist; if it was moved or renamed, give its new path"),
    "an empty folder": (empty_folder, "it is an empty folder"),
    "half a copy": (half_copied, "its other files are there, so a copy or a save"),
    "Accelerate's": (
        of_accelerate,
        "it looks like a checkpoint of Accelerate: fit checkpoint convert FOLDER OUT makes a checkpoint",
    ),
    "DeepSpeed's": (of_deepspeed, "it looks like a checkpoint of DeepSpeed: zero_to_fp32.py"),
    "a link": (linked, "it is a link to nowhere, which does not exist"),
    "other files": (other_files, "it has a, b, c, d, e and 2 more"),
}


@pytest.mark.parametrize("kind", REASONS)
def test_what_stands_in_the_place_of_a_checkpoint_is_told(kind: str, tmp_path: Path) -> None:
    make, text = REASONS[kind]
    path = tmp_path / "given"
    make(path)
    assert reason_for_absence(path).startswith(text.format(path))


def test_the_first_folder_of_a_path_that_is_gone_is_named(tmp_path: Path) -> None:
    assert reason_for_absence(tmp_path / "run" / "checkpoints" / "step=3").startswith(f"{tmp_path}/run does not exist")
    (tmp_path / "file").touch()
    assert reason_for_absence(tmp_path / "file" / "step=3") == f"{tmp_path}/file is a file"


def test_a_resume_and_a_load_say_it(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=rf"resume=.*manifest.json is missing\): {tmp_path}/run does not exist; if it was moved"
    ):
        fit(tmp_path).run(Weight(), ones(1), resume=tmp_path / "run" / "step=3")
    with pytest.raises(FileNotFoundError, match=rf"contains none .*: {tmp_path}/run does not exist; if it was moved"):
        Weight.load_from_checkpoint(tmp_path / "run")
