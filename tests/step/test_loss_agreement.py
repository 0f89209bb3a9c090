"""What the ranks send each other about their losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.step.loss_agreement import packed


@pytest.mark.parametrize("count", [None, 3, 2.5, torch.tensor(3), torch.tensor(2.5), torch.tensor([4])])
def test_counts_go_to_the_device_whatever_they_are(count: Any) -> None:
    sent = packed(count, True, torch.device("meta"))
    assert (sent.device.type, sent.dtype, sent.shape) == ("meta", torch.float64, (2,))
