"""``fit plan``: a target's plan as text, JSON and a page, its exit statuses, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.ranks import PATIENCE_S, clean_environment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from engine import TrainModule
from engine.cli.main import main
from engine.cli.terminal import DOES_NOT_FIT, STATUSES
from engine.planning import measurement

WIDTH = 8


class Net(TrainModule):
    """8 -> 8 without bias, twice."""

    def __init__(self, width: int = WIDTH, drop: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.drop = nn.Dropout(drop)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.drop(self.second(self.first(batch[0]))).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Rates(Net):
    """Reads a tensor's values while it is made, as schedules of stochastic depth do."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]


class Huge(Net):
    """4 TB of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.huge = nn.Parameter(torch.ones(1_000_000, 1_000_000))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.huge[:2, :2].sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows(count: int = 96) -> DataLoader[tuple[Tensor, ...]]:
    print("some words of the target's own")
    return DataLoader(TensorDataset(torch.zeros(count, WIDTH)), batch_size=4)


HERE = [f"{__file__}:Net", "--data", f"{__file__}:rows"]
CPU = ["--device", "cpu,1GB,fp32=1e9,1e9"]


def test_a_plan_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    options = [*CPU, "--world-size", "4", "--price", "3600", "--storage", "1kB/s", "--page", str(page), "--json"]
    assert main(["plan", *HERE, *options, "--set", "strategy=ddp", "max_epochs=2"]) == 0
    out, err = capsys.readouterr()
    assert "some words of the target's own" in err
    found = json.loads(out)
    assert (found["fits"], found["verdict"]) == (True, "yes")
    assert found["job"]["world_size"] == found["job"]["data_ranks"] == 4
    assert found["job"]["parameters"] == 128
    assert found["job"]["strategy"] == "DDP"
    memory = found["ranks"][0]["peak"]["memory"]
    assert memory["parameters"] == 512
    assert memory["optimizer_state"] == 1024 + 2 * 4  # two moments, and two counters of steps
    data = found["data"]
    # 96 rows in steps of 4 rows on each of 4 ranks
    assert (data["samples_per_step"], data["samples_per_epoch"], data["steps_per_epoch"], data["steps"]) == (
        16,
        96,
        6,
        12,
    )
    assert found["checkpoint"]["bytes"] == 512 + 1032
    assert found["checkpoint"]["seconds"] == pytest.approx(1.544)
    assert found["cost"]["total"] == pytest.approx(4 * 12 * found["time"]["step_s"])
    reduced = [each for each in found["ranks"][0]["collectives"] if each["phase"] == "backward"]
    assert sum(each["bytes"] for each in reduced) == 512
    assert page.read_text().startswith("<!doctype html>")


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--device", "cpu,1KB,fp32=1e9,1e9"]
    assert main(["plan", *HERE, *tiny, "--world-size", "1"]) == DOES_NOT_FIT
    assert "It does not fit: it needs" in capsys.readouterr().out
    assert f"  {DOES_NOT_FIT}    fit plan" in STATUSES


def test_ranks_of_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *HERE, *CPU, "--json", "--set", "devices=2", "num_nodes=3", "strategy=ddp"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["world_size"] == 6


def test_parameters_take_no_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{__file__}:Huge", *HERE[1:], *CPU, "--world-size", "1", "--json"]) == DOES_NOT_FIT
    found = json.loads(capsys.readouterr().out)
    assert found["job"]["parameters"] == 10**12 + 128
    assert found["ranks"][0]["peak"]["memory"]["parameters"] == 4 * 10**12 + 512


def test_a_module_that_reads_values_is_made_in_memory(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "engine"):
        assert main(["plan", f"{__file__}:Rates", *HERE[1:], *CPU, "--world-size", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["parameters"] == 128
    assert "Rates is made in memory, with all of its parameters" in caplog.text
    assert "self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (HERE, "for how many ranks? give --world-size N"),
        ([*HERE, "--world-size", "0"], "world_size=0 must be at least 1"),
        ([*HERE, "--world-size", "6", "--nodes", "4"], "do not divide evenly over nodes=4"),
        ([*HERE, "--world-size", "2", "--device", "h1000"], "did you mean 'h100'"),
        ([*HERE, "--world-size", "2", "--network", "fast"], "'fast' is not a bandwidth"),
        ([*HERE, "--world-size", "2", "--storage", "slow"], "storage 'slow': 'slow' is not a bandwidth"),
        ([*HERE, "--world-size", "2", "--price", "-1"], "price=-1.0: give what one device costs for one hour"),
        ([*HERE, "--world-size", "2", "--price", "nan"], "price=nan: give what one device costs"),
        ([*HERE, "--world-size", "2", "--page", "plan.txt"], "ends in .html"),
        ([*HERE, "--world-size", "2", "--page", f"{__file__}/plan.html"], f"{__file__} is not a folder"),
        ([*HERE, "--world-size", "2", "--processes", "3"], "--processes needs --measure"),
        ([*HERE, "--world-size", "2", "--seconds", "3"], "--seconds needs --search"),
        ([*HERE, "--world-size", "2", "--search", "--seconds", "0"], "give more than 0"),
        ([*HERE, "--world-size", "2", "--search", "--price", "2"], "--price is of one plan"),
        (["--measure", "--world-size", "8"], "--world-size is not for --measure"),
        (["--measure", "--search"], "--search is not for --measure"),
        ([], "no TrainModule is named"),
        ([*HERE, "--world-size", "2", "--set", "strategy=fdsp"], "did you mean 'fsdp'"),
        ([*HERE, "--world-size", "2", "--set", "model.widht=4"], "did you mean 'width'"),
        ([*HERE, "--world-size", "2", "strategy=ddp"], "unrecognized arguments"),
        ([*HERE, "--measure"], "takes no target"),
        (["--measure", "--processes", "0"], "give at least 1"),
        (["nowhere:Net", "--world-size", "2"], "there is no module 'nowhere'"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    try:
        status = main(["plan", *arguments])
    except SystemExit as end:  # argparse
        status = end.code
    assert status == 2
    assert words in capsys.readouterr().err


def test_an_error_of_the_module_ends_at_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *HERE, *CPU, "--world-size", "1", "--set", "model.width=4"]) == 1  # the data has 8
    err = capsys.readouterr().err
    assert "return self.drop(self.second(self.first(batch[0])))" in err
    assert "must have same reduction dim" in err
    assert "_subclasses" not in err


def test_a_narrow_terminal_and_a_page_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = tmp_path / "plan.html"
    page.symlink_to(tmp_path / "missing" / "plan.html")  # only writing shows that it fails
    options = ["--world-size", "4", "--set", "strategy={name: fsdp, dp_replicate: 2}", "gradient_clip_val=1"]
    assert main(["plan", *HERE, *CPU, *options, "--price", "0.0001", "--page", str(page)]) == 2
    out, err = capsys.readouterr()
    assert err.splitlines()[-1] == f"fit: error: --page {page}: cannot be written: No such file or directory"
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    (scattered,) = (line.split() for line in lines if line.startswith("reduce_scatter"))
    assert scattered[:4] == ["reduce_scatter", "dp_shard", "backward", "no"]  # on a CPU nothing overlaps
    assert scattered[6] in ("B", "KiB")
    assert any(line.startswith("epoch       96 samples, 6 steps") for line in lines)
    assert any(line.startswith("training    6 steps, 1 epoch: ") for line in lines)
    assert not any("0.00 for" in line for line in lines)


def test_what_it_measures_is_what_it_takes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "_SECONDS", 1e-3)
    assert main(["plan", "--measure", "--processes", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["within"], found["as_network"]) == (1, None, None)
    assert min(found["peaks"]["fp32"], found["bandwidth"], found["memory"]) > 1e6
    assert main(["plan", *HERE, "--world-size", "1", "--device", found["as_device"], "--json"]) == 0
    device = json.loads(capsys.readouterr().out)["device"]
    assert device["memory"] == found["memory"]
    assert device["peaks"]["float32"] == pytest.approx(found["peaks"]["fp32"], rel=0.01)
    assert device["reached"] == {"compute": 1.0, "memory": 1.0, "links": 1.0}
    assert device["caching"] is (found["device"] != "cpu")


@pytest.mark.slow
def test_links_between_ranks_are_measured(tmp_path: Path) -> None:
    # Each rank repeats the command, so it needs a program of its own.
    command = [sys.executable, "-m", "engine.cli.main", "plan", "--measure", "--processes", "2", "--json"]
    environment = clean_environment(PYTHONPATH=str(Path(__file__).parents[2]))
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ranks"] == 2
    assert found["within"]["bandwidth"] > 1e6
    assert 0 < found["within"]["latency"] < 1
    assert found["between"] is None
