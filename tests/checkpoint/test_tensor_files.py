"""Our files and those of ``torch.distributed.checkpoint``'s Hugging Face storage are the same kind."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.checkpoints import record_of
from support.ranks import run_script
from torch import nn

from engine.checkpoint.files import BLOCK, DamagedCheckpoint, blocks, fill
from engine.checkpoint.tensor_files import FORMATS, TensorFiles, _coverage_error, write_tensors


def every_format() -> dict[str, torch.Tensor]:
    found = {}
    for name in FORMATS:
        dtype = getattr(torch, name)
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
    theirs = TensorFiles(tmp_path / "theirs").whole_tensors()
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
    assert TensorFiles(tmp_path).whole_tensors()["w"].tolist() == [1, 1]


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
        assert torch.equal(TensorFiles(tmp_path).whole_tensors()["a"], whole)


def test_small_tensors_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, scalars, views, conjugates and tensors without elements among them; large ones and types that NumPy lacks stay apart."""
    numbers = torch.arange(24.0)
    tensors = {
        **{f"w{i}": nn.Parameter(numbers[i : i + 3].clone()) for i in range(20)},
        "transposed": numbers.reshape(4, 6).T,
        "every second": numbers[::2],
        "scalar": torch.tensor(7.0),
        "empty": torch.zeros(0, 3),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "minus": torch.tensor([1 + 2j]).conj().imag,
        "half": torch.ones(3, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "large": torch.full((5000,), 3.0),
    }
    writes = 0
    write = os.write

    def counted(descriptor: int, content: Any) -> int:
        nonlocal writes
        writes += 1
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", counted)
    write_tensors(tmp_path / "a.safetensors", tensors)
    assert writes <= 7
    saved = TensorFiles(tmp_path).whole_tensors()
    assert saved.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert saved[name].dtype == tensor.dtype
        assert torch.equal(saved[name], tensor.detach()), name


def test_many_parts_are_compared_quickly(tmp_path: Path) -> None:
    """Those of 40,000 ranks in an order of their own; each is compared with those that lie beside it."""
    cut = [((row, column), (1, 2)) for column in (0, 2) for row in range(20_000)]
    assert _coverage_error((20_000, 4), cut) == ""
    assert _coverage_error((20_000, 4), [*cut[:-1], ((7, 1), (1, 2))]) == "overlap, and others are missing"


REPLACED = """
import os, sys
from pathlib import Path
import torch
from engine.checkpoint.files import DamagedCheckpoint
from engine.checkpoint.tensor_files import TensorFiles, write_tensors

path, how = Path(sys.argv[1], "a.safetensors"), sys.argv[2]
write_tensors(path, {"w": torch.ones(1 << 20)})
files = TensorFiles(path.parent)
if how == "shorter":
    os.truncate(path, 1 << 20)
else:
    other = path.with_name("other")
    if how == "pipe":
        os.mkfifo(other)
    elif how == "link":
        os.mkfifo(path.with_name("pipe"))
        other.symlink_to("pipe")
    elif how == "directory":
        path.unlink()
        other.mkdir()
    else:
        write_tensors(other, {"w": torch.zeros(1 << 20)})
    other.rename(path)
try:
    files.whole_tensors()
except DamagedCheckpoint as error:
    report(str(error))
"""


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("pipe", "is not a file"),
        ("link", "is not a file"),
        ("directory", "is not a file"),
        ("shorter", "was replaced or changed while it was read"),
        ("other", "was replaced or changed while it was read"),
    ],
)
def test_a_file_that_is_replaced_after_its_header_was_read(tmp_path: Path, how: str, text: str) -> None:
    found = run_script(REPLACED, tmp_path, how, timeout=60, forked=True).value
    assert found == f"{tmp_path}/a.safetensors {text}"


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345678")
    with path.open("rb") as file:
        memory = bytearray(4)
        fill(path, file.fileno(), memoryview(memory), 4)
        assert memory == b"5678"
        with pytest.raises(DamagedCheckpoint, match="has become shorter while it was read"):
            fill(path, file.fileno(), memoryview(memory), 6)


W = '"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{" + W[:-1],
        W.join("{}").replace("F32", "F3"),
        W.join("{}").replace("[2]", "[3]"),
        W.join("{}").replace("[2]", "[2.0]"),
        W.join("{}").replace("[2]", "[-1,-2]"),
        W.join("{}").replace("[2]", "2"),
        W.join("{}").replace("[0,8]", "[8,16]"),
        W.join("{}").replace("[0,8]", "[-4,4]"),
        W.join("{}").replace('"shape":[2],', ""),
        "{" + W + ',"v":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        "{" + W + ',"v":{"dtype":"F32","shape":[0,9223372036854775808],"data_offsets":[8,8]}}',
        "{" + W + ',"v":{"dtype":"F32","shape":[0,4611686018427387904,4],"data_offsets":[8,8]}}',
        '{"__metadata__":{"DCP_SHARDING_INFO":"{}"},' + W + "}",
        '{"__metadata__":{"DCP_SHARDING_INFO":"{\\"w\\":{\\"saved_offsets\\":[1]}}"},' + W + "}",
        '{"__metadata__":{"DCP_SHARDING_INFO":"{\\"w\\":{\\"saved_offsets\\":[0,0]}}"},' + W + "}",
        '{"__metadata__":7,' + W + "}",
        '{"w@complex128":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}}',
        "[" * 100_000,
    ],
)
def test_headers_that_are_wrong(tmp_path: Path, text: str) -> None:
    content = text.encode()
    (tmp_path / "a.safetensors").write_bytes(len(content).to_bytes(8, "little") + content + bytes(8))
    with pytest.raises(DamagedCheckpoint):
        TensorFiles(tmp_path)


def test_boxes_of_shards(tmp_path: Path) -> None:
    """Rows, columns and blocks that lie across the shards, in other dtypes and memory orders."""
    whole = torch.arange(7 * 5 * 3, dtype=torch.float32).reshape(7, 5, 3)
    cuts = [((0, 0, 0), (3, 5, 3)), ((3, 0, 0), (4, 2, 3)), ((3, 2, 0), (4, 3, 1)), ((3, 2, 1), (4, 3, 2))]
    for rank, (begin, size) in enumerate(cuts):
        part = whole[tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))]
        write_tensors(tmp_path / f"rank={rank}.safetensors", {"a": part}, {"a": begin})
    files = TensorFiles(tmp_path)
    assert files.parts() == {"a": 4}
    for low in range(7):
        for high in range(low, 8):
            assert torch.equal(files.rows("a", low, high), whole[low:high])
    turned = torch.zeros(3, 5, 7, dtype=torch.float64).permute(2, 1, 0)
    files.read_into({"a": turned})
    assert torch.equal(turned, whole.double())


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_rows_are_converted_a_few_at_a_time(tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.checkpoint.tensor_files.CHUNK", rows * 12)
    whole = torch.arange(21.0).reshape(7, 3)
    write_tensors(tmp_path / "a.safetensors", {"a": whole})
    target = torch.zeros(7, 3, dtype=torch.int64)
    TensorFiles(tmp_path).read_into({"a": target})
    assert torch.equal(target, whole.long())
