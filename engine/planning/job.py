"""The planned job: what the estimates need to know about a run besides its traces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

from torch import Tensor, nn

from engine.data.loader import PreparedLoader
from engine.loop.run import Run
from engine.planning import torch_private
from engine.planning.step_time import STAGES_OF_A_RANK
from engine.planning.strategy_facts import strategy_facts
from engine.strategies.base import Single, Strategy
from engine.transforms.blocks import repeated_blocks
from engine.utils.tree import batch_size, map_tensors

_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads", "nhead")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of a dense transformer."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int = 0
    """Tokens of a sample; 0: not known."""
    feed_forward: int = 0
    """Width of the feed-forward layer; 0: four times ``hidden``."""
    gated: bool = False
    """Whether the feed-forward layer is gated, with three matrices rather than two (SwiGLU)."""
    key_heads: int = 0
    """Heads of keys and values; 0: as many as ``heads``."""
    tied: bool = True
    """Whether the output layer shares the weights of the input embedding."""
    positions: int = 0
    """Rows of a learned position embedding; 0: there is none."""

    @property
    def wide(self) -> int:
        """Width of the feed-forward layer, also where ``feed_forward`` is 0."""
        return self.feed_forward or 4 * self.hidden


@dataclass(frozen=True)
class BatchStage:
    """A stage of ``global_batch_size``."""

    start: str
    """When it begins: ``"5e8 tokens"``."""
    window: int
    """Micro-batches of a step on each rank."""
    steps: int
    """Optimizer steps of the run in this stage."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One planned run on ``world_size`` ranks."""

    world_size: int
    nodes: int = 1
    strategy: str = "single"
    """Name of the strategy's class."""
    precision: str = "32-true"
    axes: dict[str, int] = field(default_factory=dict)
    """The axes of the mesh that have more than one rank, each with its number of ranks."""
    data_ranks: int = 1
    """Ranks that see different samples."""
    window: int = 1
    """Micro-batches of a step on each rank."""
    schedule: str | None = None
    """Schedule of the pipeline; ``None``: there is no pipeline."""
    parts: int = 1
    """Parts that the pipeline splits a micro-batch into."""
    tf32: bool = False
    """Whether products of float32 matrices are computed in TF32."""
    compiled: bool = False
    checkpointing: str | int | None = None
    """The setting ``activation_checkpointing``."""
    parameters: int = 0
    """Parameters of the whole model (elements)."""
    trainable: int = 0
    """Trained parameters of the whole model (elements)."""
    parameter_bytes: int = 0
    """Bytes of the whole model, parameters and buffers, as a checkpoint has them."""
    buffer_bytes: int = 0
    """Bytes of the buffers in :attr:`parameter_bytes`."""
    optimizer_bytes: int | None = None
    """Bytes of the whole optimizer state in a checkpoint; ``None``: in proportion to the parameters, as on the traced ranks."""
    samples_per_epoch: int | None = None
    """Samples that all ranks together train on in an epoch; ``None``: the loader has no length."""
    steps_per_epoch: int | None = None
    total_steps: int | None = None
    """Optimizer steps of the run; ``None``: only a time or a callback ends it."""
    stages: tuple[BatchStage, ...] = ()
    """The stages of ``global_batch_size``, of which the largest is planned; empty: it has none, or their steps are not known."""
    zero: tuple[int, int] | None = None
    """DeepSpeed's stage of ZeRO, from 1 on, and the bytes of one parameter; ``None``: another strategy, or an optimizer other than Adam."""
    shape: Shape | None = None
    """Shape of the model for the formulas of papers; ``None``: the model is not known to be a dense transformer."""

    @property
    def pipeline(self) -> int:
        """The number of ranks of a pipeline."""
        return self.axes.get("pp", 1)

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share a node."""
        return self.world_size // self.nodes

    def as_json(self) -> dict[str, Any]:
        """The job as plain dicts, numbers and text, for JSON."""
        return asdict(self)


class JobFacts:
    """Collects the facts of a job while one of its ranks is traced."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def from_module(self, module: nn.Module) -> None:
        """Record the facts of the user's module before a strategy divides it; what ``configure_model`` creates is not there yet."""
        self._count(module, Single())
        self._values["shape"] = shape_of(module)

    def from_run(self, run: Run, batch: Any, compiled: bool) -> None:
        """Record the facts of a run that is set up for its first step.

        Args:
            run: the run.
            batch: a micro-batch.
            compiled: whether the user's settings compile the step; in the planned run it is not.
        """
        settings, strategy, engine = run.settings, run.engine.strategy, run.engine
        axes = {name: size for name, size in strategy.axes.items() if size > 1}
        facts = strategy_facts(strategy)
        schedule = (facts.schedule or "1f1b") if axes.get("pp", 1) > 1 else None
        batches, data_ranks, window = run.num_train_batches, engine.data_group.world_size, run.loaders.largest_window()
        control = run.control
        self._count(run.module, strategy)
        shape = self._values.get("shape") or shape_of(run.module)
        self._values |= {
            "strategy": type(strategy).__name__,
            "precision": str(engine.precision),
            "axes": axes,
            "data_ranks": data_ranks,
            "window": window,
            "schedule": schedule,
            "parts": 1 if schedule is None else facts.parts or axes["pp"] * STAGES_OF_A_RANK[schedule],
            "tf32": settings.matmul_precision in ("high", "medium"),
            "compiled": compiled,
            "checkpointing": settings.activation_checkpointing,
            "samples_per_epoch": _samples(run.train_loader, (batch_size(batch) or 0) * data_ranks, window, batches),
            "steps_per_epoch": None if batches is None else -(-batches // window),
            "total_steps": run.loaders.total_steps(control.max_epochs, control.max_steps, control.max_length),
            "stages": tuple(
                BatchStage(str(stage.start) if stage.start.value else "the start", stage.window, steps)
                for stage, steps in run.loaders.steps_of_stages(
                    control.max_epochs, control.max_steps, control.max_length
                )
                or ()
            ),
            "zero": _zero(run, facts.zero_stage),
            "shape": None if shape is None else replace(shape, sequence=sequence_of(batch)),
        }

    def _count(self, module: nn.Module, strategy: Strategy) -> None:
        """Record the sizes of a module if it is larger than those recorded before: one stage of a pipeline lacks the other stages."""
        sizes = {p: prod(strategy.whole_shape(p)) for p in module.parameters()}
        count = sum(sizes.values())
        if count > self._values.get("parameters", -1):
            buffers = sum(b.numel() * b.element_size() for b in torch_private.persistent_buffers(module))
            self._values |= {
                "parameters": count,
                "trainable": sum(size for p, size in sizes.items() if p.requires_grad),
                "parameter_bytes": sum(size * p.element_size() for p, size in sizes.items()) + buffers,
                "buffer_bytes": buffers,
            }

    def job(self, world_size: int, nodes: int) -> Job:
        """Create the job on ``world_size`` ranks and ``nodes`` nodes from the recorded facts."""
        return Job(world_size=world_size, nodes=nodes, **self._values)


def _zero(run: Run, stage: int) -> tuple[int, int] | None:
    """The value of :attr:`Job.zero`."""
    adam = all(
        type(getattr(optimizer, "optimizer", optimizer)).__name__.startswith("Adam") for optimizer in run.optimizers
    )
    sizes = {p.element_size() for p in run.module.parameters() if p.requires_grad}
    return (stage, sizes.pop()) if stage and adam and len(sizes) == 1 else None


def _samples(loader: PreparedLoader | None, batch_samples: int, window: int, batches: int | None) -> int | None:
    """Samples of an epoch over all ranks: all of the loader's (``loader.samples`` counts single samples or whole batches), or those of the first
    ``batches`` batches if these are fewer."""
    if loader is None or loader.samples is None or not batch_samples:
        return None
    samples = round(loader.samples / loader.stride * batch_samples * window)
    return samples if batches is None else min(samples, batches * batch_samples)


def shape_of(model: nn.Module) -> Shape | None:
    """The shape of a dense transformer, from its Hugging Face configuration or its modules; ``None``: it is another kind of model, or its shape
    cannot be read.

    The shape is read from ``config`` of the model or of one of its modules; else from the repeated blocks, the largest embedding, and the
    attribute of a module in the first block that is the number of heads. A model with experts is not dense.
    """
    return _shape_from_config(model) or _shape_from_modules(model)


def _shape_from_config(model: nn.Module) -> Shape | None:
    """The shape according to the first complete ``config`` of a module, if there is one."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None or isinstance(config, (nn.Module, Tensor)):
            continue
        get = (
            config.get
            if isinstance(config, Mapping)
            else lambda name, default=None, of=config: getattr(of, name, default)
        )
        layers, hidden, heads, vocabulary = (
            _first_number(get, names)
            for names in (
                ("num_hidden_layers", "n_layer", "num_layers"),
                ("hidden_size", "n_embd", "d_model"),
                _HEADS,
                ("vocab_size",),
            )
        )
        if not (layers and hidden and heads and vocabulary):
            continue
        if _first_number(get, ("num_experts", "num_local_experts", "n_routed_experts")):
            return None
        wide = _first_number(get, ("intermediate_size", "n_inner", "ffn_dim"))
        return Shape(
            layers=layers,
            hidden=hidden,
            heads=heads,
            vocabulary=vocabulary,
            feed_forward=wide,
            gated=_gated(model),
            key_heads=_first_number(get, _KEY_HEADS),
            tied=bool(get("tie_word_embeddings", True)),
            positions=_positions(model, hidden, vocabulary),
        )
    return None


def _shape_from_modules(model: nn.Module) -> Shape | None:
    """The shape according to the modules: embeddings, repeated blocks and their layers."""
    blocks = repeated_blocks(model)
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    if len(blocks) < 2 or not embeddings:
        return None
    outputs = {m.out_features for m in model.modules() if isinstance(m, nn.Linear)}
    word_embedding = max(
        embeddings,
        key=lambda embedding: (embedding.num_embeddings in outputs, embedding.num_embeddings * embedding.embedding_dim),
    )
    hidden = word_embedding.embedding_dim
    heads = next(filter(None, (_number(vars(m).get(name)) for m in blocks[0].modules() for name in _HEADS)), 0)
    if not heads or sum(isinstance(m, nn.ModuleList) and len(m) > 3 for m in blocks[0].modules()):
        return None
    linear = [m for m in blocks[0].modules() if isinstance(m, nn.Linear)]
    wide = max((m.out_features for m in linear if m.in_features == hidden and m.out_features != 3 * hidden), default=0)
    table = word_embedding.weight
    shared = sum(p is table for m in model.modules() for p in m._parameters.values()) > 1
    separate = any(
        isinstance(m, nn.Linear) and m.out_features == word_embedding.num_embeddings and m.weight is not table
        for m in model.modules()
    )
    return Shape(
        layers=len(blocks),
        hidden=hidden,
        heads=heads,
        vocabulary=word_embedding.num_embeddings,
        feed_forward=wide if wide > hidden else 0,
        gated=_gated(blocks[0]),
        key_heads=next(
            filter(None, (_number(vars(m).get(name)) for m in blocks[0].modules() for name in _KEY_HEADS)), 0
        ),
        tied=shared or not separate,
        positions=_positions(model, hidden, word_embedding.num_embeddings),
    )


def _gated(model: nn.Module) -> bool:
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return bool(names & {"gate_proj", "w3", "up_gate", "gate_up_proj"})


def _positions(model: nn.Module, hidden: int, vocabulary: int) -> int:
    """Rows of the position embedding: an embedding of width ``hidden`` with another number of rows than the vocabulary; 0: there is none."""
    rows = (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding) and m.embedding_dim == hidden)
    return max((count for count in rows if count != vocabulary), default=0)


def _first_number(get: Any, names: tuple[str, ...]) -> int:
    """The first positive int among the values of ``names``; 0: there is none."""
    return next(filter(None, (_number(get(name)) for name in names)), 0)


def _number(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def sequence_of(batch: Any) -> int:
    """Tokens of a sample: the length of the second dimension of the batch's first 2-d tensor of integers; 0: the batch has no such tensor."""
    lengths: list[int] = []

    def look(tensor: Tensor) -> Tensor:
        if tensor.ndim == 2 and not tensor.is_floating_point() and not tensor.is_complex():
            lengths.append(tensor.shape[1])
        return tensor

    map_tensors(look, batch)
    return lengths[0] if lengths else 0
