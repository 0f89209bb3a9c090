"""The arguments by which a transformers model with flash attention keeps the documents of packed rows apart."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.data.documents import document_lengths


def varlen_arguments(position_ids: Tensor) -> dict[str, Any]:
    """The documents of packed rows as arguments of a transformers model: ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k``.

    Models with flash attention take them; with other attention ``position_ids`` suffice. Call this in the collate function, before the batch is on
    the device::

        def collate(rows):
            batch = default_collate(rows)
            return batch | varlen_arguments(batch["position_ids"])

    Raises:
        ValueError: as :func:`engine.document_lengths`.
    """
    edges, longest = document_lengths(position_ids)
    return {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": longest, "max_length_k": longest}
