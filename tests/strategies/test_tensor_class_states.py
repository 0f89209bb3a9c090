"""torchao's low-bit optimizers: saved as plain tensors, resumed to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.stateful import Keeping
from support.toys import fit
from torch import Tensor, nn

from callbacks import ModelCheckpoint
from engine import TrainModule
from engine.strategies.tensor_class_states import flat, unflat

optim = pytest.importorskip("torchao.optim")


class Net(TrainModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.kind = nn.Linear(64, 64), kind

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.linear(batch) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return getattr(optim, self.kind)(self.parameters(), lr=0.01)


def data() -> list[Tensor]:
    return [torch.randn(4, 64, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def bits(module: nn.Module) -> list[int]:
    return [p.detach().view(torch.int32).sum().item() for p in module.parameters()]


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_a_resumed_run_goes_on_to_the_same_bits(tmp_path: Path, kind: str) -> None:
    whole, resumed = Net(kind), Net(kind)
    with torch.compiler.set_stance("force_eager"):  # its step is compiled, which takes a minute
        fit(tmp_path / "whole").run(whole, data())
        fit(tmp_path, max_steps=2, callbacks=ModelCheckpoint()).run(Net(kind), data())
        fit(tmp_path).run(resumed, data(), resume="last")
    assert bits(resumed) == bits(whole)


def test_parts_and_back() -> None:
    from torchao.optim.subclass_8bit import OptimState8bit

    state = {"exp_avg": OptimState8bit.zeros((64, 64), signed=True), "step": torch.tensor(3.0)}
    parts = flat(state)
    assert sorted(parts["exp_avg"]) == ["codes", "context", "qmap", "scale", "tensor_class"]
    assert all(type(value) in (Tensor, str, list) for value in parts["exp_avg"].values())
    back = unflat(parts)
    assert type(back["exp_avg"]) is OptimState8bit
    assert back["exp_avg"].dtype == state["exp_avg"].dtype
    assert torch.equal(back["exp_avg"].codes, state["exp_avg"].codes)
    with pytest.raises(ValueError, match=r"of class 'os\.system'; possible: OptimState8bit"):
        unflat({"exp_avg": {"tensor_class": "os.system", "context": []}})


class Transposed(Net):
    def configure_optimizers(self) -> Any:
        self.optimizer = Keeping(self.parameters(), "transposed")
        return self.optimizer


def test_the_order_of_dims_in_memory_is_resumed(tmp_path: Path) -> None:
    """Without it SOAP, whose bases are transposed, would continue with other last bits."""
    module = Transposed("")
    fit(tmp_path, max_steps=2, callbacks=ModelCheckpoint()).run(Transposed(""), data())
    fit(tmp_path, max_steps=2).run(module, data(), resume="last")
    state = module.optimizer.state[module.linear.weight]
    assert state["bases"][0].stride() == state["stride"] == (1, 64)


def test_only_dense_tensors_in_another_order_than_their_parameter_are_permuted() -> None:
    parameter = torch.zeros(2, 3, 4).permute(2, 0, 1)
    like = torch.randn(2, 3, 4).permute(2, 0, 1)
    other = torch.randn(3, 4, 2).permute(2, 0, 1)
    strided = torch.randn(4, 8)[:, ::2]
    state = {"like": like, "other": [other], "strided": (strided,), "row": torch.randn(1, 4), "none": None}
    parts = flat(state, parameter)
    assert parts["like"] is like
    assert parts["strided"][0] is strided
    assert parts["row"] is state["row"]
    assert parts["other"][0]["tensor"].is_contiguous()
    assert parts["other"][0]["tensor"].shape == (3, 4, 2)
    back = unflat(parts)
    assert torch.equal(back["other"][0], other)
    assert back["other"][0].stride() == other.stride()
    assert flat(state)["other"][0] is other
