"""What a strategy implements: the table in the README is that of the classes, and every strategy keeps its promises on two real ranks."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file
from torch import Tensor, nn

from engine import DDP, FSDP, DeepSpeed, Engine, MeshParallel, Single, Strategy

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "examples"))

from custom_strategy import LocalSGD  # noqa: E402

STRATEGIES: tuple[type[Strategy], ...] = (Single, DDP, FSDP, MeshParallel, DeepSpeed, LocalSGD)
ROW = re.compile(r"^\| `(\w+)` \| (.+) \| (.*) \|$")
VERBS = tuple(
    name
    for name in dir(Strategy)
    if not name.startswith("_")
    and name not in {field.name for field in fields(Strategy)} | {"loss_group"}
    and name != "speaks"  # the old name of a fact, refused
)


def table() -> dict[str, set[str]]:
    """The strategies that override each verb, as the README says."""
    text = (ROOT / "engine" / "strategies" / "README.md").read_text().partition("## A strategy of your own\n")[2]
    rows = filter(None, map(ROW.match, text.partition("\n## ")[0].splitlines()))
    return {row[1]: set(re.findall(r"`(\w+)`", row[3])) for row in rows if row[1] in VERBS}


def test_the_readme_lists_every_verb_and_who_overrides_it() -> None:
    assert table() == {verb: {kind.__name__ for kind in STRATEGIES if verb in vars(kind)} for verb in VERBS}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_an_override_takes_what_the_verb_takes(kind: type[Strategy]) -> None:
    for verb in set(VERBS) & set(vars(kind)):
        ours, base = getattr(kind, verb), getattr(Strategy, verb)
        if callable(base):
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(base).parameters), verb


ON_RANKS: dict[str, Any] = {
    "ddp": DDP,
    "fsdp": FSDP,
    "tp": lambda: MeshParallel(tp=2),
    "pp": lambda: MeshParallel(pp=2),
    "deepspeed": lambda: DeepSpeed(stage=1),
    "local": lambda: LocalSGD(every=1),
}


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

    def parallelize(self, mesh: Any) -> dict[str, str]:
        return {"0": "colwise", "2": "rowwise"}


def kept(strategy: Strategy) -> dict[str, Any]:
    """What one strategy does with a model, and its verbs say of it, on this rank."""
    engine = Engine(accelerator="cpu", strategy=strategy)
    rank = engine.process_index
    torch.manual_seed(rank)  # the ranks start with different values
    module = Net()
    model, optimizer = engine.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    before = {name: value.clone() for name, value in strategy.model_state(module).items()}

    def step(batch: Tensor, count: int) -> Tensor:
        return model(batch).square().mean()

    reached = strategy.traces([optimizer.optimizer], engine.models)
    engine.forward_backward(step, torch.full((2, 4), 1.0 + engine.strategy.data_group.rank))
    facts: dict[str, Any] = {
        "unwraps": strategy.unwrap(engine.models[0]) is module,
        "axes": torch.tensor(list(strategy.axes.values())).prod().item(),
        "sum": float(strategy.sum(1.0)) / strategy.data_group.world_size,
        "largest": strategy.largest([float(rank), -float(rank)]),
        "reached": reached != strategy.traces([optimizer.optimizer], engine.models),
    }
    if strategy.fused is None or strategy.pipelined:  # otherwise gradients are readable in the step only
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        facts["norm"] = float(strategy.norm(grads))
        facts["agree"] = float(strategy.agree(torch.tensor(float(rank))))
    optimizer.step()
    after = strategy.model_state(module)
    if engine.is_main_process:
        facts["weights"] = {
            name: [before[name].flatten().tolist(), after[name].flatten().tolist()] for name in module.state_dict()
        }
    engine.release()
    return facts


def rank_kept() -> dict[str, dict[str, Any]]:
    return {name: kept(make()) for name, make in ON_RANKS.items()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return ranks_of_file(__file__, 2)["kept"]


@pytest.mark.parametrize("name", ON_RANKS)
def test_verbs_on_two_ranks(found: list[dict[str, Any]], name: str) -> None:
    first, second = (rank[name] for rank in found)
    for facts in (first, second):
        assert facts["unwraps"]
        assert (facts["axes"], facts["sum"], facts["largest"]) == (2, 1.0, [1.0, 0.0])
        assert facts["reached"]
    if name != "local":  # its gradients are each rank's own
        assert first.get("norm") == pytest.approx(second.get("norm"))
    if name != "ddp":  # whose ranks have the same gradients when they step
        assert first.get("agree") == second.get("agree")


@pytest.mark.parametrize("name", ON_RANKS)
def test_a_step_on_two_ranks_is_that_of_one_process(found: list[dict[str, Any]], name: str) -> None:
    weights = found[0][name]["weights"]
    model = Net()
    model.load_state_dict(
        {key: torch.tensor(before).view_as(model.state_dict()[key]) for key, (before, _) in weights.items()}
    )
    rows = [1.0] if name in ("tp", "pp") else [1.0, 2.0]  # the ranks of one data rank see the same samples
    torch.cat([model(torch.full((2, 4), row)) for row in rows]).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for key, (before, after) in weights.items():
        assert after == pytest.approx(model.state_dict()[key].flatten().tolist(), abs=1e-6)
        assert after != before
