from __future__ import annotations

import pytest

from engine.utils.accelerator import visible_index


def test_a_single_device_that_a_launcher_left_is_the_processs_own() -> None:
    """``srun --ntasks 4 --gpus-per-task 1``: each task sees one device."""
    assert [visible_index(local_rank, 1, own=True) for local_rank in range(4)] == [0, 0, 0, 0]
    assert [visible_index(local_rank, 4, own=True) for local_rank in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("index", "there", "own"), [(1, 1, False), (4, 4, True), (0, 0, True)])
def test_a_local_rank_beyond_the_visible_devices(
    index: int, there: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(
        ValueError, match=rf"local rank {index} has no device: this process sees {there} CUDA.*CUDA_VISIBLE_DEVICES='5'"
    ):
        visible_index(index, there, own)
