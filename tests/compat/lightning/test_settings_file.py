"""The ``trainer`` of a Lightning project's YAML file as settings of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.internals import resolved_settings

from engine.cli.main import main
from engine.compat.lightning.settings_file import read


def found(folder: Path, **trainer: Any) -> Any:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"seed_everything": 1, "trainer": trainer, "model": {"width": 3}}))
    return read(path)


def test_settings_and_what_belongs_elsewhere(tmp_path: Path) -> None:
    file = found(
        tmp_path, max_epochs=3, devices=-1, precision="bf16-mixed", gradient_clip_val=0.5, strategy="ddp_spawn", logger=True
    )  # fmt: skip
    expected = {"max_epochs": 3, "devices": "auto", "precision": "bf16-mixed", "gradient_clip_val": 0.5}
    assert file.settings == {**expected, "strategy": "ddp", "val_every": "1 epochs"}
    assert file.refused == []
    assert [note.split(":")[0] for note in file.notes] == ["logger"]
    assert found(tmp_path, accelerator="cpu").settings["max_epochs"] == 1000  # Lightning's own default


@pytest.mark.parametrize(
    ("given", "every"),
    [
        ({"val_check_interval": 10, "check_val_every_n_epoch": None, "accumulate_grad_batches": 2}, "5 steps"),
        ({"val_check_interval": 0.25}, "0.25 epochs"),
        ({"check_val_every_n_epoch": 4}, "4 epochs"),
    ],
)
def test_validations(given: dict[str, Any], every: str, tmp_path: Path) -> None:
    assert found(tmp_path, **given).settings["val_every"] == every


def test_a_strategy_by_its_class(tmp_path: Path) -> None:
    given = {
        "class_path": "lightning.pytorch.strategies.FSDPStrategy",
        "init_args": {"sharding_strategy": "SHARD_GRAD_OP"},
    }
    expected = {"name": "fsdp", "reshard_after_forward": False, "cpu_offload": False}
    assert found(tmp_path, strategy=given).settings["strategy"] == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"plugins": "x"}, "plugins"),
        ({"val_check_interval": 10}, "val_check_interval: 10: counts micro-batches"),
        ({"strategy": {"class_path": "x.XLAStrategy"}}, "DDPStrategy, FSDPStrategy"),
        ({"max_epoch": 3, "max_steps": 4}, "did you mean 'max_epochs'"),
    ],
)
def test_what_has_no_counterpart_is_refused(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    (refusal,) = found(tmp_path, **given).refused
    assert said in refusal


def test_the_command_writes_a_file_that_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found(tmp_path, max_steps=5, default_root_dir="runs", enable_progress_bar=False)
    out = tmp_path / "fit.yaml"
    assert main(["config", "--from-lightning", str(tmp_path / "config.yaml"), "--output", str(out)]) == 0
    settings = resolved_settings({}, {}, out).settings
    assert (settings.max_steps, str(settings.root_dir)) == (5, "runs")
    (tmp_path / "config.yaml").write_text("model: {}\n")
    with pytest.raises(ValueError, match="neither a 'trainer' nor its arguments"):
        read(tmp_path / "config.yaml")
