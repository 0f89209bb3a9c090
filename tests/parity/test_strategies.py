"""One small transformer under every strategy: losses, gradient norms and weights of a bare loop on one process, to 1e-5 in fp32."""

from __future__ import annotations

import importlib.util
import json
import os
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from engine import FSDP, Callback, DeepSpeed, Fit, Loss, MeshParallel, TrainModule

SAMPLES, TOKENS, VOCAB, WIDTH, HEADS = 19, 6, 13, 16, 2
GLOBAL, WINDOW, EPOCHS, STEPS = 12, 3, 2, 4  # an epoch: 12 + 7 samples
CLIP = 0.25
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # A bias of the keys has gradient 0 (softmax does not see it): Adam would make steps of its rounding errors.
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH),
        )
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH + 2), nn.GELU(), nn.Linear(3 * WIDTH + 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(
            self.norm(x)
        )  # [batch, tokens, 3 * width]; head by head, so that a cut gives each rank whole heads
        q, k, v = qkv.view(*qkv.shape[:2], -1, 3, WIDTH // HEADS).unbind(3)
        attended = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


TOKENWISE = {
    "start.embed": RowwiseParallel(input_layouts=Replicate()),
    "layers.0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True),
    "layers.*.norm": SequenceParallel(use_local_output=True),
    "layers.*.qkv": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.out": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.mlp.0": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.mlp.2": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
"""Styles under which what is between the cut layers is cut over the tokens."""


class Start(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.register_buffer("positions", torch.randn(TOKENS, WIDTH))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)  # fp32 under autocast, the half format under FSDP
        out: Tensor = x + self.frozen(x + self.positions)
        return out


class Transformer(TrainModule):
    """Tied embeddings, a buffer, a frozen layer outside blocks and one inside."""

    def __init__(self, weighted: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.start = Start()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.layers[1].norm.requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.start.embed.weight
        self.weighted = weighted

    def parallelize(self, mesh: Any, sequence_parallel: bool = False) -> dict[str, Any]:
        """Blocks by columns and rows; with sequence parallel, what is between them cut over the tokens."""
        blocks = {"layers.*.qkv": "colwise", "layers.*.mlp.0": "colwise"}
        ends = {"start.embed": "embedding_rowwise", "head": "colwise_gather_output"}
        if not sequence_parallel:
            return {**blocks, **ends, "layers.*.out": "rowwise", "layers.*.mlp.2": "rowwise"}
        return TOKENWISE

    def pipeline_stages(self) -> list[nn.Module]:
        return [self.start, *self.layers, self.head]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out

    def loss(self, batch: Any) -> Loss:
        """Over all tokens, or over those that the mask keeps."""
        ids, mask = batch
        every = F.cross_entropy(self(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")
        return Loss((every * mask).sum(), mask.sum()) if self.weighted else Loss(every.sum(), float(every.numel()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss.sum / loss.count, on_step=True, batch_size=loss.count)
        return loss if self.weighted else loss.sum / loss.count

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val", loss.sum / loss.count, batch_size=loss.count)
        self.log("seen", float(len(batch[0])), reduce="sum")

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = steps(self)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def steps(model: nn.Module) -> Any:
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(9)
    ids = torch.randint(VOCAB, (SAMPLES, TOKENS + 1), generator=generator)
    lengths = torch.randint(1, TOKENS + 1, (SAMPLES, 1), generator=generator)
    return TensorDataset(ids, (torch.arange(TOKENS) < lengths).float())


@cache  # the same loop stands beside many strategies
def bare(weighted: bool, bf16: bool = False, micro: int = GLOBAL, dropped: int = -1) -> dict[str, Any]:
    """What a user would write for one process whose memory holds the whole global batch.

    Args:
        bf16: under autocast.
        micro: samples in a forward pass.
        dropped: the sample at which a micro-batch begins that is forgotten in each window.
    """
    model, dataset = Transformer(weighted), data()
    optimizer, scheduler = steps(model)
    losses, norms = [], []
    for _ in range(EPOCHS):
        for low in range(0, SAMPLES, GLOBAL):
            parts = [
                dataset[i : min(i + micro, low + GLOBAL)]
                for i in range(low, min(low + GLOBAL, SAMPLES), micro)
                if i - low != dropped
            ]
            count, total = sum(float(mask.sum()) if weighted else mask.numel() for _, mask in parts), 0.0
            for part in parts:
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    loss = model.loss(part).sum / count
                loss.backward()
                total += loss.item()
            losses.append(total)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        found = model.loss(dataset[:])
    return {
        "losses": losses,
        "norms": norms,
        "weights": flat(model.state_dict()),
        "val": (found.sum / found.count).item(),
    }


def flat(state: dict[str, Tensor]) -> list[float]:
    values: list[float] = torch.cat([state[name].flatten() for name in sorted(state)]).tolist() if state else []
    return values


class Watch(Callback):
    def __init__(self, save: bool) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.weights: list[float] = []
        self.save = save

    def on_log(self, run: Any, module: Any, values: Any, step: int) -> None:
        if "loss_step" in values or "loss" in values:
            self.losses.append(values.get("loss_step", values.get("loss")))
            self.norms.append(run.engine.grad_norm.item())

    def on_train_end(self, run: Any, module: Any) -> None:
        self.weights = flat(run.engine.strategy.model_state(module))
        if self.save:
            run.save_checkpoint()


def train(
    strategy: Any, ranks: int, weighted: bool = False, root: str = "", resume: str | None = None, **more: Any
) -> dict[str, Any]:
    """A run of Fit, and a validation of the trained module after it. ``ranks``: those that see different data."""
    watch, module = Watch(save="max_steps" in more), Transformer(weighted)
    place = (
        Path(os.environ["PARITY_ROOT"]) / root
        if root
        else Path(os.environ["PARITY_ROOT"]) / f"of {os.environ.get('WORLD_SIZE')}"
    )
    fit = Fit(
        accelerator="cpu", strategy=strategy, callbacks=watch, accumulate_grad_batches=WINDOW, gradient_clip_val=CLIP, log_every_n_steps=1,
        seed=1, num_sanity_val_steps=0, root_dir=place, **{"max_epochs": EPOCHS, **more},
    )  # fmt: skip
    batches = DataLoader(data(), batch_size=GLOBAL // WINDOW // ranks)
    result = fit.run(
        module, batches, resume=None if resume is None else str(Path(os.environ["PARITY_ROOT"]) / resume / CHECKPOINT)
    )
    found = fit.validate(module, batches)[0]
    return {
        "losses": watch.losses, "norms": watch.norms, "weights": watch.weights, "val": found["val"], "seen": found["seen"], "step": result.step,
    }  # fmt: skip


CHECKPOINT = "checkpoints/step=00000003"


def wanted(*names: str) -> list[str]:
    """Those of the names whose tests run now."""
    cases = json.loads(os.environ["PARITY_CASES"])
    return [name for name in names if name in cases]


def both(chosen: dict[str, Any], ranks: int) -> dict[str, Any]:
    """With scalar losses and with weighted ones."""
    names = [f"{name} {weighted}" for name in chosen for weighted in (False, True)]
    return {name: train(chosen[name.rpartition(" ")[0]], ranks, name.endswith("True")) for name in wanted(*names)}


# -- what runs on each of two, and of four ranks --------------------------------------------------------------------------------------


def two_runs() -> Any:
    return both({"ddp": "ddp", "fsdp": "fsdp"}, 2)


def two_bf16() -> Any:
    chosen: dict[str, Any] = {
        "ddp": ("ddp", 2),
        "fsdp": ("fsdp", 2),
        "tp": (MeshParallel(tp=2), 1),
        "pp": (MeshParallel(pp=2), 1),
    }
    chosen |= {name: (DeepSpeed(stage=int(name[-1])), 2) for name in STAGES}
    return {
        name: train(*chosen[name], weighted=True, precision="bf16-mixed") for name in chosen if wanted(f"{name} bf16")
    }


def two_settings() -> Any:
    chosen = {
        "reduced each time": FSDP(reduce_each_micro_batch=True),
        "resharded": FSDP(reshard_after_forward=True),
        "not resharded": FSDP(reshard_after_forward=False),
        "linears": FSDP(blocks=nn.Linear),
        "by name": FSDP(blocks=["layers.*.mlp", "Block"]),
        "by size": FSDP(min_size=1000),
        "ignored": FSDP(ignore=["start.embed.weight", "layers.0.*"]),
        "offloaded": FSDP(cpu_offload=True),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "FSDP2-wrapped module"
        )  # nn.Linear gives a view for three dims; nothing here changes it in place
        return {name: train(chosen[name], 2, weighted=True) for name in wanted(*chosen)}


def two_resumed() -> Any:
    train("fsdp", 2, root="fsdp", max_steps=3)
    train("ddp", 2, root="ddp", max_steps=3)
    return {
        f"{there} to {here}": train(here, 2, resume=there)
        for there, here in (("fsdp", "ddp"), ("ddp", "fsdp"), ("single", "fsdp"))
    }


# torch 2.11 sends from a rank to itself in them, which gloo does not do.
IN_A_V = ("zbv", "dualpipev") if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13) else ()


def two_meshes() -> Any:
    chosen = {
        "tp": MeshParallel(tp=2),
        "tp, sequence": MeshParallel(tp=2, sequence_parallel=True),
        "pp": MeshParallel(pp=2),
        "gpipe": MeshParallel(
            pp=2, schedule="gpipe", num_microbatches=3
        ),  # of 4 samples, and of 1 and 2 at an epoch's end
        "interleaved": MeshParallel(pp=2, schedule="interleaved", num_microbatches=4),
        "zero_bubble": MeshParallel(pp=2, schedule="zero_bubble", num_microbatches=4),
    }
    chosen |= {name: MeshParallel(pp=2, schedule=name, num_microbatches=4) for name in IN_A_V}
    found = both(chosen, 1)
    train(chosen["pp"], 1, root="pp", max_steps=3)
    train(chosen["tp"], 1, root="tp", max_steps=3)
    found["fsdp to tp"] = train(chosen["tp"], 1, resume="fsdp")
    found["tp to pp"] = train(chosen["pp"], 1, resume="tp")
    found["pp to ddp"] = train("ddp", 2, resume="pp")
    return found


STAGES = ("deepspeed 0", "deepspeed 1", "deepspeed 2", "deepspeed 3") if importlib.util.find_spec("deepspeed") else ()
BY_DEEPSPEED = (
    [f"deepspeed_stage_{n} to ddp" for n in (2, 3)] + ["deepspeed_stage_2 to deepspeed_stage_3", "deepspeed_stage_3 to fsdp"]
    + [f"ddp to deepspeed_stage_{n}" for n in (1, 2, 3)]
) if STAGES else []  # fmt: skip


SLOW = {
    *(f"{name} False" for name in ("tp, sequence", "gpipe", "interleaved", "zero_bubble", *IN_A_V, *STAGES[:3])),
    *(f"{name} True" for name in ("interleaved", *IN_A_V[1:], *STAGES[:1])),
    *(f"{name} bf16" for name in ("ddp", "deepspeed 0", "deepspeed 1", "deepspeed 3")),
    *("resharded", "linears", "by name", "by size"),
    *("fsdp of 2 to hybrid of 4", "fsdp to tp x fsdp", "tp x fsdp to pp x fsdp"),
    *(
        "deepspeed_stage_3 to ddp",
        "deepspeed_stage_3 to fsdp",
        "ddp to deepspeed_stage_1",
        "ddp to deepspeed_stage_3",
    ),
}
"""What is much like something else. All that four ranks do is slow too: they cost as much as everything on two."""


def marked(cases: Iterable[str]) -> list[Any]:
    return [
        pytest.param(case, marks=pytest.mark.slow) if case in SLOW or case.startswith("four ") else case
        for case in cases
    ]


def two_deepspeed() -> Any:
    # Without a threshold every parameter here is too small to be sharded at stage 3.
    def stage(name: str) -> Any:
        return DeepSpeed(stage=int(name[-1]), param_persistence_threshold=0 if name[-1] == "3" else None)

    return both({name: stage(name) for name in STAGES}, 2)


def two_deepspeed_resumed() -> Any:  # after two_resumed, whose checkpoint of ddp it reads
    pairs = [pair.split(" to ") for pair in wanted(*BY_DEEPSPEED)]
    for there in sorted({there for there, _ in pairs} - {"ddp"}):
        train(there, 2, root=there, max_steps=3)
    return {f"{there} to {here}": train(here, 2, resume=there) for there, here in pairs}


def four_runs() -> Any:
    found = {f"hybrid {weighted}": train(FSDP(dp_replicate=2, dp_shard=2), 4, weighted) for weighted in (False, True)}
    found["hybrid, each time"] = train(FSDP(dp_replicate=2, reduce_each_micro_batch=True), 4)
    found["from two"] = train(FSDP(dp_replicate=2), 4, resume="fsdp")
    return found


def four_bf16() -> Any:
    chosen = {
        "hybrid": (FSDP(dp_replicate=2, dp_shard=2), 4),
        "tp x fsdp": (MeshParallel(tp=2), 2),
        "pp x ddp": (MeshParallel(pp=2, dp_replicate=2, dp_shard=1), 2),
    }
    return {name: train(*chosen[name], weighted=True, precision="bf16-mixed") for name in chosen}


MESHES_OF_FOUR = ("tp x fsdp True", "tp x ddp False", "pp x ddp False", "pp x fsdp True", "pp x tp True")
"""Each with one of the two losses: on two ranks every strategy has both."""


def four_meshes() -> Any:
    chosen = {
        "tp x fsdp": (MeshParallel(tp=2), 2),
        "tp x ddp": (MeshParallel(tp=2, dp_replicate=2, dp_shard=1), 2),
        "pp x ddp": (MeshParallel.from_megatron(pp_degree=2, num_micro_batches=2), 2),
        "pp x fsdp": (MeshParallel(pp=2, num_microbatches=2), 2),
        "pp x tp": (MeshParallel(pp=2, tp=2), 1),
    }
    found = {name: train(*chosen[name.rpartition(" ")[0]], name.endswith("True")) for name in MESHES_OF_FOUR}
    train(*chosen["tp x fsdp"], root="tp x fsdp", max_steps=3)
    found["fsdp to tp x fsdp"] = train(*chosen["tp x fsdp"], resume="fsdp")
    found["tp x fsdp to pp x fsdp"] = train(*chosen["pp x fsdp"], resume="tp x fsdp")
    return found


FOUR_LEFT_OUT: dict[str, list[Any]] = {name: [{}, {}] for name in ("runs", "bf16", "meshes")}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    cases = [
        item.callspec.id for item in request.session.items if item.path == request.path and hasattr(item, "callspec")
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARITY_CASES", json.dumps(cases))
        patch.setenv("PARITY_ROOT", str(tmp_path_factory.mktemp("parity")))
        train("single", 1, root="single", max_steps=3)
        two = ranks_of_file(__file__, 2, "two_")
        four = FOUR_LEFT_OUT if request.config.option.markexpr == "not slow" else ranks_of_file(__file__, 4, "four_")
        alone = train("single", 1, resume="fsdp")
        yield {
            "runs": [
                two["runs"][r]
                | two["meshes"][r]
                | two["settings"][r]
                | two["deepspeed"][r]
                | {f"four {name}": row for name, row in (four["runs"][r] | four["meshes"][r]).items()}
                for r in range(2)
            ],
            "bf16": [two["bf16"][r] | {f"four {name}": row for name, row in four["bf16"][r].items()} for r in range(2)],
            "resumed": {
                **two["resumed"][0],
                **two["deepspeed_resumed"][0],
                **{name: row for name, row in (two["meshes"][0] | four["meshes"][0]).items() if " to " in name},
                "fsdp to single": alone,
                "fsdp of 2 to hybrid of 4": four["runs"][0].get("from two"),
            },
        }


def close(found: dict[str, Any], expected: dict[str, Any], last: int = STEPS) -> None:
    assert found["step"] == STEPS
    assert len(found["losses"]) == last
    torch.testing.assert_close(found["losses"], expected["losses"][-last:], **CLOSE)
    torch.testing.assert_close(found["norms"], expected["norms"][-last:], **CLOSE)
    torch.testing.assert_close(found["val"], expected["val"], **CLOSE)
    assert found["seen"] == SAMPLES
    if found["weights"]:
        torch.testing.assert_close(torch.tensor(found["weights"]), torch.tensor(expected["weights"]), **CLOSE)


def test_the_bare_loop_clips_and_learns() -> None:
    loop = bare(False)
    assert min(loop["norms"]) > CLIP
    assert loop["losses"][-1] < 0.95 * loop["losses"][0]


NAMES = [
    "ddp", "fsdp", "four hybrid", "tp", "tp, sequence", "four tp x fsdp", "four tp x ddp", "pp", "gpipe", "interleaved", "zero_bubble",
    *IN_A_V, "four pp x ddp", "four pp x fsdp", "four pp x tp", *STAGES,
]  # fmt: skip


BOTH_LOSSES = [name for name in NAMES if not name.startswith("four ") or name == "four hybrid"]
CASES = [f"{name} {weighted}" for name in BOTH_LOSSES for weighted in (False, True)]


@pytest.mark.parametrize("case", marked([*CASES, *(f"four {case}" for case in MESHES_OF_FOUR)]))
def test_a_strategy_trains_as_one_process(found: Any, case: str) -> None:
    for rank in found["runs"]:
        close(rank[case], bare(case.endswith("True")))
    assert found["runs"][0][case]["weights"]


@pytest.mark.parametrize(
    "name",
    marked(
        ["reduced each time", "resharded", "not resharded", "linears", "by name", "by size", "ignored", "offloaded"]
    ),
)
def test_no_setting_of_fsdp_changes_the_training(found: Any, name: str) -> None:
    close(found["runs"][0][name], bare(True))


QUANTITIES = ("losses", "norms", "weights")


def apart(one: dict[str, Any], other: dict[str, Any], quantity: str) -> float:
    return max((abs(a - b) for a, b in zip(one[quantity], other[quantity], strict=True)), default=0.0)


@pytest.fixture(scope="module")
def bounds() -> dict[str, float]:
    """How far from fp32 a right computation in bf16 may be: derived from how far bf16 itself takes this training.

    A sum in another order, or in other parts, rounds differently. The bare loop under autocast, with its windows cut in six ways, gives
    six such roundings of one and the same computation; the largest distance of one of them to fp32 is the size of rounding's effect
    (1/256 a rounding, through 3 blocks, 8 steps and Adam, which normalises small gradients up). Two roundings are at most
    twice that apart; a third is for the roundings that strategies add (norms in bf16 inside sharded blocks, sums over ranks).
    """
    exact = bare(True)
    rounded = [bare(True, bf16=True, micro=micro) for micro in (12, 6, 4, 3, 2, 1)] + [bare(False, bf16=True, micro=2)]
    exacts = [exact] * 6 + [bare(False)]
    return {q: 3 * max(apart(r, e, q) for r, e in zip(rounded, exacts, strict=True)) for q in QUANTITIES}


def test_the_bound_of_bf16_finds_a_forgotten_micro_batch(bounds: dict[str, float]) -> None:
    exact = bare(True)
    assert apart(bare(True, micro=4), exact, "losses") < 1e-5
    for dropped in (0, 4, 8):
        wrong = bare(True, bf16=True, micro=4, dropped=dropped)
        assert all(apart(wrong, exact, quantity) > 4 * bounds[quantity] for quantity in ("losses", "norms"))


BF16 = ["ddp", "fsdp", "tp", "pp", "four hybrid", "four tp x fsdp", "four pp x ddp", *STAGES]


@pytest.mark.parametrize("case", marked(f"{name} bf16" for name in BF16))
def test_a_strategy_trains_in_bf16_as_one_process(found: Any, bounds: dict[str, float], case: str) -> None:
    exact = bare(True)
    for rank in found["bf16"]:
        run = rank[case.removesuffix(" bf16")]
        assert run["step"] == STEPS
        for quantity in QUANTITIES if run["weights"] else QUANTITIES[:2]:
            assert apart(run, exact, quantity) < bounds[quantity]


@pytest.mark.slow
def test_hybrid_reducing_each_time(found: Any) -> None:
    close(found["runs"][0]["four hybrid, each time"], bare(False))


RESUMED = [
    "fsdp to ddp", "ddp to fsdp", "single to fsdp", "fsdp to single", "fsdp of 2 to hybrid of 4", "fsdp to tp", "tp to pp", "pp to ddp",
    "fsdp to tp x fsdp", "tp x fsdp to pp x fsdp", *BY_DEEPSPEED,
]  # fmt: skip


@pytest.mark.parametrize("name", marked(RESUMED))
def test_resuming_under_another_strategy(found: Any, name: str) -> None:
    close(found["resumed"][name], bare(False), last=STEPS - 3)
