"""Tensor and pipeline parallel on real processes: what each rank holds, raw loops, logged values, plans, errors before the first step."""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from support.drawing import Noisy
from support.ranks import ranks_of_file, run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

from engine import FSDP, Engine, Fit, Loss, MeshParallel, Strategy, TrainModule

CLASSES = 6


class Net(TrainModule):
    """A classifier of [batch, 8] in three parts."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, classes)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.dropout = nn.Dropout(0.5)
        self.shown: list[Any] = []

    def parallelize(self, mesh: Any) -> dict[str, Any]:
        return {"up": "colwise", "down": RowwiseParallel()}

    def pipeline_stages(self) -> list[nn.Module]:
        return [self.up, self.down, self.head]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.down(self.up(x)))
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self(x)
        loss = F.cross_entropy(out, y)
        self.accuracy(out, y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("count", float(len(y)), on_step=False, on_epoch=True, reduce="sum")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val", F.cross_entropy(self(x), y))
        self.log("val_count", float(len(y)), reduce="sum")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.shown.append(float(outputs.detach()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data(count: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, 8, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


def batches(size: int = 4) -> list[Any]:
    x, y = data()
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


def bytes_of(tensors: Any) -> int:
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local if not t.is_meta)


def fit(module: TrainModule, strategy: str | Strategy, **settings: Any) -> Any:
    with tempfile.TemporaryDirectory() as root:
        runner = Fit(
            **{
                "accelerator": "cpu",
                "strategy": strategy,
                "max_epochs": 1,
                "seed": 1,
                "root_dir": root,
                "log_every_n_steps": 1,
                **settings,
            }
        )
        return runner.run(module, batches(), batches(5)), runner


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return "no error"


# -- what runs on each of two ranks -----------------------------------------------------------------------------------------------


def rank_bytes() -> Any:
    """Bytes of planned parameters, of parameters that are whole, and of Adam's state: of this rank, and of the whole model."""
    engine = Engine(accelerator="cpu", strategy=MeshParallel(tp=2))
    model = engine.prepare(Net())
    optimizer = engine.prepare(torch.optim.Adam(model.parameters()))
    engine.backward(F.cross_entropy(model(data()[0]), data()[1]))
    optimizer.step()
    state = bytes_of(s for entry in optimizer.state.values() for name, s in entry.items() if name != "step")
    planned = [model.up.weight, model.up.bias, model.down.weight]
    return [bytes_of(planned), bytes_of(model.parameters()), state, bytes_of(Net().parameters())]


def rank_stage_bytes() -> Any:
    engine = Engine(accelerator="cpu", strategy=MeshParallel(pp=2, split=["head"]))
    model = engine.prepare(Net())
    optimizer = engine.prepare(torch.optim.Adam(model.parameters()))
    engine.forward_backward(lambda part, size: F.cross_entropy(model(part[0]), part[1]), data())
    optimizer.step()
    state = bytes_of(s for entry in optimizer.state.values() for name, s in entry.items() if name != "step")
    return [bytes_of(model.parameters()), state, [n for n, p in model.named_parameters() if not p.is_meta]]


def rank_runs() -> Any:
    """Losses, metrics and predictions of runs with dropout off, on every rank."""
    found = {}
    for name, strategy in {"tp": MeshParallel(tp=2), "pp": MeshParallel(pp=2, num_microbatches=3)}.items():
        module = Net()
        result, runner = fit(module, strategy)
        predicted = torch.cat(runner.predict(module, batches(5)))
        found[name] = [module.shown, result.metrics, predicted.sum(1).tolist()]
    return found


