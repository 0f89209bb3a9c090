"""Exports of a module: TorchScript equals the module, and what is missing is named."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engine import TrainModule


class Net(TrainModule):
    """Batch norm and dropout: eval mode differs from training mode."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(width, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("method", ["script", "trace"])
def test_torchscript_is_the_module_in_eval_mode(method: str, tmp_path: Path) -> None:
    module, x = Net(), torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    module.net[2].eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's
        made = module.to_torchscript(tmp_path / "net.pt", method, x)
        loaded = torch.jit.load(tmp_path / "net.pt")
    assert [module.training, module.net[1].training, module.net[2].training] == [True, True, False]  # as before
    expected = module.eval()(x)
    for found in (made, loaded):
        torch.testing.assert_close(found(x), expected, rtol=0, atol=0)


def test_the_example_is_used_when_no_input_is_given() -> None:
    module = Net()
    with pytest.raises(
        ValueError, match=r"to_torchscript\(method='trace'\) needs an input of forward: .*example_input_array"
    ):
        module.to_torchscript(method="trace")
    module.example_input_array = torch.ones(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert module.to_torchscript(method="trace")(torch.ones(2, 3)).shape == (2, 4)
    with pytest.raises(ValueError, match="method='tarce'"):
        module.to_torchscript(method="tarce")


@pytest.mark.skipif(importlib.util.find_spec("onnx") is not None, reason="onnx is installed")
def test_onnx_names_the_package_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="to_onnx needs onnx: pip install onnx onnxscript"):
        Net().to_onnx(tmp_path / "net.onnx", torch.ones(1, 3))


@pytest.mark.filterwarnings("ignore")  # the exporter's own
def test_onnx_is_the_module_in_eval_mode(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    module, x = Net(), torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    module(x)  # batch norm has seen data
    module.net[2].eval()
    module.to_onnx(tmp_path / "net.onnx", x, input_names=["x"], dynamo=True)
    module.to_onnx(str(tmp_path / "any.onnx"), x, input_names=["x"], dynamic_shapes=({0: torch.export.Dim("rows")},))
    assert [module.training, module.net[1].training, module.net[2].training] == [True, True, False]  # as before
    expected = module.eval()(torch.cat([x, x])).detach()
    for name, rows in (("net", 5), ("any", 10)):
        session = runtime.InferenceSession(tmp_path / f"{name}.onnx")
        (found,) = session.run(None, {"x": torch.cat([x, x])[:rows].numpy()})
        torch.testing.assert_close(torch.from_numpy(found), expected[:rows])
