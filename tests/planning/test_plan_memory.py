"""What the caching allocator makes of tensors, and formulas of papers, against the papers' own numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hand_made import DEVICE, GIB, collective, job, rank_trace
from torch import nn

from engine.planning import paper_formulas
from engine.planning.device_memory import MARGIN, NCCL_BYTES, assumptions, is_enough, memory_need
from engine.planning.job import Shape, sequence_of, shape_of
from engine.planning.paper_formulas import Check
from engine.planning.plan import Plan
from engine.planning.rank_trace import Allocations

MIB = 2**20
GPU = replace(DEVICE, caching=True, reserved=GIB // 2)


def test_the_need_of_a_rank() -> None:
    trace = rank_trace(collectives=(collective(), collective("all_gather")))
    found = memory_need(trace, replace(GPU, memory=9 * GIB))
    # The optimizer's state of the first step takes the place of the activations, which need another segment in the second.
    assert found.tensors == found.rounded == found.reserved == 7 * GIB
    assert found.margin == int(7 * GIB * MARGIN)
    assert (found.context, found.communicators) == (GIB // 2, NCCL_BYTES)  # one group
    assert found.total == 7 * GIB + found.margin + GIB // 2 + NCCL_BYTES


def test_rounding_is_part_of_the_need() -> None:
    found = memory_need(rank_trace(allocations=Allocations((0, 11 * MIB, 1, 1), (), (0, 0))), GPU)
    assert (found.rounded, found.reserved) == (12 * MIB + 512, 14 * MIB)


def test_what_the_allocator_keeps_counts_unless_it_can_give_it_back() -> None:
    """A segment of 3 GiB cannot hold 3 GiB again once a part of it stays in use. One that nothing uses goes back where there is no room for both."""
    first = (0, 3 * GIB, 0, 0, 1, GIB)
    trace = rank_trace(allocations=Allocations(first, (0, 3 * GIB, 0, 0), (0, 0)))
    assert memory_need(trace, GPU).reserved == 6 * GIB
    assert not is_enough(trace, replace(GPU, memory=5 * GIB))  # the first step's segment is in use
    alone = rank_trace(allocations=Allocations((0, 3 * GIB, 0, 0, 1, 4 * GIB), (2, GIB, 2, 0), (0, 0, 0)))
    assert memory_need(alone, replace(GPU, memory=10 * GIB)).reserved == 7 * GIB
    small = replace(GPU, memory=6 * GIB)
    assert memory_need(alone, small).reserved == 5 * GIB
    assert Plan((alone,), job(), small).verdict == "yes"


def test_memory_that_goes_back_in_each_step_is_not_enough() -> None:
    by_turns = (0, 3 * GIB, 0, 0, 1, 4 * GIB, 1, 0)
    trace = rank_trace(allocations=Allocations(by_turns, by_turns, (0, 1)))
    tight = replace(GPU, memory=7 * GIB)
    assert memory_need(trace, tight).reserved == 7 * GIB
    assert Plan((trace,), job(), tight).verdict == "only without the margins"


def test_a_cpu_rounds_nothing() -> None:
    found = memory_need(rank_trace(collectives=(collective(),)), DEVICE)
    assert found.total == found.tensors == 7 * GIB
    assert any("rounds nothing" in line for line in assumptions(DEVICE, ()))
    assert any("NCCL" in line for line in assumptions(GPU, [collective()]))
    assert not any("NCCL" in line for line in assumptions(GPU, [collective(ranks=(0,))]))


GPT3 = Shape(layers=96, hidden=12288, heads=96, vocabulary=51200, sequence=2048, positions=2048)
LLAMA_8B = Shape(
    layers=32,
    hidden=4096,
    heads=32,
    vocabulary=128256,
    sequence=8192,
    feed_forward=14336,
    gated=True,
    key_heads=8,
    tied=False,
)
LLAMA_405B = replace(LLAMA_8B, layers=126, hidden=16384, heads=128, feed_forward=53248)


def test_parameters_of_published_models() -> None:
    # Narayanan et al. 2021, table 1: 174.6 billion.
    assert paper_formulas.parameters(GPT3) == pytest.approx(174.6e9, rel=1e-3)
    # Llama 3.1: 8,030,261,248 and 405,853,388,800 parameters, with their norms.
    assert paper_formulas.parameters(LLAMA_8B) == pytest.approx(8_030_261_248, rel=1e-4)
    assert paper_formulas.parameters(LLAMA_405B) == pytest.approx(405_853_388_800, rel=1e-4)


def test_flops_of_gpt3() -> None:
    # Narayanan et al. 2021, formula 3: 96 B s l h^2 (1 + s/6h + V/16lh) with recomputation, which is a quarter of it.
    b, s, layers, h, v = 1536, 2048, 96, 12288, 51200
    theirs = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert paper_formulas.flops(GPT3, paper_formulas.parameters(GPT3), b * s) == pytest.approx(theirs, rel=2e-3)


def test_activations_by_korthikanti() -> None:
    # Table 2 of "Reducing Activation Recomputation in Large Transformer Models", for s b h = 100 in one layer.
    shape = Shape(layers=1, hidden=10, heads=1, vocabulary=1, sequence=10)
    assert paper_formulas.activations(shape, 1) == 34 * 100
    assert paper_formulas.activations(shape, 1, tp=8) == pytest.approx((10 + 24 / 8) * 100)
    assert paper_formulas.activations(shape, 1, tp=8, sequence_parallel=True) == pytest.approx(34 / 8 * 100)
    assert paper_formulas.activations(shape, 1, full=True) == 2 * 100
    assert paper_formulas.activations(shape, 3, bytes_each=4) == 3 * 2 * 34 * 100


def test_a_check_that_differs() -> None:
    assert not Check("x", 119, 100, "").differs
    assert Check("x", 121, 100, "").differs
    assert Check("x", 79, 100, "").differs


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.n_heads = heads
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 5 * hidden), nn.Linear(5 * hidden, hidden)


class Decoder(nn.Module):
    def __init__(self, tied: bool = True, words: int = 100, longest: int = 512) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, 16), nn.Embedding(longest, 16)
        self.blocks = nn.ModuleList(Block(16, 4) for _ in range(3))
        self.head = nn.Linear(16, words, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


@pytest.mark.parametrize("tied", [True, False])
def test_the_shape_of_a_module(tied: bool) -> None:
    found = shape_of(Decoder(tied))
    assert found == Shape(layers=3, hidden=16, heads=4, vocabulary=100, feed_forward=80, tied=tied, positions=512)
    with torch.device("meta"):
        assert shape_of(Decoder(tied)) == found


def test_the_shape_of_a_hugging_face_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    with torch.device("meta"):
        model = nn.ModuleDict({"inner": transformers.LlamaForCausalLM(config)})
    found = shape_of(model)
    assert found == Shape(
        layers=2, hidden=32, heads=4, vocabulary=64, feed_forward=48, gated=True, key_heads=2, tied=False
    )
    count = sum(p.numel() for p in model.parameters())
    assert paper_formulas.parameters(found) == pytest.approx(count, rel=0.02)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)),
        nn.Sequential(nn.Embedding(10, 4), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])),  # no heads
    ],
)
def test_what_is_no_transformer(model: nn.Module) -> None:
    assert shape_of(model) is None


def test_the_length_of_sequences() -> None:
    assert sequence_of({"image": torch.zeros(2, 3), "ids": torch.zeros(2, 7, dtype=torch.long)}) == 7
    assert sequence_of((torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))) == 0
