"""A case: one training, written down as plain values. :func:`cases` draws the combinations that the library promises to train exactly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from hypothesis import assume
from hypothesis import strategies as st


class Ranks(NamedTuple):
    """How many processes a strategy has here, and how many of them see different data."""

    world: int
    data: int


STRATEGIES = {
    "single": Ranks(1, 1),
    "ddp2": Ranks(2, 2),
    "ddp3": Ranks(3, 3),
    "fsdp2": Ranks(2, 2),
    "fsdp2x2": Ranks(4, 4),
    "tp2": Ranks(2, 1),
    "pp2": Ranks(2, 1),
    "tp2x2": Ranks(4, 2),
    "pp2x2": Ranks(4, 2),
    "deepspeed1": Ranks(2, 2),
    "deepspeed2": Ranks(2, 2),
    "deepspeed3": Ranks(2, 2),
}
"""Every strategy that cases are drawn for."""
REPLICATED = ("single", "ddp2", "ddp3")
"""Each rank has the whole model."""

SAMPLED = ("sequential", "shuffled", "front", "subset", "repeats", "drawn", "distributed")
"""Data whose samples are dealt to micro-batches."""
BATCHED = ("list", "ready", "batch_sampler", "stream", "combined")
"""Data whose batches stay whole."""


OFF = (False,) * 4
"""An axis that is on in one of five cases adds this to ``True``: with all of them on in each, none would meet the simple ones of the others."""


def drawn(*values: Any) -> Any:
    """A field of :class:`Case` with the values that are drawn for it, those more often that stand here more often; the first is the default."""
    return field(default=values[0], metadata={"values": values})


def between(low: int, high: int, default: int) -> Any:
    """A field of :class:`Case` for which a whole number from ``low`` to ``high`` is drawn."""
    return field(default=default, metadata={"values": range(low, high + 1)})


@dataclass(frozen=True)
class Case:
    """One training. The defaults are the simplest one; a reproducer names what differs from them.

    Each field is an axis: its values stand here, which of them go together in :func:`legal`. What a value means to the library is in
    :mod:`.library` and :mod:`.loop`, what it must give in :mod:`.reference`, and what both sides share (models, data) in :mod:`.models`.
    """

    strategy: str = "single"
    door: str = drawn("fit", "fit", "engine")
    """``"fit"``: ``Fit.run``; ``"engine"``: a loop of its own with ``Engine``."""
    precision: str = drawn("64-true", "64-true", "64-true", "32-true", "bf16-mixed", "16-mixed")
    body: str = drawn("mlp", "gru", "tied", "batchnorm", "complex")
    """The model: ``"mlp"``, ``"gru"``, ``"tied"`` (embeddings), ``"batchnorm"``, ``"complex"``."""
    frozen: bool = drawn(False, True)
    """The first layer is not trained."""
    shared: bool = drawn(False, True)
    """A layer is used twice."""
    unused: bool = drawn(False, True)
    """There are parameters that the forward pass never uses."""
    loss: str = drawn("mean", "dict", "weighted", "counted")
    """``"mean"``, ``"dict"``, ``"weighted"`` (``Loss`` with tensor counts, some of them 0), ``"counted"`` (``Loss`` with float counts)."""
    none: int = drawn(0, 0, 0, 2, 3)
    """Micro-batches whose first sample's number divides by this return no loss (0: all return one)."""
    data: str = drawn(*SAMPLED, *BATCHED)
    """``"sequential"``, ``"shuffled"``; samplers: ``"front"`` (torch's sequential one over a part), ``"subset"``, ``"repeats"``, ``"drawn"``
    (random, with replacement), ``"distributed"`` (torch's, given by the user); whole batches: ``"list"``, ``"ready"`` (``batch_size=None``),
    ``"batch_sampler"``, ``"stream"``, ``"combined"`` (``CombinedLoader``: one loader after the other)."""
    samples: int = between(1, 24, default=8)
    batch: int = between(1, 3, default=2)
    """Samples of a micro-batch."""
    units: int = drawn(1, 2, 3)
    """Micro-batches of one step, over all ranks; drawn for each rank."""
    later: int = drawn(0, 0, 1, 2)
    """The same from the second epoch on (0: as before)."""
    workers: int = drawn(0, 0, 2)
    """Processes that load each loader's data."""
    drop_last: bool = drawn(False, False, True)
    limit: int = drawn(0, 0, 0, 2, 3)
    """At most so many micro-batches of each rank in an epoch (0: all)."""
    epochs: int = drawn(1, 2, 3)
    max_steps: int = drawn(0, 0, 3, 5)
    """0: no limit."""
    clip: str = drawn("", "norm", "value")
    """``"norm"``, ``"value"``."""
    optimizer: str = drawn("sgd", "momentum", "adam", "adamw", "two")
    """``"sgd"``, ``"momentum"``, ``"adam"``, ``"adamw"``, ``"two"`` (SGD and Adam, each with a part of the parameters)."""
    schedule: str = drawn("", "step", "steps", "epoch", "epochs", "cycle", "plateau", "val")
    """``"step"``, ``"steps"`` (every second step), ``"epoch"``, ``"epochs"`` (every second epoch), ``"cycle"`` (``OneCycleLR``),
    ``"plateau"`` (of the epoch's loss), ``"val"`` (of the validation's)."""
    log_every: int = drawn(1, 1, 2, 3)
    val: str = drawn("", "epoch", "steps", "half")
    """When to validate: ``"epoch"``, ``"steps"`` (every second), ``"half"`` (of an epoch)."""
    val_samples: int = between(1, 7, default=5)
    val_loaders: int = drawn(1, 2)
    sanity: bool = drawn(False, True)
    """Two validation batches before the training."""
    predicted: int = drawn(0, 0, 1, 4, 7)
    """Samples that are predicted after the training."""
    poison: int = drawn(-1, -1, -1, 3)
    """The sample whose gradient is not finite: steps with it are skipped."""
    recompute: str = drawn("", "", "full", "selective")
    """``activation_checkpointing``: ``"full"``, ``"selective"``."""
    hook: bool = drawn(False, True)
    """There is an ``on_before_optimizer_step``."""
    manual: str = drawn("", "", "", "", "each", "second", "drop", "both")
    """Manual optimization: ``"each"``, ``"second"`` (a step every second batch), ``"drop"`` (some gradients are clipped and thrown away),
    ``"both"`` (two optimizers, one after the other)."""
    resume: int = drawn(0, 0, 0, 1, 2, 3)
    """Save after this step, and continue in a new run (0: one run)."""
    killed: bool = drawn(False, True)
    """The first run ends right after the save."""
    saves: str = drawn("", "", "", "asynchronous", "one_file", "elsewhere", "callback", "lenient", "configured")
    """How the checkpoint is written: in the background, as one file, out of the run's folder, by a ``ModelCheckpoint``; or resumed:
    ``Resume(strict=False)``, ``Resume(hyperparameters="configured")``."""
    sync: bool = drawn(*OFF, True)
    """``sync_batchnorm``."""
    dropout: bool = drawn(*OFF, True)
    """Half of the values in the middle of the model are dropped, by torch's random numbers."""
    ddp: str = drawn("", "", "", "static", "buckets", "view", "bf16")
    """Settings of ``DDP``: ``static_graph``, many small buckets, ``gradient_as_bucket_view``, gradients on the wire in bfloat16."""
    pipeline: str = drawn("", "gpipe", "interleaved", "zero_bubble", "zbv", "dualpipev")
    """The pipeline's schedule (empty: ``"1f1b"``)."""
    by_size: bool = drawn(*OFF, True)
    """``global_batch_size`` in place of ``accumulate_grad_batches``."""
    closure: str = drawn("", "", "", "", "", "", "lbfgs", "sam", "warmup")
    """Steps with a closure: ``LBFGS``; :class:`.models.SAM`; a module's ``optimizer_step``, which sets the learning rate first."""
    stop: str = drawn("", "", "", "", "", "step", "epoch", "early")
    """Who asks for the end: ``run.stop()`` at step 2, or on the last rank at the first epoch's end; ``EarlyStopping``."""
    min_steps: int = drawn(0, 0, 3, 5)
    """Steps before which such a wish is not met."""
    average: str = drawn("", "", "", "", "", "ema", "late", "swa")
    """``EMA``, one of every second step from the third on, ``SWA``."""
    evaluated: str = drawn("", "", "", "", "validate", "test")
    """What is called with the validation data after the training."""
    nested: bool = drawn(*OFF, True)
    """Batches are tuples with a dict, a list, text and ``None`` in them, which a ``collate_fn`` builds."""
    datamodule: bool = drawn(*OFF, True)
    """A ``DataModule`` has the loaders."""
    kernel: str = drawn("", "", "", "foreach", "fused")
    """Which implementation of torch's optimizers."""
    compiled: bool = drawn(*OFF, *OFF, *OFF, True)
    """``compile``, by the backend that changes no operation."""
    conditional: str = drawn("", "", "", "", "", "some", "one", "nobody")
    """A block that a micro-batch runs or leaves out, by its first sample: ``"some"`` run it, few (``"one"``), or ``"nobody"``."""
    again: str = drawn("", "", "", "", "", "retain", "views")
    """Second backward passes in a micro-batch: through one graph (``retain_graph``), or of two forward passes, both before the backward passes."""
    filtered: bool = drawn(*OFF, True)
    """The collate function leaves out every fourth sample, though not all of a micro-batch: batches have other sizes than were asked for."""
    noisy: bool = drawn(*OFF, *OFF, True)
    """The optimizer draws random numbers in its step."""
    configured: str = drawn("", "", "", "", "plain", "own")
    """``configure_model`` builds the model, with the layers' initial values or with its own."""
    then: str = ""
    """The strategy that continues (empty: the same)."""
    seed: int = between(0, 99, default=0)

    @property
    def second(self) -> str:
        """The strategy of the run that continues."""
        return self.then or self.strategy

    def units_at(self, epoch: int) -> int:
        """Micro-batches of one step in that epoch, over all ranks."""
        return self.later if self.later and epoch else self.units

    def window(self, strategy: str, epoch: int = 0) -> int:
        """Micro-batches of one step on each rank."""
        return self.units_at(epoch) // STRATEGIES[strategy].data

    def changes(self) -> dict[str, Any]:
        """What is not as in the simplest case."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def __str__(self) -> str:
        return f"Case({', '.join(f'{name}={value!r}' for name, value in self.changes().items())})"


def sharded(strategy: str) -> bool:
    return strategy not in REPLICATED


def model_parallel(strategy: str) -> bool:
    return strategy.startswith(("tp2", "pp2"))


def pipelined(*strategies: str) -> bool:
    return any(strategy.startswith("pp2") for strategy in strategies)


def deepspeed(strategy: str) -> bool:
    return strategy.startswith("deepspeed")


Wanted = Mapping[str, Sequence[Any]]
"""Values that fields of drawn cases must have, by name."""


@st.composite
def cases(
    draw: Any, strategy: str, others: tuple[str, ...] = tuple(STRATEGIES), wanted: Wanted = MappingProxyType({})
) -> Case:
    """A case under that strategy, possibly one that continues under one of the others."""
    values = {
        f.name: draw(st.sampled_from(wanted.get(f.name, f.metadata["values"]))) for f in fields(Case) if f.metadata
    }
    values["then"] = draw(st.sampled_from(["", "", *others])) if values["resume"] else ""
    step = math.lcm(*(STRATEGIES[name].data for name in (strategy, values["then"] or strategy)))
    values |= {"units": step * values["units"], "later": step * values["later"]}
    case = legal(Case(strategy=strategy, **values))
    assume(all(getattr(case, name) in possible for name, possible in wanted.items()))
    return case


def wanted_values(texts: Iterable[str]) -> dict[str, list[Any]]:
    """Values that a command asks for: of ``"stop=early"`` this one, of ``"stop"`` every value but that of the simplest case."""
    drawn_fields = {f.name: f for f in fields(Case) if f.metadata}
    values: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if name not in drawn_fields:
            raise ValueError(f"{name!r} is not drawn; possible: {', '.join(drawn_fields)}")
        axis = drawn_fields[name]
        possible = [v for v in axis.metadata["values"] if (str(v) == value if equals else v != axis.default)]
        if not possible:
            raise ValueError(
                f"{name} is never {value!r}; possible: {', '.join(map(str, dict.fromkeys(axis.metadata['values'])))}"
            )
        values[name] = possible
    return values


class _Rules:
    """Changes to a case, one after the other."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def when(self, holds: object, **changes: Any) -> None:
        if holds:
            self.case = replace(self.case, **changes)


