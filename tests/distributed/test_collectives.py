"""One script makes all the collective calls on two ranks, once for the file; the tests hold its results against values worked out by hand."""

import math

import pytest
import torch
from support.internals import group_of_one
from support.ranks import run_ranks
from torch import Tensor
from torch.nn import Parameter

from engine.distributed import collectives

SCRIPT = """
import os, sys
from datetime import timedelta
import torch
from engine.distributed import collectives as c
from engine.distributed.environments import detect
from engine.distributed.join import join

group = join(detect(os.environ), torch.device("cpu"), timeout=timedelta(seconds=30))
r = group.rank
out = {}

def show(tree):
    if isinstance(tree, torch.Tensor):
        return [str(tree.dtype).removeprefix("torch."), torch.view_as_real(tree).tolist() if tree.is_complex() else tree.tolist()]
    if isinstance(tree, dict):
        return {key: show(value) for key, value in tree.items()}
    return [show(item) for item in tree] if isinstance(tree, (list, tuple)) else tree

def keep(name, call):
    try:
        out[name] = show(call())
    except Exception as error:
        out[name] = f"{type(error).__name__}: {error}"

for op in ("sum", "mean", "min", "max", "maxx"):
    tree = {"f": torch.tensor([[1.0, 2.0 + r]]), "i": torch.tensor(2**40 + r), "s": torch.tensor([100 + r], dtype=torch.int16),
            "b": torch.tensor([True, r == 1]), "h": torch.tensor([2049.0 - 2048 * r], dtype=torch.bfloat16), "text": "same"}
    before = show(tree)
    keep(op, lambda: c.all_reduce(group, tree, op))
    out[op + " keeps its input"] = before == show(tree)
keep("double", lambda: c.all_reduce(group, torch.tensor(2.0**-40 + r, dtype=torch.float64), "mean"))
keep("fp16", lambda: c.all_reduce(group, torch.full((2,), 60000.0).half(), "mean"))
keep("complex", lambda: c.all_reduce(group, torch.tensor([1j + r]), "sum"))
keep("none", lambda: c.all_reduce(group, {"x": 1}, "sum"))
keep("strided", lambda: c.all_reduce(group, torch.arange(4.0).reshape(2, 2).t(), "sum"))
keep("grad", lambda: c.all_reduce(group, torch.ones(1, requires_grad=True), "sum").requires_grad)

keep("rows", lambda: c.gather(group, torch.full((r + 1, 2), float(r))))
keep("scalars", lambda: c.gather(group, torch.tensor(r)))
keep("one empty", lambda: c.gather(group, torch.arange(3 * r).bfloat16()))
keep("all empty", lambda: c.gather(group, torch.zeros(0, 3)).shape)
keep("zero-size rows", lambda: c.gather(group, torch.zeros(2 + r, 0)).shape)
keep("bools", lambda: c.gather(group, (torch.tensor([r == 0, True]), torch.tensor([1j * r]))))
keep("strided rows", lambda: c.gather(group, torch.arange(4.0).reshape(2, 2).t()))
keep("one of a column", lambda: c.gather(group, (torch.arange(6.0).reshape(2, 3) + r)[:1, 0]))
keep("other dims", lambda: c.gather(group, [torch.zeros(1), torch.zeros([2] * (r + 1))]))
keep("scalar and vector", lambda: c.gather(group, torch.zeros([3] * r)))
keep("other dtypes", lambda: c.gather(group, torch.zeros(2, dtype=[torch.float32, torch.int64][r])))
keep("other widths", lambda: c.gather(group, torch.zeros(2, 3 + r)))
keep("other structure", lambda: c.gather(group, [torch.zeros(1)] * (r + 1)))

keep("broadcast", lambda: c.broadcast(group, {"a": torch.full((2,), r == 1), "b": torch.full((2, 2), float(r)).t()}, 1))
keep("broadcast shapes", lambda: c.broadcast(group, torch.zeros(r + 1)))
keep("broadcast src", lambda: c.broadcast(group, torch.zeros(1), 2))
keep("objects", lambda: c.gather_object(group, {"rank": r}))
keep("bad object", lambda: c.gather_object(group, (lambda: 0) if r else 0))
keep("broadcast object", lambda: c.broadcast_object(group, [r], 1))
keep("bad broadcast object", lambda: c.broadcast_object(group, lambda: 0, 1))
keep("pad", lambda: c.pad_across_processes(group, torch.ones(2, r + 1), dim=1, pad_index=-1))
keep("pad first", lambda: c.pad_across_processes(group, torch.ones(r + 1), dim=-1, pad_first=True))
keep("pad no such dim", lambda: c.pad_across_processes(group, torch.ones(2), dim=1))
keep("after all errors", lambda: c.gather_object(group, r))
report(out)
"""


