"""Which accelerators Ray's workers can have. The cluster itself is in tests/integration."""

from __future__ import annotations

import pytest

from engine.launch.job import LaunchError
from engine.launch.ray import RayJob, _size

CLUSTER = {"CPU": 8.0, "GPU": 2.0}


@pytest.mark.parametrize(
    ("accelerator", "expected"), [("auto", (2, True)), ("gpu", (2, True)), ("cuda", (2, True)), ("cpu", (1, False))]
)
def test_one_worker_for_each_gpu(accelerator: str, expected: tuple[int, bool]) -> None:
    assert _size(RayJob("train.py", (), False, ".", accelerator=accelerator), CLUSTER) == expected


@pytest.mark.parametrize("accelerator", ["mps", "xpu", "npu", "hpu"])
def test_a_device_that_ray_does_not_place_is_an_error(accelerator: str) -> None:
    with pytest.raises(LaunchError, match=rf"accelerator='{accelerator}' with --ray: .*possible: auto, cpu, gpu, cuda"):
        _size(RayJob("train.py", (), False, ".", accelerator=accelerator), CLUSTER)