def legal(case: Case) -> Case:
    """The nearest case that the library takes, and whose result is defined; each rule says why."""
    rules = _Rules(case)
    both = (case.strategy, case.second)
    _by_axis(rules, both)
    _by_strategy(rules, both)
    _by_precision(rules, both)
    _by_loop(rules)
    _by_data(rules, both)
    _by_resume(rules, both)
    return rules.case


def _by_axis(rules: _Rules, both: tuple[str, str]) -> None:
    """What an axis needs of the others. An axis that a strategy has no use for goes; otherwise the others follow it."""
    when, case = rules.when, rules.case
    several = max(STRATEGIES[name].world for name in both) > 1
    whole = all(not sharded(name) or name.startswith("fsdp") for name in both)  # a rank can do a step of its own shards
    when(case.saves and not case.resume, resume=2)
    when(case.saves, door="fit", manual="", poison=-1)
    when(case.saves == "callback", killed=False)  # it saves after the callback that kills
    when(not case.resume, saves="")
    if case.sync and all(not sharded(name) for name in both) and several:
        when(True, body="batchnorm", none=0, then="", loss="mean" if case.manual else case.loss)
        when(True, precision="64-true")  # the statistics of two values make much of float32's rounding
    else:
        when(True, sync=False)
    when(several, dropout=False)
    when(not any(name.startswith("ddp") for name in both), ddp="")
    when(case.ddp == "static", unused=False, none=0)
    if rules.case.ddp == "bf16":
        when(True, optimizer="sgd", manual="", closure="")
        when(rules.case.body not in ("mlp", "tied"), body="mlp", sync=False)
    when(not pipelined(*both), pipeline="")
    # The library refuses them where stages are sharded, too: torch does not reduce gradients of backward passes of weights alone.
    when("pp2x2" in both and case.pipeline in ("zero_bubble", "zbv", "dualpipev"), pipeline="interleaved")
    if case.by_size:
        when(True, door="fit", manual="", later=0)
        when(case.data in BATCHED or case.data == "front", data="sequential")
    if case.closure and whole and rules.case.closure:
        when(True, door="fit", manual="", poison=-1, none=0, schedule="", compiled=False)
        # LBFGS divides by differences of gradients, of which float32's rounding is a large part: a plain loop in float32 is as far off.
        when(case.precision.endswith("mixed") or case.closure == "lbfgs", precision="64-true")
        when(case.closure != "warmup" and any(map(sharded, both)), closure="warmup")
        # SAM does not move where gradients are zero, as those of a normalized batch of one are: the library then does not evaluate again.
        when(case.closure == "sam" and case.body == "batchnorm", body="mlp")
        when(rules.case.closure != "warmup", optimizer="sgd", dropout=False, kernel="", recompute="")
        when(case.optimizer == "two", optimizer="adam")
    else:
        when(True, closure="")
    when(case.stop == "step" and several, stop="epoch")  # ranks agree on it when they get to it
    if case.stop:
        when(True, door="fit", manual="", max_steps=0, none=0, poison=-1)
        when(rules.case.stop != "early", resume=0, saves="")
        when(rules.case.stop == "step", val="epoch" if case.val else "")
        when(rules.case.stop == "epoch", epochs=max(2, case.epochs))
    if case.stop == "early":
        when(True, epochs=3, val_loaders=1, val="epoch" if case.val == "half" else case.val)
        when(
            rules.case.resume, min_steps=0
        )  # the training that is resumed ends at max_steps, which may not be below the minimum
        when(case.loss in ("weighted", "counted"), loss="mean")  # the mean over nothing is not logged
    when(not case.stop, min_steps=0)
    if rules.case.min_steps:  # the library refuses one that the training does not reach
        steps = math.ceil(rules.case.min_steps / rules.case.epochs)
        least = 2 * steps * max(case.units, case.later) * (case.batch + 1)
        when(True, limit=0, drop_last=False, samples=max(case.samples, least))
    if case.average and not any(map(deepspeed, both)):
        when(True, door="fit", compiled=False)
        when(case.average == "swa", schedule="", closure="", manual="")
        when(case.average == "swa" and rules.case.data == "stream", data="list")
    else:
        when(True, average="")
    when(case.evaluated or case.datamodule, door="fit")
    when(case.kernel == "fused" and rules.case.body == "complex", body="mlp")
    if case.compiled and not any(map(deepspeed, both)) and not any(map(model_parallel, both)):
        when(rules.case.compiled, body="mlp", none=0, dropout=False, sync=False, recompute="")
        when(rules.case.compiled and rules.case.ddp == "buckets", ddp="")  # which torch does not compile
    else:
        when(True, compiled=False)
    when(case.schedule == "val", door="fit", val="epoch", val_loaders=1)
    _by_odd_axis(rules, both)