@pytest.fixture(scope="module")
def results():
    return [ran.value for ran in run_ranks(SCRIPT, 2)]


def both(results, name):
    assert results[0][name] == results[1][name]
    return results[0][name]


def test_sum(results):
    # bfloat16 keeps 8 bits: 2049 is stored as 2048, and 2048 + 1 = 2049 is rounded back to 2048.
    assert both(results, "sum") == {
        "f": ["float32", [[2.0, 5.0]]],
        "i": ["int64", 2**41 + 1],
        "s": ["int16", [201]],
        "b": ["int64", [2, 1]],
        "h": ["bfloat16", [2048.0]],
        "text": "same",
    }


def test_mean(results):
    found = both(results, "mean")
    assert found["f"] == ["float32", [[1.0, 2.5]]]
    assert found["i"] == ["float32", float(2**40)]  # 2**40 + 0.5 in float32
    assert found["s"] == ["float32", [100.5]]
    assert found["b"] == ["float32", [1.0, 0.5]]
    assert found["h"] == ["bfloat16", [1024.0]]


def test_min_and_max(results):
    low, high = both(results, "min"), both(results, "max")
    assert (low["f"], high["f"]) == (["float32", [[1.0, 2.0]]], ["float32", [[1.0, 3.0]]])
    assert (low["i"], high["i"]) == (["int64", 2**40], ["int64", 2**40 + 1])
    assert (low["b"], high["b"]) == (["bool", [True, False]], ["bool", [True, True]])


def test_unknown_reduction(results):
    assert (
        both(results, "maxx")
        == "ValueError: unknown reduction 'maxx'; did you mean 'max'?. Possible: sum, mean, min, max"
    )


def test_reductions_leave_their_input(results):
    assert all(both(results, f"{op} keeps its input") for op in ("sum", "mean", "min", "max"))


def test_precision_of_reductions(results):
    assert both(results, "double") == ["float64", 2.0**-40 + 0.5]
    assert both(results, "fp16") == ["float16", [60000.0, 60000.0]]  # the sum, 120000, is beyond float16
    assert both(results, "complex") == ["complex64", [[1.0, 2.0]]]


def test_reductions_of_odd_trees(results):
    assert both(results, "none") == {"x": 1}
    assert both(results, "strided") == ["float32", [[0.0, 4.0], [2.0, 6.0]]]
    assert both(results, "grad") is False


def test_gather_of_unequal_lengths(results):
    assert both(results, "rows") == ["float32", [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]]
    assert both(results, "one empty") == ["bfloat16", [0.0, 1.0, 2.0]]
    assert both(results, "all empty") == [0, 3]
    assert both(results, "zero-size rows") == [5, 0]
    assert both(results, "one of a column") == ["float32", [0.0, 1.0]]


def test_gather_of_scalars_stacks_them(results):
    assert both(results, "scalars") == ["int64", [0, 1]]


