"""Saving, loading, resuming and exporting work where ``pickle.load``, ``pickle.loads`` and ``torch.load`` raise; hostile directories are refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.checkpoints import read, resummed, save
from support.internals import checkpoint_source, open_checkpoint
from support.ranks import run_ranks, run_script

from engine.checkpoint.files import DamagedCheckpoint

SCRIPT = """
import os, pickle, sys
from pathlib import Path
import torch

def refused(*arguments, **options):
    raise AssertionError("a pickle was read")

pickle.load = pickle.loads = torch.load = pickle._loads = pickle._load = refused
sys.path.insert(0, sys.argv[1])
from job import Net, train
from engine import Engine
from torch.utils.data import DataLoader, TensorDataset

root, strategy = Path(sys.argv[2]), sys.argv[3]
rank = os.environ.get("RANK", "0")
for epochs in (1, 2):
    train(root / "fit", root / f"diary{rank}", strategy=strategy, dropout=0.0, workers=0, max_epochs=epochs)
Net.load_from_checkpoint(max((root / "fit" / "checkpoints").iterdir()))

def objects():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    engine = Engine(strategy=strategy, accelerator="cpu")
    data = TensorDataset(torch.randn(8, 2))
    return engine, *engine.prepare(model, optimizer, DataLoader(data, batch_size=2), torch.optim.lr_scheduler.StepLR(optimizer, 1))

engine, model, optimizer, loader, scheduler = objects()
for (x,) in loader:
    engine.backward(model(x).square().mean())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
