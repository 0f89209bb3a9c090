"""Files that a module publishes with its weights: written as they were given, and never outside of the folder or as code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import save

from engine.checkpoint.export import export_checkpoint
from engine.checkpoint.files import DamagedCheckpoint
from engine.checkpoint.published import published

FILES = {
    "config.json": b'{"dtype": "float32"}',
    "spiece.model": bytes(range(256)),
    "chat_template.jinja": "{{ ä }}".encode(),
}


def saved(folder: Path, entry: Any, **more: Any) -> Path:
    return Path(save(folder / "step", shared={"user": {"published": entry}, "registered": []}, **more))


def test_files_are_written_beside_the_weights(tmp_path: Path) -> None:
    done = export_checkpoint(saved(tmp_path, published(FILES, prefix="body.")), tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.name in FILES} == FILES
    assert [Path(each).name for each in done.published] == list(FILES)
    assert [Path(each).name for each in done.files] == ["model.safetensors"]
    with pytest.raises(FileExistsError, match=r"model\.safetensors"):
        export_checkpoint(tmp_path / "step", tmp_path / "out")


def test_the_configuration_names_the_dtype_of_the_tensors(tmp_path: Path) -> None:
    export_checkpoint(saved(tmp_path, published(FILES)), tmp_path / "out", dtype="bf16")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"dtype": "bfloat16"}


def test_an_object_that_an_engine_registered(tmp_path: Path) -> None:
    path = save(tmp_path / "step", shared={"registered": [{"other": 1}, published(FILES)]})
    export_checkpoint(path, tmp_path / "out")
    assert (tmp_path / "out" / "spiece.model").exists()


def test_only_the_names_that_are_published_are_exported(tmp_path: Path) -> None:
    entry = published({}, stem="adapter_model", names={"body.bias": "bias"})
    done = export_checkpoint(saved(tmp_path, entry), tmp_path / "out", max_shard_size=1)
    assert [Path(each).name for each in done.files] == ["adapter_model.safetensors"]
    assert done.tensors == 1
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="has no 'lost'"):
        export_checkpoint(saved(tmp_path / "other", published({}, names={"lost": "lost"})), tmp_path / "b")


@pytest.mark.parametrize(
    "name", ["modeling.py", "../x.json", ".x.json", "a/b.json", "model.safetensors.index.json", "x", "model.bin"]
)
def test_no_other_file_is_published(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be published"):
        published({name: b"x"})
    entry = published({"x.json": b"x"})
    entry["files"] = {name: entry["files"]["x.json"]}
    with pytest.raises(DamagedCheckpoint, match="published"):
        export_checkpoint(saved(tmp_path, entry), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change",
    [{"stem": "../x"}, {"stem": 1}, {"names": {"body.bias": 1}}, {"files": {"x.json": "text"}}, {"files": {"x.json": torch.zeros(2)}}],
)  # fmt: skip
def test_an_entry_of_another_form_is_damage(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpoint):
        export_checkpoint(saved(tmp_path, published({"x.json": b"x"}) | change), tmp_path / "out")


@pytest.mark.parametrize("text", [b"[]", b"null", b"3", b"", b"[" * 100_000, b"\xff", b'"a"', b'{"a": NaN}'])
def test_a_configuration_that_is_none_is_damage(text: bytes, tmp_path: Path) -> None:
    path = saved(
        tmp_path,
        published({"config.json": text})
        if text
        else {**published(FILES), "files": {"config.json": torch.zeros(0, dtype=torch.uint8)}},
    )
    with pytest.raises(DamagedCheckpoint, match=r"the published config\.json"):
        export_checkpoint(path, tmp_path / "out", dtype="bf16")


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError, match=r"config\.json"):
        export_checkpoint(saved(tmp_path, published(FILES)), tmp_path / "out")
    assert not (tmp_path / "elsewhere").exists()
