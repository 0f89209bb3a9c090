"""Process-wide torch flags that a run sets and restores afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from engine.config.settings import Settings
from engine.utils import cuda


@contextmanager
def switched(settings: Settings) -> Iterator[None]:
    """Inside the block ``deterministic``, ``benchmark``, ``matmul_precision`` and ``detect_anomaly`` apply; other flags stay as the user set them."""
    with ExitStack() as stack:
        if settings.deterministic:  # the call alone imports torch's compiler
            before = torch.are_deterministic_algorithms_enabled()
            stack.callback(
                torch.use_deterministic_algorithms,
                before,
                warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            )
            torch.use_deterministic_algorithms(True, warn_only=settings.deterministic == "warn")
        # The search for the fastest algorithm may find a different one in each run.
        search = False if settings.benchmark is None and settings.deterministic is True else settings.benchmark
        if search is not None:
            stack.callback(cuda.set_convolution_search, cuda.convolution_search())
            cuda.set_convolution_search(search)
        if settings.matmul_precision is not None:
            stack.callback(cuda.set_products, cuda.products())
            torch.set_float32_matmul_precision(settings.matmul_precision)
        if settings.detect_anomaly:
            stack.enter_context(torch.autograd.set_detect_anomaly(True))
        yield
