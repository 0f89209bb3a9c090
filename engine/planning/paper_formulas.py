"""A dense transformer's parameters, FLOPs and memory by published formulas: a cross-check of what was traced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from engine.transforms.blocks import repeated
from engine.utils.tree import map_tensors

DIFFERS = 0.2
"""From this relative difference on, a formula is shown beside the traced number."""
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads", "nhead")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A dense transformer."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int = 0
    """Tokens of a sample; 0: not known."""
    feed_forward: int = 0
    """Width of the feed-forward layer; 0: four times ``hidden``."""
    gated: bool = False
    """Three matrices in the feed-forward layer rather than two (SwiGLU)."""
    key_heads: int = 0
    """Heads of keys and values; 0: as many as ``heads``."""
    tied: bool = True
    """The output layer is the input embedding."""
    positions: int = 0
    """Learned positions."""

    @property
    def wide(self) -> int:
        """Width of the feed-forward layer."""
        return self.feed_forward or 4 * self.hidden


@dataclass(frozen=True, slots=True)
class Check:
    """A traced number beside the formula's."""

    what: str
    traced: float
    formula: float
    source: str

    @property
    def differs(self) -> bool:
        """Whether by more than :data:`DIFFERS`."""
        return abs(self.traced - self.formula) > DIFFERS * max(self.formula, 1e-12)


def parameters(shape: Shape) -> int:
    """Weights of the matrices, with biases and norms left out: 12 l h^2 + V h for GPT (Narayanan et al. 2021, section 5)."""
    h = shape.hidden
    keys = (shape.key_heads or shape.heads) / shape.heads
    attention = 2 * h * h + 2 * h * h * keys
    feed_forward = (3 if shape.gated else 2) * h * shape.wide
    embeddings = shape.vocabulary * h * (1 if shape.tied else 2) + shape.positions * h
    return int(shape.layers * (attention + feed_forward) + embeddings)


def flops(shape: Shape, count: int, tokens: int) -> float:
    """Of forward and backward passes: 6 N D (Kaplan et al. 2020) and 12 l h s for each token (PaLM, Chowdhery et al. 2022, appendix B).

    Args:
        shape: of the model.
        count: of parameters, N; those of an input embedding that is not also the output layer multiply nothing and are left out here.
        tokens: D.
    """
    idle = (0 if shape.tied else shape.vocabulary * shape.hidden) + shape.positions * shape.hidden
    return 6.0 * (count - idle) * tokens + 12.0 * shape.layers * shape.hidden * shape.sequence * tokens


def activations(
    shape: Shape, samples: int, *, bytes_each: int = 2, tp: int = 1, sequence_parallel: bool = False, full: bool = False
) -> float:
    """Bytes that the layers keep for the backward pass, without attention scores (Korthikanti et al. 2022, table 2, selective recomputation).

    Args:
        shape: of the model.
        samples: of a micro-batch.
        bytes_each: of an activation; the paper's numbers are for 2.
        tp: ranks of tensor parallelism.
        sequence_parallel: between the tensor parallel regions activations are split as well.
        full: every layer is computed again in the backward pass, and keeps its input only.
    """
    each = shape.sequence * samples * shape.hidden * shape.layers
    if full:
        return each * bytes_each
    factor = 34 / tp if sequence_parallel else 10 + 24 / tp
    return each * factor * bytes_each / 2


def model_state(
    count: int, shards: int, stage: int, *, parameter_bytes: int = 2, gradient_bytes: int = 2, optimizer_bytes: int = 12
) -> float:
    """Bytes of parameters, gradients and optimizer state on a rank: ZeRO (Rajbhandari et al. 2020, figure 1), mixed precision with Adam.

    Args:
        count: of parameters.
        shards: ranks that share them.
        stage: 0 (nothing is shared), 1 (optimizer state), 2 (and gradients), 3 (and parameters).
        parameter_bytes, gradient_bytes: for each parameter.
        optimizer_bytes: for each parameter: 12 with Adam and a float32 copy.
    """
    parts = (
        parameter_bytes / (shards if stage >= 3 else 1),
        gradient_bytes / (shards if stage >= 2 else 1),
        optimizer_bytes / (shards if stage >= 1 else 1),
    )
    return count * sum(parts)


