"""Activation offload: what is refused, and that a CPU has nothing to move. What it moves: ``tests/sim/scenarios/offload.py``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import Engine, Fit, MeshParallel, TrainModule
from engine.transforms.offload import ActivationOffload, HostCopies


class Net(TrainModule):
    """A stack of layers of one class, so that each is a block."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_on_a_cpu_a_run_says_once_that_nothing_moves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, weights = [torch.ones(2, 4)] * 3, []
    for setting in (False, True):
        module = Net()
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="engine"):
            Fit(accelerator="cpu", activation_offload=setting, root_dir=tmp_path / str(setting)).run(module, data)
        told = [record.getMessage() for record in caplog.records if "activation_offload" in record.getMessage()]
        assert told == [
            "activation_offload=True: on a CPU activations are in the host's memory already, so nothing is moved"
        ] * int(setting)
        assert not any(inner._forward_pre_hooks for inner in module.modules())
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.parametrize(
    ("setting", "blocks", "words"),
    [
        (True, 0, "no repeated blocks; define blocks"),
        ("blocks", 0, "no repeated blocks"),
        (3, 3, "Net has 3 blocks, and the last one's activations stay.* give at most 2"),
        (9, 3, "give at most 2"),
    ],
)
def test_a_model_with_too_few_blocks_is_refused(setting: Any, blocks: int, words: str) -> None:
    offload = ActivationOffload(setting, HostCopies(torch.device("cpu")))
    with pytest.raises(ValueError, match=f"activation_offload={setting!r}: .*{words}"):
        offload.attach(Net(blocks))


def test_a_single_block_is_refused() -> None:
    class One(Net):
        def blocks(self) -> list[nn.Module]:
            return [self.layers[0]]

    offload = ActivationOffload(True, HostCopies(torch.device("cpu")))
    with pytest.raises(ValueError, match=r"One has 1 block, .* define blocks\(self\) with more blocks"):
        offload.attach(One())


def test_hooks_are_removed_with_the_engine() -> None:
    offload, model = ActivationOffload(2, HostCopies(torch.device("cpu"))), Net()
    offload.attach(model)
    assert [bool(layer._forward_pre_hooks) for layer in model.layers] == [True] * 3
    offload.release()
    assert not any(inner._forward_pre_hooks or inner._forward_hooks for inner in model.modules())


@pytest.mark.parametrize("compiled", [True, {"mode": "default"}])
def test_a_model_that_is_compiled_as_a_whole_is_refused(compiled: Any) -> None:
    for make in (Fit, Engine):
        with pytest.raises(ValueError, match=r"activation_offload=True and compile=.*use compile='blocks'"):
            make(activation_offload=True, compile=compiled)
    Fit(activation_offload=True, compile={"blocks": True, "mode": "default"})


def test_a_pipeline_and_deepspeed_refuse_it_before_processes_start() -> None:
    with pytest.raises(ValueError, match="activation_offload=2 under MeshParallel: a pipeline has several"):
        Fit(strategy=MeshParallel(pp=2), devices=2, activation_offload=2)
    with pytest.raises(ValueError, match="activation_offload=True under DeepSpeed: DeepSpeed empties and refills"):
        Fit(strategy="deepspeed", activation_offload=True)
    Fit(strategy=MeshParallel(tp=2), devices=2, activation_offload=True)
