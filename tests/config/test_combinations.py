"""Settings that contradict each other are refused, and a strategy, also one of another package, can refuse and set some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from engine import Fit, Settings, Strategy
from engine.config.combinations import check_with_strategy, configured_by_strategy, implied, implied_origins


class Particular(Strategy):
    """A strategy of a third party: it cannot clip, needs an even number of processes, and logs every step."""

    def check(self, settings: Settings, origins: Mapping[str, str], world_size: int | None) -> None:
        if settings.gradient_clip_val is not None:
            raise ValueError(f"gradient_clip_val={settings.gradient_clip_val}: Particular cannot clip; leave it out")
        if world_size is not None and world_size % 2:
            raise ValueError(f"Particular needs an even number of processes, not {world_size}")

    def configure(self, settings: Settings, origins: Mapping[str, str]) -> Settings:
        return replace(settings, log_every_n_steps=1) if origins["log_every_n_steps"] == "default" else settings


def test_a_strategy_refuses_a_setting_when_fit_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error ends with where the setting comes from, unless that is the code."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"Particular cannot clip; leave it out$"):
        Fit(strategy=Particular(), gradient_clip_val=2)
    monkeypatch.setenv("FIT_GRADIENT_CLIP_VAL", "2")
    with pytest.raises(ValueError, match=r"leave it out \[gradient_clip_val: environment FIT_GRADIENT_CLIP_VAL\]$"):
        Fit(strategy=Particular())


@pytest.mark.parametrize(
    ("settings", "launched", "counted"),
    [
        (Settings(devices=3), None, 3),
        (Settings(devices=(0, 2, 3)), None, 3),
        (Settings(devices=1, num_nodes=3), None, 3),
        (Settings(devices=2), 5, 5),
    ],
)
def test_a_strategy_refuses_a_number_of_processes(settings: Settings, launched: int | None, counted: int) -> None:
    with pytest.raises(ValueError, match=f"not {counted} .devices: file fit.yaml:3; num_nodes: file fit.yaml:4.$"):
        check_with_strategy(
            settings, {"devices": "file fit.yaml:3", "num_nodes": "file fit.yaml:4"}, Particular(), launched
        )
    check_with_strategy(Settings(), {}, Particular())  # "auto": not known yet
    check_with_strategy(settings, {}, None, launched)


def test_a_strategy_sets_what_nobody_has_given() -> None:
    settings, origins = configured_by_strategy(
        Settings(), {"log_every_n_steps": "default", "seed": "code"}, Particular()
    )
    assert settings.log_every_n_steps == 1
    assert origins == {"log_every_n_steps": "the strategy's configuration", "seed": "code"}
    given = Settings(log_every_n_steps=7)
    assert configured_by_strategy(given, {"log_every_n_steps": "code"}, Particular())[0] is given


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"global_batch_size": 64, "accumulate_grad_batches": 2}, "the first derives the second; give one of them"),
        ({"overfit_batches": 2, "limit_val_batches": 3}, "overfit_batches=2 and limit_val_batches=3"),
        ({"benchmark": True, "deterministic": True}, "the fastest algorithm differs between runs"),
        ({"min_epochs": 3, "max_epochs": 2}, "min_epochs=3 and max_epochs=2: .*give a larger max_epochs"),
        ({"min_steps": 3, "max_epochs": 2, "max_steps": 2}, "min_steps=3 and max_steps=2: .*give a larger max_steps"),
    ],
)
def test_settings_that_contradict_each_other(settings: Mapping[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**settings)  # type: ignore[arg-type]


def test_what_settings_imply_has_an_origin() -> None:
    settings = Settings(overfit_batches=2)
    assert implied(settings) == {"limit_train_batches": 2, "limit_val_batches": 2}
    assert implied_origins(settings) == dict.fromkeys(implied(settings), "overfit_batches")
    settings = Settings(overfit_batches=2, fast_dev_run=True)
    assert (settings.limit_train_batches, settings.limit_val_batches, settings.max_epochs) == (1, 1, 1)
    assert set(implied_origins(settings).values()) == {"fast_dev_run"}