def _by_odd_axis(rules: _Rules, both: tuple[str, str]) -> None:
    """What programs need that are odd but right."""
    when, case = rules.when, rules.case
    if case.conditional:
        # A gradient of zero and none at all differ for other optimizers; what is computed again must not run another way.
        when(
            True,
            optimizer="sgd",
            closure="",
            kernel="",
            none=0,
            poison=-1,
            compiled=False,
            recompute="",
            sync=False,
            ddp="",
        )
        when(rules.case.body not in ("mlp", "tied"), body="mlp")
        # An evaluation's batches are not those of the reference, which takes all samples at once.
        when(True, val="", evaluated="", predicted=0, sanity=False, val_loaders=1, val_samples=5)
        when(case.schedule == "val", schedule="epoch")
    if rules.case.again:
        if case.seed % 2 or any(map(sharded, both)):  # others need manual optimization
            when(True, door="engine", manual="", stop="", min_steps=0, average="", evaluated="", predicted=0)
            when(True, datamodule=False, configured="", by_size=False, saves="", hook=False)
            when(case.schedule == "val", schedule="epoch")
        when(
            True,
            loss="mean",
            none=0,
            poison=-1,
            closure="",
            compiled=False,
            dropout=False,
            sync=False,
            body="mlp",
            precision="64-true",
        )
        when(rules.case.door == "fit", manual="each")
        when(rules.case.ddp == "static", ddp="")
    if rules.case.filtered:
        when(True, nested=False, by_size=False, drop_last=False, none=0, poison=-1)
        when(rules.case.data not in SAMPLED, data="shuffled")
    when(
        rules.case.noisy,
        optimizer="sgd",
        closure="",
        kernel="",
        poison=-1,
        average="",
        body="mlp",
        precision="64-true",
        clip="",
    )
    when(rules.case.noisy, val="", evaluated="", predicted=0, stop="", min_steps=0, sanity=False, schedule="")
    when(rules.case.noisy and rules.case.manual == "both", manual="each")  # both would need two optimizers
    when(rules.case.configured, door="fit")


