"""The worked example of a custom strategy: local SGD on real ranks, against loops written by hand, and found by its name."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import ranks_of_file
from torch import Tensor, nn

from engine import Fit, Loss, Strategy, TrainModule

ROOT = Path(__file__).resolve().parents[2]
STEPS, EVERY = 7, 3


class Net(TrainModule):
    def __init__(self, tokens: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net, self.tokens = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), tokens
        self.seen: list[list[float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        error = (self.net(batch) - 1).square()
        return (
            Loss(error[:3].sum(), 3)
            if self.tokens and self.global_rank
            else error.mean()
            if not self.tokens
            else Loss(error.sum(), len(batch))
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9 if self.momentum else 0.0)

    momentum = True

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(flat(self))


def flat(model: nn.Module) -> list[float]:
    values: list[float] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return values


def batches(count: int = 2 * STEPS) -> list[Tensor]:
    return [torch.randn(5, 4, generator=torch.Generator().manual_seed(i)) for i in range(count)]


def fit(module: TrainModule, strategy: str | Strategy) -> TrainModule:
    with tempfile.TemporaryDirectory() as root:
        Fit(accelerator="cpu", strategy=strategy, max_epochs=1, seed=1, root_dir=root).run(module, batches())
    return module


def local(every: int) -> Strategy:
    sys.path.insert(0, str(ROOT / "examples"))
    from custom_strategy import LocalSGD

    return LocalSGD(every=every)


def rank_weights() -> Any:
    """After each step: by the strategy, and by a loop written by hand."""
    module = Net()
    fit(module, local(EVERY))
    model = Net()
    optimizer = model.configure_optimizers()
    expected = []
    for step, batch in enumerate(batches()[dist.get_rank() :: 2]):
        model.training_step(batch, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            for p in model.parameters():
                dist.all_reduce(p.data)
                p.data /= 2
        expected.append(flat(model))
    return [module.seen, expected]


def rank_ddp() -> Any:
    found = []
    for tokens in (False, True):
        Net.momentum = False  # momentum is each rank's own between two averages
        found.append([flat(fit(Net(tokens), local(1))), flat(fit(Net(tokens), "ddp"))])
    return found


@pytest.fixture(scope="module")
def found() -> Any:
    pytest.importorskip("sklearn")
    return ranks_of_file(__file__, 2)


def test_it_is_a_local_sgd_loop(found: Any) -> None:
    for seen, expected in found["weights"]:
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_ranks_are_equal_after_every_third_step_only(found: Any) -> None:
    (one, _), (other, _) = found["weights"]
    assert [a == b for a, b in zip(one, other, strict=True)] == [(step + 1) % EVERY == 0 for step in range(STEPS)]


@pytest.mark.parametrize("tokens", [False, True])
def test_averaged_after_each_step_it_is_ddp(found: Any, tokens: bool) -> None:
    for rank in found["ddp"]:
        ours, ddp = (torch.tensor(weights) for weights in rank[tokens])
        torch.testing.assert_close(ours, ddp, rtol=1e-6, atol=1e-6)


# -- by name ----------------------------------------------------------------------------------------------------------------------


def installed(folder: Path, module: str) -> dict[str, str]:
    """A distribution with an entry point, as pip leaves one behind."""
    (folder / "my_strategies.py").write_text(module)
    info = folder / "my_strategies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-strategies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[engine.strategies]\nmine = my_strategies:Mine\n")
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def ask(name: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    code = f"from engine import strategies; print(type(strategies.get({name!r})).__name__)"
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)


def test_an_installed_strategy_by_its_name(tmp_path: Path) -> None:
    environment = installed(tmp_path, "from engine import Strategy\nclass Mine(Strategy):\n    pass\n")
    assert ask("mine", environment).stdout == "Mine\n"
    assert "did you mean 'mine'" in ask("mein", environment).stderr


def test_an_error_in_an_installed_strategy_is_told(tmp_path: Path) -> None:
    failed = ask("mine", installed(tmp_path, "raise RuntimeError('needs the other library')"))
    assert failed.returncode
    assert "needs the other library" in failed.stderr
