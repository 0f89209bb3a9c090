"""What an error says about a path at which no checkpoint is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.toys import Weight, fit, ones

from engine.checkpoint.missing_checkpoint import reason


def empty(path: Path) -> None:
    path.mkdir()


def half_copied(path: Path) -> None:
    (path / "model").mkdir(parents=True)
    (path / "model" / "rank=00000.safetensors").touch()


def of_accelerate(path: Path) -> None:
    path.mkdir()
    (path / "model.safetensors").touch()
    (path / "random_states_0.pkl").touch()


def of_deepspeed(path: Path) -> None:
    (path / "global_step1").mkdir(parents=True)
    (path / "latest").write_text("global_step1")


def linked(path: Path) -> None:
    path.symlink_to("nowhere")


def others(path: Path) -> None:
    path.mkdir()
    for name in "abcdefg":
        (path / name).touch()


REASONS: dict[str, tuple[Callable[[Path], None], str]] = {
    "nothing": (lambda path: None, "{} does not exist; if it was moved or renamed, give its new path"),
    "an empty folder": (empty, "it is an empty folder"),
    "half a copy": (half_copied, "its other files are there, so a copy or a save"),
    "Accelerate's": (
        of_accelerate,
        "it looks like a checkpoint of Accelerate: fit checkpoint convert FOLDER OUT makes a checkpoint",
    ),
    "DeepSpeed's": (of_deepspeed, "it looks like a checkpoint of DeepSpeed: zero_to_fp32.py"),
    "a link": (linked, "it is a link to nowhere, which does not exist"),
    "other files": (others, "it has a, b, c, d, e and 2 more"),
}


@pytest.mark.parametrize("kind", REASONS)
def test_what_stands_in_the_place_of_a_checkpoint_is_told(kind: str, tmp_path: Path) -> None:
    make, text = REASONS[kind]
    path = tmp_path / "given"
    make(path)
    assert reason(path).startswith(text.format(path))


def test_the_first_folder_of_a_path_that_is_gone_is_named(tmp_path: Path) -> None:
    assert reason(tmp_path / "run" / "checkpoints" / "step=3").startswith(f"{tmp_path}/run does not exist")
    (tmp_path / "file").touch()
    assert reason(tmp_path / "file" / "step=3") == f"{tmp_path}/file is a file"


def test_a_resume_and_a_load_say_it(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=rf"resume=.*manifest.json is missing\): {tmp_path}/run does not exist; if it was moved"
    ):
        fit(tmp_path).run(Weight(), ones(1), resume=tmp_path / "run" / "step=3")
    with pytest.raises(FileNotFoundError, match=rf"contains none .*: {tmp_path}/run does not exist; if it was moved"):
        Weight.load_from_checkpoint(tmp_path / "run")
