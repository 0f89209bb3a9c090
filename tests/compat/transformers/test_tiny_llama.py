"""A tiny Llama, whole and with LoRA, under each kind of strategy and by both doors: the losses of a bare loop, and files that load again."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file

pytest.importorskip("transformers")
pytest.importorskip("peft")
sys.path.insert(0, str(Path(__file__).parent))

from peft import PeftModel
from tiny_llama import bare, by_engine, by_fit, llama, logits_of, model_of, module_of
from transformers import LlamaForCausalLM

from engine.cli.main import main

# peft reads an attribute that transformers is renaming.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
FOLDER = "TEST_FOLDER"
WITH_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
KINDS = ("full", "lora")


def by_door(door: str, strategy: str, kind: str) -> list[float]:
    """Train; leaves a checkpoint and, from rank 0, the logits of the trained weights. The losses."""
    folder = Path(os.environ[FOLDER]) / f"{door}_{strategy}_{kind}"
    if door == "fit":
        module = module_of(kind)
        fit, losses = by_fit(strategy, module, folder)
        state = {name.removeprefix("model."): value for name, value in fit.state_dict(module).items()}
        keeps = fit.is_main_process
    else:
        engine, model, losses = by_engine(strategy, model_of(kind), folder / "state")
        state = engine.get_state_dict(model)
        keeps = engine.is_main_process
    if keeps:
        again = model_of(kind)
        again.load_state_dict(state)
        torch.save(logits_of(again), folder / "logits.pt")
    return losses


def exported(folder: Path, kind: str) -> Any:
    """The model that ``fit checkpoint export`` writes, read by transformers or peft."""
    assert main(["checkpoint", "export", str(folder), str(folder / "out")]) == 0
    names = {path.name for path in (folder / "out").iterdir()}
    if kind == "full":
        assert names == {"model.safetensors", "config.json", "generation_config.json"}
        return LlamaForCausalLM.from_pretrained(folder / "out")
    assert names == {"adapter_model.safetensors", "adapter_config.json"}
    return PeftModel.from_pretrained(llama(), folder / "out")


def check(losses: list[float], folder: Path, kind: str) -> None:
    expected, logits = bare(kind)
    assert losses == pytest.approx(expected, abs=1e-5)
    saved = torch.load(folder / "logits.pt")
    assert torch.equal(logits_of(exported(folder, kind)), saved)
    torch.testing.assert_close(saved, logits, atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("door", ["fit", "engine"])
def test_one_process(door: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    check(by_door(door, "single", kind), tmp_path / f"{door}_single_{kind}", kind)


CASES: list[tuple[str, str, str]] = [
    (door, strategy, kind)
    for strategy in ("ddp", "fsdp", "zero3")
    for door in ("fit", "engine")
    for kind in KINDS
    if strategy != "zero3" or WITH_DEEPSPEED
]
QUICK = [("fit", "ddp", "full"), ("fit", "fsdp", "lora")]


def _name(case: tuple[str, str, str]) -> str:
    return "_".join(case)


for _case in CASES:
    globals()[f"{'quick' if _case in QUICK else _case[1]}_{_name(_case)}"] = partial(by_door, *_case)


@pytest.fixture(scope="module")
def ran() -> Any:
    """What the functions with a prefix gave on two ranks, and the folder; each prefix is run once."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:

        def run(prefix: str) -> dict[str, list[Any]]:
            if prefix not in found:
                found[prefix] = ranks_of_file(__file__, 2, prefix, **{FOLDER: folder})
            return found[prefix]

        yield Path(folder), run


def check_on_ranks(case: tuple[str, str, str], ran: tuple[Path, Callable[[str], Any]], prefix: str) -> None:
    folder, run = ran
    losses = run(prefix)[_name(case)]
    assert losses[0] == losses[1]
    check(losses[0], folder / _name(case), case[2])


@pytest.mark.parametrize("case", QUICK, ids=_name)
def test_two_ranks(case: tuple[str, str, str], ran: Any) -> None:
    check_on_ranks(case, ran, "quick_")


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICK], ids=_name)
def test_two_ranks_in_every_way(case: tuple[str, str, str], ran: Any) -> None:
    check_on_ranks(case, ran, f"{case[1]}_")
