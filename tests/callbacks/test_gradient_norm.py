"""``GradientNorm`` and ``Engine.grad_norms`` against a bare loop's gradients, alone and over two ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file
from torch import Tensor, nn

from callbacks import GradientNorm
from engine import Callback, Engine, Fit, Loss, Run, TrainModule


class Net(TrainModule):
    def __init__(self, weighted: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.weighted = weighted

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        squares = self.layers(batch).square()
        return Loss(squares.sum(), float(squares.numel())) if self.weighted else squares.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Kept(Callback):
    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def on_log(self, run: Run, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        self.rows.setdefault(step, {}).update(metrics)


def data(batches: int, size: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, 3, generator=generator) for _ in range(batches)]


def bare(batches: list[Tensor], window: int, norm_type: float) -> list[dict[str, float]]:
    """Each step's norms in a plain loop."""
    net, rows = Net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for start in range(0, len(batches), window):
        net.layers(torch.cat(batches[start : start + window])).square().mean().backward()
        row = {f"grad_norm/{n}": float(p.grad.norm(norm_type)) for n, p in net.named_parameters() if p.grad is not None}
        flat = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        rows.append({"grad_norm": float(flat.norm(norm_type)), **row})
        optimizer.step()
        optimizer.zero_grad()
    return rows


@pytest.mark.parametrize(
    ("norm_type", "weighted", "clip"), [(2.0, False, None), (1.0, True, 0.01), (float("inf"), True, None)]
)
def test_norms_are_those_of_a_bare_loop_before_clipping(
    tmp_path: Path, norm_type: float, weighted: bool, clip: float | None
) -> None:
    kept = Kept()
    fit = Fit(
        max_epochs=1,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        gradient_clip_val=clip,
        root_dir=tmp_path,
        callbacks=[GradientNorm(norm_type, per_parameter=True), kept],
    )
    fit.run(Net(weighted), data(2 if clip else 6))
    for step, row in enumerate(bare(data(2 if clip else 6), 2, norm_type), start=1):
        assert kept.rows[step] == pytest.approx(row, rel=1e-5)
    assert len(kept.rows) == (1 if clip else 3)


def test_only_logged_steps_are_measured_and_a_resumed_run_logs_the_same(tmp_path: Path) -> None:
    kept = Kept()
    Fit(max_epochs=1, log_every_n_steps=3, root_dir=tmp_path, callbacks=[GradientNorm(), kept]).run(Net(), data(7))
    expected = bare(data(7), 1, 2.0)
    assert {step: row["grad_norm"] for step, row in kept.rows.items()} == pytest.approx(
        {step: expected[step - 1]["grad_norm"] for step in (1, 3, 6)}, rel=1e-5
    )


def test_each_optimizer_of_manual_optimization_has_its_own_step(tmp_path: Path) -> None:
    class Two(Net):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            first, last = self.optimizers()
            self.manual_backward(self.layers(batch).square().mean())
            first.step()
            first.zero_grad()
            last.step()
            last.zero_grad()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.layers[i].parameters(), lr=0.5) for i in (0, 2)]

    kept = Kept()
    fit = Fit(max_steps=2, log_every_n_steps=1, root_dir=tmp_path, callbacks=[GradientNorm(), kept])
    fit.run(Two(), data(1))
    assert kept.rows[2]["grad_norm"] == pytest.approx(bare(data(1), 1, 2.0)[0]["grad_norm"], rel=1e-5)


def test_in_a_loop_of_ones_own_there_are_none_inside_a_window() -> None:
    engine = Engine(accumulate_grad_batches=2)
    model = nn.Linear(2, 1, bias=False)
    prepared, optimizer, loader = engine.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0), [torch.ones(1, 2), torch.ones(1, 2)]
    )
    found = []
    for batch in loader:
        with engine.accumulate(prepared):
            engine.backward(prepared(batch).mean())
            found.append({name: norm.item() for name, norm in engine.grad_norms(prepared).items()})
            optimizer.step()
            optimizer.zero_grad()
    assert found == [{}, {"weight": pytest.approx(2**0.5)}]


def test_wrong_norms_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="norm_type=0"):
        GradientNorm(0)


def rank_norms() -> dict[str, Any]:
    found = {}
    for strategy in ("ddp", "fsdp"):
        kept, callback = Kept(), GradientNorm(per_parameter=True)
        with tempfile.TemporaryDirectory() as root:
            fit = Fit(strategy=strategy, max_epochs=1, log_every_n_steps=1, root_dir=root, callbacks=[callback, kept])
            fit.run(Net(), data(6))
        found[strategy] = kept.rows
    return found


def test_two_ranks_have_the_norms_of_one_process() -> None:
    expected = bare(data(6), 2, 2.0)
    for strategies in ranks_of_file(__file__, 2)["norms"]:
        for rows in strategies.values():
            assert len(rows) == 3
            for step, row in enumerate(expected, start=1):
                assert rows[str(step)] == pytest.approx(row, rel=1e-5)
