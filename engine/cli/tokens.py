"""``fit tokens``: writes the tokens of texts to a file."""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from engine.cli.class_paths import importable_here, load
from engine.cli.terminal import OK, UsageError, show
from engine.data.token_file import TokenFile
from engine.data.token_shards import SAFETENSORS
from engine.data.token_writer import BadToken
from engine.utils.paths import expanded

_TABLES = (".jsonl", ".jsonl.gz", ".parquet")


def run(options: argparse.Namespace) -> int:
    """Write the file, and print how many tokens it has.

    Returns:
        0. Inputs, outputs, tokenizers and tokens that are not possible lead to status 2.
    """
    paths = [Path(expanded(path)) for path in options.inputs]
    for path in paths:
        if not path.is_file():
            raise UsageError(f"{path} is not a file")
        if not path.name.endswith((".txt", *_TABLES)):
            raise UsageError(f"{path}: texts are read from .txt, {', '.join(_TABLES)}")
    output = Path(expanded(options.output))
    if output.suffix != SAFETENSORS or not output.parent.is_dir():
        raise UsageError(f"--output {output}: give a file that ends in {SAFETENSORS}, in a folder that exists")
    tokenizer = tokenizer_of(options.tokenizer)
    end_token = None if options.end_token is None else _end_token(tokenizer, options.end_token)
    texts = (text for path in paths for text in texts_in(path, options.column, options.lines))
    try:
        with closing(texts):
            TokenFile.write(output, texts, tokenizer=tokenizer, end_token=end_token, dtype=options.dtype)
    except BadToken as error:
        raise UsageError(f"{error} (--dtype)") from None
    written = TokenFile(output)
    facts = {"tokens": written.tokens, "documents": len(written), "output": str(output)}
    if options.json:
        print(json.dumps(facts))
    else:
        show(f"{written.tokens:,} tokens of {len(written):,} documents in {output}")
    return OK


def tokenizer_of(name: str) -> Any:
    """The tokenizer that ``--tokenizer`` names.

    Raises:
        UsageError: there is none of this name.
    """
    importable_here()
    if ":" in name and not Path(name).exists():
        return load(name, "the tokenizer", object)
    try:
        if name.endswith(".json"):
            return importlib.import_module("tokenizers").Tokenizer.from_file(expanded(name))
        return importlib.import_module("transformers").AutoTokenizer.from_pretrained(expanded(name))
    except ImportError as error:
        raise UsageError(f"--tokenizer {name}: {error}; give my.module:name for a tokenizer of your own") from None
    except Exception as error:  # tokenizers raises no class of its own
        raise UsageError(f"--tokenizer {name}: {error}") from None


def _end_token(tokenizer: Any, text: str) -> int:
    if text != "eos":
        if not text.isdecimal():
            raise UsageError(f"--end-token {text}: give the number of a token, or eos")
        return int(text)
    token = getattr(tokenizer, "eos_token_id", None)
    if token is None:
        raise UsageError("--end-token eos: the tokenizer has no eos_token_id; give the number of the token")
    return int(token)


def texts_in(path: Path, column: str, by_line: bool) -> Iterator[str]:
    """Yield the documents of a file.

    Args:
        column: the column with texts in a table.
        by_line: whether each line of a ``.txt`` is a document.

    Raises:
        UsageError: a row has no text in this column, or the file cannot be read.
    """
    if path.suffix == ".parquet":
        yield from _parquet(path, column)
        return
    open_text: Any = gzip.open if path.suffix == ".gz" else open
    with open_text(path, "rt", encoding="utf-8") as file:
        if path.suffix == ".txt":
            yield from (line.rstrip("\n") for line in file if line.strip()) if by_line else (file.read(),)
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _text_of(line, column, f"{path}, line {number}")


def _text_of(line: str, column: str, place: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{place} is not JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise UsageError(f"{place} has no text under {column!r} ({keys}): give --column")
    text: str = row[column]
    return text


def _parquet(path: Path, column: str) -> Iterator[str]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError(f"{path}: reading .parquet needs pyarrow: pip install pyarrow") from None
    table = parquet.ParquetFile(path)
    if column not in table.schema_arrow.names:
        raise UsageError(
            f"{path} has the columns {', '.join(table.schema_arrow.names)}, and no {column!r}: give --column"
        )
    for batch in table.iter_batches(columns=[column]):
        for text in batch.column(0).to_pylist():
            if not isinstance(text, str):
                raise UsageError(f"{path} has a row without a text under {column!r}: leave such rows out")
            yield text
