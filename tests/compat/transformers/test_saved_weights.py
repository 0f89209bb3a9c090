"""Other libraries' safetensors files: what names a file outside of its folder, or is no such file, is an error that says so."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine import Single
from engine.checkpoint.files import DamagedCheckpoint
from engine.compat.transformers.saved_weights import SavedWeights

NAMES: list[Any] = ["../a.safetensors", "/etc/passwd", "", ".", "..", "a\0b", "\x1b[2J", 3, None, ["a.safetensors"]]
TEXTS = [
    "[]",
    "{}",
    '{"weight_map": []}',
    "[" * 100_000,
    "\ufeff{}",
    "",
    *(json.dumps({"weight_map": {"a": name}}) for name in NAMES),
]


@pytest.mark.parametrize("text", TEXTS)
def test_an_index_that_is_none(text: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    with pytest.raises(DamagedCheckpoint, match=r"index\.json") as caught:
        SavedWeights(folder)
    assert str(caught.value).isprintable()


def test_only_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a.safetensors"}}')
    with pytest.raises(DamagedCheckpoint, match="safetensors"):
        SavedWeights(tmp_path)


def test_the_files_of_an_index_are_read(tmp_path: Path) -> None:
    for name in "ab":
        save_file({name: torch.full((2,), float(ord(name)))}, tmp_path / f"{name}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}'
    )
    targets = {"a": torch.zeros(2), "b": torch.zeros(2)}
    SavedWeights(tmp_path).read_into(targets, Single())
    assert {name: value.tolist() for name, value in targets.items()} == {"a": [97.0, 97.0], "b": [98.0, 98.0]}