def shape_of(model: nn.Module) -> Shape | None:
    """The shape of a dense transformer, from its Hugging Face configuration or its modules; ``None``: it is none, or its shape cannot be read.

    Read are: ``config`` of the model or of one of its modules; else the repeated blocks, the largest embedding, and the number of heads that a
    module of the first block has as an attribute. A model with experts is not dense.
    """
    return _configured(model) or _of_modules(model)


def _configured(model: nn.Module) -> Shape | None:
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None or isinstance(config, (nn.Module, Tensor)):
            continue
        get = (
            config.get
            if isinstance(config, Mapping)
            else lambda name, default=None, of=config: getattr(of, name, default)
        )
        layers, hidden, heads, words = (
            _first(get, names)
            for names in (
                ("num_hidden_layers", "n_layer", "num_layers"),
                ("hidden_size", "n_embd", "d_model"),
                _HEADS,
                ("vocab_size",),
            )
        )
        if not (layers and hidden and heads and words):
            continue
        if _first(get, ("num_experts", "num_local_experts", "n_routed_experts")):
            return None
        wide = _first(get, ("intermediate_size", "n_inner", "ffn_dim"))
        return Shape(
            layers=layers,
            hidden=hidden,
            heads=heads,
            vocabulary=words,
            feed_forward=wide,
            gated=_gated(model),
            key_heads=_first(get, _KEY_HEADS),
            tied=bool(get("tie_word_embeddings", True)),
            positions=_positions(model, hidden, words),
        )
    return None


def _of_modules(model: nn.Module) -> Shape | None:
    blocks = repeated(model)
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    if len(blocks) < 2 or not embeddings:
        return None
    outputs = {m.out_features for m in model.modules() if isinstance(m, nn.Linear)}
    words = max(embeddings, key=lambda each: (each.num_embeddings in outputs, each.num_embeddings * each.embedding_dim))
    hidden = words.embedding_dim
    heads = next(filter(None, (_number(vars(m).get(name)) for m in blocks[0].modules() for name in _HEADS)), 0)
    if not heads or sum(isinstance(m, nn.ModuleList) and len(m) > 3 for m in blocks[0].modules()):
        return None
    linear = [m for m in blocks[0].modules() if isinstance(m, nn.Linear)]
    wide = max((m.out_features for m in linear if m.in_features == hidden and m.out_features != 3 * hidden), default=0)
    table = words.weight
    shared = sum(p is table for m in model.modules() for p in m._parameters.values()) > 1
    separate = any(
        isinstance(m, nn.Linear) and m.out_features == words.num_embeddings and m.weight is not table
        for m in model.modules()
    )
    return Shape(
        layers=len(blocks),
        hidden=hidden,
        heads=heads,
        vocabulary=words.num_embeddings,
        feed_forward=wide if wide > hidden else 0,
        gated=_gated(blocks[0]),
        key_heads=next(
            filter(None, (_number(vars(m).get(name)) for m in blocks[0].modules() for name in _KEY_HEADS)), 0
        ),
        tied=shared or not separate,
        positions=_positions(model, hidden, words.num_embeddings),
    )


def _gated(model: nn.Module) -> bool:
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return bool(names & {"gate_proj", "w3", "up_gate", "gate_up_proj"})


def _positions(model: nn.Module, hidden: int, vocabulary: int) -> int:
    """Rows of a second embedding of that width."""
    rows = (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding) and m.embedding_dim == hidden)
    return max((count for count in rows if count != vocabulary), default=0)


def _first(get: Any, names: tuple[str, ...]) -> int:
    return next(filter(None, (_number(get(name)) for name in names)), 0)


def _number(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def sequence_of(batch: Any) -> int:
    """Tokens of a sample: the length of the batch's first tensor of whole numbers with two dims; 0: it has none."""
    found: list[int] = []

    def look(tensor: Tensor) -> Tensor:
        if tensor.ndim == 2 and not tensor.is_floating_point() and not tensor.is_complex():
            found.append(tensor.shape[1])
        return tensor

    map_tensors(look, batch)
    return found[0] if found else 0
