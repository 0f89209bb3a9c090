"""Buffers for copies in host memory."""

from __future__ import annotations

import pytest
import torch

from engine.checkpoint.staging import CHUNK, Staging, chunks


def test_small_tensors_share_chunks_and_fill_what_large_ones_leave() -> None:
    sizes = {"large": 5 * CHUNK, "a": CHUNK // 2, "b": CHUNK, "c": CHUNK // 2, "d": 2 * CHUNK + 64, "none": 0}
    # 5 chunks are rounded up to 8: the other 3 take d, and a and c beside it; b is a chunk of its own
    assert chunks(sizes) == [["large", "d", "a", "none"], ["b"], ["c"]]
    assert chunks({}) == []
    assert chunks({"none": 0}) == [["none"]]


def test_every_kind_of_tensor_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.checkpoint.staging.CHUNK", 256)
    tensors = {
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "bool": torch.tensor([True, False, True]),
        "half": torch.arange(100, dtype=torch.bfloat16),
        "complex": torch.tensor([1 + 2j], dtype=torch.complex128),
        "parameter": torch.nn.Parameter(torch.ones(3)),
    }
    staging = Staging(torch.device("cpu"))
    for later in (set(tensors), set(), {"half", "empty"}):
        staging.start(tensors, later)
        copies = staging.complete()
        assert list(copies) != []
        for name, tensor in tensors.items():
            assert (copies[name].dtype, copies[name].tolist()) == (tensor.dtype, tensor.tolist())
            assert copies[name].is_contiguous()
            assert not copies[name].requires_grad
        staging.hold()
        tensors["half"] = tensors["half"] + 1
    staging.close()
    assert staging._buffers == {}


def test_a_copy_that_fails_does_not_leave_the_training_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Staging) -> None:
        raise MemoryError("no memory")

    staging = Staging(torch.device("cpu"))
    staging.start({"w": torch.ones(1)}, {"w"})
    monkeypatch.setattr(Staging, "_copy", full)
    with pytest.raises(MemoryError):
        staging.complete()
    staging.hold()
