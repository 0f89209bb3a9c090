"""Checks over HTTP, before the training starts, that a module can be served."""

from __future__ import annotations

import copy
import importlib.util
import json
import threading
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine import DDP, Callback, Run, Single

Functions = dict[str, Callable[[Any], Any]]


class ServableModule(ABC, nn.Module):
    """Base class, next to ``TrainModule``, of modules that answer requests. The methods are Lightning's."""

    @abstractmethod
    def configure_payload(self) -> dict[str, Any]:
        """Return an example of a request, ``{"body": {argument: JSON value}}``."""

    @abstractmethod
    def configure_serialization(self) -> tuple[Functions, Functions]:
        """Return two dicts of functions by name: from JSON values to arguments of :meth:`serve_step`, and from its outputs to JSON values."""

    @abstractmethod
    def serve_step(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Compute the outputs, by name."""

    @abstractmethod
    def configure_response(self) -> dict[str, Any]:
        """Return the expected answer to :meth:`configure_payload`."""


@dataclass
class Response:
    """An answer of the server."""

    status_code: int
    body: bytes

    def json(self) -> Any:
        """Return the body, decoded."""
        return json.loads(self.body)


class ServableModuleValidator(Callback):
    """Serves a copy of the module at the start of a training, with FastAPI on this machine, sends its example, and compares the answer.

    Args:
        optimization, server: ``None`` and ``"fastapi"``; Lightning names others.
        host, port: where the server listens.
        timeout: how long the server may take to start (s).
        exit_on_failure: end the run if the module cannot answer; with False only :attr:`successful` says so.

    Raises:
        ModuleNotFoundError: fastapi or uvicorn is not installed.
        NotImplementedError: another optimization or server. Before the first step: the strategy shards the weights.
        TypeError, ValueError: before the first step: the module is not a :class:`ServableModule`, or its answer is not the expected one.
    """

    def __init__(
        self,
        optimization: str | None = None,
        server: str = "fastapi",
        host: str = "127.0.0.1",
        port: int = 8080,
        timeout: float = 20,
        exit_on_failure: bool = True,
    ) -> None:
        if missing := [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]:
            raise ModuleNotFoundError(
                f"ServableModuleValidator needs {' and '.join(missing)}: pip install fastapi uvicorn"
            )
        if optimization is not None or server != "fastapi":
            raise NotImplementedError(
                f"ServableModuleValidator(optimization={optimization!r}, server={server!r}): the module is served as it is, by 'fastapi'"
            )
        self.optimization, self.server, self.host, self.port = optimization, server, host, port
        self.timeout, self.exit_on_failure = timeout, exit_on_failure
        self.resp: Response | None = None
        """The answer of the module."""

    @property
    def successful(self) -> bool | None:
        """Whether the module has answered the request; ``None``: no request was sent."""
        return None if self.resp is None else self.resp.status_code == 200

    def on_train_start(self, run: Run, module: nn.Module) -> None:
        if not isinstance(run.engine.strategy, (DDP, Single)):
            raise NotImplementedError(
                f"ServableModuleValidator: {type(run.engine.strategy).__name__} shards the weights: check with strategy='single' or 'ddp'"
            )
        if not isinstance(module, ServableModule):
            raise TypeError(
                f"ServableModuleValidator: {type(module).__name__} does not inherit from ServableModule: add it to its bases"
            )
        payload = module.configure_payload()
        if "body" not in payload:
            raise ValueError(f"{type(module).__name__}.configure_payload() gave {payload}, which has no 'body'")
        if not run.is_main_process:
            return
        self.resp = self._ask(copy.deepcopy(module).eval(), payload)
        answer = self.resp.json() if self.successful else self.resp.body.decode(errors="replace")
        if self.exit_on_failure and not self.successful:
            raise ValueError(
                f"{type(module).__name__} cannot be served: the server answered {self.resp.status_code}: {answer}"
            )
        if self.successful and answer != (expected := module.configure_response()):
            raise ValueError(f"{type(module).__name__} answered {answer}, and configure_response() says {expected}")

    def _ask(self, module: ServableModule, payload: dict[str, Any]) -> Response:
        import uvicorn

        server = uvicorn.Server(uvicorn.Config(_app(module), self.host, self.port, log_level="error"))
        errors: list[BaseException] = []

        def serve() -> None:
            try:
                server.run()
            except BaseException as error:  # uvicorn raises SystemExit
                errors.append(error)

        thread = threading.Thread(target=serve, name="servable-module", daemon=True)
        thread.start()
        end = time.monotonic() + self.timeout
        try:
            while not server.started:
                if not thread.is_alive():
                    raise RuntimeError(
                        f"the server could not start on {self.host}:{self.port}, its log says why; is the port free?"
                    ) from (errors[0] if errors else None)
                if time.monotonic() > end:
                    raise TimeoutError(f"the server did not start on {self.host}:{self.port} within {self.timeout} s")
                time.sleep(0.01)
            data = json.dumps(payload).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"http://{self.host}:{self.port}/serve", data, headers)
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                return Response(answer.status, answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Response(error.code, error.read())
        finally:
            server.should_exit = True
            thread.join(self.timeout)


def _app(module: ServableModule) -> Any:
    from fastapi import Body, FastAPI

    app = FastAPI()
    deserializers, serializers = module.configure_serialization()

    def ping() -> bool:
        return True

    def serve(payload: dict[str, Any] = Body(...)) -> dict[str, Any]:  # noqa: B008
        body = payload["body"]
        arguments = {
            name: deserializers[name](value) if name in deserializers else value for name, value in body.items()
        }
        with torch.no_grad():
            outputs = module.serve_step(**arguments)
        return {name: serializers[name](value) if name in serializers else value for name, value in outputs.items()}

    app.get("/ping")(ping)
    app.post("/serve")(serve)
    return app
