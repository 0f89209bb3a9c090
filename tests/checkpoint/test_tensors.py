"""Our files and those of ``torch.distributed.checkpoint``'s Hugging Face storage are the same kind."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from saved import record_of

from engine.checkpoint.files import BLOCK, DamagedCheckpoint, blocks
from engine.checkpoint.tensors import FORMATS, TensorFiles, _untiled, write_tensors


def every_format() -> dict[str, torch.Tensor]:
    found = {}
    for dtype in FORMATS:
        base = torch.arange(6).reshape(2, 3)
        found[str(dtype)] = (
            base.to(dtype) if dtype.itemsize > 1 or not dtype.is_floating_point else base.float().to(dtype)
        )
    return found


def test_safetensors_reads_every_format(tmp_path: Path) -> None:
    tensors = every_format() | {
        "scalar": torch.tensor(2.5),
        "empty": torch.ones(0, 3),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
    }
    write_tensors(tmp_path / "a.safetensors", tensors)
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        # As bytes: not every format can be compared.
        one, other = (each.contiguous().reshape(-1).view(torch.uint8) for each in (found[name], tensor))
        assert torch.equal(one, other)


def test_elements_are_aligned(tmp_path: Path) -> None:
    """Each tensor begins at a multiple of its element's size, as maps of the file into memory need it."""
    write_tensors(
        tmp_path / "a.safetensors",
        {"b": torch.ones(3, dtype=torch.bool), "h": torch.ones(1).half(), "d": torch.ones(1).double()},
    )
    header = int.from_bytes((tmp_path / "a.safetensors").read_bytes()[:8], "little")
    assert header % 8 == 0
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert list(file.offset_keys()) == ["d", "h", "b"]


def test_what_torch_writes_we_read_and_back(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(4, 5), "step": torch.tensor(3.0), "n": torch.arange(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            dict(tensors),
            storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / "theirs"), save_distributed=True),
            no_dist=True,
        )
    theirs = TensorFiles(tmp_path / "theirs").whole()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in tensors.items())
    (tmp_path / "ours").mkdir()
    halves = {0: {"a": tensors["a"][:2], "n": tensors["n"]}, 1: {"a": tensors["a"][2:], "step": tensors["step"]}}
    for rank, own in halves.items():
        offsets = {name: (2 * rank, 0) if name == "a" else (0,) * tensor.ndim for name, tensor in own.items()}
        write_tensors(tmp_path / "ours" / f"rank={rank}.safetensors", own, offsets)
    found = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "ours")), no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_plain_file_is_read(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert TensorFiles(tmp_path).whole()["w"].tolist() == [1, 1]


def test_wrong_names_and_shapes(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", {"w": torch.ones(2)})
    files = TensorFiles(tmp_path)
    with pytest.raises(ValueError, match="no tensor 'v'"):
        files.read_into({"v": torch.ones(2)})
    with pytest.raises(ValueError, match=r"'w' has shape \[2\], and \[3\] was requested"):
        files.read_into({"w": torch.ones(3)})
    other = torch.zeros(2, dtype=torch.bfloat16)
    files.read_into({"w": other})  # another format is converted
    assert other.tolist() == [1, 1]


def test_blocks_have_their_own_checksums(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    written = write_tensors(path, {"w": torch.arange((BLOCK + 4096) // 4, dtype=torch.int32)})
    assert len(written["crc32"]) == 2
    assert blocks({"a": written}, ["a"]) == [("a", 0), ("a", 1)]
    assert record_of(path) == written


@pytest.mark.parametrize(
    ("parts", "wrong"),
    [
        ([((0, 0), (2, 4)), ((2, 0), (4, 4))], ""),
        ([((0, 0), (6, 1)), ((0, 1), (3, 3)), ((3, 1), (3, 3))], ""),
        ([((0, 0), (2, 4)), ((4, 0), (2, 4))], "are missing"),
        (
            [((0, 0), (2, 4)), ((1, 0), (2, 4)), ((4, 0), (2, 4))],
            "overlap, and others are missing",
        ),  # row 1 twice, row 3 never
        ([((0, 0), (6, 2)), ((0, 1), (6, 1)), ((0, 3), (6, 1))], "overlap, and others are missing"),
        ([((0, 0), (2, 4)), ((0, 0), (2, 4)), ((4, 0), (2, 4))], "overlap, and others are missing"),
        ([((0, 0), (2, 4)), ((2, 0), (2, 5)), ((4, 0), (2, 4))], "are missing"),
        ([((0, 0), (2, 4)), ((-1, 0), (3, 4)), ((4, 0), (1, 4)), ((5, 0), (1, 4))], ""),
    ],
)
def test_parts_fill_a_tensor_once(
    tmp_path: Path, parts: list[tuple[tuple[int, ...], tuple[int, ...]]], wrong: str
) -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    for rank, (begin, shape) in enumerate(parts):
        part = whole[max(begin[0], 0) : begin[0] + shape[0], begin[1] : begin[1] + shape[1]]
        part = part if part.shape == shape else torch.zeros(shape)
        write_tensors(tmp_path / f"rank={rank}.safetensors", {"a": part}, {"a": begin})
    if min(min(begin) for begin, _ in parts) < 0:
        wrong = "."
    if wrong:
        with pytest.raises(DamagedCheckpoint, match=wrong):
            TensorFiles(tmp_path)
    else:
        assert torch.equal(TensorFiles(tmp_path).whole()["a"], whole)


def test_many_parts_are_compared_quickly(tmp_path: Path) -> None:
    """Those of 40,000 ranks in an order of their own; each is compared with those that lie beside it."""
    cut = [((row, column), (1, 2)) for column in (0, 2) for row in range(20_000)]
    assert _untiled((20_000, 4), cut) == ""
    assert _untiled((20_000, 4), [*cut[:-1], ((7, 1), (1, 2))]) == "overlap, and others are missing"
