"""The content of a checkpoint as parts of tensors and JSON trees, and which rank writes which part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from engine.checkpoint.json_tree import pack, same_memory
from engine.checkpoint.manifest import OTHER_WEIGHTS, RANK, SHARED, WEIGHTS, PackedFacts, packed_facts
from engine.checkpoint.storage import Packed
from engine.checkpoint.tensor_files import is_dtensor, storable
from engine.distributed.collectives import gather_json
from engine.distributed.group import Group
from engine.utils.parameters import parameters_of

FILE = 1 << 27
"""Bytes above which a rank's parts go into several files, which are written concurrently."""
MOST_FILES = 8
"""The maximum number of files for one rank's parts."""

Row = tuple[str, tuple[int, ...], int, bool]
"""A part's name, offsets in the whole tensor, bytes, and whether the lowest rank that holds it must write it."""


@dataclass
class Content:
    """This rank's content of a checkpoint. Tensors may be whole or sharded (``DTensor``)."""

    model: Mapping[str, Any]
    """Parameters and buffers by name, and results of ``get_extra_state``. Names that only other ranks hold may be missing."""
    optimizers: Mapping[str, Any]
    """``{number: state}`` of each optimizer; ``state["state"]`` is keyed by parameter names. Entries that only other ranks hold may be missing."""
    shared: Any
    """The tree that all ranks share."""
    of_rank: Any
    """A tree with this rank's own state."""
    facts: Mapping[str, Any]
    """Additional facts for the manifest: small JSON values."""
    parts_differ: bool = False
    """True if the ranks hold tensors of different names; the value is the same on all ranks."""
    changed_by_steps: Set[int] | None = frozenset()
    """The ``id`` of each parameter that nothing but optimizer steps changes; optimizer states and other weights are taken to change in steps only.
    ``None``: all of them may change at any time, so everything is copied before an asynchronous save returns."""
    other_weights: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Weights besides the trained ones, such as averages: ``{name of the weights: {name in the model: tensor}}``, with the same names of weights on
    all ranks. The tensors must not change before :meth:`engine.checkpoint.writer.CheckpointWriter.hold`."""


class Part(NamedTuple):
    """This rank's part of a tensor."""

    tensor: Tensor
    """Shares the memory of the original, on its device."""
    offsets: tuple[int, ...]
    """Where in the whole tensor the part starts."""


class PackedContent:
    """One rank's content as parts of tensors and JSON trees. It is empty until :meth:`pack`, and shares the memory of the tensors."""

    def __init__(self, group: Group) -> None:
        self.facts = PackedFacts()
        """Additional facts for the manifest."""
        self.parts: dict[str, Part] = {}
        """Parts of the model, the optimizers and other weights, by names such as ``"model/layer.weight"``."""
        self.trees: dict[str, Packed] = {}
        """Trees by their names in the checkpoint, such as ``"state/shared"``."""
        self.late: set[str] = set()
        """Names of parts that only an optimizer step changes: they may be copied while forward and backward passes run."""
        self.rows: list[Row] = []
        """A row for each part. The ranks exchange their rows to decide who writes what."""
        self._group = group
        self._to_merge: list[str] = []
        self._parts_differ = False

    def pack(self, content: Content) -> None:
        """Split ``content`` into parts and trees.

        Raises:
            TypeError: a value cannot be stored; the message says where it is.
        """
        group = self._group
        self.facts = packed_facts(content.facts)
        tensors, model = split(content.model)
        optim, states = pack(dict(content.optimizers), is_dtensor)
        self.trees = {
            "model/model": (model, {}),
            "optim/optim": (optim, {}),
            RANK.format(group.rank): pack(content.of_rank),
        }
        if group.is_main:
            self.trees[SHARED] = pack(content.shared)
        self._to_merge, self._parts_differ = ["model/model", "optim/optim"], content.parts_differ
        other_tensors, named = packed_weights(content.other_weights)
        if content.other_weights:
            self.trees[OTHER_WEIGHTS] = (named, {})
            self._to_merge.append(OTHER_WEIGHTS)
        own_tensors = {f"model/{n}": t for n, t in tensors.items()} | {f"optim/{n}": t for n, t in states.items()}
        self.parts = parts_of(own_tensors | other_tensors)
        if content.changed_by_steps is not None:
            trained = (f"model/{n}" for n, t in tensors.items() if id(t) in content.changed_by_steps)
            self.late = {*(f"optim/{n}" for n in states), *trained, *other_tensors}
        # Where ranks may have different values, such as batch statistics, rank 0's are saved.
        varying = {n for n, t in tensors.items() if not isinstance(t, nn.Parameter)}
        fixed = {f"model/{n}" for n in varying} | {key for key in other_tensors if key.split("/", 2)[2] in varying}
        self.rows = rows_of(self.parts, fixed)

    def merge_trees(self) -> None:
        """Merge the ranks' trees of the model, the optimizers and other weights on the main process, the only one that keeps them. All ranks call
        this together."""
        trees = {stem: self.trees.pop(stem)[0] for stem in self._to_merge}
        trees_of_ranks = gather_json(self._group, trees) if self._parts_differ else [trees]
        if self._group.is_main:
            self.trees |= {stem: (_merged([row[stem] for row in trees_of_ranks]), {}) for stem in trees}


