"""``fit tokens``: texts from files, a tokenizer by name, and one file of tokens."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from engine import TokenFile
from engine.cli.main import main


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "letters", raising=False)
    Path("letters.py").write_text("def encode(text):\n    return [ord(letter) for letter in text]\n")
    Path("one.txt").write_text("ab\n\ncd\n")
    rows = [json.dumps({"text": "ef", "other": "gh"}), "", json.dumps({"text": "i", "other": "j"})]
    Path("two.jsonl").write_text("\n".join(rows))
    with gzip.open("three.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "k"}))


def written() -> list[str]:
    documents = TokenFile("t.safetensors")
    return ["".join(map(chr, documents[number]["input_ids"].tolist())) for number in range(len(documents))]


LETTERS = ("--tokenizer", "letters.py:encode", "--output", "t.safetensors")


def test_texts_of_several_files_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokens", "one.txt", "two.jsonl", "three.jsonl.gz", *LETTERS]) == 0
    assert written() == ["ab\n\ncd\n", "ef", "i", "k"]
    assert capsys.readouterr().out == "11 tokens of 4 documents in t.safetensors\n"
    assert main(["tokens", "one.txt", "--lines", *LETTERS, "--end-token", "46", "--json"]) == 0
    assert written() == ["ab.", "cd."]
    assert json.loads(capsys.readouterr().out) == {"tokens": 6, "documents": 2, "output": "t.safetensors"}
    assert main(["tokens", "two.jsonl", "--column", "other", *LETTERS, "--dtype", "uint8"]) == 0
    assert written() == ["gh", "j"]


def test_a_tokenizer_of_hugging_face_and_parquet() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 97, "b": 98, "?": 63}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save("tokenizer.json")
    parquet.write_table(arrow.table({"text": ["a b", "c"]}), "four.parquet")
    assert main(["tokens", "four.parquet", "--tokenizer", "tokenizer.json", "--output", "t.safetensors"]) == 0
    assert written() == ["ab", "?"]


WRONG = {
    "no input": (["no.txt", *LETTERS], "no.txt is not a file"),
    "another input": (["letters.py", *LETTERS], "texts are read from .txt, .jsonl"),
    "column": (["two.jsonl", *LETTERS, "--column", "words"], "two.jsonl, line 1 has no text under 'words' (text, other)"),
    "output": (["one.txt", *LETTERS[:2], "--output", "t.bin"], "give a file that ends in .safetensors"),
    "tokenizer": (["one.txt", "--tokenizer", "letters.py:decode", "--output", "t.safetensors"], "has no 'decode'"),
    "no tokenizer": (["one.txt", "--tokenizer", "no.json", "--output", "t.safetensors"], "--tokenizer no.json"),
    "end": (["one.txt", *LETTERS, "--end-token", "x"], "the number of a token, or eos"),
    "eos": (["one.txt", *LETTERS, "--end-token", "eos"], "no eos_token_id"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_words_end_with_status_2(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = WRONG[case]
    assert main(["tokens", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not Path("t.safetensors").exists()


def test_a_token_that_does_not_fit_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("wide.txt").write_text("\N{GRINNING FACE}")
    assert main(["tokens", "wide.txt", *LETTERS]) == 2
    assert "give dtype='uint32'" in capsys.readouterr().err
    assert main(["tokens", "wide.txt", *LETTERS, "--dtype", "uint32"]) == 0
