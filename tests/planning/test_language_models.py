"""Plans of models with many words, with and without logits, and a search with Muon. ``test_real_ranks.py`` compares their bytes with real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import BATCH, WIDTH, Words, adamw, muon
from torch.utils.data import DataLoader, TensorDataset

from engine import Fit
from engine.planning.plan import RankTrace

MANY = 4096
ROWS = BATCH * 8


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(MANY * 9).view(-1, 9) % MANY), batch_size=BATCH)


def flops(trace: RankTrace) -> int:
    return sum(operation.flops * operation.count for operation in trace.operations)


def test_without_logits_the_flops_are_the_same_and_the_peak_is_not(tmp_path: Path) -> None:
    fit = Fit(accelerator="cpu", root_dir=tmp_path)
    plain, ours = (
        fit.plan(Words(adamw, plain, words=MANY), loader(), world_size=1, device="cpu").traces[0]
        for plain in (True, False)
    )
    assert (
        flops(ours) == flops(plain) > 3 * 2 * ROWS * MANY * WIDTH
    )  # three products of the output layer, and the blocks
    assert plain.peak.memory.total - ours.peak.memory.total > 4 * ROWS * MANY


@pytest.mark.slow
def test_a_search_plans_muon_where_it_gets_whole_tensors_and_says_where_it_does_not(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    search = Fit(accelerator="cpu", strategy="fsdp", root_dir=tmp_path).search_plans(
        lambda: Words(muon, words=MANY), loader(), world_size=2, device="h100", seconds=600
    )
    verdicts: dict[str, set[str]] = {}
    for candidate in search.as_json()["candidates"]:
        verdicts.setdefault(str(candidate["strategy"]), set()).add(candidate["verdict"])
    assert "fits" in verdicts["fsdp"]
    assert "fits" in verdicts["ddp"]
    assert {v for name, found in verdicts.items() if name.startswith("deepspeed") for v in found} == {"refused"}
    assert not any("failed" in found for found in verdicts.values()), verdicts
    reasons = " ".join(tried.reason for tried in search.tried)
    assert "Muon under ZeRO stage 2: it needs whole tensors" in reasons