engine.save_state(root / "state")
engine.save_model(model, root / "model")
engine, model, optimizer, loader, scheduler = objects()
engine.load_state(root / "state")
assert scheduler.last_epoch > 0
"""


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_no_pickle_is_read(tmp_path: Path, strategy: str, ranks: int) -> None:
    args = (Path(__file__).parent, tmp_path, strategy)
    if ranks == 1:
        run_script(SCRIPT, *args, timeout=300, forked=True)
    else:
        run_ranks(SCRIPT, ranks, *args, timeout=300)
    suffixes = {path.suffix for path in (tmp_path / "fit").rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors"}
    for path in tmp_path.rglob("*.safetensors"):
        load_file(path)


class Evil:
    """Unpickling it would write a file."""

    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def swapped(path: Path, name: str, content: bytes) -> None:
    """Another content under a name of the manifest, with checksums that fit: what an attacker would do."""
    (path / name).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "crc32": [f"{zlib.crc32(content):08x}"]}
    write_manifest(path, manifest)


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    (path / "manifest.json").write_text(json.dumps(resummed(manifest)))


def safetensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


WEIGHTS, OPTIM = "model/rank=00000.safetensors", "optim/optim.json"
HUGE = {"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
SHARDED = {"format": "pt", "DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [1 << 50]}})}
LINKED = {"aliases": {"head.weight": "not there"}, "extra": {}}


@pytest.mark.usefixtures("checkpoints_in_folders")
@pytest.mark.parametrize(
    ("name", "content"),
    [
        (WEIGHTS, pickle.dumps(Evil())),
        (WEIGHTS, b""),
        (WEIGHTS, struct.pack("<Q", 1 << 62) + b"{}"),
        (WEIGHTS, safetensors(HUGE, b"\0" * 16)),
        (WEIGHTS, safetensors({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"\0" * 4)),
        (WEIGHTS, safetensors({"w": {"dtype": "F32", "shape": [4], "data_offsets": [8, 4]}}, b"\0" * 4)),
        (
            WEIGHTS,
            safetensors(
                {"__metadata__": SHARDED, "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4
            ),
        ),
        (
            WEIGHTS,
            safetensors(
                {
                    "__metadata__": {"DCP_SHARDING_INFO": "[]"},
                    "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                },
                b"\0" * 4,
            ),
        ),
        (WEIGHTS, safetensors(b"{" * 1000)),
        ("model/model.json", json.dumps(LINKED).encode()),
        ("model/model.json", b"[]"),
        (OPTIM, b"NaN"),
        (OPTIM, b'{"0": NaN}'),
        (OPTIM, pickle.dumps(Evil())),
        (OPTIM, b'{"0": {"$": "object", "class": "os.system"}}'),
        (OPTIM, b'{"0": {"$": "tensor", "name": "../../secret"}}'),
        (OPTIM, b"[" * 100_000),
        ("state/shared.json", b'{"$": "eval"}'),
    ],
)
def test_hostile_content_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "step=1")
    swapped(path, name, content)
    with pytest.raises(DamagedCheckpoint, match="step=1"):
        read(path)
    assert not (tmp_path / "ran").exists()


JOINED = "rank=00000.safetensors"


def reheaded(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    """Another header before the same data."""

    def changed(content: bytes) -> bytes:
        size = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + size])
        change(header)
        return safetensors(header, content[8 + size :])

    return changed


def entry(**values: Any) -> Callable[[bytes], bytes]:
    return reheaded(lambda header: header["model/head.weight"].update(values))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content[:8],
        lambda content: b"",
        lambda content: content + b"more",
        lambda content: pickle.dumps(Evil()),
        lambda content: struct.pack("<Q", 1 << 62) + content[8:],
        entry(data_offsets=[0, 1 << 42], shape=[1 << 40]),
        entry(shape=[1 << 40]),
        entry(shape=[1 << 62, 1 << 62]),
        entry(shape=[0, 1 << 62], data_offsets=[0, 0]),
        entry(data_offsets=[1 << 40, (1 << 40) + 24]),
        entry(data_offsets=[-24, 0]),
        entry(dtype="PICKLE"),
        reheaded(lambda header: header.update({"model/head.weight": header["model/body.bias"]})),
        reheaded(lambda header: header.update({"model/another": header["model/head.weight"]})),
        reheaded(lambda header: header.pop("model/head.weight")),
        reheaded(lambda header: header.update(__metadata__={"DCP_SHARDING_INFO": '{"model/head.weight": 1}'})),
    ],
)
def test_hostile_tensors_of_a_joined_checkpoint_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[bytes], bytes]
) -> None:
    """Offsets that are wrong, overlap or lead out of the file, and sizes that nothing holds: before memory is taken for them."""
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "step=1")
    swapped(path, JOINED, change((path / JOINED).read_bytes()))
    with pytest.raises(DamagedCheckpoint, match="step=1"):
        read(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "trees",
    [
        None,
        [],
        {},
        "model/model",
        {"../secret": {}},
        {"model/model": LINKED},
        {"model/model": []},
        {"optim/optim": {"0": {"$": "object", "class": "os.system"}}},
        {"optim/optim": {"0": {"$": "tensor", "name": "../../secret"}}},
        {"optim/optim": {"0": {"$": "bytes", "base64": 7}}},
        {"optim/optim": 7},
        {"state/shared": {"$": "eval"}},
        {"state/shared": {"$": "set", "items": [[1]]}},
    ],
)
def test_hostile_trees_of_a_joined_checkpoint_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trees: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "step=1")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["$trees"] = {**manifest["$trees"], **trees} if isinstance(trees, dict) and trees else trees
    write_manifest(path, manifest)
    with pytest.raises(DamagedCheckpoint, match="step=1"):
        read(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "model/rank=00000.safetensors", "other"])
def test_a_joined_checkpoint_has_one_file(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "step=1")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = manifest["files"][JOINED]
    write_manifest(path, manifest)
    with pytest.raises(DamagedCheckpoint, match="names the file"):
        read(path)


def renamed(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"][name] = manifest["files"].pop(WEIGHTS)
        (path.parent / "secret.safetensors").write_bytes((path / WEIGHTS).read_bytes())
        write_manifest(path, manifest)

    return change


def extra_file(path: Path) -> None:
    shutil.copy(path / WEIGHTS, path / "model" / "rank=00001.safetensors")


def pickle_beside(path: Path) -> None:
    (path / "model" / ".metadata").write_bytes(pickle.dumps(Evil()))


@pytest.mark.usefixtures("checkpoints_in_folders")
@pytest.mark.parametrize(
    "change",
    [renamed("../secret.safetensors"), renamed("model/../../secret.safetensors"), renamed("/etc/passwd"), extra_file],
)
def test_hostile_names_are_refused(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = save(tmp_path / "step=1")
    change(path)
    with pytest.raises(DamagedCheckpoint):
        read(path)


@pytest.mark.usefixtures("checkpoints_in_folders")
def test_a_pickle_beside_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "step=1")
    pickle_beside(path)
    assert read(path).model["body.bias"].tolist() == [0.0, 0.0]
    assert not (tmp_path / "ran").exists()


@pytest.mark.usefixtures("checkpoints_in_folders")
def test_huge_shapes_take_no_memory(tmp_path: Path) -> None:
    """What a tensor claims to be is compared with what its file holds before memory is taken for it."""
    path = save(tmp_path / "step=1")
    swapped(
        path,
        WEIGHTS,
        safetensors({"__metadata__": SHARDED, "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4),
    )
    with open_checkpoint(path) as opened, pytest.raises(DamagedCheckpoint, match="parts of 'w' are missing"):
        checkpoint_source(opened)
