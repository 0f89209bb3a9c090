"""``all_gather`` of a module on several ranks: values, numbers, gradients, groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import TESTS, ranks_of_file, run_ranks
from support.toys import Weight, ones
from torch import Tensor

from engine import Fit


class Gathers(Weight):
    """Loss of rank r: ``(r + 1) * sum over ranks q of z[q]`` with ``z[q] = w * (q + 2)``."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options, self.found = options, {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        r = self.global_rank
        z = self.w * (r + 2)
        every = self.all_gather(z, **self.options)
        self.found = {
            "shape": list(every.shape),
            "graph": every.requires_grad,
            "tree": [[t.tolist() for t in pair] for pair in self.all_gather([(torch.ones(2) * r, r)])],
        }
        return (r + 1) * (every.sum() if every.requires_grad else z.sum())


def trained(module: Gathers) -> Any:
    try:
        Fit(strategy="ddp", accelerator="cpu", max_epochs=1).run(module, ones(2))  # one step of two ranks
    except ValueError as error:
        return str(error)
    return module.found | {"w": module.w.item()}


def rank_plain() -> Any:
    return trained(Gathers())


def rank_with_gradients() -> Any:
    return trained(Gathers(sync_grads=True))


def rank_groups() -> Any:
    import torch.distributed as dist

    alone = [dist.new_group([rank]) for rank in range(2)]
    return [trained(Gathers(group=dist.group.WORLD)), trained(Gathers(group=alone[dist.get_rank()]))]


class GathersInSteps(Weight):
    """Gathers the batch in each step of an evaluation, and at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.found.append(self.all_gather(batch.sum()).tolist())

    def on_validation_epoch_end(self) -> None:
        self.found.append(self.all_gather(self.global_rank).tolist())

    predict_step = validation_step


def rank_evaluations() -> Any:
    outcomes = []
    for verb in ("validate", "predict"):
        module = GathersInSteps()
        getattr(Fit(strategy="ddp", accelerator="cpu"), verb)(module, ones(4))
        outcomes.append(module.found)
    # a training whose last window repeats a batch, with a validation whose batches divide
    module = GathersInSteps()
    Fit(strategy="ddp", accelerator="cpu", max_epochs=1).run(module, ones(3), ones(2))
    return [*outcomes, module.found]


@pytest.fixture(scope="module")
def by_rank() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2)


def test_the_values_of_all_ranks_without_a_graph(by_rank: Any) -> None:
    for found in by_rank["plain"]:
        assert (found["shape"], found["graph"]) == ([2, 1], False)
        assert found["tree"] == [[[[0.0, 0.0], [1.0, 1.0]], [0, 1]]]
        assert found["w"] == -(1 * 2 + 2 * 3) / 2  # each rank's own loss


def test_gradients_of_the_values_of_other_ranks(by_rank: Any) -> None:
    for found in by_rank["with_gradients"]:
        assert (found["shape"], found["graph"]) == ([2, 1], True)
        assert found["w"] == -(1 * (2 + 3) + 2 * (2 + 3)) / 2  # as one process would have it


def test_a_group_of_some_ranks_is_an_error(by_rank: Any) -> None:
    for world, alone in by_rank["groups"]:
        assert world["shape"] == [2, 1]
        assert alone.startswith("all_gather(group=...) is a group of 1 rank(s), but values are gathered over all 2")


def test_values_are_gathered_in_evaluations(by_rank: Any) -> None:
    for validated, predicted, in_training in by_rank["evaluations"]:
        assert validated == [[2.0, 2.0], [2.0, 2.0], [0, 1]]
        assert predicted == [[2.0, 2.0], [2.0, 2.0]]
        assert in_training[-2:] == [[2.0, 2.0], [0, 1]]


@pytest.mark.parametrize("verb", ["validate", "predict"])
def test_a_step_in_which_some_rank_has_no_batch_gathers_nothing(verb: str) -> None:
    class InUnevenStep(GathersInSteps):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            position = self.run.engine.window.position
            position.share = position.share._replace(repeats=True)
            super().validation_step(batch, batch_idx)

        predict_step = validation_step

    with pytest.raises(ValueError, match="some rank has no batch"):
        getattr(Fit(accelerator="cpu", devices=1), verb)(InUnevenStep(), ones(1))


@pytest.mark.slow
@pytest.mark.parametrize(("batches", "verb"), [(1, "test"), (3, "validate"), (3, "predict")])
def test_ranks_with_different_numbers_of_batches(batches: int, verb: str) -> None:
    script = f"""
import sys; sys.path[:0] = [{str(TESTS)!r}, {str(Path(__file__).parent)!r}]
import test_module_calls as tests
tests.GathersInSteps.test_step = tests.GathersInSteps.validation_step
tests.Fit(strategy="ddp", accelerator="cpu").{verb}(tests.GathersInSteps(), tests.ones({batches}))
"""
    ranks = run_ranks(script, 2, check=False)
    assert all(rank.returncode for rank in ranks)
    assert any("some rank has no batch now" in rank.stderr for rank in ranks)
