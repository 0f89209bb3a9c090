"""What a search names under a bound that rules data parallel training out really runs on 4 ranks within that bound."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from measured import measure
from support.ranks import ranks_of_file
from torch.utils.data import DataLoader

from engine import Fit

ROOT = Path(__file__).resolve().parents[2]
RANKS, BATCH, LIMIT = 4, 2, 17 * 2**19


@dataclass
class Chosen:
    """A candidate of the search as a job to measure: the GPT example with its ``settings`` of ``Fit``."""

    given: dict[str, Any]
    micro_batch: int

    @property
    def micro_batches(self) -> int:
        return int(self.given["accumulate_grad_batches"])

    def settings(self) -> dict[str, Any]:
        return self.given

    def module(self) -> Any:
        sys.path.insert(0, str(ROOT / "examples"))
        from gpt import GPT, Size

        return GPT(Size(layers=2, heads=4, width=128, context=64, batch_size=BATCH, lr=1e-3, max_steps=100), 100)

    def loader(self) -> Any:
        numbers = torch.Generator().manual_seed(3)
        rows = torch.randint(1, 256, (RANKS * BATCH * 16, 65), dtype=torch.uint8, generator=numbers)
        return DataLoader(list(rows), batch_size=self.micro_batch)


def rank_measured() -> Any:
    given = json.loads(os.environ["CHOSEN"])
    return measure(Chosen(given["settings"], given["micro_batch"]), Path(os.environ["PLANNING_ROOT"]))


@pytest.mark.slow
def test_what_it_names_runs_within_the_bound(tmp_path: Path) -> None:
    asked = Chosen({}, BATCH)
    fit = Fit(accelerator="cpu", num_sanity_val_steps=0, log_every_n_steps=0, root_dir=tmp_path)
    found = fit.search_plans(asked.module(), asked.loader(), world_size=RANKS, device="cpu", memory_limit=LIMIT)
    assert {tried.verdict for tried in found.tried if tried.candidate.settings["strategy"] == "ddp"} == {"too large"}
    best = found.best
    assert best is not None
    assert best.plan is not None
    assert best.plan.peak_bytes <= LIMIT
    chosen = {"settings": best.candidate.settings, "micro_batch": best.candidate.micro_batch}
    env = {
        "CHOSEN": json.dumps(chosen),
        "PLANNING_ROOT": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT)]),
    }
    measured = ranks_of_file(__file__, RANKS, **env)["measured"]
    peaks = [sum(rank["peak"].values()) for rank in measured]
    assert max(peaks) <= LIMIT
    assert max(peaks) == pytest.approx(best.plan.peak_bytes, rel=1e-5)  # 16 bytes: the loss's two numbers
