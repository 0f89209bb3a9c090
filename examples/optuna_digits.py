"""A search for a learning rate with Optuna: trials that are worse than the others at the same epoch are ended early.

    python examples/optuna_digits.py --trials 10

Needs Optuna, which proposes the values: ``pip install optuna``.
"""

from __future__ import annotations

import argparse
from typing import Any

import optuna

from callbacks import EarlyStopping
from engine import Callback, Fit, Run, seed_everything
from examples.digits import Digits, DigitsData


class ReportToTrial(Callback):
    """After each validation, reports ``monitor`` to the trial; raises ``optuna.TrialPruned`` if the trial is not worth its time."""

    def __init__(self, trial: optuna.trial.BaseTrial, monitor: str) -> None:
        self.trial, self.monitor = trial, monitor

    def on_validation_end(self, run: Run, module: Any) -> None:
        if run.stage != "fit":  # the check before the training
            return
        self.trial.report(run.metrics[self.monitor], step=run.epoch)
        if self.trial.should_prune():
            raise optuna.TrialPruned(f"{self.monitor}={run.metrics[self.monitor]:.3f} after epoch {run.epoch}")


def train(trial: optuna.trial.BaseTrial, args: argparse.Namespace) -> float:
    """The validation accuracy of one trial."""
    lr = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    batch_size = trial.suggest_categorical("batch_size", [64, 128, 256])
    fit = Fit(
        accelerator=args.accelerator,
        devices=1,  # each trial is one process; several can run side by side on one study
        max_epochs=args.max_epochs,
        root_dir=args.root_dir,
        name=f"trial={trial.number}",
        callbacks=[ReportToTrial(trial, "val/accuracy"), EarlyStopping("val/loss", patience=3)],
    )
    seed_everything(args.seed)  # the trials differ in what is searched for, not in their first weights
    result = fit.run(Digits(lr, args.max_epochs), datamodule=DigitsData(batch_size))
    return result.metrics["val/accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Optuna searches for a learning rate and a batch size for the digits.")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--max-epochs", type=int, default=5)
    parser.add_argument("--accelerator", default="cpu", help="cpu, cuda or auto (default: cpu)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--root-dir", default="runs/optuna")
    args = parser.parse_args()

    pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=args.seed), pruner=pruner)
    study.optimize(lambda trial: train(trial, args), n_trials=args.trials)

    states = [trial.state.name.lower() for trial in study.trials]
    print(f"{states.count('complete')} trials completed, {states.count('pruned')} pruned")
    print(f"best validation accuracy: {study.best_value:.2%} with {study.best_params}")


if __name__ == "__main__":
    main()
