"""A checkpoint as one file: written by a run or packed, and read wherever a checkpoint's path is taken."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import Tied, train_and_save
from support.toys import fit

from engine import Callback, DamagedCheckpoint, Engine, TrainModule
from engine.checkpoint.one_file import is_one_file, pack_folder, unpack_folder
from engine.compat.foreign_checkpoints.conversion import convert


class Keeps(Callback):
    def __init__(self, where: Path, step: int) -> None:
        self.where, self.step = where, step

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if run.step == self.step:
            assert run.save_checkpoint_at(self.where, one_file=True) == self.where


def data() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(8, 6) for _ in range(4)]


def trained(root: Path, callbacks: list[Callback], **options: Any) -> TrainModule:
    torch.manual_seed(0)
    module = Tied()
    fit(root, max_epochs=2, callbacks=callbacks).run(module, data(), **options)
    return module


def test_a_run_goes_on_from_one_file_as_if_it_had_not_ended(tmp_path: Path) -> None:
    file = tmp_path / "moved" / "x.ckpt"
    whole = trained(tmp_path / "one", [Keeps(file, 5)])
    assert [path.name for path in file.parent.iterdir()] == ["x.ckpt"]
    again = trained(tmp_path / "two", [], resume=file)
    torch.testing.assert_close(dict(again.state_dict()), dict(whole.state_dict()), rtol=0, atol=0)
    loaded = Tied.load_from_checkpoint(file)
    engine = Engine(accelerator="cpu")
    prepared = engine.prepare_model(Tied())
    engine.prepare_data_loader(data())
    engine.prepare_optimizer(torch.optim.AdamW(prepared.parameters(), lr=0.1))
    assert engine.load_state(file)["counters"]["step"] == 5
    torch.testing.assert_close(dict(loaded.state_dict()), dict(prepared.state_dict()), rtol=0, atol=0)


def test_a_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only at a local path"):
        trained(tmp_path, [Keeps("memory://x.ckpt", 1)])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with its files in folders, and its archive."""
    root = tmp_path_factory.mktemp("packed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.checkpoint.manifest.JOINED_BYTES", -1)
        folder = train_and_save(root / "run", Tied())
    pack_folder(folder, root / "x.ckpt")
    return folder, root / "x.ckpt"


def again(file: Path, out: Path, method: int = zipfile.ZIP_STORED, **changed: Any) -> Path:
    """The archive, written by another program: with its folders, and ``changed`` files (``None``: left out)."""
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(out, "w", method) as target:
        target.writestr("model/", b"", zipfile.ZIP_STORED)
        content = {name: source.read(name) for name in source.namelist()}
        for name, data in {**content, **changed}.items():
            if data is not None:
                target.writestr(name, data)
    return out


def test_what_leads_out_of_the_folder_is_not_unpacked(packed: tuple[Path, Path], tmp_path: Path) -> None:
    again(packed[1], tmp_path / "x.ckpt", **{"../outside.json": "{}"})
    assert is_one_file(tmp_path / "x.ckpt")
    with pytest.raises(DamagedCheckpoint, match=r"outside.json is not in the manifest"):
        unpack_folder(tmp_path / "x.ckpt", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.ckpt"]


def test_an_archive_has_the_files_of_its_manifest_and_no_others(packed: tuple[Path, Path], tmp_path: Path) -> None:
    folder, file = packed
    (notes := folder / "notes.txt").write_text("mine")
    pack_folder(folder, tmp_path / "y.ckpt")
    notes.unlink()
    assert (tmp_path / "y.ckpt").read_bytes() == file.read_bytes()  # of one checkpoint it is always the same
    same = again(file, tmp_path / "z.ckpt")
    assert is_one_file(same)
    Tied.load_from_checkpoint(same)
    for changed, message in (
        ({"notes.txt": "x"}, "notes.txt is not in the manifest"),
        ({"model/model.json": None}, "model/model.json is missing"),
        ({"model/model.json": "{}"}, r"model/model.json has 2 bytes, and had \d+ when it was written"),
        ({"manifest.json": "{}"}, "manifest.json has no format version"),
    ):
        with pytest.raises(DamagedCheckpoint, match=message):
            Tied.load_from_checkpoint(again(file, tmp_path / "other.ckpt", **changed))


def test_what_is_compressed_or_encrypted_is_not_unpacked(packed: tuple[Path, Path], tmp_path: Path) -> None:
    _, file = packed
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with pytest.raises(DamagedCheckpoint, match=r"is compressed, .* pack it with fit checkpoint pack, or zip -0"):
            Tied.load_from_checkpoint(again(file, tmp_path / f"{method}.ckpt", method))
    content = bytearray(file.read_bytes())
    content[content.index(b"PK\1\2") + 8] |= 1  # the flag of the first entry of the central directory
    (tmp_path / "locked.ckpt").write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"manifest.json is encrypted"):
        Tied.load_from_checkpoint(tmp_path / "locked.ckpt")


def test_the_first_part_of_an_archive_is_a_damaged_checkpoint(packed: tuple[Path, Path], tmp_path: Path) -> None:
    content = packed[1].read_bytes()
    for size in (len(content) // 2, len(content) - 1, 60):
        (tmp_path / "cut.ckpt").write_bytes(content[:size])
        with pytest.raises(DamagedCheckpoint, match=r"cut.ckpt is a damaged archive: BadZipFile"):
            Tied.load_from_checkpoint(tmp_path / "cut.ckpt")


def test_pipes_and_devices_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero"), tmp_path, tmp_path / "nothing"):
        assert not is_one_file(path)
    with pytest.raises(DamagedCheckpoint, match="is not a file"):
        convert(tmp_path / "fifo", tmp_path / "out", trust_pickle=True)


def test_a_folder_with_a_link_out_of_it_is_not_packed(packed: tuple[Path, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(packed[0], tmp_path / "step=00000002"))
    (tmp_path / "secret").write_text("secret")
    os.mkfifo(folder / "fifo")  # is not in the manifest
    pack_folder(folder, tmp_path / "x.ckpt")
    for name in ("notes", "model/notes", "model/model.json"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tmp_path / "secret")
        with pytest.raises(DamagedCheckpoint, match=f"'{name}', which leads out of the checkpoint"):
            pack_folder(folder, tmp_path / "y.ckpt")
        (folder / name).unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "step=00000002", "x.ckpt"]
