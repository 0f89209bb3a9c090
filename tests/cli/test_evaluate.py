"""``fit validate``, ``test`` and ``predict``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.cli import predictions

DATA = ("net:Net", "--data", "net:Numbers")


@pytest.fixture
def trained(fit) -> None:
    """Checkpoints with the weights -7 (step 2) and -14 (step 4), the first of which has the better score."""
    callback = (
        "--callback",
        "ModelCheckpoint",
        "--set",
        "callbacks.0.monitor=val",
        "callbacks.0.mode=max",
        "callbacks.0.save_top_k=2",
    )
    assert fit("run", *DATA, *callback, "max_epochs=2", "num_sanity_val_steps=0").status == 0


@pytest.mark.parametrize(
    ("checkpoint", "weight"), [("last", -14.0), ("best", -7.0), ("runs/checkpoints/step=00000002", -7.0)]
)
def test_metrics_of_a_checkpoint(fit, trained: None, checkpoint: str, weight: float) -> None:
    ended = fit("test", *DATA, "--checkpoint", checkpoint, "--json")
    assert (ended.status, json.loads(ended.out)) == (0, [{"mean": 3.5, "weight": weight}])
    ended = fit("validate", *DATA, "--checkpoint", checkpoint, "--json")
    assert json.loads(ended.out) == [{"val": 3.5 * weight}]


def test_metrics_are_a_table(fit) -> None:
    ended = fit("test", *DATA, "--set", "data.several=true", "model.start=2")
    rows = [
        [cell.strip() for cell in line.strip("│┃ ").replace("┃", "│").split("│")]
        for line in ended.out.splitlines()
        if line[0] in "│┃"
    ]
    names = [
        [f"{name}/dataloader_idx_{index}", value]
        for index in (0, 1)
        for name, value in (("mean", "3.5"), ("weight", "2"))
    ]
    assert rows == [["metric", "value"], *names]


def test_a_progress_bars_table_is_the_only_one(fit) -> None:
    ended = fit("test", *DATA, "--callback", "RichProgressBar")
    assert ended.out.count("mean") == 1
    assert ended.out.split()[:2] == ["test", "value"]


def test_what_the_module_prints_is_no_part_of_json(fit, here: Path) -> None:
    (here / "loud.py").write_text(
        "import net\nclass Loud(net.Net):\n    def on_test_end(self):\n        print('done')\n"
    )
    ended = fit("test", "loud.py", "--data", "net:Numbers", "--json")
    assert json.loads(ended.out) == [{"mean": 3.5, "weight": 0.0}]
    assert ended.err == "done\n"


def test_predictions_as_tensors(fit, trained: None, here: Path) -> None:
    ended = fit("predict", *DATA, "--checkpoint", "last", "--output", "out.safetensors", "--json")
    assert json.loads(ended.out) == {"samples": 8, "output": "out.safetensors"}
    found = load_file(here / "out.safetensors")
    assert {name: tensor.flatten().tolist() for name, tensor in found.items()} == {
        "predictions": [-14.0 * i for i in range(8)]
    }
    (here / "other").touch()
    assert (here / "out.safetensors").stat().st_mode == (here / "other").stat().st_mode


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_a_name_that_no_file_of_tensors_can_have(here: Path, name: str) -> None:
    with pytest.raises(ValueError, match="a tensor has"):
        predictions.write([{name: torch.ones(2)}], False, "out.safetensors")
    assert not (here / "out.safetensors").exists()


def test_predictions_as_lines(fit, here: Path) -> None:
    arguments = ("predict", *DATA, "--set", "model.start=2", "data.count=3", "data.batch_size=2")
    assert fit(*arguments, "model.kind=FANCY", "--output", "out.jsonl").out == "samples: 3\noutput: out.jsonl\n"
    lines = [json.loads(line) for line in (here / "out.jsonl").read_text().splitlines()]
    assert lines == [{"out": [2.0 * i], "name": f"sample {i}"} for i in range(3)]
    assert fit(*arguments, "data.several=true", "model.start=.inf", "--output", "out.jsonl").status == 0
    lines = [json.loads(line) for line in (here / "out.jsonl").read_text().splitlines()]
    assert lines == [
        {"loader": loader, "prediction": [None]} for loader in (0, 1) for _ in range(3)
    ]  # nan, inf and inf


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("ending", predictions.ENDINGS)
def test_a_full_disk_names_the_file(tmp_path: Path, ending: str) -> None:
    (output := tmp_path / f"full{ending}").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: .*full{ending}"):
        predictions.write([torch.ones(2)], False, str(output))


def test_predictions_without_a_file_are_described(fit) -> None:
    assert fit("predict", *DATA).out == "samples: 8\npredictions: float32 [8, 1]\n"
    several = json.loads(fit("predict", *DATA, "--set", "data.several=true", "--json").out)
    assert several == {"samples": 16, "0": "float32 [8, 1]", "1": "float32 [8, 1]"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--output", "out.pt"), "the suffix must be .safetensors or .jsonl"),
        (("--output", "none/out.jsonl"), "there is no directory 'none'"),
        (
            ("--output", "out.safetensors", "--set", "model.kind=FANCY"),
            "predictions hold 'sample 0' of type str, which is not a tensor",
        ),
        (("--checkpoint", "last"), "no complete checkpoint in"),
        (("--checkpoint", "nowhere"), "nowhere"),
    ],
)
def test_what_is_wrong(fit, arguments: tuple[str, ...], message: str) -> None:
    ended = fit("predict", *DATA, *arguments)
    assert (ended.status, message in ended.err) == (2, True), ended.err


def test_a_file_of_settings_that_is_named_makes_test_the_loop(fit, here: Path) -> None:
    (here / "fit.yaml").write_text("model: net:Net\ndata: net:Numbers\n")
    ended = fit("test", "--config", "fit.yaml", "--json")
    assert json.loads(ended.out) == [{"mean": 3.5, "weight": 0.0}]
