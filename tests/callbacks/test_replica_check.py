"""A bit flipped on one rank is found and named; equal replicas, and parts that belong to one rank, are not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from support.ranks import run_ranks

from callbacks import ModelCheckpoint, ReplicaCheck
from callbacks.replica_check import _hash, _message


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int8, torch.bool, torch.float8_e4m3fn],
)
def test_a_change_of_any_element_changes_the_hash(dtype):
    tensor = torch.arange(40).remainder(2).reshape(5, 8).to(dtype)
    before, flipped = int(_hash(tensor)), set()
    bits = tensor.view(torch.uint8).reshape(-1)
    for place in range(bits.numel()):
        bits[place] ^= 1
        flipped.add(int(_hash(tensor)))
        bits[place] ^= 1
    assert len(flipped | {before}) == bits.numel() + 1
    assert int(_hash(tensor.t())) != before  # another order
    assert int(_hash(tensor.clone())) == before


def test_the_hash_is_the_sum_that_the_documentation_says():
    values = torch.tensor([3, -5, 1 << 40])
    expected = sum(v * (6364136223846793004 * i + 1) for i, v in enumerate(values.tolist())) % 2**64
    assert int(_hash(values)) % 2**64 == expected


def test_long_tensors_are_hashed_in_pieces(monkeypatch):
    tensor = torch.randn(1000)
    whole = int(_hash(tensor))
    monkeypatch.setattr("callbacks.replica_check._CHUNK", 7)
    assert int(_hash(tensor)) == whole


def test_zeros_and_nan_are_compared_by_their_bits():
    assert int(_hash(torch.tensor([0.0]))) != int(_hash(torch.tensor([-0.0])))
    nan = torch.tensor([float("nan")])
    assert int(_hash(nan)) == int(_hash(nan.clone()))


def test_the_message_names_the_minority():
    assert "another value than most of the 4 ranks that hold it: rank 2;" in _message(
        "w", {0: 1, 1: 1, 2: 7, 3: 1}, 1, 5, 9
    )
    assert "values differ between the ranks 1, 3;" in _message("w", {1: 5, 3: 6}, 1, 5, 9)


def test_one_process_has_nothing_to_compare(make_fit, scripted, batches, caplog):
    caplog.set_level(logging.INFO, logger="engine")
    make_fit(callbacks=[ReplicaCheck(every_n_steps=1)]).run(scripted(), batches)
    assert [r.getMessage() for r in caplog.records if "ReplicaCheck" in r.getMessage()] == [
        "ReplicaCheck: the run has one process, so nothing is compared"
    ]


def test_checks_come_at_multiples_also_after_a_resume(make_fit, scripted):
    data = [torch.ones(2, 1)] * 8
    checked = []

    class Notes(ReplicaCheck):
        def _check(self, run: Any, module: Any) -> None:
            super()._check(run, module)
            checked.append(run.step)

    for steps in (4, 8):
        make_fit(
            callbacks=[Notes(every_n_steps=3), ModelCheckpoint(every=4)], max_steps=steps, accumulate_grad_batches=1
        ).run(scripted(), data, resume="auto")
    assert checked == [3, 4, 6, 8]  # 4 and 8: the end


@pytest.mark.parametrize(
    ("arguments", "message"), [({"every_n_steps": 0}, "at least 1"), ({"on_mismatch": "log"}, "'raise' or 'warn'")]
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ReplicaCheck(**arguments)


def test_a_name_that_matches_nothing_is_an_error(make_fit, scripted, batches):
    with pytest.raises(ValueError, match=r"ignore=\['weights'\]\) matches no parameter or buffer; there are weight, "):
        make_fit(callbacks=[ReplicaCheck(ignore=["w*", "weights"])]).run(scripted(), batches)
    with pytest.raises(TypeError, match="give a list of names"):
        ReplicaCheck(ignore="weight")


RANKS = """
import os, sys
sys.path[:0] = ["tests"]
import logging
import torch
from torch import nn
from support.toys import fit
from callbacks import ReplicaCheck
from engine import Callback, CheckError, FSDP, MeshParallel, TrainModule
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

rank, said = int(os.environ["RANK"]), []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("engine").addHandler(handler)
logging.getLogger("engine").setLevel(logging.INFO)


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)
        self.register_buffer("count", torch.zeros(1))

    def training_step(self, batch, batch_idx):
        return self.norm(self.b(self.a(batch)))[:, 0].mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Flips(Callback):
    "Changes the lowest bit of one element on the last rank, after step 4, before the check."

    def __init__(self, name):
        self.name = name

    def on_train_batch_end(self, run, module, outputs, batch, batch_idx):
        if run.step == 4 and self.name and rank == 1:
            tensor = {**dict(module.named_parameters()), **dict(module.named_buffers())}[self.name].data
            tensor = getattr(tensor, "to_local", lambda: tensor)()
            tensor.view(torch.int32).view(-1)[-1] ^= 1


def run(name, strategy="ddp", **options):
    said.clear()
    check = ReplicaCheck(every_n_steps=2, **options)
    try:
        fit(sys.argv[1], devices="auto", strategy=strategy, callbacks=[Flips(name), check]).run(Net(), [torch.ones(2, 4)] * 12)
    except CheckError as error:
        return [check.checked_step, str(error)]
    return [check.checked_step, [line for line in said if line.startswith("ReplicaCheck")]]


tp = lambda: MeshParallel(tp=2, plan={"a": ColwiseParallel(), "b": RowwiseParallel()})
report({
    "equal": run(None),
    "flipped": run("norm.weight"),
    "warned": run("norm.weight", on_mismatch="warn"),
    "buffer": run("count", buffers=True),
    "buffer ignored": run("count"),
    "ignored": run("norm.weight", ignore=["norm.*"]),
    "fsdp": run(None, "fsdp"),
    "fsdp flipped": run("norm.weight", "fsdp"),
    "hsdp flipped": run("b.weight", FSDP(replicate=2) if "replicate" in FSDP.__dataclass_fields__ else MeshParallel(dp_replicate=2, dp_shard=1)),
    "tp": run(None, tp()),
    "tp flipped": run("norm.weight", tp()),
})
"""


def test_replicas_of_two_ranks(tmp_path):
    first, second = (rank.value for rank in run_ranks(RANKS, 2, tmp_path))
    assert first["equal"] == second["equal"] == [6, []]
    for name in ("flipped", "buffer", "hsdp flipped", "tp flipped"):
        # All ranks raise.
        assert first[name] == second[name], name
        step, message = first[name]
        assert step == 4
        parameter = {"buffer": "count", "hsdp flipped": "b.weight"}.get(name, "norm.weight")
        assert message.startswith(f"ReplicaCheck: replicas differ after step 4. The first parameter is {parameter}: ")
        assert "differ between the ranks 0, 1; " in message
    assert first["buffer ignored"] == first["ignored"] == [6, []]
    step, lines = first["warned"]
    assert step == 6
    assert [line.partition(". ")[0] for line in lines] == [
        f"ReplicaCheck: replicas differ after step {step}" for step in (4, 6)
    ]
    assert second["warned"] == [6, []]
    nothing = "ReplicaCheck: under FSDP each rank has a different part of the model, so nothing is compared"
    assert first["fsdp"] == first["fsdp flipped"] == [6, [nothing]]
    assert first["tp"] == [12, []]  # both ranks see all batches
