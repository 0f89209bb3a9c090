"""One fresh process of ``startup.py``: prints the seconds from the start of a run to its first step, and to that step's end.

Run as ``python tests/benchmarks/first_step.py Fit`` (or another name of ``LOADERS``).
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import time
import warnings

import torch
from cases import Case, make_optimizer

# By name, so that a process imports nothing of the others: what they load would be warm for it.
LOADERS = {
    "bare": ("bare", "load"),
    "Fit": ("ours", "load_fit"),
    "Lightning": ("peers", "lightning"),
    "Fabric": ("peers", "fabric"),
    "Accelerate": ("peers", "accelerate"),
    "Ignite": ("peers", "ignite"),
    "torchtnt": ("peers", "torchtnt"),
}


class Marked(torch.nn.Linear):
    """Notes when it is called. The second call comes when the first step is over."""

    calls: list[float] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls.append(time.perf_counter())
        return super().forward(inputs)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    module, loader = LOADERS[sys.argv[1]]
    contender = getattr(importlib.import_module(module), loader)()
    work = Case("first step", net=lambda sizes: Marked(sizes[0], sizes[1])).work(2)
    make_optimizer(Marked(1, 1))
    start = time.perf_counter()
    contender.train(work)
    print(json.dumps([call - start for call in Marked.calls[:2]]))


if __name__ == "__main__":
    main()
