"""Strategies by name, and the single process, where every verb is neutral."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints import source_of
from support.internals import group_of_one
from support.toys import Linear
from torch import nn

from callbacks import BaseFinetuning, GradientNorm, WeightAveraging
from engine import DDP, Callback, Fit, Single, Strategy, strategies
from engine.compat.transformers.saved_weights import SavedWeights, fill


def group(world_size: int) -> Any:
    return SimpleNamespace(world_size=world_size, rank=0)


@pytest.mark.parametrize(
    ("name", "world_size", "kind"),
    [("auto", 1, Single), ("auto", 2, DDP), ("single", 1, Single), ("ddp", 1, DDP), ("ddp", 2, DDP)],
)
def test_names(name: str, world_size: int, kind: type) -> None:
    assert type(strategies.get(name, world_size)) is kind


def test_an_object_is_used_as_it_is() -> None:
    own = DDP(bucket_cap_mb=1.0)
    assert strategies.get(own, 2) is own


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"strategy='zero' is unknown.*possible: auto, single, ddp, fsdp, .*or a Strategy object"
    ):
        strategies.get("zero")
    with pytest.raises(ValueError, match=r"strategy='singel' is unknown; did you mean 'single'"):
        strategies.get("singel")


def test_the_nearest_name_begins_alike() -> None:
    with pytest.raises(ValueError, match=r"strategy='dpp' is unknown; did you mean 'ddp'"):
        strategies.get("dpp")


def test_names_of_lightning_are_known() -> None:
    found = strategies.get("ddp_find_unused_parameters_true", 2)
    assert repr(found) == repr(DDP(find_unused_parameters=True))
    written = strategies.describe(found, "ddp_find_unused_parameters_true")
    assert (written["name"], written["find_unused_parameters"]) == ("ddp", True)
    assert repr(strategies.get(written)) == repr(found)
    assert repr(strategies.get("ddp_find_unused_parameters_false", 2)) == repr(DDP())
    with pytest.raises(ValueError, match="'ddp_spawn' is unknown; this name of Lightning's is 'ddp' here"):
        strategies.get("ddp_spawn")  # how processes start is not the strategy's


def test_third_parties_register_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(Strategy):
        pass

    point = SimpleNamespace(name="theirs", load=lambda: Theirs)
    monkeypatch.setattr(strategies, "entry_points", lambda group: [point] if group == "engine.strategies" else [])
    assert type(strategies.get("theirs")) is Theirs
    with pytest.raises(ValueError, match="'their' is unknown; did you mean 'theirs'"):
        strategies.get("their")


def test_single_refuses_several_processes() -> None:
    with pytest.raises(
        ValueError, match=r"strategy='single' was asked for, but this job has 2 processes; use strategy='ddp' or 'auto'"
    ):
        Single().connect(group(2))


def test_alone_every_verb_is_neutral() -> None:
    own = Single()
    own.connect(group(1))
    model = torch.nn.Linear(2, 1)
    found = torch.ones(())
    assert own.setup(model) is model
    assert own.unwrap(model) is model
    own.sync([model], False)
    own.expect([model], found)
    own.share_parameters(model)
    own.average_gradients(list(model.parameters()))
    assert own.sum(3) == 3
    assert own.agree(found) is found
    grads = [found]
    assert own.local(grads) is grads
    own.repoint(torch.optim.SGD(model.parameters(), lr=1.0))
    assert not own.matched_forward


@pytest.mark.parametrize(("method", "verb"), [("step", "stepper"), ("run_pipeline", "passes")])
def test_a_method_that_nothing_would_call_is_refused(method: str, verb: str) -> None:
    with pytest.raises(TypeError, match=rf"Own.{method} would never be called: override {verb}\(\)"):
        type("Own", (Single,), {method: lambda self: None})
    type("Own", (Single,), {method: lambda self: None, verb: lambda self: None})


def test_the_old_name_of_a_fact_is_refused() -> None:
    renamed = "Own.speaks is called is_counted now"
    with pytest.raises(TypeError, match=renamed):
        type("Own", (Single,), {"speaks": False})
    with pytest.raises(TypeError, match=renamed):
        type("Own", (Single,), {"__annotations__": {"speaks": bool}})

    class Own(Single):
        def connect(self, group: Any) -> None:
            super().connect(group)
            self.speaks = group.rank == 0  # type: ignore[misc]

    with pytest.raises(AttributeError, match=renamed):
        Own().connect(group_of_one())


@pytest.mark.parametrize(("grads", "expected"), [([], 0.0), ([[3.0], [4.0]], 5.0)])
def test_norm(grads: list[list[float]], expected: float) -> None:
    assert Single().norm([torch.tensor(g) for g in grads]).item() == expected


def two_groups(model: torch.nn.Module, reverse: bool = False) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.ndim == 2]
    groups = [
        {"params": weights[::-1] if reverse else weights, "lr": 0.5},
        {"params": [p for p in model.parameters() if p.ndim == 1]},
    ]
    return torch.optim.Adam(groups, lr=0.1)


def test_optimizer_states_are_kept_by_name(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    one, other = two_groups(model), two_groups(model, reverse=True)
    model(torch.ones(1, 2)).sum().backward()
    one.step()
    state = Single().optimizer_parts(one, model)
    assert [group["params"] for group in state["param_groups"]] == [["0.weight", "1.weight"], ["0.bias", "1.bias"]]
    assert set(state["state"]) == {"0.weight", "1.weight", "0.bias", "1.bias"}
    source = source_of(tmp_path / "a", optimizer=state)
    Single().load_optimizer(other, model, source.optim["0"], source)
    for p in model.parameters():
        assert torch.equal(one.state[p]["exp_avg"], other.state[p]["exp_avg"])
    assert [group["lr"] for group in other.param_groups] == [0.5, 0.1]


def test_numbered_optimizer_states_are_taken_as_torch_does(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    one, other = two_groups(model), two_groups(model)
    model(torch.ones(1, 2)).sum().backward()
    one.step()
    source = source_of(tmp_path / "a", optimizer=one.state_dict())
    Single().load_optimizer(other, model, source.optim["0"], source)
    assert torch.equal(other.state[model.bias]["exp_avg"], one.state[model.bias]["exp_avg"])


def test_a_state_of_other_parameters_is_refused(tmp_path: Path) -> None:
    small, large = (
        torch.nn.Sequential(torch.nn.Linear(2, 1)),
        torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)),
    )
    source = source_of(tmp_path / "a", optimizer=Single().optimizer_parts(two_groups(large), large))
    with pytest.raises(
        ValueError, match=r"state of Adam has other parameters.*only in the checkpoint: \['1.bias', '1.weight'\]"
    ):
        Single().load_optimizer(two_groups(small), small, source.optim["0"], source)


class Flattened(Single):
    """A strategy of a third party: rank 1 of 2 has the second half of each parameter, padded, in its attribute ``part``."""

    owns_weights = True

    def whole_shape(self, parameter: Any) -> torch.Size:
        return torch.Size(parameter.whole)

    def flat_range(self, parameter: Any) -> tuple[int, int] | None:
        return (3, 6)

    def local(self, grads: list[Any]) -> list[Any]:
        return [tensor.part for tensor in grads]


def divided() -> nn.Module:
    module = nn.Module()
    parameter: Any = nn.Parameter(torch.empty(0))
    parameter.whole, parameter.part, parameter.sharded_by = (3, 2), torch.zeros(4), "Flattened"
    module.weight = parameter
    return module


def test_saved_weights_fill_a_flat_shard(tmp_path: Path) -> None:
    save_file({"weight": torch.arange(6.0).view(3, 2)}, tmp_path / "model.safetensors")
    module: Any = divided()
    SavedWeights(tmp_path).read_into({"weight": module.weight}, Flattened())
    assert module.weight.part.tolist() == [3.0, 4.0, 5.0, 0.0]
    fill(module.weight, -torch.arange(6.0).view(3, 2), Flattened())
    assert module.weight.part.tolist() == [-3.0, -4.0, -5.0, 0.0]


def test_a_model_that_another_strategy_has_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match=r"whose parameters are sharded already\. If an earlier run"):
        DDP().setup(divided())


@pytest.mark.parametrize("callback", [WeightAveraging(), GradientNorm(), BaseFinetuning()])
def test_callbacks_refuse_a_strategy_that_owns_the_weights(callback: Callback, tmp_path: Path) -> None:
    fit = Fit(strategy=Flattened(), accelerator="cpu", root_dir=tmp_path, callbacks=[callback])
    with pytest.raises(ValueError, match=r"does not work (with|under) Flattened, which"):
        fit.run(Linear(), [torch.ones(2, 4)])