def _by_strategy(rules: _Rules, both: tuple[str, str]) -> None:
    """What a strategy refuses, or leaves to one of its own."""
    when, case = rules.when, rules.case
    when(
        any(map(deepspeed, both)),
        none=0,
        poison=-1,
        unused=False,
        door="fit",
        precision="32-true",
        clip="norm" if case.clip else "",
    )
    when(any(map(deepspeed, both)) and case.optimizer == "two", optimizer="adamw")
    when(any(map(sharded, both)), manual="", none=0)
    when(any(map(sharded, both)) and case.body in ("complex", "batchnorm"), body="mlp")
    when(any(map(model_parallel, both)), body="mlp", unused=False, none=0, door="fit")
    when(any(map(model_parallel, both)) or any(map(deepspeed, both)), again="")
    when(any(map(model_parallel, both)), conditional="", filtered=False)
    # Ranks wait there where a block runs a second time before one that only some of them run, as the chapter says.
    when("deepspeed3" in both and rules.case.conditional in ("some", "one"), shared=False)
    when(rules.case.door == "fit" and any(map(sharded, both)), again="")  # which needs manual optimization
    when(pipelined(*both), shared=False, frozen=False, poison=-1, configured="")
    when(pipelined(*both) and case.optimizer == "two", optimizer="adam")


