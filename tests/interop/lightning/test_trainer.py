"""``Trainer`` against Lightning's: the same weights, events, counters, metrics and results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from both import OURS, THEIRS, data, module, quietly, trainer, watcher, weights

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "clipped": {"gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    "every 3 batches": {"val_check_interval": 3},
    "every 3 batches over epochs": {"val_check_interval": 7, "check_val_every_n_epoch": None},
    "a quarter": {"val_check_interval": 0.25},
    "a third of every second epoch": {"val_check_interval": 0.3, "check_val_every_n_epoch": 2, "max_epochs": 4},
    "every second epoch": {"check_val_every_n_epoch": 2, "max_epochs": 4},
    "accumulated, every 4 batches": {"accumulate_grad_batches": 2, "val_check_interval": 4},
    "limited": {"limit_train_batches": 3, "limit_val_batches": 2},
    "limited in part": {"limit_train_batches": 0.5, "limit_val_batches": 0.25},
    "steps": {"max_steps": 13, "max_epochs": None},
    "steps in epochs": {"max_steps": 13, "max_epochs": -1},
    "no sanity check": {"num_sanity_val_steps": 0},
    "all of the sanity check": {"num_sanity_val_steps": -1},
    "overfitting": {"overfit_batches": 3},
    "once": {"fast_dev_run": True},
    "bf16": {"precision": "bf16-mixed"},
    "64": {"precision": 64},
}


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("name", RUNS)
def test_a_training_is_lightnings(name: str, automatic: bool, tmp_path: Path) -> None:
    options = {"max_epochs": 2, **RUNS[name]}
    if not automatic and ("clip" in name or "accumulated" in name):
        pytest.skip("refused by both")
    found = []
    for library in (THEIRS, OURS):
        net, watch = module(library, automatic), watcher(library)
        fitted = trainer(library, tmp_path, callbacks=[watch], **options)
        loader = data()
        if "64" in name:
            loader = torch.utils.data.DataLoader([(x.double(), y.double()) for x, y in loader.dataset], batch_size=4)
        quietly(fitted.fit, net, loader, loader)
        found.append((net, watch, fitted))
    (theirs, seen, fitted), (mine, mine_seen, mine_fitted) = found
    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-5)
    assert mine.seen == theirs.seen
    assert mine_seen.seen == seen.seen
    assert (mine_fitted.current_epoch, mine_fitted.global_step) == (fitted.current_epoch, fitted.global_step)
    metrics = {key: value.item() for key, value in fitted.callback_metrics.items()}
    assert {key: value.item() for key, value in mine_fitted.callback_metrics.items()} == pytest.approx(metrics, abs=1e-5)


def test_evaluations_return_what_lightnings_do(tmp_path: Path) -> None:
    found = []
    for library in (THEIRS, OURS):
        net, own = module(library), trainer(library, tmp_path)
        results = [quietly(own.validate, net, data()), quietly(own.test, net, [data(), data(20)]), quietly(own.predict, net, data())]
        found.append((net.seen, results))
    (theirs, results), (mine, mine_results) = found
    assert mine == theirs
    for own, other in zip(mine_results[:2], results[:2], strict=True):
        assert len(own) == len(other)
        for metrics, expected in zip(own, other, strict=True):
            assert metrics == pytest.approx(expected)
    torch.testing.assert_close(mine_results[2], results[2])
