"""Strategies by name, and the single process, where every verb is neutral."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import DDP, Single, Strategy, strategies


def group(world_size: int) -> Any:
    return SimpleNamespace(world_size=world_size, rank=0)


@pytest.mark.parametrize(
    ("name", "world_size", "kind"), [("auto", 1, Single), ("auto", 2, DDP), ("single", 1, Single), ("ddp", 1, DDP), ("ddp", 2, DDP)]
)
def test_names(name: str, world_size: int, kind: type) -> None:
    assert type(strategies.get(name, world_size)) is kind


def test_an_object_is_used_as_it_is() -> None:
    own = DDP(bucket_cap_mb=1.0)
    assert strategies.get(own, 2) is own


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"strategy='fsdpp' is unknown.*possible: auto, single, ddp, or a Strategy object"):
        strategies.get("fsdpp")
    with pytest.raises(ValueError, match=r"strategy='singel' is unknown; did you mean 'single'"):
        strategies.get("singel")


def test_third_parties_register_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(Strategy):
        pass

    point = SimpleNamespace(name="theirs", load=lambda: Theirs)
    monkeypatch.setattr(strategies, "entry_points", lambda group: [point] if group == "engine.strategies" else [])
    assert type(strategies.get("theirs")) is Theirs
    with pytest.raises(ValueError, match="'their' is unknown; did you mean 'theirs'"):
        strategies.get("their")


def test_single_refuses_several_processes() -> None:
    with pytest.raises(ValueError, match=r"strategy='single' was asked for, but this job has 2 processes; use strategy='ddp' or 'auto'"):
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
    assert not own.matched_forward


@pytest.mark.parametrize(("grads", "expected"), [([], 0.0), ([[3.0], [4.0]], 5.0)])
def test_norm(grads: list[list[float]], expected: float) -> None:
    assert Single().norm([torch.tensor(g) for g in grads]).item() == expected
