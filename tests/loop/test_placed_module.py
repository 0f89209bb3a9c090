"""A module after its run: its counters, its whole weights under every strategy, and that it can be used on."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from support.ranks import ranks_of_file
from support.toys import fit
from torch import Tensor, nn

from engine import Callback, Fit, MeshParallel, TrainModule


class Net(TrainModule):
    """Its first two layers share a weight, where the strategy can cut that."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        if tied:
            self.layers[1].weight = self.layers[0].weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.seen: list[tuple[str, int, int]] = []

    def pipeline_stages(self) -> list[nn.Module]:
        return list(self.layers)

    def parallelize(self, mesh: Any) -> dict[str, str]:
        return {"layers.2": "colwise", "layers.3": "rowwise"}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self(batch) - 1).square().mean()

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.note("test")

    def note(self, where: str) -> None:
        self.seen.append((where, self.current_epoch, self.global_step))

    def on_train_epoch_end(self) -> None:
        self.note("epoch end")

    def on_train_end(self) -> None:
        self.note("train end")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data() -> list[Tensor]:
    return [torch.randn(4, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]


def whole(tied: bool, state: dict[str, Tensor]) -> Net:
    """A module of these weights that was in no run."""
    module = Net(tied)
    module.load_state_dict(state)
    return module


def bare(tied: bool, batches: list[Tensor]) -> dict[str, Tensor]:
    module = Net(tied).double()
    optimizer = module.configure_optimizers()
    for batch in batches:
        (module(batch.double()) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.float() for name, value in module.state_dict().items()}


# -- on two ranks -----------------------------------------------------------------------------------------------------------------


STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "fsdp": lambda: "fsdp",
    "tp": lambda: MeshParallel(tp=2),
    "pp": lambda: MeshParallel(pp=2),
    "deepspeed_2": lambda: "deepspeed_stage_2",
    "deepspeed_3": lambda: "deepspeed_stage_3",
}


def rank_gathered() -> dict[str, Any]:
    return {name: after(name, make()) for name, make in STRATEGIES.items()}


def after(name: str, strategy: Any) -> dict[str, Any]:
    """How far the whole weights are from a bare loop's, and what else works once a run is over."""
    tied = name in ("ddp", "fsdp")
    module = Net(tied)
    half = name not in ("tp", "pp")
    # A global batch is one of data()'s: two ranks that see different data have a half each.
    batches = [part for batch in data() for part in batch.chunk(2 if half else 1)]
    expected = bare(tied, data())
    with tempfile.TemporaryDirectory() as root:
        ours = Fit(accelerator="cpu", strategy=strategy, root_dir=root)
        ours.run(module, batches)
        found: dict[str, Any] = {"after": module.seen[-1]}
        state = ours.state_dict(module, everywhere=True)
        found["apart"] = max((state[key] - value).abs().max().item() for key, value in expected.items())
        found["plain"] = all(type(value) is Tensor and value.device.type == "cpu" for value in state.values())
        found["tied"] = not tied or state["layers.0.weight"].data_ptr() == state["layers.1.weight"].data_ptr()
        found["main only"] = len(ours.state_dict(module))
        before = [id(p) for p in module.parameters()]
        with ours.gathered(module):
            if ours.is_main_process:
                save_model(module, f"{root}/out.safetensors")
                saved = load_file(f"{root}/out.safetensors")
                found["saved"] = max((saved[key] - expected[key]).abs().max().item() for key in saved)
            if half and ours.is_main_process:
                inputs = data()[0]
                found["copied"] = torch.allclose(
                    copy.deepcopy(module)(inputs), whole(tied, expected)(inputs), atol=1e-5
                )
        with ours.gathered(module, everywhere=True):
            found["summed"] = sum(p.detach().double().sum().item() for p in module.parameters()) - sum(
                expected[key].double().sum().item() for key, _ in Net(tied).named_parameters()
            )
        found["back"] = before == [id(p) for p in module.parameters()]
        ours.test(module, batches)
        found["tested"] = module.seen[-1]
        ours.run(module, batches)
        again = ours.state_dict(module, everywhere=True)
        found["again"] = max(
            (again[key] - value).abs().max().item() for key, value in bare(tied, [*data(), *data()]).items()
        )
    return found


@pytest.fixture(scope="module")
def found() -> Any:
    return ranks_of_file(__file__, 2, timeout=300)["gathered"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_whole_weights_after_a_run(found: Any, name: str) -> None:
    for rank, one in enumerate(row[name] for row in found):
        assert one["apart"] < 1e-6
        assert one["again"] < 1e-6
        assert abs(one["summed"]) < 1e-5
        assert one["plain"]
        assert one["tied"]
        assert one["back"]
        assert one.get("copied", True)
        assert one["main only"] == (0 if rank else 9)
        assert one.get("saved", 1.0) < 1e-6 or rank
        assert one["after"] == ["train end", 1, 4]
        assert one["tested"] == ["test", 1, 4]


# -- on one process ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "ends", "last"), [({"max_epochs": 2}, [0, 1], (2, 8)), ({"max_steps": 6}, [0, 1], (2, 6))]
)
def test_counters_are_lightnings(tmp_path: Path, limit: Any, ends: list[int], last: tuple[int, int]) -> None:
    class Reads(Callback):
        def on_train_end(self, run: Any, module: Any) -> None:
            module.seen.append(("callback", run.epoch, run.step))

    module = Net()
    ours = fit(tmp_path, callbacks=Reads(), **limit)
    ours.run(module, data())
    assert [epoch for where, epoch, _ in module.seen if where == "epoch end"] == ends
    assert module.seen[-2:] == [("callback", *last), ("train end", *last)]
    assert (module.current_epoch, module.global_step) == last
    ours.test(module, data()[:1])
    assert module.seen[-1] == ("test", *last)
    assert (module.current_epoch, module.global_step) == last
    fit(tmp_path, max_steps=1).run(module, data())
    assert (module.current_epoch, module.global_step) == (1, 1)


def test_not_inside_of_a_run(tmp_path: Path) -> None:
    class Gathers(Net):
        def on_train_end(self) -> None:
            with pytest.raises(RuntimeError, match=r"use run.engine.get_state_dict\(module\)"):
                ours.state_dict(self)
            self.seen.append(("refused", 0, 0))

    module, ours = Gathers(), fit(tmp_path)
    ours.run(module, data())
    assert module.seen[-1][0] == "refused"