def _by_precision(rules: _Rules, both: tuple[str, str]) -> None:
    """Half precision rounds gradients, which Adam makes steps of full size of; and torch has no complex or GRU kernels for it."""
    exact = any(sharded(name) and not name.startswith("fsdp") for name in both)
    rules.when(exact and rules.case.precision.endswith("mixed"), precision="64-true")
    if rules.case.precision.endswith("mixed"):
        rules.when(rules.case.body not in ("mlp", "tied"), body="mlp")
        rules.when(rules.case.optimizer not in ("sgd", "momentum"), optimizer="sgd")
        rules.when(rules.case.manual == "both", manual="each")
    # torch has no fused SGD of DTensors, and no list operations on them together with tensors.
    fused = rules.case.kernel == "fused" and rules.case.optimizer not in ("adam", "adamw")
    rules.when(fused and any(map(sharded, both)), kernel="foreach")
    rules.when(any(sharded(name) and not name.startswith("fsdp") for name in both), kernel="")


def _by_loop(rules: _Rules) -> None:
    """What belongs to one of the doors, or to manual optimization."""
    case, when = rules.case, rules.when
    if case.manual:
        when(
            True,
            door="fit",
            units=STRATEGIES[case.strategy].data,
            later=0,
            none=0,
            loss="mean",
            poison=-1,
            resume=0,
            max_steps=0,
        )
        when(True, log_every=1, schedule="", val="epoch" if case.val else "")
        when(case.manual == "both", optimizer="two", frozen=False)  # each has something to train
        when(case.manual != "both" and case.optimizer == "two", optimizer="momentum")
    elif case.door == "engine":
        when(True, sanity=False, hook=False, log_every=1, killed=False, val_loaders=1, limit=0, max_steps=0, none=0)
        when(True, predicted=0)
        when(True, val="epoch" if case.val else "")
        when(case.loss == "dict", loss="mean")
        when(case.schedule in ("plateau", "val"), schedule="epoch")
    when(
        rules.case.schedule == "plateau" and case.loss in ("weighted", "counted"), schedule="epoch"
    )  # the mean over nothing is not logged
    when(rules.case.schedule == "val" and not rules.case.val, schedule="epoch")
    when(not rules.case.val, sanity=False)
    when(not rules.case.val and not rules.case.evaluated, val_loaders=1, val_samples=5)


