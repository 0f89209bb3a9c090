"""``TokenFile``: the tokens of a file in rows or documents; files are complete or absent, and bad ones are errors.

Expected values are slices of NumPy arrays.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
from safetensors import safe_open
from torch.utils.data import DataLoader

from engine import Fit, Loss, Mixture, Packed, TokenFile, TrainModule

GENERATOR = numpy.random.default_rng(0)
LENGTHS = [5, 0, 31, 1, 12, 40, 7]
DOCUMENTS = [GENERATOR.integers(0, 50257, length) for length in LENGTHS]
FLAT = numpy.concatenate(DOCUMENTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tokens in each format, and halves in ``shards/``."""
    folder = tmp_path_factory.mktemp("tokens")
    assert TokenFile.write(folder / "t.safetensors", DOCUMENTS) == len(FLAT)
    FLAT.astype(numpy.uint16).tofile(folder / "t.bin")
    numpy.save(folder / "t.npy", FLAT)
    numpy.save(folder / "big.npy", FLAT.astype(">u4"))
    header = numpy.zeros(256, dtype=numpy.int32)
    header[:3] = 20240520, 1, len(FLAT)
    (folder / "llm.bin").write_bytes(header.tobytes() + FLAT.astype(numpy.uint16).tobytes())
    (folder / "shards").mkdir()
    TokenFile.write(folder / "shards" / "b.safetensors", DOCUMENTS[4:], dtype="uint32")
    TokenFile.write(folder / "shards" / "a.safetensors", iter(DOCUMENTS[:4]), dtype="uint32")
    return folder


def samples(dataset: Any) -> list[Any]:
    return [dataset[index] for index in range(len(dataset))]


def saved(path: Path, array: Any) -> Path:
    numpy.save(path, array)
    return path