def rank_raw_loop() -> Any:
    """A user's own loop: windows of two, clipping, and two backward passes before a step; the largest distance to one process."""
    found = {}
    for name, strategy in {
        "tp": MeshParallel(tp=2),
        "pp": MeshParallel(pp=2),
        "fsdp": FSDP(),
        "tied": MeshParallel(pp=2),
    }.items():
        models = []
        for engine in (Engine(accelerator="cpu", strategy=strategy), None):
            model: Any = Tied() if name == "tied" else Net()
            optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
            if engine is not None:
                model, optimizer = engine.prepare(model, optimizer)
            x, y = data()
            step = partial(class_loss, model)
            for _ in range(3):
                for low in (0, 12):
                    part = (x[low : low + 12], y[low : low + 12])
                    if engine is None:
                        step(part, 12).backward()
                    else:
                        if name == "fsdp":
                            part = tuple(t[engine.process_index :: 2] for t in part)
                        engine.forward_backward(step, part)
                if engine is None:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                else:
                    norm = engine.clip_grad_norm_(model.parameters(), 0.1)
                    assert norm is not None
                    assert norm > 0.1
                optimizer.step()
                optimizer.zero_grad()
            models.append(model.state_dict() if engine is None else engine.strategy.model_state(model))
        found[name] = (
            max((models[0][key] - models[1][key]).abs().max().item() for key in models[1]) if models[0] else 0.0
        )
    return found


