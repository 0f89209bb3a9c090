"""Export of models to ONNX and TorchScript by torch's exporters."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from engine.utils.paths import expanded
from engine.utils.tree import move


def to_onnx(module: Any, file: str | Path | IO[bytes] | None, sample: Any, options: dict[str, Any]) -> Any:
    """Call ``torch.onnx.export(module, sample, file, **options)`` on the module's device, in eval mode unless ``options`` has ``training``.

    Raises:
        ModuleNotFoundError: a package that the exporter needs is missing.
        ValueError: there is no sample.
    """
    needed = ("onnx",) if options.get("dynamo") is False else ("onnx", "onnxscript")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise ModuleNotFoundError(f"to_onnx needs {missing[0]}: pip install {' '.join(needed)}", name=missing[0])
    sample = _sample(module, sample, "to_onnx", "input_sample")
    with _exported(module, "training" in options and module.training):
        return torch.onnx.export(module, sample, expanded(file) if isinstance(file, (str, Path)) else file, **options)  # type: ignore[arg-type]


def to_torchscript(
    module: Any, file: str | Path | None, method: str | None, sample: Any, options: dict[str, Any]
) -> Any:
    """Convert the module, in eval mode, to a ``torch.jit.ScriptModule``; write that to ``file`` if one is given.

    Raises:
        ValueError: ``method`` is unknown, or is ``"trace"`` without a sample.
    """
    if method not in ("script", "trace"):
        raise ValueError(f"to_torchscript(method={method!r}) is unknown; possible: 'script', 'trace'")
    if method == "trace":
        sample = _sample(module, sample, "to_torchscript(method='trace')", "example_inputs")
        with _exported(module, False):
            script = torch.jit.trace(module, sample, **options)
    else:
        with _exported(module, False):
            script = torch.jit.script(module, **options)
    if file is not None:
        torch.jit.save(script, expanded(file))
    return script


def _sample(module: Any, sample: Any, call: str, argument: str) -> Any:
    sample = module.example_input_array if sample is None else sample
    if sample is None:
        raise ValueError(f"{call} needs an input of forward: give {argument}, or set example_input_array")
    device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    return move(sample, device)


@contextmanager
def _exported(module: nn.Module, training: bool) -> Iterator[None]:
    """Compute without gradients inside the block, in eval mode unless ``training``; restore each submodule's mode afterwards."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    if not training:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for submodule, mode in modes:
            submodule.training = mode
