"""Which part of a tensor each rank of a grid holds."""

from __future__ import annotations

import torch

from engine.strategies.tensor_exchange import Layout


def test_a_layout_cuts_as_torch_does() -> None:
    for shape, cuts in (((7, 5), [(0, 0)]), ((1, 6), [(0, 0), (1, 1)]), ((6, 4), [(1, 0), (0, 0)]), ((0, 3), [(0, 0)])):
        layout = Layout(torch.Size(shape), (2, 3), tuple(cuts))
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        for rank in range(6):
            part, indices = whole, divmod(rank, 3)
            for axis, dim in cuts:
                chunks = part.chunk((2, 3)[axis], dim)
                part = chunks[indices[axis]] if indices[axis] < len(chunks) else part.narrow(dim, 0, 0)
            where, count = layout.part(rank)
            assert count == part.numel()
            assert torch.equal(whole[where], part)