def class_loss(model: nn.Module, batch: Any, size: int) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Tied(nn.Sequential):
    """First and last layer share their weight: with a pipeline, two ranks have it."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
        self[3].weight = self[0].weight


def rank_loss_parallel() -> Any:
    """Cross entropy on logits that are cut over the classes."""

    class Cut(Net):
        def parallelize(self, mesh: Any) -> dict[str, Any]:
            return {"up": "colwise", "down": "rowwise", "head": ColwiseParallel(use_local_output=False)}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = self(batch[0])
            self.kind = type(out).__name__
            loss = F.cross_entropy(out, batch[1], reduction="sum")
            self.log("loss", loss / len(batch[1]), on_step=True, on_epoch=True)
            return Loss(loss, len(batch[1]))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    module = Cut()
    result, _ = fit(module, MeshParallel(tp=2, loss_parallel=True))
    return [module.kind, result.metrics["loss"], result.metrics["val"]]


def rank_fused() -> Any:
    """A fused optimizer whose group has sharded and whole parameters, over windows that are weighted: the weights of a bare loop."""

    class Weighted(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Loss:
            return Loss(F.cross_entropy(self(batch[0]), batch[1], reduction="sum"), len(batch[1]))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)

    module, bare = Weighted(), Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # foreach and fused are switched off
        _, runner = fit(module, MeshParallel(tp=2), accumulate_grad_batches=2, limit_val_batches=0)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=0.01)
    for first, second in zip(batches()[::2], batches()[1::2], strict=True):
        x, y = torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]])
        F.cross_entropy(bare(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = runner.state_dict(module, everywhere=True)
    return max(float((trained[name] - value).abs().max()) for name, value in bare.state_dict().items() if value.ndim)


def rank_process_groups() -> Any:
    """How many process groups there are after one run under each strategy, and after another."""
    found = []
    for _ in range(2):
        for strategy in (FSDP(), MeshParallel(tp=2), MeshParallel(pp=2)):
            fit(Net(), strategy, limit_val_batches=0)
        found.append(len(dist.distributed_c10d._world.pg_map))
    return found


def rank_fp16() -> Any:
    """A gradient that overflows where the loss is, and nowhere else, skips the step on both stages."""

    class Overflow(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.cross_entropy(self(batch[0]), batch[1])
            return loss * (float("inf") if batch_idx == 1 else 0.01)

    module = Overflow()
    result, _ = fit(module, MeshParallel(pp=2), precision="16-mixed", limit_val_batches=0)
    return [result.step, all(bool(p.isfinite().all()) for p in module.parameters() if not p.is_meta)]


def rank_batch_norm() -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    with pytest.warns(UserWarning, match="batch norm in a pipeline takes its statistics from each chunk"):
        Engine(accelerator="cpu", strategy=MeshParallel(pp=2)).prepare(model)


def rank_hugging_face() -> Any:
    import transformers  # takes seconds

    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(2))
    outs, placed = [], ""
    for engine in (Engine(accelerator="cpu", strategy=MeshParallel(tp=2)), None):
        torch.manual_seed(4)
        model = transformers.LlamaForCausalLM(config)
        prepared = model if engine is None else engine.prepare(model)
        loss = prepared(input_ids=ids, labels=ids).loss
        loss.backward()
        weight: Any = model.model.layers[0].self_attn.q_proj.weight
        outs.append([loss.item(), (weight.grad.full_tensor() if engine else weight.grad).flatten()])
        placed = placed or str(weight.placements)
    return [outs[0][0], outs[1][0], (outs[0][1] - outs[1][1]).abs().max().item(), placed]


def rank_drawn() -> Any:
    """What an optimizer that draws makes of parameters that both ranks have, and the error where stages share one."""
    engine = Engine(accelerator="cpu", strategy=MeshParallel(tp=2), seed=1)
    torch.manual_seed(engine.process_index)
    model = engine.prepare(Net())
    inner = Noisy(model.parameters())
    optimizer = engine.prepare(inner)
    for _ in range(2):
        engine.backward(F.cross_entropy(model(data()[0]), data()[1]))
        optimizer.step()
        optimizer.zero_grad()
    whole = [p.flatten().tolist() for p in model.parameters() if not hasattr(p, "placements")]
    engine.release()

    def staged(kind: Any, **settings: Any) -> Noisy:
        engine = Engine(accelerator="cpu", strategy=MeshParallel(pp=2, **settings), seed=1)
        model = engine.prepare(kind())
        inner = Noisy([p for p in model.parameters() if not p.is_meta])
        optimizer = engine.prepare(inner)
        engine.forward_backward(lambda part, size: F.cross_entropy(model(part[0]), part[1]), data())
        optimizer.step()
        engine.release()
        return inner

    return [whole, staged(Net, split=["head"]).drawn, message(lambda: staged(Tied))]


def rank_refused() -> Any:
    class Plain(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Around(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.head(self.down(self.up(batch[0]))).mean()

    class Random(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0] + torch.randn(8)).mean()

    class PlainRandom(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0] + random.random() + numpy.random.rand()).mean()

    class Named(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self(x=batch[0]).mean()

    class Extra(Net):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(2, 2)

    def run(module: TrainModule, **settings: Any) -> str:
        return message(lambda: fit(module, MeshParallel(**settings), limit_val_batches=0))

    found = {
        "no plan": run(Plain(), tp=2),
        "missing module": run(Net(), tp=2, plan={"upp": "colwise"}),
        "unknown style": run(Net(), tp=2, plan={"up": "columns"}),
        "uneven": run(Net(classes=7), tp=2, plan={"head": "colwise"}),
        "sequence": run(Net(), tp=2, sequence_parallel=True),
        "not linear": run(Net(), tp=2, plan={"accuracy": "colwise"}),
        "no stages": run(Plain(), pp=2),
        "too few parts": run(Net(), pp=2, schedule="interleaved"),
        "split": run(Net(), pp=2, split=["haed"]),
        "split count": run(Net(), pp=2, split=["down", "head"]),
        "around": run(Around(), pp=2),
        "random": run(Random(), pp=2),
        "plain random": run(PlainRandom(), pp=2),
        "keyword": run(Named(), pp=2),
        "extra": run(Extra(), pp=2),
        "context": run(Net(), cp=2),
        "degrees": run(Net(), tp=3),
        "ddp over tp": "",
    }
    module = Net()
    fit(module, MeshParallel(tp=2))
    found["ddp over tp"] = message(lambda: fit(module, "ddp"))
    engine = Engine(accelerator="cpu", strategy=MeshParallel(pp=2))
    model = engine.prepare(Net())
    found["forward"] = message(lambda: model(data()[0]))
    found["two models"] = message(lambda: engine.prepare(Net()))
    return found


EACH_NORM = 0.05


def by_parameter(model: nn.Module, part: slice) -> Callable[[], Any]:
    """The loss of some rows."""
    return lambda: F.cross_entropy(model(data()[0][part]), data()[1][part])


def rank_clipped_by_parameter() -> Any:
    """The parameters after two steps that are clipped by parameter, on this rank, with the global norms, and the collectives of a step."""
    values = {}
    for name, strategy in {
        "ddp": "ddp",
        "fsdp": "fsdp",
        "tp": MeshParallel(tp=2, dp_shard=1),
        "pp": MeshParallel(pp=2, dp_shard=1),
    }.items():
        engine = Engine(accelerator="cpu", strategy=strategy)
        module = Net()
        model, optimizer = engine.prepare(module, torch.optim.SGD(module.parameters(), lr=0.5))
        own = slice(12 * engine.process_index, 12 * engine.process_index + 12) if name in ("ddp", "fsdp") else slice(24)
        norms, calls, all_reduce = [], [], dist.all_reduce
        for _ in range(2):
            if name == "pp":
                engine.forward_backward(
                    lambda part, size, model=model: F.cross_entropy(model(part[0]), part[1]), data()
                )
            else:
                engine.backward(by_parameter(model, own)())
            calls.append(0)

            def counted(*args: Any, calls: list[int] = calls, all_reduce: Any = all_reduce, **kwargs: Any) -> Any:
                calls[-1] += 1
                return all_reduce(*args, **kwargs)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dist, "all_reduce", counted)
                engine.step([optimizer], max_parameter_norm=EACH_NORM)
            norms.append(float(engine.grad_norm))  # type: ignore[arg-type]
            optimizer.zero_grad()
        weights = {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).flatten().tolist()
            for name, p in module.named_parameters()
            if not p.is_meta
        }
        values[name] = [weights, norms, calls[-1]]  # all ranks compare hyperparameters once, before the first step
    return values


def rank_graph() -> Any:
    """The errors of backward passes that create a graph."""
    errors = []
    for strategy in ("ddp", MeshParallel(tp=2, dp_shard=1)):
        engine = Engine(accelerator="cpu", strategy=strategy)
        model = engine.prepare(Net())
        loss = by_parameter(model, slice(24))()
        errors.append(message(partial(engine.backward, loss, create_graph=True)))
    return errors


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2, timeout=300)


def test_a_rank_holds_half_of_what_is_planned(found: Any) -> None:
    for planned, all_of_them, state, whole in found["bytes"]:
        own = (8 * 16 + 16 + 16 * 8) * 4
        assert planned == own / 2
        assert all_of_them == whole - own / 2
        assert state == 2 * all_of_them  # Adam's two moments


def test_ranks_draw_alike_for_parameters_that_they_share(found: Any) -> None:
    (whole, stage, words), other = found["drawn"]
    assert whole
    assert whole == other[0]
    assert stage != other[1]
    assert "Noisy draws random numbers in its step, and stages of the pipeline share a parameter" in words == other[2]


def test_a_rank_holds_its_stage(found: Any) -> None:
    (first, first_state, first_names), (last, last_state, last_names) = found["stage_bytes"]
    assert first + last == bytes_of(Net().parameters())
    assert (first_state, last_state) == (2 * first, 2 * last)
    assert first_names == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert last_names == ["head.weight", "head.bias"]


@pytest.mark.parametrize("name", ["tp", "pp"])
def test_losses_metrics_and_predictions_are_on_every_rank(found: Any, name: str) -> None:
    module = Net()
    result, runner = fit(module, "single")
    predicted = torch.cat(runner.predict(module, batches(5))).sum(1).tolist()
    for rank in found["runs"]:
        shown, metrics, outputs = rank[name]
        assert shown == pytest.approx(module.shown, rel=1e-5)
        assert metrics == pytest.approx(result.metrics, rel=1e-5)
        assert outputs == pytest.approx(predicted, rel=1e-4)
    assert result.metrics["count"] == result.metrics["val_count"] == 24


@pytest.mark.parametrize("name", ["tp", "pp", "fsdp", "tied"])
def test_a_loop_of_ones_own(found: Any, name: str) -> None:
    assert all(rank[name] < 1e-6 for rank in found["raw_loop"])


def test_loss_parallel(found: Any) -> None:
    result, _ = fit(Net(), "single")
    for kind, loss, val in found["loss_parallel"]:
        assert kind == "DTensor"
        assert loss == pytest.approx(result.metrics["loss"], rel=1e-5)
        assert val == pytest.approx(result.metrics["val"], rel=1e-5)


def test_a_fused_optimizer_that_cannot_be_fused_here_divides_gradients_all_the_same(found: Any) -> None:
    assert max(found["fused"]) < 1e-5


def test_runs_share_their_process_groups(found: Any) -> None:
    for first, second in found["process_groups"]:
        assert first == second == 2  # on two ranks every axis is all ranks, or one


def test_an_overflow_at_the_loss_is_skipped_by_all_stages(found: Any) -> None:
    assert found["fp16"] == [[5, True]] * 2


def test_a_hugging_face_models_own_plan(found: Any) -> None:
    for loss, expected, distance, placed in found["hugging_face"]:
        assert loss == pytest.approx(expected, rel=1e-5)
        assert distance < 1e-6
        assert placed == "(Shard(dim=0),)"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no plan", "tensor parallel needs a plan for Plain: give MeshParallel(plan="),
        ("missing module", "the tensor parallel plan has 'upp', but Net has no such module; did you mean 'up'?"),
        ("unknown style", "gives 'up' the style 'columns', which is unknown; did you mean 'colwise'?"),
        ("uneven", "'head' has 7 outputs, not divisible by tp=2"),
        ("sequence", "sequence_parallel=True, but Net.parallelize has no SequenceParallel style"),
        ("not linear", "ColwiseParallel cannot shard 'accuracy' (MulticlassAccuracy)"),
        ("no stages", "Plain does not define pipeline_stages(self)"),
        ("too few parts", "Net has 3 modules for 4 stages; return more, or lower pp"),
        ("split", "no module 'haed'; did you mean 'head'?; the modules are up, down, head"),
        ("split count", "must name the first modules of the 1 stages after the first one"),
        ("around", "ended before it called the model: "),
        ("random", "random numbers were drawn before the model was called (from torch on the CPU)"),
        ("plain random", "random numbers were drawn before the model was called (from random and numpy)"),
        ("keyword", "the model takes positional tensors only, but was called with (x=)"),
        ("extra", "'extra.weight' is in no stage"),
        ("context", "MeshParallel(cp=2): context parallel is not supported. On the CPU torch has no backward pass"),
        ("degrees", "needs a multiple of 3 processes, this job has 2"),
        ("ddp over tp", "strategy='ddp' with Net, whose parameters are sharded already"),
        ("two models", "MeshParallel(pp=2) with two models: one MeshParallel runs one pipeline"),
        ("forward", "forward and backward run together; train with Fit, or Engine.forward_backward"),
    ],
)
def test_refusals(found: Any, case: str, words: str) -> None:
    # A rank that learns of the error from another one only says so.
    assert any(words in rank[case] for rank in found["refused"]), found["refused"][0][case]


BROKEN = """
import sys
sys.path[:0] = ["tests/strategies", "tests"]
from test_mesh_parallel import Loss, MeshParallel, Net, fit

