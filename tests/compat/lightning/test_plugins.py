"""What published packages pass and read beside the modules: plugins that read checkpoints, the connector of devices, own loggers' decorators."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.interop.lightning.plugins.io.torch_io import TorchCheckpointIO
from engine.interop.lightning.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch.utils.data import DataLoader

import engine.interop.lightning as L
from engine import DDP
from engine.interop.lightning.loggers import Logger, rank_zero_experiment
from engine.interop.lightning.strategies import DDPStrategy, FSDPStrategy

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
}


class Weight(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.w * batch).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("w", self.w.sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def ones() -> Any:
    return DataLoader(torch.ones(2, 1))  # type: ignore[arg-type]


class Doubling(TorchCheckpointIO):
    """Reads each weight times two."""

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        found = super().load_checkpoint(path, map_location, weights_only)
        return {**found, "state_dict": {name: 2 * value for name, value in found["state_dict"].items()}}


def test_a_plugin_reads_files_of_lightning(tmp_path: Path) -> None:
    trainer = L.Trainer(max_epochs=1, default_root_dir=tmp_path, **QUIET)
    trainer.fit(Weight(), ones())  # two steps of -1
    trainer.save_checkpoint(tmp_path / "theirs.ckpt", pickle=True)
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    for plugins, name, expected in (
        (None, "theirs", -2.0),
        ([Doubling()], "theirs", -4.0),
        (Doubling(), "theirs", -4.0),
        ([Doubling()], "ours", -2.0),  # one format, which is not the plugin's
    ):
        other = L.Trainer(default_root_dir=tmp_path, plugins=plugins, **QUIET)
        (found,) = other.validate(Weight(), ones(), ckpt_path=tmp_path / f"{name}.ckpt", verbose=False)
        assert found == {"w": expected}


def test_other_plugins_are_refused() -> None:
    class Writes(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None: ...

    with pytest.raises(
        ValueError, match=r"plugins=\[Writes\(\)\]\): nothing calls its save_checkpoint.*on_checkpoint_saved"
    ):
        L.Trainer(plugins=[Writes()])
    with pytest.raises(ValueError, match=r"plugins=.*has no counterpart"):
        L.Trainer(plugins=["anything"])


@pytest.mark.filterwarnings("ignore:The `srun` command")
@pytest.mark.parametrize("devices", ["auto", 1, 2])
def test_the_connector_is_lightnings(devices: Any) -> None:
    theirs = pytest.importorskip("lightning.pytorch.trainer.connectors.accelerator_connector")._AcceleratorConnector
    ours, expected = _AcceleratorConnector("cpu", devices), theirs(accelerator="cpu", devices=devices)
    for name in ("_accelerator_flag", "_devices_flag", "_parallel_devices", "is_distributed"):
        assert getattr(ours, name) == getattr(expected, name), name
    trainer = L.Trainer(devices=devices, **QUIET)
    assert trainer._accelerator_connector._parallel_devices == expected._parallel_devices


def test_a_validation_that_never_comes(tmp_path: Path) -> None:
    module, seen = Weight(), []
    module.validation_step = lambda *_: seen.append(1)  # type: ignore[method-assign]
    options = {"check_val_every_n_epoch": sys.maxsize, "num_sanity_val_steps": 0, "max_epochs": 2}
    L.Trainer(default_root_dir=tmp_path, **options, **QUIET).fit(module, ones(), ones())
    assert seen == []


def test_a_strategy_is_known_by_its_class() -> None:
    made = DDPStrategy(find_unused_parameters=True)
    assert (type(made), made.find_unused_parameters) == (DDP, True)
    assert isinstance(made, DDPStrategy)
    assert not isinstance("ddp", DDPStrategy)
    assert not isinstance(FSDPStrategy(), DDPStrategy)


def test_a_strategy_of_ones_own_is_an_error_only_when_it_is_used() -> None:
    class Mine(DDPStrategy):
        def __init__(self, more: int) -> None: ...

    class Later(Mine): ...

    for kind in (Mine, Later):
        with pytest.raises(TypeError, match=rf"{kind.__name__}\(.*\): subclass engine.DDP, whose methods differ"):
            kind(1)


def test_an_experiment_on_rank_0_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Logger):
        made = 0

        @property
        @rank_zero_experiment
        def experiment(self) -> Any:  # type: ignore[override]
            Mine.made += 1
            return [1]

    assert Mine().experiment == [1]
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setitem(os.environ, name, value)
    nothing = Mine().experiment
    nothing.log({"a": 1}).anything[0].more()
    nothing["a"] = 1
    assert Mine.made == 1