def test_gather_of_dtypes_that_gloo_does_not_know(results):
    assert both(results, "bools") == [["bool", [True, True, False, True]], ["complex64", [[0.0, 0.0], [0.0, 1.0]]]]
    assert both(results, "strided rows") == ["float32", [[0.0, 2.0], [1.0, 3.0]] * 2]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "other dims",
            [
                "ValueError",
                "tensor 1",
                "numbers of dims",
                "rank 0 gave torch.float32 [2]",
                "rank 1 gave torch.float32 [2, 2]",
            ],
        ),
        ("scalar and vector", ["ValueError", "numbers of dims", "[]", "[3]"]),
        ("other dtypes", ["ValueError", "dtypes", "rank 0 gave torch.float32", "rank 1 gave torch.int64"]),
        ("other widths", ["ValueError", "[2, 3]", "[2, 4]", "pad_across_processes"]),
        ("other structure", ["ValueError", "rank 0 gave 1 tensors, rank 1 gave 2"]),
        ("broadcast shapes", ["ValueError", "shapes", "[1]", "[2]"]),
        ("broadcast src", ["ValueError", "src=2", "0 to 1"]),
        ("bad object", ["TypeError", "rank 1", "function"]),
        ("bad broadcast object", ["TypeError", "rank 1", "function"]),
    ],
)
def test_what_cannot_be_sent_is_the_same_error_on_all_ranks(results, name, parts):
    message = both(results, name)
    assert all(part in message for part in parts), message
    assert both(results, "after all errors") == [0, 1]


def test_broadcast(results):
    assert both(results, "broadcast") == {"a": ["bool", [True, True]], "b": ["float32", [[1.0, 1.0], [1.0, 1.0]]]}
    assert both(results, "broadcast object") == [1]


def test_objects(results):
    assert both(results, "objects") == [{"rank": 0}, {"rank": 1}]


def test_padding(results):
    assert results[0]["pad"] == ["float32", [[1.0, -1.0], [1.0, -1.0]]]
    assert results[1]["pad"] == ["float32", [[1.0, 1.0], [1.0, 1.0]]]
    assert results[0]["pad first"] == ["float32", [0.0, 1.0]]
    assert both(results, "pad no such dim") == ["float32", [1.0, 1.0]]


ALONE = group_of_one()


def test_alone_nothing_changes():
    tree = {"a": torch.ones(2), "b": [torch.tensor(1)]}
    assert collectives.all_reduce(ALONE, tree, "sum") is tree
    assert collectives.broadcast(ALONE, tree) is tree
    assert collectives.pad_across_processes(ALONE, tree) is tree
    assert collectives.gather(ALONE, tree)["a"].data_ptr() == tree["a"].data_ptr()
    assert collectives.gather_object(ALONE, tree) == [tree]
    assert collectives.broadcast_object(ALONE, tree) is tree


def test_alone_dtypes_and_dims_are_those_of_many():
    assert collectives.all_reduce(ALONE, torch.tensor([3]), "mean").dtype is torch.float32
    assert collectives.all_reduce(ALONE, torch.tensor([True]), "sum").dtype is torch.int64
    assert collectives.gather(ALONE, torch.tensor(math.pi)).shape == (1,)


def test_alone_wrong_arguments_are_errors_too():
    with pytest.raises(ValueError, match="did you mean 'mean'"):
        collectives.all_reduce(ALONE, torch.ones(1), "meen")
    with pytest.raises(ValueError, match="possible are 0 to 0"):
        collectives.broadcast(ALONE, torch.ones(1), 1)


class Away(Tensor):
    """Stands for a tensor of the sender's second device."""

    device = property(lambda self: torch.device("cuda", 1))  # type: ignore[assignment]

    def cpu(self) -> Tensor:  # type: ignore[override]
        return self.as_subclass(Tensor).clone()


def test_tensors_in_objects_arrive_on_the_host():
    away = torch.ones(2).as_subclass(Away)
    found = collectives._unpacked(collectives._packed({"x": [away, away], "y": Parameter(torch.zeros(1)), "n": 1}), 0)
    assert [type(tensor) for tensor in found["x"]] == [Tensor] * 2
    assert found["x"][0] is found["x"][1]
    assert found["x"][0].tolist() == [1.0, 1.0]
    assert (type(found["y"]), found["n"]) == (Parameter, 1)
