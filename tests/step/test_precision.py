"""Number formats by name."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics

from callbacks import ModelCheckpoint
from engine import Engine, Fit, TrainModule
from engine.step.precision import Precision
from engine.utils import accelerator
from engine.utils.tree import move

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "expected", "autocast", "parameters", "scaled"),
    [
        ("32-true", "32-true", None, None, False),
        ("bf16-mixed", "bf16-mixed", torch.bfloat16, None, False),
        ("16-mixed", "16-mixed", torch.float16, None, True),
        ("bf16-true", "bf16-true", None, torch.bfloat16, False),
        ("16-true", "16-true", None, torch.float16, False),
        ("64-true", "64-true", None, torch.float64, False),
        ("no", "32-true", None, None, False),
        ("bf16", "bf16-mixed", torch.bfloat16, None, False),
        ("fp16", "16-mixed", torch.float16, None, True),
        (16, "16-mixed", torch.float16, None, True),
        (32, "32-true", None, None, False),
        (64, "64-true", None, torch.float64, False),
    ],
)
def test_names(
    name: str | int, expected: str, autocast: torch.dtype | None, parameters: torch.dtype | None, scaled: bool
) -> None:
    found = Precision.parse(name)
    assert (found.name, found.autocast, found.parameters, found.scaled) == (expected, autocast, parameters, scaled)
    assert Precision.parse(found) is found
    assert pickle.loads(pickle.dumps(found)) == found


def test_unknown_name() -> None:
    with pytest.raises(
        ValueError,
        match=r"precision='fp7' is unknown; did you mean 'fp8'.*possible: 32-true, bf16-mixed, 16-mixed.*fp16",
    ):
        Precision.parse("fp7")


@pytest.mark.parametrize(
    ("precision", "missing", "told"),
    [
        ("64-true", "computes_in", "lacks float64"),
        ("bf16-true", "computes_in", "lacks bfloat16"),
        ("bf16-mixed", "autocasts_to", "lacks autocast to bfloat16"),
        ("fp8-mixed", "autocasts_to", "lacks autocast to bfloat16"),
        ("16-mixed", "autocasts_to", "lacks autocast to float16"),
        ("16-mixed", "scales_losses", "lacks the loss scaler"),
    ],
)
def test_what_the_device_lacks_is_an_error_with_its_name(
    monkeypatch: pytest.MonkeyPatch, precision: str, missing: str, told: str
) -> None:
    monkeypatch.setattr(accelerator, missing, lambda *_: False)
    monkeypatch.setattr(accelerator, "name", lambda device: "mps:0 (Apple M1)")
    with pytest.raises(ValueError, match=rf"precision='{precision}': mps:0 \(Apple M1\) {told}.*'32-true' works"):
        Engine(accelerator="cpu", precision=precision)
    Engine(accelerator="cpu")


def test_a_dtype_that_autocast_leaves_out_is_an_error() -> None:
    """Torch warns, and computes in fp32."""
    with pytest.raises(ValueError, match="cpu lacks autocast to float64"):
        Engine(accelerator="cpu", precision=Precision("own", autocast=torch.float64))


@pytest.mark.parametrize(
    ("name", "dtype"), [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)]
)
def test_context(name: str, dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(2, 2)
    with Precision.parse(name).context(CPU):
        assert layer(torch.ones(1, 2)).dtype == dtype


class Rotary(TrainModule):
    """Turns pairs of features by angles that grow with the position, as rotary embeddings do, with a complex buffer; and buffers of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)
        self.scale = torch.nn.Parameter(torch.tensor([1.0 + 1.0j, 2.0 - 0.5j]))
        self.register_buffer(
            "turns", torch.polar(torch.ones(3, 2), torch.outer(torch.arange(3.0), torch.tensor([1.0, 0.1])))
        )
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("low", torch.ones(2).to(torch.float8_e4m3fn))
        self.mean = torchmetrics.MeanMetric()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        pairs = torch.view_as_complex(
            y.to(torch.float32 if y.dtype == torch.bfloat16 else y.dtype).view(*y.shape[:-1], 2, 2)
        )
        return torch.view_as_real(pairs * self.turns * self.scale).flatten(-2)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        out = self(batch)
        self.mean.update(out.detach()[0, 0, 0].float() * 0 + 1)
        return (out - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sequences() -> list[torch.Tensor]:
    return [torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]


def bare(real: torch.dtype, complex_: torch.dtype) -> dict[str, torch.Tensor]:
    """The training of :class:`Rotary` with formats that are given to each tensor by hand."""
    module = Rotary()
    module.linear.to(real)
    module.scale.data, module.turns = module.scale.data.to(complex_), module.turns.to(complex_)
    optimizer = module.configure_optimizers()
    for batch in sequences():
        module.training_step(batch.to(real), 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict()


@pytest.mark.parametrize(
    ("precision", "real", "complex_"),
    [("bf16-true", torch.bfloat16, torch.complex64), ("64-true", torch.float64, torch.complex128)],
)
def test_complex_numbers_stay_complex(tmp_path: Path, precision: str, real: torch.dtype, complex_: torch.dtype) -> None:
    module, expected = Rotary(), bare(real, complex_)
    assert expected["turns"].imag.abs().sum() > 0
    Fit(accelerator="cpu", precision=precision, root_dir=tmp_path, callbacks=ModelCheckpoint()).run(module, sequences())
    assert {n: t.dtype for n, t in module.state_dict().items()} == {n: t.dtype for n, t in expected.items()}
    for name, value in expected.items():
        assert torch.equal(
            module.state_dict()[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)
        ), name
    assert module.mean.mean_value.dtype == module.mean.weight.dtype == torch.float32  # sums of many values
    assert module.low.dtype == torch.float8_e4m3fn
    assert [module.count.dtype, module.mask.dtype] == [torch.int64, torch.bool]
    loaded = Rotary.load_from_checkpoint(tmp_path / "checkpoints", strict=False)  # numbers of half the width
    torch.testing.assert_close(loaded.turns, expected["turns"].to(torch.complex64))
    torch.testing.assert_close(loaded.scale.detach(), expected["scale"].to(torch.complex64))


def test_complex_batches() -> None:
    batch = [
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, dtype=torch.complex128),
        torch.ones(2),
        torch.ones(2).to(torch.float8_e5m2),
    ]
    found = {
        name: [t.dtype for t in move(batch, CPU, dtype)]
        for name, dtype in (("64", torch.float64), ("bf16", torch.bfloat16))
    }
    assert found["64"] == [torch.complex128, torch.complex128, torch.float64, torch.float8_e5m2]
    assert found["bf16"] == [torch.complex64, torch.complex64, torch.bfloat16, torch.float8_e5m2]
