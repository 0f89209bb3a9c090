"""Checkpoints in a directory and in places that fsspec reaches: the same verbs, the same content, the manifest last."""

from __future__ import annotations

import errno
import json
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import save_file
from support.checkpoints import read, resummed, save
from support.internals import group_of_one, new_content, new_folder, new_writer, save_request
from support.ranks import run_ranks
from support.toys import LINEAR_BATCHES, Linear, linear_fit

from callbacks import ModelCheckpoint
from engine.checkpoint.export import export_checkpoint
from engine.checkpoint.files import DamagedCheckpoint
from engine.checkpoint.resume import opening
from engine.checkpoint.storage import Storage
from engine.checkpoint.storage_paths import split_path, storage_of
from engine.cli.main import main
from engine.compat.foreign_checkpoints.conversion import convert


@pytest.fixture(params=["directory", "file", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "memory":
        url = f"memory://{uuid.uuid4().hex}/checkpoints"
        yield url
        fsspec.filesystem("memory").rm(url.removeprefix("memory:/").rpartition("/")[0], recursive=True)
    else:
        yield f"file://{tmp_path}/checkpoints" if request.param == "file" else str(tmp_path / "checkpoints")


def test_paths_and_urls() -> None:
    assert storage_of("runs/a").path("step=1") == Path("runs/a/step=1").absolute()
    assert storage_of("memory://a/b/").path("step=1") == "memory://a/b/step=1"
    where, name = split_path("memory://a/b/step=1/")
    assert (where.root, name, where.path(name)) == ("memory://a/b", "step=1", "memory://a/b/step=1")
    with pytest.raises(ValueError, match=r"nope://x: .*nope"):
        storage_of("nope://x")
    with pytest.raises(ValueError, match=r"github://x: .*org"):  # fsspec raises a TypeError
        storage_of("github://x")


def test_two_spellings_of_one_place(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    here = storage_of(tmp_path)
    assert here.is_same(storage_of(tmp_path / "link"))
    assert not here.is_same(storage_of(tmp_path / "other"))
    assert not here.is_same(storage_of(f"file://{tmp_path}"))  # ranks have copies of what is there
    assert storage_of("memory://a/b/").is_same(storage_of("memory://a/b"))


@pytest.mark.parametrize("url", ["data://x", "http://127.0.0.1:1/runs?X-Signature=abc", "webhdfs://127.0.0.1:1/runs"])
def test_the_errors_of_other_libraries_name_the_url(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["replay", url, "--step", "1"], ["checkpoint", "list", url]):
        assert main(command) in (1, 2)
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        assert url.partition("?")[0] in line
        assert "abc" not in line


def test_a_manifest_far_away_that_is_larger_than_any_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(str(tmp_path / "step=1"))
    for module in ("files", "remote_storage"):
        monkeypatch.setattr(f"engine.checkpoint.{module}.LARGEST_JSON", 100, raising=False)
    with pytest.raises(DamagedCheckpoint, match="has 101 bytes"):
        storage_of(f"file://{tmp_path}").manifest("step=1")


def test_a_password_in_a_url_is_refused_and_not_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "memory://me:pass@word@host/run"
    doors = [
        lambda: storage_of(url),
        lambda: linear_fit(tmp_path, ModelCheckpoint(dirpath=url)).run(Linear(), LINEAR_BATCHES),
        lambda: linear_fit(tmp_path).run(Linear(), LINEAR_BATCHES, resume=url),
        lambda: Linear.load_from_checkpoint(f"{url}/step=1"),
        lambda: convert(f"{url}/a.safetensors", tmp_path / "out"),
        lambda: export_checkpoint(url, tmp_path / "out"),
    ]
    for door in doors:
        with pytest.raises(ValueError, match=r"me:\*\*\*@host.*FSSPEC_FTP_PASSWORD") as caught:
            door()
        assert "word" not in str(caught.value).replace("password", "")
    for command in (["checkpoint", "list", url], ["report", url], ["replay", url, "--step", "1"]):
        assert main(command) in (1, 2)
    text = capsys.readouterr()
    assert "pass@word" not in caplog.text + text.out + text.err
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"pass@word" in path.read_bytes()]


def test_what_a_signed_url_ends_with_is_not_recorded(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    fsspec.filesystem("memory").put_file(str(tmp_path / "a.safetensors"), "/signed/a.safetensors?X-Amz-Signature=abc")
    convert("memory://signed/a.safetensors?X-Amz-Signature=abc", tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["converted_from"]["path"] == "memory://signed/a.safetensors"
    with pytest.raises(FileNotFoundError, match=r"^memory://signed/b.safetensors does not exist$"):
        convert("memory://signed/b.safetensors?X-Amz-Signature=abc", tmp_path / "out2")
    fsspec.filesystem("memory").rm("/signed", recursive=True)


class Buckets(MemoryFileSystem):
    """An object storage in memory: the first part of a path is a bucket, which ``makedirs`` creates, as that of ``s3fs`` does."""

    protocol = "cosn"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    buckets: ClassVar[set[str]] = set()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("cosn://", "memory://")))

    def exists(self, path: str, **options: Any) -> bool:
        path = self._strip_protocol(path).strip("/")
        return path in self.buckets if "/" not in path else super().exists(path, **options)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.buckets.add(self._strip_protocol(path).strip("/").partition("/")[0])


@pytest.fixture
def buckets() -> Iterator[set[str]]:
    fsspec.register_implementation("cosn", Buckets, clobber=True)
    Buckets.buckets.add("good")
    yield Buckets.buckets
    Buckets.buckets.clear()
    Buckets.store.clear()


def test_a_bucket_that_does_not_exist_is_an_error_before_the_first_step(buckets: set[str], tmp_path: Path) -> None:
    class Counting(Linear):
        steps = 0

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            self.steps += 1
            return super().training_step(batch, batch_idx)

    module = Counting()
    with pytest.raises(
        FileNotFoundError, match=r"^cosn://nobucket/run: there is no bucket 'nobucket', or it may not be"
    ):
        linear_fit(tmp_path / "runs", ModelCheckpoint(dirpath="cosn://nobucket/run")).run(module, LINEAR_BATCHES)
    assert (module.steps, buckets, Buckets.store) == (0, {"good"}, {})
    assert not (tmp_path / "runs").exists()
    result = linear_fit(tmp_path / "runs", ModelCheckpoint(dirpath="cosn://good/run")).run(module, LINEAR_BATCHES)
    assert str(result.last_checkpoint).startswith("cosn://good/run/step=")
    with pytest.raises(FileNotFoundError, match="there is no bucket 'nobucket'"):
        export_checkpoint(str(result.last_checkpoint), "cosn://nobucket/model")
    assert buckets == {"good"}


def test_write_list_read_remove(root: str) -> None:
    where = storage_of(root)
    assert where.manifests() == {}
    for value, name in ((1.0, "step=2"), (2.0, "step=1")):
        assert str(save(where.path(name), value)) == str(where.path(name))
    assert list(where.manifests()) == ["step=2", "step=1"]  # in the order of writing
    assert read(where.path("step=1")).model["head.weight"][0, 0] == 2
    assert where.remove("step=2")
    assert list(storage_of(root).manifests()) == ["step=1"]
    assert not where.remove("step=1")  # the only one
    save(where.path("step=1"), 3.0)
    assert read(storage_of(root).path("step=1")).model["head.weight"][0, 0] == 3
    with pytest.raises(FileNotFoundError, match=r"step=9 holds no complete checkpoint .*step=1"):
        read(where.path("step=9"))


def test_several_writers_of_one_folder_count_on(root: str) -> None:
    writer, first, second = new_writer(), new_folder(root), new_folder(root)
    for folder, name in ((first, "a"), (second, "b"), (first, "c"), (second, "b"), (first, "d"), (first, "d")):
        writer.save(folder, new_content(), save_request(name))
    serials = {name: manifest["serial"] for name, manifest in storage_of(root).manifests().items()}
    assert serials == {"a": 1, "c": 3, "b": 4, "d": 6}


def test_a_removal_that_fails_is_tried_again(
    root: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer, folder = new_writer(), new_folder(root)
    writer.save(folder, new_content(), save_request("a"))
    verb, owner = ("rename", Path) if folder.storage.shared else ("rm_file", type(vars(folder.storage)["files"]))
    call = getattr(owner, verb)

    def busy(this: Any, *rest: Any) -> Any:
        """The removal's first operation; sealing another checkpoint is a ``rename`` as well."""
        if verb == "rm_file" or this.name == "a":
            raise OSError(errno.EBUSY, "busy")
        return call(this, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(owner, verb, busy)
        writer.save(folder, new_content(), save_request("b", remove=["a"]))
        writer.save(folder, new_content(), save_request("c"))
    assert sorted(storage_of(root).manifests()) == ["a", "b", "c"]
    assert caplog.text.count("checkpoint a could not be removed: OSError") == 1
    writer.save(folder, new_content(), save_request("d"))
    assert sorted(storage_of(root).manifests()) == ["b", "c", "d"]


class Stops(Exception):
    pass


def test_what_is_cut_short_is_not_there_and_swept(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = storage_of(root)
    save(where.path("step=1"))
    writer, folder = new_writer(), new_folder(root)

    def stop(*_: Any, **__: Any) -> None:
        raise Stops

    draft = where.begin("step=2")
    draft.abandon()
    for verb in ("send", "seal"):
        with monkeypatch.context() as patch:
            patch.setattr(type(draft), verb, stop)
            patch.setattr(type(draft), "abandon", lambda *_: None)  # as after a kill
            with pytest.raises(Stops):
                writer.save(folder, new_content(), save_request("step=2"))
        assert list(storage_of(root).manifests()) == ["step=1"]
    assert [why.is_leftover for why in storage_of(root).incomplete().values()] == [True]
    storage_of(root).sweep()  # young: far away it may be another job's
    writer.save(folder, new_content(), save_request("step=2"))
    assert list(storage_of(root).manifests()) == ["step=1", "step=2"]


@pytest.mark.parametrize(("limit", "file"), [(-1, "state/rank=00000.json"), (4 << 20, "rank=00000.safetensors")])
def test_old_remains_far_away_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, file: str) -> None:
    monkeypatch.setattr("engine.checkpoint.manifest.JOINED_BYTES", limit)
    for url in (f"file://{tmp_path}/far", f"memory://{uuid.uuid4().hex}/far"):
        where = storage_of(url)
        for name in ("step=1", "step=2"):
            save(where.path(name))
        files, inside = fsspec.core.url_to_fs(url)
        files.rm_file(f"{inside}/step=2/manifest.json")
        where.sweep()
        assert files.exists(f"{inside}/step=2/{file}")
        with monkeypatch.context() as patch:
            patch.setattr("engine.checkpoint.remote_storage.OLD", timedelta(seconds=-5))
            where.sweep()
        assert not files.exists(f"{inside}/step=2")
        assert list(where.manifests()) == ["step=1"]


def test_a_place_of_others_is_left_alone(root: str) -> None:
    files, inside = fsspec.core.url_to_fs(root)
    files.makedirs(f"{inside}/data")
    files.pipe_file(f"{inside}/data/mine.txt", b"mine")
    with pytest.raises(FileExistsError, match="not a checkpoint"):
        save(storage_of(root).path("data"))
    storage_of(root).sweep()
    assert files.cat_file(f"{inside}/data/mine.txt") == b"mine"


def remote_damage(where: Storage, name: str, change: Any) -> None:
    files, inside = fsspec.core.url_to_fs(str(where.path(name)))
    path = f"{inside}/model/rank=00000.safetensors"
    files.pipe_file(path, change(files.cat_file(path)))


@pytest.mark.usefixtures("checkpoints_in_folders")
def test_damage_far_away(root: str) -> None:
    where = storage_of(root)
    save(where.path("step=1"))
    remote_damage(where, "step=1", lambda found: found[:-1] + bytes([found[-1] ^ 1]))
    with (
        pytest.raises(DamagedCheckpoint, match="not what was written"),
        opening(group_of_one(), where, str(where.path("step=1"))),
    ):
        pass  # pragma: no cover
    remote_damage(where, "step=1", lambda found: found[:-1])
    assert storage_of(root).manifests() == {}
    (why,) = storage_of(root).incomplete().values()
    assert not why.is_leftover
    assert why.reason.startswith("model/rank=00000.safetensors has ")


@pytest.mark.parametrize("root", ["memory"], indirect=True)
def test_a_place_that_cannot_be_looked_into_is_not_full_of_checkpoints(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A save looks for a name that is free: there must be one, or the training stands still.
    assert not storage_of(tmp_path).must_stay("x" * 300)
    save(f"{root}/one", 1.0)
    where: Any = storage_of(root)

    def fails(*arguments: Any, **options: Any) -> Any:
        raise PermissionError("Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(where.files, "cat_file", fails)
        assert where.must_stay("one")  # it is there, whatever it is
        assert not where.must_stay("another")
        patch.setattr(where.files, "ls", fails)
        assert not where.must_stay("one")
    assert not where.must_stay("one")


@pytest.mark.usefixtures("checkpoints_in_folders")
def test_names_that_lead_out_of_the_copy() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    save(f"{url}/step=1")
    files, inside = fsspec.core.url_to_fs(f"{url}/step=1/manifest.json")
    manifest = json.loads(files.cat_file(inside))
    manifest["files"]["../../evil"] = manifest["files"].pop("state/shared.json")
    files.pipe_file(inside, json.dumps(resummed(manifest)).encode())
    with pytest.raises(DamagedCheckpoint, match="leads out"):
        storage_of(url).fetch("step=1")


def test_a_run_with_its_checkpoints_elsewhere(root: str, tmp_path: Path) -> None:
    one = Linear()
    result = linear_fit(tmp_path / "run", ModelCheckpoint(dirpath=root, save_top_k=2), max_epochs=2).run(
        one, LINEAR_BATCHES
    )
    assert str(result.last_checkpoint) == str(storage_of(root).path("step=00000008"))
    assert list(storage_of(root).manifests()) == ["step=00000004", "step=00000008"]
    two = Linear()
    result = linear_fit(tmp_path / "run", ModelCheckpoint(dirpath=root), max_epochs=2).run(
        two, LINEAR_BATCHES, resume="last"
    )
    assert result.step == 8
    assert torch.equal(one.net.weight, two.net.weight)


def test_two_places_for_one_run(tmp_path: Path) -> None:
    linear_fit(
        tmp_path, ModelCheckpoint(dirpath=tmp_path / "a"), ModelCheckpoint("1 steps", dirpath=tmp_path / "b")
    ).run(Linear(), LINEAR_BATCHES)
    for name in ("a", "b"):
        assert list(storage_of(tmp_path / name).manifests()) == ["step=00000012"]


RANKS = """
import sys
sys.path.insert(0, sys.argv[1])
from support.toys import LINEAR_BATCHES, Linear, linear_fit
from callbacks import ModelCheckpoint
root, url = sys.argv[2:]
for epochs in (1, 2):
    linear_fit(root, ModelCheckpoint(dirpath=url), devices=2, max_epochs=epochs).run(Linear(), LINEAR_BATCHES, resume="auto")
"""


def test_two_ranks_send_their_files(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/far"
    run_ranks(RANKS, 2, Path(__file__).parents[1], tmp_path / "run", url, timeout=300)
    manifests = storage_of(url).manifests()
    assert [manifest["counters"]["step"] for manifest in manifests.values()] == [
        2,
        4,
    ]  # the one that was resumed from stays
    assert {"state/rank=00000.json", "state/rank=00001.json"} <= manifests["step=00000004"]["files"].keys()
