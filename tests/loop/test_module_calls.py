"""``all_gather`` of a module on several ranks: values, numbers, gradients, groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file
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