def trained_by(optimizers: Sequence[Any]) -> set[int]:
    """The ``id`` of each parameter that an optimizer trains. Others, such as a teacher's, may change at any time."""
    return {id(p) for p in parameters_of(optimizers) if p.requires_grad}


# -- states as tensors and trees --------------------------------------------------------------------------------------------------------


def split(model: Mapping[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Split a model's state into its tensors, each once, and a JSON value with the aliases of shared tensors and the entries that are not tensors.

    Raises:
        TypeError: a value cannot be stored.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    other_entries: dict[str, Any] = {}
    first_names: dict[Any, str] = {}
    for name, value in model.items():
        if not isinstance(value, Tensor):
            other_entries[name] = value
            continue
        if not storable(value):
            raise TypeError(
                f"the model's {name!r} ({type(value).__name__}, {value.dtype} on {value.device}) cannot be stored: convert it to a dense tensor of "
                "a type that safetensors has"
            )
        original = first_names.setdefault(same_memory(value), name)
        if original == name:
            tensors[name] = value
        else:
            aliases[name] = original
    packed, tensors_in_entries = pack(other_entries)
    if tensors_in_entries:
        raise TypeError(
            f"get_extra_state returned tensors ({sorted(tensors_in_entries)[:3]}): register them as buffers"
        )
    return tensors, {"aliases": aliases, "extra": packed}


def packed_weights(weights: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split weights besides the trained ones into tensors, each once, by folder and name, and the JSON value that is stored beside them.

    :mod:`engine.checkpoint.reader` describes the format.

    Args:
        weights: ``{name of the weights: {name in the model: tensor}}``.

    Raises:
        TypeError: a tensor cannot be stored.
    """
    tensors: dict[str, Tensor] = {}
    tree: dict[str, Any] = {}
    for name, state in weights.items():
        unique, packed_tree = split(state)
        tensors |= {f"{WEIGHTS}/{name}/{key}": tensor for key, tensor in unique.items()}
        tree[name] = {"aliases": packed_tree["aliases"]}
    return tensors, tree


def _merged(rows: list[Any]) -> Any:
    """Merge the ranks' JSON trees; where several ranks have a name, the lowest one's value counts."""
    if len(rows) == 1 or not all(isinstance(row, dict) for row in rows):
        return rows[0]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _merged([row[name] for row in rows if name in row]) for name in names}


# -- parts, and who writes them ---------------------------------------------------------------------------------------------------------


def parts_of(tensors: Mapping[str, Tensor]) -> dict[str, Part]:
    """This rank's part of each tensor: its shard of a ``DTensor``, all of any other. Tensors of which this rank has an empty shard are left out."""
    sharded = {name: tensor for name, tensor in tensors.items() if is_dtensor(tensor)}
    parts = {name: Part(tensor.detach(), (0,) * tensor.ndim) for name, tensor in tensors.items() if name not in sharded}
    return parts | _shards_of(sharded) if sharded else parts


def _shards_of(tensors: Mapping[str, Tensor]) -> dict[str, Part]:
    """This rank's shards of sharded tensors; empty shards are left out."""
    # Imported here: it takes 0.7 s.
    from torch.distributed.checkpoint import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    parts: dict[str, Part] = {}
    for item in planner.create_local_plan().items:
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        if chunk.sizes.numel() or not item.tensor_data.size.numel():
            shard = planner.resolve_data(item)
            assert isinstance(shard, Tensor)
            parts[item.index.fqn] = Part(shard, tuple(chunk.offsets))
    return parts


def rows_of(parts: Mapping[str, Part], fixed: Set[str]) -> list[Row]:
    """The :data:`Row` of each part. ``fixed``: names of the parts that must be written by the lowest rank that holds them."""
    return [(name, part.offsets, part.tensor.nbytes, name in fixed) for name, part in parts.items()]


def assign(rows_of_ranks: list[Any], rank: int) -> set[str]:
    """The names of the parts that this rank writes. Of the ranks that hold a part, the one with the least to write so far writes it.

    Args:
        rows_of_ranks: the rows of every rank, in the order of ranks; so all ranks compute the same assignment.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    for holder, rows in enumerate(rows_of_ranks):
        for name, offsets, size, fixed in rows:
            key = (name, tuple(offsets))
            if not fixed or key not in holders:
                holders.setdefault(key, []).append(holder)
            sizes[key] = size
    load = [0] * len(rows_of_ranks)
    own_names: set[str] = set()
    for key in sorted(holders, key=lambda key: -sizes[key]):  # largest first, which balances the loads
        writer = min(holders[key], key=lambda holder: load[holder])
        load[writer] += sizes[key]
        if writer == rank:
            own_names.add(key[0])
    return own_names


def file_count(size: int) -> int:
    """The number of files for ``size`` bytes of one rank's parts: as many as are worth writing concurrently."""
    return min(MOST_FILES, max(1, size // FILE))


def into_files(parts: Mapping[str, Part]) -> list[dict[str, Part]]:
    """Distribute a rank's parts over files of about equal size; an empty list if there are no parts."""
    sizes = {name: part.tensor.nbytes for name, part in parts.items()}
    count = file_count(sum(sizes.values()))
    files: list[dict[str, Part]] = [{} for _ in range(count)]
    load = [0] * count
    for name in sorted(parts, key=lambda name: (-sizes[name], name)):
        lightest = load.index(min(load))
        files[lightest][name] = parts[name]
        load[lightest] += sizes[name]
    return [file for file in files if file]
