"""The process methods of ``Engine``, on one process and on two."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.internals import new_share
from support.ranks import ranks_of_file

from engine import Engine


def engine() -> Engine:
    return Engine(accelerator="cpu")


# -- what runs on each of two ranks -----------------------------------------------------------------------------------------------


def rank_identity() -> Any:
    e = engine()
    return [
        e.process_index,
        e.local_process_index,
        e.num_processes,
        e.is_main_process,
        e.is_local_main_process,
        e.is_last_process,
        str(e.device),
    ]


def rank_only() -> Any:
    e = engine()
    ran: list[str] = []
    for name, decorate in (
        ("main", e.on_main_process),
        ("local", e.on_local_main_process),
        ("last", e.on_last_process),
        ("one", e.on_process(process_index=1)),
    ):
        assert decorate(lambda name=name: ran.append(name) or name)() in (name, None)
    return ran


def rank_gather() -> Any:
    e = engine()
    r = e.process_index
    tree = e.gather({"x": torch.full((r + 1, 2), float(r)), "s": torch.tensor(r * 10)})
    return {name: tensor.tolist() for name, tensor in tree.items()}


def rank_reduce() -> Any:
    e = engine()
    value = torch.tensor([1.0, -2.0]) * (e.process_index + 1)
    found = {op: e.reduce(value, op).tolist() for op in ("sum", "mean", "min", "max")}
    assert value.tolist() == [1.0 * (e.process_index + 1), -2.0 * (e.process_index + 1)]
    return {**found, "default": e.reduce(value).tolist(), "scaled": e.reduce([value], "mean", scale=2.0)[0].tolist()}


def rank_broadcast() -> Any:
    e = engine()
    mine = torch.tensor([float(e.process_index)])
    return [e.broadcast(mine).item(), e.broadcast({"a": mine}, from_process=1)["a"].item()]


def rank_pad() -> Any:
    e = engine()
    mine = torch.ones(e.process_index + 1, 1)
    return [e.pad_across_processes(mine, pad_index=-1).tolist(), e.pad_across_processes(mine, pad_first=True).tolist()]


def rank_gather_for_metrics() -> Any:
    e = engine()
    loader = e.prepare_data_loader([torch.arange(2), torch.arange(2, 3), torch.arange(3, 7)])
    tensors, objects, forced = [], [], []
    for batch in loader:
        tensors.append(e.gather_for_metrics(batch).tolist())
        objects.append(e.gather_for_metrics([f"n{int(batch[0])}"]))
        forced.append(e.gather_for_metrics([batch], use_gather_object=True))
    return {"tensors": tensors, "objects": objects, "forced": [[t.tolist() for t in part] for part in forced]}


def rank_split() -> Any:
    e = engine()
    found = []
    for inputs in ([1, 2, 3], (1, 2, 3), {"a": [1, 2, 3], "b": [4, 5, 6]}):
        for padding in (False, True):
            with e.split_between_processes(inputs, apply_padding=padding) as mine:
                found.append(mine)
    with e.split_between_processes(torch.arange(3), apply_padding=True) as mine:
        found.append(mine.tolist())
    return found


def shared_folder(e: Engine) -> Path:
    """A new folder, the same on both ranks."""
    letters = torch.tensor(list(tempfile.mkdtemp().encode()), dtype=torch.uint8)
    return Path(bytes(e.broadcast(letters).tolist()).decode())


def rank_main_first() -> Any:
    """Whether this rank, when it entered, saw what the main process leaves at the end of its turn."""
    e = engine()
    mark = shared_folder(e) / "the main process was here"
    with e.main_process_first():
        seen = mark.exists()
        if e.is_main_process:
            time.sleep(
                0.1
            )  # long enough for a rank that does not wait to look too early; a slow machine can only make it pass
            mark.touch()
    return seen


def rank_an_exception_in_main_first() -> Any:
    e = engine()
    caught = None
    try:
        with e.main_process_first():
            if e.is_main_process:
                raise KeyError("on the main process")
    except KeyError as error:
        caught = str(error)
    try:
        with e.local_main_process_first():
            if not e.is_local_main_process:
                raise KeyError("on the other")
    except KeyError as error:
        caught = str(error)
    # Barriers that were shifted by the exceptions would let rank 0 through before rank 1 has left its mark.
    mark = shared_folder(e) / "rank 1 was here"
    if e.process_index == 1:
        time.sleep(0.1)
        mark.touch()
    e.wait_for_everyone()
    return [caught, mark.exists(), e.reduce(torch.ones(1)).item()]


def rank_trigger() -> Any:
    e = engine()
    found = [e.check_trigger()]
    if e.process_index == 1:
        e.set_trigger()
    return [*found, e.check_trigger(), e.check_trigger()]


def rank_two_engines() -> Any:
    first, second = engine(), Engine(accelerator="cpu", accumulate_grad_batches=3)
    first.set_trigger()
    return [
        first.check_trigger(),
        second.check_trigger(),
        first.accumulate_grad_batches,
        second.accumulate_grad_batches,
    ]


def rank_seed() -> Any:
    torch.manual_seed(torch.initial_seed() + 17 + engine().process_index)
    return Engine(accelerator="cpu").seed


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2)


def test_identity(found: Any) -> None:
    assert found["identity"] == [[0, 0, 2, True, True, False, "cpu"], [1, 1, 2, False, False, True, "cpu"]]


def test_functions_for_some_ranks(found: Any) -> None:
    assert found["only"] == [["main", "local"], ["last", "one"]]


def test_gather(found: Any) -> None:
    assert found["gather"] == [{"x": [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]], "s": [0, 10]}] * 2


def test_reduce(found: Any) -> None:
    expected = {
        "sum": [3.0, -6.0],
        "mean": [1.5, -3.0],
        "min": [1.0, -4.0],
        "max": [2.0, -2.0],
        "default": [3.0, -6.0],
        "scaled": [3.0, -6.0],
    }
    assert found["reduce"] == [expected] * 2


def test_broadcast(found: Any) -> None:
    assert found["broadcast"] == [[0.0, 1.0]] * 2


def test_pad(found: Any) -> None:
    assert found["pad"] == [[[[1.0], [-1.0]], [[0.0], [1.0]]], [[[1.0], [1.0]], [[1.0], [1.0]]]]


def test_gather_for_metrics_leaves_out_the_repeated(found: Any) -> None:
    # Batches 0 and 1 in the first round; batch 2 on rank 0 in the second, where rank 1 repeats one.
    expected = {
        "tensors": [[0, 1, 2], [3, 4, 5, 6]],
        "objects": [["n0", "n2"], ["n3"]],
        "forced": [[[0, 1], [2]], [[3, 4, 5, 6]]],
    }
    assert found["gather_for_metrics"] == [expected] * 2


def test_split(found: Any) -> None:
    first, second = found["split"]
    assert first == [[1, 2], [1, 2], [1, 2], [1, 2], {"a": [1, 2], "b": [4, 5]}, {"a": [1, 2], "b": [4, 5]}, [0, 1]]
    assert second == [[3], [3, 3], [3], [3, 3], {"a": [3], "b": [6]}, {"a": [3, 3], "b": [6, 6]}, [2, 2]]


def test_main_process_first(found: Any) -> None:
    assert found["main_first"] == [False, True]


def test_an_exception_in_main_process_first_shifts_no_barrier(found: Any) -> None:
    assert found["an_exception_in_main_first"] == [["'on the main process'", True, 2.0], ["'on the other'", True, 2.0]]


def test_trigger(found: Any) -> None:
    assert found["trigger"] == [[False, True, False]] * 2


def test_two_engines_have_their_own_state(found: Any) -> None:
    assert found["two_engines"] == [[True, False, 1, 3]] * 2


def test_the_data_seed_is_rank_0s(found: Any) -> None:
    assert found["seed"][0] == found["seed"][1]


# -- on one process ---------------------------------------------------------------------------------------------------------------


def test_alone(capsys: pytest.CaptureFixture[str]) -> None:
    e = engine()
    assert (e.process_index, e.num_processes, e.is_main_process, e.is_last_process) == (0, 1, True, True)
    graph = torch.ones(2, requires_grad=True) * 2
    gathered = e.gather([graph, torch.tensor(3)])
    assert [t.tolist() for t in gathered] == [[2.0, 2.0], [3]]
    assert not gathered[0].requires_grad
    assert e.reduce(torch.tensor([2.0]), "mean", scale=3.0).tolist() == [6.0]
    assert e.broadcast(graph) is graph
    e.wait_for_everyone()
    with e.main_process_first(), e.split_between_processes([1, 2]) as mine:
        assert mine == [1, 2]
    e.print("once", end="!")
    assert capsys.readouterr().out == "once!"
    e.set_trigger()
    assert [e.check_trigger(), e.check_trigger()] == [True, False]


@pytest.mark.parametrize("op", ["avg", "add", "Sum"])
def test_unknown_reductions_are_errors(op: str) -> None:
    with pytest.raises(ValueError, match=f"unknown reduction '{op}'.*Possible: sum, mean, min, max"):
        engine().reduce(torch.ones(1), op)


def test_what_cannot_be_split() -> None:
    e = engine()
    with (
        pytest.raises(ValueError, match=r"values differ in length: {'a': 1, 'b': 2}"),
        e.split_between_processes({"a": [1], "b": [1, 2]}),
    ):
        pass
    with pytest.raises(TypeError, match="got int"), e.split_between_processes(3):
        pass


def test_decorated_functions_keep_their_names() -> None:
    @engine().on_main_process
    def named() -> int:
        """Documented."""
        return 3

    assert named() == 3
    assert (named.__name__, named.__doc__) == ("named", "Documented.")


def test_gather_for_metrics_alone_honours_weight_zero() -> None:
    e = engine()
    e.window.begin(new_share(0, 1.0, 1.0, True))
    assert e.gather_for_metrics(torch.ones(3)).tolist() == []
    assert e.gather_for_metrics(["a"]) == []
