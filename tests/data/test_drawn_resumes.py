"""A dozen drawn combinations of data, ranks, strategy and step: each run that is continued on other ranks has the steps of the undisturbed one.

Expected values come from a training on one process that nothing interrupts.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file
from support.resumable import resumable_fit
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from engine import Callback, Engine, Mixture, Packed, PackedStream, TokenBudget, TrainModule

LAST = 32
WEIGHTS = {"a": 0.6, "b": 0.3, "c": 0.1}
COUNTS = {"a": (0, 100), "b": (1000, 50), "c": (2000, 30)}


def document(number: int) -> list[int]:
    return [number + 1] * (1 + number * 7 % 13)


class Stream(IterableDataset[Any]):
    """Numbers, or documents of them; of several workers each has its part. It can continue."""

    def __init__(self, low: int, count: int, documents: bool = False) -> None:
        self.low, self.count, self.documents, self.at = low, count, documents, 0

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        numbers = range(self.low + first, self.low + self.count, step)
        while self.at < len(numbers):
            self.at += 1
            number = numbers[self.at - 1]
            yield document(number) if self.documents else number
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def first_tokens(documents: list[list[int]]) -> Tensor:
    return torch.tensor([tokens[0] for tokens in documents])


def documents_of(low: int, count: int) -> list[list[int]]:
    return [document(low + number) for number in range(count)]


def rows(documents: list[list[int]], length: Any = 16) -> Packed:
    return Packed(documents, length)


def packed_of(name: str) -> Packed:
    low, count = COUNTS[name]
    return rows(documents_of(low, 2 * count))


def mixture(kind: str) -> Mixture:
    if kind == "packs mixed":
        return Mixture({name: packed_of(name) for name in COUNTS}, WEIGHTS)
    if kind == "packed streams mixed":
        return Mixture({name: PackedStream(Stream(*place, True), 16) for name, place in COUNTS.items()}, WEIGHTS)
    streams = {"streams": "abc", "streams, workers": "abc", "both": "b"}.get(kind, "")
    sources: dict[str, Any] = {
        name: Stream(low, count) if name in streams else range(low, low + count)
        for name, (low, count) in COUNTS.items()
    }
    if kind == "stages":
        stages = {0: WEIGHTS, 90: "equal", "200 samples": {"a": 0, "b": 0.5, "c": 0.5}}
        return Mixture(sources, stages, samples=110)
    return Mixture(sources, WEIGHTS, stop="all_exhausted" if kind == "all" else "first_exhausted")


def loader_of(kind: str, ranks: int) -> Any:
    """A loader with 12 samples in a step, or 120 tokens."""
    if kind.startswith("budget"):
        documents = documents_of(0, 300)
        budget = TokenBudget(list(map(len, documents)), 30, padded=kind == "budget")
        return DataLoader(documents, batch_sampler=budget, collate_fn=first_tokens)  # type: ignore[arg-type]
    if kind == "packed stream":
        return DataLoader(PackedStream(Stream(0, 300, True), 16), 3)
    if kind in ("packed", "lengths"):
        length: Any = 16 if kind == "packed" else {0: 4, "3e3 tokens": 8, "5e3 tokens": 16}
        return DataLoader(rows(documents_of(0, 300), length), 12 // ranks, shuffle=True)
    data = mixture(kind)
    workers = 2 if kind.endswith("workers") else 0
    if isinstance(data, IterableDataset):
        return DataLoader(data, 3, num_workers=workers)
    return DataLoader(data, 12 // ranks, shuffle=True, num_workers=workers)


KINDS = (
    "map", "map, workers", "stages", "all", "streams", "streams, workers", "both", "packs mixed", "packed streams mixed", "packed", "packed stream",
    "budget", "budget, joined", "lengths",
)  # fmt: skip
INDEXED = ("map", "stages", "all", "packs mixed", "packed")


def drawn() -> list[dict[str, Any]]:
    """A case for each kind, drawn once. Jobs of four ranks take most of the time, so few have them."""
    chance = random.Random(7)
    cases = []
    for kind in KINDS:
        before, after = chance.choice([(1, 2), (2, 1), (1, 2), (2, 1), (1, 4), (4, 2)])
        door = chance.choice(["fit", "engine"]) if kind in INDEXED else "fit"
        strategy, stop = chance.choice(["ddp", "fsdp"]), chance.randint(3, LAST - 8)
        cases.append({"kind": kind, "before": before, "after": after, "door": door, "strategy": strategy, "stop": stop})
    return cases


def numbers_in(batch: Any) -> list[int]:
    return batch["input_ids"].flatten().tolist() if isinstance(batch, dict) else batch.tolist()


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(4, 1)

    def forward(self, batch: Any) -> Tensor:
        values = batch["input_ids"].float() if isinstance(batch, dict) else batch.float().unsqueeze(1)
        return self.weight(values.mean(1, keepdim=True).expand(-1, 4) / 1e6).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Seen(Callback):
    def __init__(self) -> None:
        self.steps: dict[int, list[int]] = {}

    def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if run.engine.window.share.size:  # else it repeats another batch, at weight 0
            self.steps.setdefault(run.step, []).extend(numbers_in(batch))


def with_fit(case: dict[str, Any], ranks: int, folder: Path, stop: int, resume: str | None) -> dict[int, list[int]]:
    seen = Seen()
    size: Any = "120 tokens" if case["kind"].startswith("budget") else 12
    strategy = case["strategy"] if ranks > 1 else "single"
    fit = resumable_fit(
        folder, seen, devices=ranks, strategy=strategy, max_steps=stop, max_epochs=50, global_batch_size=size
    )
    result = fit.run(Net(), loader_of(case["kind"], ranks), resume=resume)
    if ranks == 1 or int(os.environ["RANK"]) == 0:
        folder.with_suffix(".txt").write_text(str(result.last_checkpoint))
    return seen.steps


def with_engine(case: dict[str, Any], ranks: int, folder: Path, stop: int, resume: str | None) -> dict[int, list[int]]:
    strategy = case["strategy"] if ranks > 1 else "single"
    engine = Engine(accelerator="cpu", seed=3, strategy=strategy)
    net = Net()
    model, optimizer, loader = engine.prepare(net, net.configure_optimizers(), loader_of(case["kind"], ranks))
    steps: dict[int, list[int]] = {}
    step = 0
    if resume is not None:
        engine.load_state(resume)
        step = case["stop"]
    while step < stop:
        for batch in loader:
            if engine.window.share.size:
                steps[step] = numbers_in(batch)
            engine.backward(model(batch))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == stop:
                break
    if resume is None:
        engine.save_state(folder)
        engine.wait_for_checkpoint()
        if ranks == 1 or int(os.environ["RANK"]) == 0:
            folder.with_suffix(".txt").write_text(str(folder))
    return steps


def trained(case: dict[str, Any], ranks: int, folder: Path, stop: int, resume: str | None = None) -> Any:
    function = with_engine if case["door"] == "engine" else with_fit
    return function(case, ranks, folder, stop, resume)


def rank_before() -> None:
    """Train the cases that begin on as many ranks as this job has, up to their checkpoints."""
    train_before(int(os.environ["WORLD_SIZE"]), Path(os.environ["DRAWN"]))


def train_before(ranks: int, folder: Path) -> None:
    for number, case in enumerate(drawn()):
        if case["before"] == ranks:
            trained(case, ranks, folder / f"{number}", case["stop"])


def last_rank_after() -> dict[str, Any]:
    """The steps of the cases that go on on as many ranks as this job has."""
    return train_after(int(os.environ["WORLD_SIZE"]), Path(os.environ["DRAWN"]))


def train_after(ranks: int, folder: Path) -> dict[str, Any]:
    steps = {}
    for number, case in enumerate(drawn()):
        if case["after"] == ranks:
            resume = (folder / f"{number}.txt").read_text()
            steps[str(number)] = trained(case, ranks, folder / f"{number} again", case["stop"] + 8, resume)
    return steps


@pytest.mark.slow
def test_drawn_combinations_continue_as_the_undisturbed_run(tmp_path: Path) -> None:
    cases = drawn()
    assert {case["door"] for case in cases} == {"fit", "engine"}
    train_before(1, tmp_path)
    for ranks in (2, 4):
        ranks_of_file(__file__, ranks, "rank_", DRAWN=str(tmp_path))
    after = {number: [steps] for number, steps in train_after(1, tmp_path).items()}
    for ranks in (2, 4):
        by_rank = ranks_of_file(__file__, ranks, "last_rank_", DRAWN=str(tmp_path))["after"]
        after |= {number: [steps[number] for steps in by_rank] for number in by_rank[0]}
    assert len(after) == len(cases)
    differing = []
    for number, case in enumerate(cases):
        whole = with_fit(case, 1, tmp_path / f"{number} whole", LAST, None)
        by_rank = [{int(step): numbers for step, numbers in rank.items()} for rank in after[str(number)]]
        steps = {
            step: sorted({n for rank in by_rank for n in rank.get(step, [])})
            for step in sorted({step for rank in by_rank for step in rank})
        }
        expected = {step: sorted({*whole[step]}) for step in range(case["stop"], case["stop"] + 8)}
        differing += [] if steps == expected else [case]
    assert not differing
