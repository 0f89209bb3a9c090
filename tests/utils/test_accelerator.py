"""Which device a name means, and what a device can do. Devices that this machine lacks are pretended in torch.accelerator's answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from support.ranks import ranks_of

from engine import Engine, Fit, TrainModule
from engine.config.settings import Settings
from engine.utils import accelerator
from engine.utils.accelerator import visible_index

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def probes_anew() -> Iterator[None]:
    """What is tried on a pretended device must not be remembered of a real one."""
    probes = [each for each in vars(accelerator).values() if hasattr(each, "cache_clear")]
    for probe in probes:
        probe.cache_clear()
    yield
    for probe in probes:
        probe.cache_clear()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    return Pretend(monkeypatch)


class Pretend:
    """Lets torch say that the machine has ``there`` devices of a kind; nothing can be computed on them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.chosen: list[int] = []

    def has(self, kind: str, there: int = 1) -> None:
        owner = SimpleNamespace(is_available=lambda: there > 0, device_count=lambda: there)
        found = SimpleNamespace(type=kind)  # torch.device does not know the names of packages that are not installed
        self.monkeypatch.setattr(
            torch.accelerator,
            "current_accelerator",
            lambda check_available=False: found if there or not check_available else None,
        )
        self.monkeypatch.setattr(torch, "get_device_module", lambda device=None: owner)
        self.monkeypatch.setattr(torch.accelerator, "set_device_index", self.chosen.append)


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu", "npu", "hpu", "mtia"])
def test_every_accelerator_has_three_names(kind: str, machine: Pretend) -> None:
    machine.has(kind, 2)
    assert [accelerator.device_type(name) for name in ("auto", "gpu", kind)] == [kind] * 3
    assert accelerator.device_type("cpu") == "cpu"
    assert (accelerator.count(kind, "auto"), accelerator.count(kind, 1), accelerator.count("cpu", "auto")) == (2, 1, 1)


def test_a_device_of_a_package_by_its_name() -> None:
    with pytest.raises(
        ValueError, match=r"accelerator='gadget' is unknown.*a package adds to torch, once it is imported"
    ):
        Settings(accelerator="gadget")
    assert ranks_of(device_of_a_package, 1) == [["gadget"] * 3]


def device_of_a_package() -> list[object]:
    torch.utils.rename_privateuse1_backend("gadget")  # for the whole process
    Pretend(pytest.MonkeyPatch()).has("gadget")
    setting = Settings(accelerator="gadget").accelerator
    return [setting, accelerator.device_type("gadget"), accelerator.device_type("auto")]


@pytest.mark.parametrize("kind", ["gpu", "cuda", "mps", "xpu", "npu", "hpu"])
def test_an_accelerator_that_is_not_there(kind: str, machine: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Really: this test's torch may be a CPU build. Then one that was built for a device that the machine lacks."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    for ask in (lambda: Engine(accelerator=kind), lambda: Fit(accelerator=kind).run(TrainModule(), [])):
        with pytest.raises(RuntimeError) as told:
            ask()
        assert f"accelerator='{kind}' was requested, but torch {torch.__version__} was built without" in str(told.value)
        assert "use 'cpu' or 'auto'" in str(told.value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    machine.has("cuda", 0)
    with pytest.raises(RuntimeError, match=r"built for cuda\) sees only the CPU.*CUDA_VISIBLE_DEVICES='7'"):
        accelerator.device_type(kind)
    assert accelerator.device_type("auto") == "cpu"


def test_another_accelerator_than_the_machines(machine: Pretend) -> None:
    machine.has("mps")
    with pytest.raises(
        RuntimeError, match=r"accelerator='cuda' .* sees 1 mps device\(s\).*; use 'mps' or 'gpu' or 'auto'"
    ):
        accelerator.device_type("cuda")


def test_more_devices_than_there_are(machine: Pretend) -> None:
    machine.has("mps")
    with pytest.raises(ValueError, match=r"devices=2 was requested, but this machine has 1 mps device\(s\)"):
        accelerator.count("mps", 2)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("cuda:1", "accelerator='cuda', devices=[1]"),
        ("rocm", "torch calls ROCm's GPUs 'cuda'"),
        ("tpu", "has no TPU"),
        ("metal", "it is called 'mps'"),
    ],
)
def test_names_from_elsewhere_are_explained(name: str, told: str) -> None:
    for ask in (lambda: Settings(accelerator=name), lambda: accelerator.device_type(name)):
        with pytest.raises(ValueError, match=re.escape(told)):
            ask()


def test_the_local_ranks_device_becomes_the_current_one(machine: Pretend) -> None:
    machine.has("cuda", 2)
    assert accelerator.device("cuda", 1) == torch.device("cuda", 1)
    assert machine.chosen == [1]
    assert accelerator.device("cpu", 3) == CPU


def test_what_a_cpu_can_do() -> None:
    assert accelerator.supports_float64(CPU)
    assert accelerator.supports_bf16(CPU)
    assert accelerator.autocasts_to(CPU, torch.bfloat16)
    assert not accelerator.autocasts_to(CPU, torch.float64)  # torch only warns, and computes in fp32
    assert accelerator.scales_losses(CPU)
    assert accelerator.collectives_backend(CPU) == "gloo"
    assert not any(has(CPU) for has in (accelerator.has_streams, accelerator.has_events, accelerator.pins))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_fused_kernels_are_tried(optimizer: type[torch.optim.Optimizer]) -> None:
    assert accelerator.fused_skips(CPU, optimizer)


def test_a_fused_kernel_that_ignores_what_it_is_given() -> None:
    class Deaf(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            del self.found_inf, self.grad_scale
            super().step()

    class HalfDeaf(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            self.found_inf = torch.zeros(()) if hasattr(self, "found_inf") else None
            super().step()

    class Without(torch.optim.SGD):
        def __init__(self, params: object, lr: float, fused: bool) -> None:
            raise RuntimeError("`fused=True` requires supported devices")

    assert not accelerator.fused_skips(CPU, Deaf)
    assert not accelerator.fused_skips(CPU, HalfDeaf)
    assert not accelerator.fused_skips(CPU, Without)


def test_no_memory_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "ones", full)
        with pytest.raises(MemoryError, match="no memory is left to try"):
            accelerator.supports_float64(CPU)
    assert accelerator.supports_float64(CPU)


def test_a_device_without_collectives() -> None:
    with pytest.raises(RuntimeError, match=r"meta has no back end for collectives.*or use devices=1"):
        accelerator.collectives_backend(torch.device("meta"))


def test_a_single_device_that_a_launcher_left_is_the_processs_own() -> None:
    """``srun --ntasks 4 --gpus-per-task 1``: each task sees one device."""
    assert [visible_index(local_rank, 1, binds_devices=True) for local_rank in range(4)] == [0, 0, 0, 0]
    assert [visible_index(local_rank, 4, binds_devices=True) for local_rank in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("index", "there", "own"), [(1, 1, False), (4, 4, True), (0, 0, True)])
def test_a_local_rank_beyond_the_visible_devices(
    index: int, there: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(
        ValueError, match=rf"local rank {index} has no device: this process sees {there} cuda.*CUDA_VISIBLE_DEVICES='5'"
    ):
        visible_index(index, there, own)
