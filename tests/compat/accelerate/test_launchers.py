"""``notebook_launcher`` and ``debug_launcher``: scripts of Accelerate's, trained on two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.commands import free_port
from support.ranks import run_script

from engine.interop.accelerate import notebook_launcher

SCRIPT = """
import sys
import torch
from engine.interop.accelerate import Accelerator, debug_launcher, notebook_launcher
from engine.interop.accelerate.utils import set_seed

X = torch.arange(24.0).reshape(12, 2) / 24


def train(epochs, rate=0.5):
    accelerator = Accelerator()
    set_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loader = torch.utils.data.DataLoader(X, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for x in loader:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    weights = accelerator.unwrap_model(model).state_dict()
    return accelerator.num_processes, accelerator.mixed_precision, [weights["weight"].tolist(), weights["bias"].tolist()]


if __name__ == "__main__":
    report({
        "notebook": notebook_launcher(train, (2,), num_processes=2, use_port=sys.argv[1]),
        "bf16": notebook_launcher(train, (2,), num_processes=2, mixed_precision="bf16"),
        "debug": debug_launcher(train, (2, 0.5), num_processes=2),
    })
"""


@pytest.fixture(scope="module")
def launched() -> Any:
    env = {"ACCELERATE_USE_CPU": "1", "FIT_ACCELERATOR": "cpu"}
    return run_script(SCRIPT, free_port(), env=env, forked=True).value


def bare() -> list[Any]:
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        for x in (torch.arange(24.0).reshape(12, 2) / 24).split(4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return [model.weight.tolist(), model.bias.tolist()]


@pytest.mark.parametrize("launcher", ["notebook", "debug"])
def test_both_train_on_two_processes(launched: Any, launcher: str) -> None:
    for processes, precision, weights in launched[launcher]:
        assert (processes, precision) == (2, "no")
        for found, expected in zip(weights, bare(), strict=True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))


def test_the_notebooks_precision(launched: Any) -> None:
    for processes, precision, weights in launched["bf16"]:
        assert (processes, precision) == (2, "bf16")
        assert weights != launched["notebook"][0][2]
        torch.testing.assert_close(torch.tensor(weights[0]), torch.tensor(bare()[0]), rtol=0.05, atol=0.01)


def test_what_the_notebooks_launcher_cannot_do() -> None:
    with pytest.raises(ValueError, match=r"num_nodes.*fit launch"):
        notebook_launcher(print, num_processes=2, num_nodes=2)
