"""Low-bit training under each strategy: a training that is saved at step 2 and resumed has the bits of an uninterrupted one, or it is refused before
its first step."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from low_bit_models import DATA, Net, cell, same, trained
from support.ranks import ranks_of

from engine import Engine, MeshParallel
from engine.utils.errors import CheckError

HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None
EQUAL = ""


class Row(NamedTuple):
    """What is trained, and the outcome on one process, under ddp and under fsdp: equal bits, or a part of the error."""

    kind: str = "plain"
    optimizer: str = "AdamW"
    single: str = EQUAL
    ddp: str = EQUAL
    fsdp: str = EQUAL
    is_near: bool = True
    """Whether the weights of all strategies agree to 1e-4. Fake quantization rounds, so that last bits become whole steps of 4 bits."""
    is_slow: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind} {self.optimizer}"


INT8 = "layers.0.base.weight (Int8Tensor)"
ROWS = {
    row.name: row
    for row in (
        Row(),
        Row("nf4"),
        Row("nf4 double", is_slow=True),
        Row("nf4 in float32", is_slow=True),
        Row("int8", fsdp="layers.0.base.weight (Int8Params)"),
        Row("torchao Int8WeightOnlyConfig", "AdamW", INT8, INT8, INT8),
        Row("torchao Float8WeightOnlyConfig", "AdamW", *["layers.0.base.weight (Float8Tensor)"] * 3, is_slow=True),
        Row("qat", is_near=False),
        Row("qat", "SGD", is_near=False),
        *(Row("plain", f"torchao {name}", is_slow=True) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")),
        Row("plain", "bitsandbytes AdamW8bit", is_slow=True),
    )
    if HAS_BITSANDBYTES or not row.name.startswith(("nf4", "int8", "plain bitsandbytes"))
}
STRATEGY_NAMES = {"single": "Single", "ddp": "'ddp'", "fsdp": "FSDP"}
"""How the errors name the strategies."""


def cells_on_ranks(root: str, speed: str) -> dict[str, Any]:
    """The cells of all quick, or all slow rows on this rank; and what is refused there."""
    rows = [row for row in ROWS.values() if row.is_slow is (speed == "slow")]
    cells = {f"{r.name} {s}": cell(Path(root), r.kind, r.optimizer, s) for r in rows for s in ("ddp", "fsdp")}
    return cells if speed == "slow" or not HAS_BITSANDBYTES else cells | {"errors": errors_on_ranks(Path(root))}


def errors_on_ranks(root: Path) -> dict[str, str]:
    """The errors of trainings that would go wrong without a word, or with one of torch's."""
    plan = {"layers.*.base": "colwise"}
    cases: dict[str, Callable[[], Any]] = {
        "other weights": lambda: trained(root / "a", Net("nf4", seed=int(os.environ["RANK"])), 1, "ddp"),
        "storage": lambda: trained(root / "b", Net("nf4 in float32"), 1, "fsdp", precision="bf16-mixed"),
        "plan": lambda: trained(root / "c", Net("nf4"), 1, MeshParallel(tp=2, dp_shard=1, plan=plan)),
    }
    found = {}
    for name, train in cases.items():
        with pytest.raises((ValueError, CheckError)) as error:
            train()
        found[name] = str(error.value)
    return found


@pytest.fixture(scope="module")
def quick_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the quick rows' trainings."""
    return tmp_path_factory.mktemp("quick")