class Broken(Net):
    def training_step(self, batch, batch_idx):
        STEP

    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass

fit(Broken(), MeshParallel(pp=2), limit_val_batches=0)
"""


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("self(batch[0])", "training_step returned None in a pipeline"),
        (
            "out = self(batch[0]).sum(); return Loss(out, 1) if batch_idx else out",
            "training_step returned a scalar loss in one micro-batch and Loss(sum, count) in another",
        ),
    ],
)
def test_an_error_where_the_loss_is_ends_all_ranks(step: str, words: str) -> None:
    ran = run_ranks(BROKEN.replace("STEP", step), 2, check=False, timeout=300)
    assert [rank.returncode != 0 for rank in ran] == [True, True]
    assert words in ran[1].stderr


# -- on one process ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tp": 0}, r"MeshParallel\(tp=0\) must be an int of at least 1, or -1"),
        ({"pp": True}, r"MeshParallel\(pp=True\)"),
        ({"schedule": "1f1"}, r"schedule='1f1'\) is unknown; did you mean '1f1b'\?; possible: gpipe, 1f1b"),
        ({"num_microbatches": 0}, r"num_microbatches=0\) must be an int of at least 1"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MeshParallel(**settings)


@pytest.mark.parametrize(
    ("settings", "size", "words"),
    [
        ({"tp": 2, "pp": 2, "dp_shard": 1}, 8, "needs 4 processes, this job has 8"),
        ({"tp": -1}, 4, r"only one axis can be -1 \(inferred\); dp_shard and tp are"),
        ({"tp": 3}, 4, "needs a multiple of 3 processes, this job has 4"),
        ({"pp": 2, "schedule": "zbv"}, 4, r"schedule='zbv'\) with dp_replicate=1, dp_shard=2: .* use 'interleaved'"),
        ({"pp": 2, "schedule": "zero_bubble", "dp_replicate": 2, "dp_shard": 1}, 4, "does not reduce over these ranks"),
    ],
)
def test_degrees_that_do_not_fit(settings: dict[str, Any], size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MeshParallel(**settings).connect(SimpleNamespace(world_size=size))  # type: ignore[arg-type]


def test_megatrons_names() -> None:
    made = MeshParallel.from_megatron(tp_degree=2, pp_degree=4, num_micro_batches=8, sequence_parallelism=True)
    assert (made.tp, made.pp, made.num_microbatches, made.sequence_parallel, made.dp_replicate, made.dp_shard) == (
        2,
        4,
        8,
        True,
        -1,
        1,
    )
    assert MeshParallel.from_megatron(dp_shard=-1).dp_replicate == 1


def test_alone_every_degree_is_one() -> None:
    module = Net()
    result, _ = fit(module, MeshParallel())
    expected, _ = fit(Net(), "single")
    assert result.metrics == expected.metrics


def test_styles_by_name_and_object() -> None:
    from engine.strategies.tensor_parallel import fitting

    found = fitting(Net(), {"*": "rowwise", "up": ColwiseParallel(output_layouts=Replicate())})
    assert [(name, type(style).__name__) for name, _, style in found][:3] == [
        ("up", "ColwiseParallel"), ("down", "RowwiseParallel"), ("head", "RowwiseParallel"),
    ]  # fmt: skip


def test_clipping_by_parameter_is_that_of_one_process_by_one_collective(found: Any) -> None:
    model = Net()
    norms = []
    for _ in range(2):
        model.zero_grad()
        by_parameter(model, slice(24))().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(float(nn.utils.get_total_norm(grads)))
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p -= 0.5 * p.grad * torch.clamp(EACH_NORM / (p.grad.norm() + 1e-6), max=1.0)
    expected = dict(model.named_parameters())
    for rank in found["clipped_by_parameter"]:
        for strategy, (weights, global_norms, collectives) in rank.items():
            assert global_norms == pytest.approx(norms, rel=1e-6), strategy
            assert collectives <= (0 if strategy == "ddp" else 1), strategy
            for name, values in weights.items():
                torch.testing.assert_close(
                    torch.tensor(values), expected[name].detach().flatten(), rtol=1e-6, atol=1e-7
                )
    names = [set(rank["pp"][0]) for rank in found["clipped_by_parameter"]]
    assert names[0] | names[1] == set(expected)
    assert not names[0] & names[1]


def test_gradients_that_ranks_reduce_have_no_graph(found: Any) -> None:
    for errors in found["graph"]:
        assert errors[0].startswith(
            "backward(create_graph=True): DDP reduces gradients over 2 ranks outside of their graph"
        )
        assert errors[1].startswith("backward(create_graph=True): MeshParallel reduces gradients over 2 ranks outside")