FORMATS = {"t.safetensors": None, "t.bin": "uint16", "t.npy": None, "big.npy": None, "llm.bin": None}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("length", [1, 8, 96])
def test_rows_are_slices_of_the_tokens(name: str, length: int, folder: Path) -> None:
    rows = TokenFile(folder / name, length, dtype=FORMATS[name])
    assert (len(rows), rows.tokens, rows.tokens_per_sample) == (len(FLAT) // length, len(FLAT), length)
    assert rows.lengths.tolist() == [length] * len(rows)
    expected = [FLAT[i * length : (i + 1) * length].tolist() for i in range(len(rows))]
    for row, tokens in zip(rows.__getitems__(range(len(rows))), expected, strict=True):
        assert row["input_ids"].tolist() == tokens
        assert row["labels"].tolist() == [-100, *tokens[1:]]
        assert {values.dtype for values in row.values()} == {torch.int64}
    assert rows[-1]["input_ids"].tolist() == expected[-1]
    assert rows[0]["labels"].tolist() == [-100, *expected[0][1:]]
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_documents_and_their_lengths_are_known(folder: Path) -> None:
    documents = TokenFile(folder / "t.safetensors", 8).documents()
    assert documents.lengths.tolist() == LENGTHS
    assert [document["input_ids"].tolist() for document in samples(documents)] == [text.tolist() for text in DOCUMENTS]
    assert documents.tokens_per_sample is None


def test_a_folder_is_read_shard_by_shard(folder: Path) -> None:
    first, second = (numpy.concatenate(part) for part in (DOCUMENTS[:4], DOCUMENTS[4:]))
    expected = [part[i : i + 8].tolist() for part in (first, second) for i in range(0, len(part) - 7, 8)]
    rows = TokenFile(folder / "shards", 8)
    assert [row["input_ids"].tolist() for row in samples(rows)] == expected
    assert [row["input_ids"].tolist() for row in rows.__getitems__([-1, 2, 6])] == [expected[i] for i in (-1, 2, 6)]
    documents = TokenFile(str(folder / "shards"))
    assert documents.lengths.tolist() == LENGTHS
    assert [document["input_ids"].tolist() for document in samples(documents)] == [text.tolist() for text in DOCUMENTS]


def test_safetensors_itself_reads_the_file(folder: Path) -> None:
    with safe_open(folder / "t.safetensors", "np") as file:
        assert file.get_tensor("tokens").dtype == numpy.uint16
        assert file.get_tensor("tokens").tolist() == FLAT.tolist()
        assert file.get_tensor("ends").tolist() == numpy.cumsum(LENGTHS).tolist()


def test_packed_measures_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Packed([text.tolist() for text in DOCUMENTS], 48)
    documents = TokenFile(folder / "shards")
    monkeypatch.setattr(Packed, "_read", None)
    rows = Packed(documents, 48)
    monkeypatch.undo()
    assert (len(rows), rows.fill) == (2, len(FLAT) / 96)
    for row, other in zip(samples(rows), samples(expected), strict=True):
        assert {name: values.tolist() for name, values in row.items()} == {
            name: values.tolist() for name, values in other.items()
        }


def test_it_is_sent_as_the_place_of_its_files(folder: Path) -> None:
    for dataset in (TokenFile(folder / "shards", 8), TokenFile(folder / "shards")):
        sent = pickle.dumps(dataset)
        assert len(sent) < 1000
        assert pickle.loads(sent)[3]["input_ids"].tolist() == dataset[3]["input_ids"].tolist()


@pytest.mark.slow
def test_workers_that_are_spawned_read_it(folder: Path) -> None:
    rows = TokenFile(folder / "t.safetensors", 8)
    context = multiprocessing.get_context("spawn")
    batches = list(DataLoader(rows, 3, num_workers=2, multiprocessing_context=context))
    assert torch.cat([batch["input_ids"] for batch in batches]).flatten().tolist() == FLAT[:96].tolist()


class Rows(TrainModule):
    """Keeps the tokens that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Loss:
        self.seen += batch["input_ids"].tolist()
        counts = (batch["labels"] != -100).sum()
        return Loss(self.weight * counts, counts)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_mixture_of_files_trains(folder: Path) -> None:
    module = Rows()
    mixture = Mixture({"a": TokenFile(folder / "t.safetensors", 8), "b": TokenFile(folder / "shards", 8)})
    assert mixture.tokens_per_sample == 8
    Fit(accelerator="cpu", max_epochs=1, check=False).run(module, DataLoader(mixture, 4, shuffle=True))
    rows = [FLAT[i * 8 : i * 8 + 8].tolist() for i in range(12)]
    assert all(row in module.seen for row in rows)
    assert len(module.seen) == 23


# -- writing ---------------------------------------------------------------------------------------------------------------------------------


def test_any_sequences_are_documents(tmp_path: Path) -> None:
    documents: list[Any] = [[1, 2], (3,), torch.tensor([4, 5]), numpy.array([6], dtype=numpy.int8), {"input_ids": [7]}]
    assert TokenFile.write(tmp_path / "t.safetensors", documents, dtype="uint8") == 7
    read = TokenFile(tmp_path / "t.safetensors")
    assert [sample["input_ids"].tolist() for sample in samples(read)] == [[1, 2], [3], [4, 5], [6], [7]]
    assert read.shards[0].tokens.dtype == numpy.uint8


class Coder:
    """A tokenizer with ``encode``, as SentencePiece's."""

    def __init__(self, size: int) -> None:
        self.vocab_size = size

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


class Encoded:
    def __init__(self, text: str) -> None:
        self.ids = [ord(letter) for letter in text]


class Batched:
    """A tokenizer with ``encode_batch``, as Hugging Face's tokenizers."""

    name = "batched"

    def encode(self, text: str) -> Any:
        raise AssertionError("the call for many is used")

    def encode_batch(self, texts: list[str]) -> list[Encoded]:
        return list(map(Encoded, texts))


def as_dict(text: str) -> dict[str, list[int]]:
    return {"input_ids": [ord(letter) for letter in text]}


TOKENIZERS: dict[str, tuple[Any, str]] = {
    "a method": (Coder(200), "uint16"),
    "many tokens": (Coder(100_000), "uint32"),
    "many at once": (Batched(), "uint16"),
    "a function": (lambda text: numpy.array([ord(letter) for letter in text]), "uint16"),
    "a dict": (as_dict, "uint16"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_texts_are_written_with_a_tokenizer(case: str, tmp_path: Path) -> None:
    tokenizer, dtype = TOKENIZERS[case]
    texts = [f"text {number}" for number in range(300)]
    TokenFile.write(tmp_path / "t.safetensors", texts, tokenizer=tokenizer, end_token=3)
    documents = TokenFile(tmp_path / "t.safetensors")
    assert [sample["input_ids"].tolist() for sample in samples(documents)] == [[*map(ord, text), 3] for text in texts]
    assert documents.shards[0].tokens_region.dtype == dtype


def test_transformers_tokenizers_write_without_a_warning(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=2)
    for number, tokenizer in enumerate((words, fast)):
        TokenFile.write(tmp_path / f"{number}.safetensors", ["a b a b", "b c"], tokenizer=tokenizer)
        read = TokenFile(tmp_path / f"{number}.safetensors")
        assert [sample["input_ids"].tolist() for sample in samples(read)] == [[0, 1, 0, 1], [1, 2]]


def broken() -> Iterator[list[int]]:
    yield [1, 2]
    raise KeyboardInterrupt


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    with pytest.raises(KeyboardInterrupt):
        TokenFile.write(path, broken())
    assert list(tmp_path.iterdir()) == []
    TokenFile.write(path, [[1, 2]])
    with pytest.raises(ValueError, match="70000"):
        TokenFile.write(path, [[3], [70000]])
    assert TokenFile(path)[0]["input_ids"].tolist() == [1, 2]


def killed() -> Iterator[list[int]]:
    yield [1] * 10
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_writer_that_is_killed_leaves_no_file_that_could_be_read(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this process has threads, of which the child needs none
        child = os.fork()
    if not child:
        TokenFile.write(path, killed())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    with pytest.raises(FileNotFoundError, match=r"does not exist: t.safetensors.part is there, whose writer"):
        TokenFile(path, 4)
    TokenFile.write(tmp_path / "u.safetensors", [[1, 2]])
    with pytest.raises(ValueError, match=r"has t.safetensors.part: a shard is still being written, or its writer was"):
        TokenFile(tmp_path)
    TokenFile.write(path, [[1, 2]])
    assert len(TokenFile(tmp_path)) == 2


# -- bad files and arguments -----------------------------------------------------------------------------------------------------------------


def changed(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def with_header(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def whole(folder: Path) -> bytes:
    return (folder / "t.safetensors").read_bytes()


def shards(folder: Path, tmp: Path, name: str, content: Any) -> TokenFile:
    """A folder of a good shard and another one."""
    TokenFile.write(tmp / "a.safetensors", DOCUMENTS, tokenizer=None)
    content(tmp / name)
    return TokenFile(tmp)


BAD: dict[str, tuple[Any, str]] = {
    "truncated": (
        lambda f, t: TokenFile(changed(t, "t.safetensors", whole(f)[:-1]), 8),
        "bytes, and its header describes 4,344: it is truncated",
    ),
    "in the header": (
        lambda f, t: TokenFile(changed(t, "t.safetensors", whole(f)[:100]), 8),
        "is not a safetensors file, or is truncated: it has 100",
    ),
    "empty": (lambda f, t: TokenFile(changed(t, "t.safetensors", b""), 8), "truncated: it has 0 bytes"),
    "another format": (
        lambda f, t: TokenFile(changed(t, "t.safetensors", struct.pack("<Q", 90) + bytes(9000)), 8),
        "its header cannot be read",
    ),
    "a model": (
        lambda f, t: TokenFile(changed(t, "t.safetensors", with_header({"w": tensor("F32", [1], 0, 4)}, bytes(4))), 8),
        "the tensors w, and no 'tokens'",
    ),
    "floats": (
        lambda f, t: TokenFile(
            changed(t, "t.safetensors", with_header({"tokens": tensor("F32", [1], 0, 4)}, bytes(4))), 1
        ),
        "tokens of F32: tokens are whole",
    ),
    "two dimensions": (
        lambda f, t: TokenFile(
            changed(t, "t.safetensors", with_header({"tokens": tensor("U8", [2, 2], 0, 4)}, bytes(4))), 1
        ),
        "the shape \\[2, 2\\]",
    ),
    "other ends": (
        lambda f, t: TokenFile(
            changed(
                t,
                "t.safetensors",
                with_header({"tokens": tensor("U8", [4], 0, 4), "ends": tensor("I64", [1], 4, 12)}, bytes(12)),
            ),
            1,
        ),
        "damaged: its last document does not end with token 4",
    ),
    "falling ends": (
        lambda f, t: (
            TokenFile(
                changed(
                    t,
                    "t.safetensors",
                    with_header(
                        {"tokens": tensor("U8", [4], 0, 4), "ends": tensor("I64", [3], 4, 28)},
                        bytes(4) + numpy.array([3, 2, 4]).tobytes(),
                    ),
                )
            ).lengths
        ),
        "document 1 ends before it begins",
    ),
    "no file": (lambda f, t: TokenFile(t / "t.safetensors", 8), "t.safetensors does not exist$"),
    "no file in a folder": (lambda f, t: TokenFile(t, 8), "has no file of tokens \\(.safetensors, .npy, .bin\\)"),
    "raw of unknown dtype": (lambda f, t: TokenFile(f / "t.bin", 8), "no header that says .* dtype='uint16'"),
    "raw of another dtype": (
        lambda f, t: TokenFile(changed(t, "t.bin", bytes(7)), 1, dtype="uint16"),
        "7 bytes, which is not a whole number of uint16",
    ),
    "raw floats": (
        lambda f, t: TokenFile(f / "t.bin", 8, dtype="float16"),
        "tokens of float16: tokens are whole numbers",
    ),
    "raw with a short header": (
        lambda f, t: TokenFile(changed(t, "t.bin", (f / "llm.bin").read_bytes()[:-2]), 1),
        "its header describes 1,216: it is truncated",
    ),
    "raw documents": (
        lambda f, t: TokenFile(f / "t.bin", dtype="uint16"),
        "does not say where documents end: give length=",
    ),
    "an index beside": (
        lambda f, t: (changed(t, "t.idx", b""), TokenFile(changed(t, "t.bin", bytes(8)), 1, dtype="uint16")),
        "beside t.idx, as Megatron's",
    ),
    "negative": (
        lambda f, t: TokenFile(changed(t, "t.bin", numpy.array([1, -100, 2, 3]).tobytes()), 2, dtype="int64")[0],
        "the token -100: tokens are 0 or more",
    ),
    "an array of objects": (
        lambda f, t: TokenFile(saved(t / "t.npy", numpy.array([[1], [2, 3]], dtype=object)), 1),
        "not a .npy file with numbers",
    ),
    "an array of floats": (
        lambda f, t: TokenFile(saved(t / "t.npy", numpy.zeros(3)), 1),
        "tokens of float64",
    ),
    "an array of rows": (
        lambda f, t: TokenFile(saved(t / "t.npy", numpy.zeros((3, 2), int)), 1),
        "the shape \\[3, 2\\].*reshape\\(-1\\)",
    ),
    "a truncated array": (
        lambda f, t: TokenFile(changed(t, "t.npy", (f / "t.npy").read_bytes()[:-8]), 1),
        "is not a .npy file with numbers, or is truncated",
    ),
    "another dtype": (
        lambda f, t: TokenFile(f / "t.npy", 8, dtype="uint16"),
        "tokens of int64, and dtype='uint16' was asked for",
    ),
    "too short": (lambda f, t: TokenFile(f / "t.npy", 97), "has 96 tokens, fewer than one sample of length=97"),
    "length": (lambda f, t: TokenFile(f / "t.npy", 0), "length=0"),
    "no int": (lambda f, t: TokenFile(f / "t.npy", cast("int", 8.0)), "length=8.0"),
    "mixed dtypes": (
        lambda f, t: shards(f, t, "b.safetensors", lambda path: TokenFile.write(path, [[1]], dtype="uint32")),
        "a.safetensors and b.safetensors .* tokens of uint16, the other tokens of uint32",
    ),
    "mixed formats": (
        lambda f, t: shards(f, t, "b.npy", lambda path: saved(path, FLAT.astype(numpy.uint16))),
        "the ending .safetensors, the other the ending .npy",
    ),
    "mixed tokenizers": (
        lambda f, t: shards(f, t, "b.safetensors", lambda path: TokenFile.write(path, ["a"], tokenizer=Batched())),
        "one has no named tokenizer, the other the tokenizer 'batched'",
    ),
    "overflow": (
        lambda f, t: TokenFile.write(t / "t.safetensors", [[1], [2, 65536]]),
        "document 1 has the token 65536, and uint16 holds 65535 at most: give dtype='uint32'",
    ),
    "more than any": (
        lambda f, t: TokenFile.write(t / "t.safetensors", [[2**32]], dtype="uint32"),
        "no tokenizer has so many",
    ),
    "negative tokens": (
        lambda f, t: TokenFile.write(t / "t.safetensors", [[1, -1]]),
        "document 0 has the token -1: tokens are 0 or more",
    ),
    "float tokens": (
        lambda f, t: TokenFile.write(t / "t.safetensors", [[1], [0.5]]),
        "document 1 must be a sequence of whole numbers.*float64",
    ),
    "a flat list": (
        lambda f, t: TokenFile.write(t / "t.safetensors", [1, 2, 3]),
        "document 0 must be a sequence of whole numbers",
    ),
    "texts": (lambda f, t: TokenFile.write(t / "t.safetensors", ["words"]), "document 0 is a text: give tokenizer="),
    "labels": (
        lambda f, t: TokenFile.write(t / "t.safetensors", [{"input_ids": [1], "labels": [1]}]),
        "labels of its own",
    ),
    "nothing": (lambda f, t: TokenFile.write(t / "t.safetensors", [[], []]), "the documents have no token"),
    "another ending": (lambda f, t: TokenFile.write(t / "t.bin", [[1]]), "written as .safetensors: give t.safetensors"),
    "no folder": (lambda f, t: TokenFile.write(t / "no" / "t.safetensors", [[1]]), "there is no folder"),
    "signed": (
        lambda f, t: TokenFile.write(t / "t.safetensors", [[1]], dtype="int32"),
        "dtype='int32': tokens are written as 'uint8'",
    ),
    "a name as tokenizer": (
        lambda f, t: TokenFile.write(t / "t.safetensors", ["a"], tokenizer="gpt2"),
        "tokenizer='gpt2': give a tokenizer with encode",
    ),
    "rows as texts": (
        lambda f, t: TokenFile.write(t / "t.safetensors", [{"text": "a"}], tokenizer=as_dict),
        "text 0 is dict: tokenizer= needs texts",
    ),
    "an end without a tokenizer": (
        lambda f, t: TokenFile.write(t / "t.safetensors", [[1]], end_token=0),
        "end_token is added to texts",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_and_arguments_are_errors_that_say_what_to_do(case: str, folder: Path, tmp_path: Path) -> None:
    attempt, message = BAD[case]
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
        attempt(folder, tmp_path)
    assert not list(tmp_path.glob("*.part"))


def test_a_file_that_was_replaced_by_a_shorter_one_is_an_error_in_workers(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    TokenFile.write(path, [[1] * 5000])
    sent = pickle.dumps(TokenFile(path, 8))
    TokenFile.write(path, [[1] * 10])
    with pytest.raises(ValueError, match="has changed since it was opened"):
        pickle.loads(sent)


def test_one_text_is_not_a_list_of_texts(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="give a list of texts"):
        TokenFile.write(tmp_path / "one.safetensors", "hello", tokenizer=lambda text: list(text.encode()))
    assert not list(tmp_path.iterdir())