@pytest.fixture(scope="module")
def quick(quick_root: Path) -> dict[str, Any]:
    """The cells of quick rows on two ranks, as rank 0 has them."""
    return ranks_of(cells_on_ranks, 2, quick_root, "quick")[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The cells of slow rows on two ranks, as rank 0 has them."""
    return ranks_of(cells_on_ranks, 2, tmp_path_factory.mktemp("slow"), "slow")[0]  # type: ignore[no-any-return]


def _check(row: Row, on_ranks: dict[str, Any], root: Path) -> None:
    cells = {s: on_ranks[f"{row.name} {s}"] for s in ("ddp", "fsdp")}
    cells["single"] = cell(root, row.kind, row.optimizer, "single")
    for strategy, found in cells.items():
        if expected := getattr(row, strategy):
            assert expected in found["error"]
            assert STRATEGY_NAMES[strategy] in found["error"]
            assert "bitsandbytes" in found["error"]  # the way out
            assert found["steps"] == 0
            continue
        assert "error" not in found, found
        assert found["equal"], f"{row.name} under {strategy} differs after its resume"
        for name, values in found["weights"].items() if row.is_near else ():
            assert values == pytest.approx(cells["single"]["weights"][name], abs=1e-4), (strategy, name)


@pytest.mark.parametrize("name", [row.name for row in ROWS.values() if not row.is_slow])
def test_row(name: str, quick: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    _check(ROWS[name], quick, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [row.name for row in ROWS.values() if row.is_slow])
def test_slow_row(name: str, slow: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    _check(ROWS[name], slow, tmp_path)


# -- what was wrong without a word ----------------------------------------------------------------------------------------------------

needs_bitsandbytes = pytest.mark.skipif(not HAS_BITSANDBYTES, reason="bitsandbytes is not installed")


@needs_bitsandbytes
def test_ranks_with_other_weights_floats_that_are_bits_and_parts_of_blocks_are_refused(quick: dict[str, Any]) -> None:
    errors = quick["errors"]
    assert "scales of quantized weights differ between the ranks" in errors["other weights"]
    assert "layers.0.base.weight.absmax" in errors["other weights"]
    assert "layers.0.base.weight (Params4bit) has its 4 bits in numbers of type torch.float32" in errors["storage"]
    assert "quant_storage=torch.bfloat16" in errors["storage"]
    assert "the tensor parallel plan cuts 'layers.0.base'" in errors["plan"]


@needs_bitsandbytes
def test_one_process_continues_sharded_4_bits(quick: dict[str, Any], quick_root: Path, tmp_path: Path) -> None:
    """The checkpoint of ``fsdp`` has the scales, which the layer keeps outside of its parameters."""
    (saved,) = quick_root.glob("nf4 AdamW fsdp/resumed/checkpoints/step=*2")
    continued = trained(tmp_path / "continued", Net("nf4"), 4, resume=saved)
    whole = trained(tmp_path / "whole", Net("nf4"), 4)
    assert continued.keys() == whole.keys()
    assert all(torch.allclose(continued[name].float(), whole[name].float(), atol=1e-4) for name in whole)


@needs_bitsandbytes
def test_evaluations_change_nothing(tmp_path: Path) -> None:
    """bitsandbytes repacks weights for inference on CPUs with bf16 instructions, and no gradient passes such a layer."""
    plain = trained(tmp_path / "plain", Net("nf4"), 3)
    assert same(trained(tmp_path / "evaluated", Net("nf4"), 3, validates=True), plain)


@needs_bitsandbytes
def test_a_resume_takes_the_scales_of_the_checkpoint(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", Net("nf4"), 4)
    trained(tmp_path / "resumed", Net("nf4"), 2)
    assert same(trained(tmp_path / "resumed", Net("nf4", seed=5), 4, resume="auto"), whole)


@needs_bitsandbytes
def test_a_format_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    """Scales that are quantized themselves have an offset, which bitsandbytes saves within the description of the format."""
    trained(tmp_path, Net("nf4 double"), 2)
    with pytest.raises(ValueError, match=r"another value of layers\.0\.base\.weight\.quant_state\.bitsandbytes__nf4"):
        trained(tmp_path, Net("nf4 double", seed=5), 4, resume="auto")


@needs_bitsandbytes
def test_precisions_do_not_convert_bits(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"precision='bf16-true' would convert to torch\.bfloat16"):
        trained(tmp_path / "refused", Net("nf4 in float32"), 1, precision="bf16-true")
    states = [trained(tmp_path / kind, Net(kind), 2, precision="bf16-true") for kind in ("nf4", "nf4 in bfloat16")]
    for name in ("layers.0.a", "layers.1.b", "head.weight"):  # the same bits in numbers of another type
        assert torch.equal(states[0][name], states[1][name])


@needs_bitsandbytes
def test_a_loop_with_engine_continues_from_its_checkpoint(tmp_path: Path) -> None:
    def looped(first: int, last: int, net: Net, saved: Path | None = None) -> dict[str, Any]:
        engine = Engine(accelerator="cpu")
        model, optimizer = engine.prepare(net, net.configure_optimizers())
        if saved is not None and first:
            engine.load_state(saved)
        for step in range(first, last):
            engine.backward(net.training_step(DATA[8 * step : 8 * step + 8], step))
            optimizer.step()
            optimizer.zero_grad()
        if saved is not None and not first:
            engine.save_state(saved)
        return {name: value.detach().clone() for name, value in engine.unwrap_model(model).state_dict().items()}

    whole = looped(0, 4, Net("nf4"))
    looped(0, 2, Net("nf4"), tmp_path / "state")
    assert same(looped(2, 4, Net("nf4", seed=5), tmp_path / "state"), whole)


def test_a_loop_with_engine_names_the_class_that_it_cannot_save(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    engine, net = Engine(accelerator="cpu"), Net("torchao Int8WeightOnlyConfig")
    engine.prepare(net, net.configure_optimizers())
    with pytest.raises(TypeError, match=r"'layers\.0\.base\.weight' \(.*Int8Tensor.* cannot be stored"):
        engine.save_state(tmp_path / "state")
