"""``ServableModuleValidator``: a module answers a request before it is trained."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import Weight, fit, ones
from torch import Tensor

from callbacks import ServableModule, ServableModuleValidator

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")


class Serves(Weight, ServableModule):
    def __init__(self, expected: float = 6.0) -> None:
        super().__init__(2.0)
        self.expected = expected

    def configure_payload(self) -> dict[str, Any]:
        return {"body": {"x": 3.0}}

    def configure_serialization(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"x": torch.tensor}, {"y": Tensor.item}

    def serve_step(self, x: Tensor) -> dict[str, Any]:
        assert not self.training
        return {"y": (self.w * x).squeeze()}

    def configure_response(self) -> dict[str, Any]:
        return {"y": self.expected}


class Fails(Serves):
    def serve_step(self, x: Tensor) -> dict[str, Any]:
        raise RuntimeError("no answer")


def validator(**options: Any) -> ServableModuleValidator:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    return ServableModuleValidator(port=port, **options)


def test_a_module_answers(tmp_path: Path) -> None:
    checked, module = validator(), Serves()
    assert checked.successful is None
    fit(tmp_path, max_steps=2, callbacks=[checked]).run(module, ones(2))
    assert checked.successful
    assert checked.resp is not None
    assert checked.resp.json() == {"y": 6.0}
    assert module.training
    assert module.w.item() == 0.0  # 2 - 2 * 1: it has trained as ever


@pytest.mark.parametrize(
    ("module", "error", "said"),
    [
        (Serves(5.0), ValueError, r"answered {'y': 6.0}, and configure_response\(\) says {'y': 5.0}"),
        (Weight(), TypeError, "Weight does not inherit from ServableModule"),
        (Fails(), ValueError, "cannot be served: the server answered 500"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # the server logs the error of its module
def test_what_cannot_be_served_ends_the_run_before_its_first_step(
    module: Any, error: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        fit(tmp_path, max_steps=2, callbacks=[validator()]).run(module, ones(2))
    assert not module.losses


def test_a_failure_may_be_left_to_the_user(tmp_path: Path) -> None:
    checked = validator(exit_on_failure=False)
    fit(tmp_path, max_steps=1, callbacks=[checked]).run(Fails(), ones(1))
    assert checked.successful is False
    with pytest.raises(NotImplementedError, match="by 'fastapi'"):
        validator(server="torchserve")
