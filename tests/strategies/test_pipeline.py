"""How a model's depth is divided, and a batch's samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from engine.strategies.pipeline import _generator_states, _rows
from engine.strategies.pipeline_stages import _balanced, stages_of


@pytest.mark.parametrize(
    ("weights", "count", "starts"),
    [
        ([1, 1, 1, 1], 2, [0, 2]),
        ([4, 1, 1, 1, 1], 2, [0, 1]),
        ([1, 1, 1, 9], 2, [0, 3]),
        ([5, 5, 5], 3, [0, 1, 2]),
        ([1, 2, 3, 4, 5, 6], 3, [0, 3, 5]),  # 6, 9, 6; any other cut has a stage of 10 or more
    ],
)
def test_the_heaviest_stage_is_as_light_as_can_be(weights: list[int], count: int, starts: list[int]) -> None:
    assert _balanced(weights, count) == starts


@pytest.mark.parametrize("count", range(1, 8))
def test_no_stage_is_empty(count: int) -> None:
    for weights in ([1, 1, 1, 1, 1, 1, 100], [100, 1, 1, 1, 1, 1, 1], [1, 1, 1, 100, 1, 1, 1]):
        starts = _balanced(weights, count)
        assert len(starts) == count
        assert starts == sorted(set(starts))
        assert starts[0] == 0
        assert starts[-1] < len(weights)


def test_stages_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))
    assert [len(stage) for stage in stages_of(model, 3, ["1", "3"])] == [1, 2, 1]


def test_samples_of_a_batch() -> None:
    batch = {
        "x": torch.arange(6).reshape(3, 2),
        "names": ["a", "b", "c"],
        "scale": torch.tensor(2.0),
        "pair": (torch.arange(3), 5),
    }
    found = _rows(batch, 3, torch.tensor([1, 2, 2]))
    assert found["x"].tolist() == [[2, 3], [4, 5], [4, 5]]
    assert found["names"] == ["b", "c", "c"]
    assert found["scale"] == 2.0
    assert found["pair"][0].tolist() == [1, 2, 2]
    assert found["pair"][1] == 5
    assert _rows(batch, 3, torch.arange(1, 3))["x"].data_ptr() == batch["x"][1:].data_ptr()  # neighbours are not copied


def test_the_devices_generator_is_among_those_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout on the inputs draws from it alone. The simulated device tests a whole step; here only that it is asked."""
    state = torch.zeros(16, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: state.clone())
    before = _generator_states(torch.device("cuda", 0))
    assert before == _generator_states(torch.device("cuda", 0))
    state[8] += 4  # CUDA's offset
    after = _generator_states(torch.device("cuda", 0))
    assert [name for name in after if after[name] != before[name]] == ["torch on cuda"]
    assert "torch on cuda" not in _generator_states(torch.device("cpu"))


def test_a_batch_that_cannot_be_divided_is_an_error() -> None:
    """It would go whole into every chunk."""

    class Graph:
        def to(self, device: torch.device) -> Graph:
            return self

    for item in (Graph(), pack_sequence([torch.ones(3), torch.ones(2)])):
        with pytest.raises(TypeError, match=f"cannot divide a {type(item).__name__} into chunks"):
            _rows({"x": torch.ones(2, 1), "other": item}, 2, torch.arange(2))
