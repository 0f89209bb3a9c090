"""``TokenFile``: tokens on the disk as a dataset, in rows of one length or document by document."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from engine.data.arguments import MOST, whole_number
from engine.data.packed_rows import IGNORED
from engine.data.token_shards import Tokens, TokenShard, shards_at
from engine.data.token_writer import TextEncoder, write_token_file
from engine.utils.paths import expanded


class TokenFile(Dataset[dict[str, Tensor]]):
    """Tokens of a memory-mapped file, or of all files in a folder, as a map-style dataset::

        TokenFile.write("train.safetensors", texts, tokenizer=tokenizer)
        rows = TokenFile("train.safetensors", length=1024)              # rows of 1,024 tokens, which may cut documents
        rows = Packed(TokenFile("train.safetensors"), length=1024)      # rows of whole documents; the file knows their lengths
        fit.run(module, DataLoader(rows, batch_size=8, shuffle=True))

    With ``length``, sample ``i`` has the tokens ``i * length`` to ``(i + 1) * length``:

    - ``input_ids``: shape ``[length]``, int64;
    - ``labels``: the same tokens, as in rows of :class:`engine.Packed`, since a causal model's loss compares each with the place before. The first
      is -100, because nothing in the row comes before it.

    Tokens at the end of a file that do not fill a row are left out. Without ``length`` each sample is a document, ``{"input_ids": tokens}``.

    Nothing is read before it is asked for. Worker processes map the file again, so sending the dataset costs a few hundred bytes.

    Args:
        path: a ``.safetensors`` file with ``tokens`` and ``ends`` of documents, as :meth:`write` makes it; NumPy's ``.npy``; raw numbers, such as
            nanoGPT's ``.bin``; or a folder of such files of one kind, read in the order of their names.
        length: the number of tokens in a sample; ``None``: samples are documents, which only ``.safetensors`` files know.
        dtype: the dtype of tokens in raw files, such as ``"uint16"``. Of llm.c's files it is known.

    Raises:
        FileNotFoundError: there is no file.
        ValueError: a file is truncated, was not written to its end, is something else, or has fewer than ``length`` tokens; or the shards of a
            folder do not belong together.
        TypeError: tokens are not whole numbers.
    """

    def __init__(self, path: str | os.PathLike[str], length: int | None = None, *, dtype: str | None = None) -> None:
        if length is not None:
            text = f"TokenFile(length={length!r})"
            length = whole_number(text, length, "the number of tokens in a sample, or None for documents", highest=MOST)
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(
                f"TokenFile({path!r:.60}): give the path of a file, or of a folder of files, as text or as a Path"
            )
        if dtype is not None:
            try:
                numpy.dtype(dtype if isinstance(dtype, (str, type, numpy.dtype)) else "")
            except TypeError:
                raise TypeError(
                    f"TokenFile(dtype={dtype!r:.60}): give the name of a dtype of whole numbers, such as 'uint16'"
                ) from None
        self.path, self.length, self.dtype = Path(expanded(path)), length, dtype
        self.sample_keys = ("input_ids",) if length is None else ("input_ids", "labels")
        self.tokens_per_sample = length
        """The number of tokens in each sample; ``None``: documents differ."""
        self.shards = shards_at(self.path, dtype)
        counts = [self._samples_in(shard) for shard in self.shards]
        self._ends: list[int] = numpy.cumsum(counts).tolist()
        """By shard, the number of samples in it and in those before it."""
        if not self._ends[-1]:
            raise ValueError(f"{self.path} has {self.tokens:,} tokens, fewer than one sample of length={length}")

    def _samples_in(self, shard: TokenShard) -> int:
        if self.length is not None:
            return len(shard.tokens) // self.length
        if shard.ends is None:
            raise ValueError(
                f"{shard.path} does not say where documents end: give length=, the number of tokens in a sample, or write documents with "
                "TokenFile.write"
            )
        return len(shard.ends)

    @staticmethod
    def write(
        path: str | os.PathLike[str],
        documents: Iterable[Any],
        *,
        tokenizer: Any = None,
        end_token: int | None = None,
        dtype: str | None = None,
    ) -> int:
        """Write documents to a ``.safetensors`` file, in one pass. The file appears when it is complete; an earlier one is replaced.

        Args:
            documents: any iterable of token sequences, or of dicts with ``input_ids``; with ``tokenizer``, of texts.
            tokenizer: a tokenizer of Hugging Face, tiktoken or SentencePiece, or a function from a text to its tokens.
            end_token: a token that is added after each text, such as ``tokenizer.eos_token_id``; ``None``: what the tokenizer gives is kept.
            dtype: ``"uint8"``, ``"uint16"`` or ``"uint32"``. ``None``: ``"uint32"`` if the tokenizer says that it has more than 65,536 tokens, else
                ``"uint16"``.

        Returns:
            The number of tokens.

        Raises:
            ValueError: a token is negative or does not fit in ``dtype``, or there is no token.
            TypeError: a document is not a sequence of whole numbers, or with ``tokenizer`` not a text.
        """
        if isinstance(documents, (str, bytes)):
            raise TypeError(
                "TokenFile.write: documents is one text, of which each character would be a document: give a list of texts"
            )
        if not isinstance(documents, Iterable):
            raise TypeError(
                f"TokenFile.write: documents is {documents!r:.60} ({type(documents).__name__}): give an iterable of texts, or of token sequences"
            )
        target = Path(expanded(path))
        if tokenizer is None:
            if end_token is not None:
                raise ValueError(
                    "end_token is added to texts, so it needs tokenizer=; documents of tokens are kept as they are"
                )
            return write_token_file(target, documents, "uint16" if dtype is None else dtype)
        encoder = TextEncoder(tokenizer, end_token)
        return write_token_file(
            target, encoder.documents(documents), encoder.dtype if dtype is None else dtype, encoder.name
        )

    @property
    def tokens(self) -> int:
        """The number of tokens in all files."""
        return sum(len(shard.tokens) for shard in self.shards)

    @property
    def lengths(self) -> Tokens:
        """The number of tokens in each sample. Shape ``[samples]``, int64.

        :class:`engine.Packed` reads it.
        """
        if self.length is not None:
            return numpy.full(len(self), self.length, dtype=numpy.int64)
        return numpy.concatenate([shard.lengths for shard in self.shards])

    def documents(self) -> TokenFile:
        """A dataset of the documents in these files, without ``length``."""
        return TokenFile(self.path, dtype=self.dtype)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self._tokens_at(index).astype(numpy.int64)
        self._refuse_negative(tokens)
        if self.length is None:
            return {"input_ids": torch.from_numpy(tokens)}
        labels = tokens.copy()
        labels[0] = IGNORED
        return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """The samples with these indices, in memory that is allocated once."""
        if self.length is None:
            return [self[index] for index in indices]
        block = numpy.empty((2, len(indices), self.length), dtype=numpy.int64)
        tokens, labels = block
        for row, index in zip(tokens, indices, strict=True):
            row[:] = self._tokens_at(index)
        self._refuse_negative(tokens)
        labels[:] = tokens
        labels[:, 0] = IGNORED
        inputs, targets = torch.from_numpy(block)
        return [{"input_ids": a, "labels": b} for a, b in zip(inputs.unbind(0), targets.unbind(0), strict=True)]

    def _tokens_at(self, index: int) -> Tokens:
        """The tokens of a sample, as the file has them."""
        shards, length = self.shards, self.length
        if index < 0 or index >= self._ends[-1]:
            index = range(self._ends[-1])[index]
        shard = shards[0]
        if len(shards) > 1:
            number = bisect_right(self._ends, index)
            shard, index = shards[number], index - (self._ends[number - 1] if number else 0)
        if length is not None:
            return shard.tokens[index * length : (index + 1) * length]
        assert shard.ends is not None
        return shard.tokens[int(shard.ends[index - 1]) if index else 0 : int(shard.ends[index])]

    def _refuse_negative(self, tokens: Tokens) -> None:
        """Refuse negative tokens, which only files of signed numbers can have."""
        if self.shards[0].is_signed and tokens.size and int(tokens.min()) < 0:
            raise ValueError(
                f"{self.path} has the token {int(tokens.min())}: tokens are 0 or more; is the file one of labels, or is dtype= another?"
            )