def _by_data(rules: _Rules, both: tuple[str, str]) -> None:
    when = rules.when
    when(rules.case.data in BATCHED, drop_last=False)
    others = rules.case.val or rules.case.predicted or rules.case.evaluated
    when(rules.case.data == "list" and not others, workers=0)
    when(rules.case.data == "stream" and rules.case.val == "half", val="epoch")  # half of what nobody knows
    when(rules.case.none, poison=-1)
    if rules.case.poison >= 0:
        when(True, resume=0, max_steps=0)
        when(rules.case.optimizer == "two", optimizer="adam")  # with Engine each is skipped by itself
    when(
        rules.case.val == "half" and (rules.case.none or rules.case.poison >= 0), val="epoch"
    )  # half of the steps that are left
    when(rules.case.body == "complex" and rules.case.clip == "value", clip="norm")  # complex numbers cannot be clamped
    # Each rank of a BatchNorm sees its own part, and what evaluation uses then is not one process's.
    when(
        rules.case.body == "batchnorm" and not rules.case.sync and max(STRATEGIES[name].data for name in both) > 1,
        val="",
        evaluated="",
        schedule="" if rules.case.schedule == "val" else rules.case.schedule,
        sanity=False,
        val_loaders=1,
        predicted=0,
        resume=0,
    )


def _by_resume(rules: _Rules, both: tuple[str, str]) -> None:
    case, when = rules.case, rules.when
    when(not case.resume, killed=False, then="")
    when(case.resume, max_steps=0)
    when(rules.case.then == case.strategy, then="")
    when(rules.case.then, drop_last=False, limit=0, none=0)  # they count for each rank
    if rules.case.drop_last:
        least = case.batch * max(STRATEGIES[name].data for name in both)
        when(True, samples=max(case.samples, 2 * least))  # some samplers give half of them
