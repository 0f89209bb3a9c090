"""Models that transformers has sharded when it loaded them: trained, saved and continued as whole ones are, and errors for what contradicts."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

pytest.importorskip("transformers")
pytest.importorskip("peft")
sys.path.insert(0, str(Path(__file__).parent))

from peft import LoraConfig, get_peft_model
from tiny_llama import llama
from transformers import (
    AutoModelForCausalLM,
    DistributedConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from callbacks import EMA, ModelCheckpoint
from engine import FSDP, Engine, Fit, MeshParallel, TrainModule, optim
from engine.checkpoint.export import export_checkpoint
from engine.huggingface import HFModule, without_logits

FOLDER = "TEST_ADOPTED_FOLDER"
TOKENS = torch.randint(3, 50, (64, 10), generator=torch.Generator().manual_seed(1))
SIZES = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2_PLAN = {
    "transformer.h.*": "free_full_weight",
    "transformer.wte": "free_full_weight",
    "lm_head": "keep_full_weight",
}


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, **SIZES, **dropouts))


def qwen3() -> Qwen3ForCausalLM:
    """A model with norms of heads, which tensor parallelism divides among the ranks."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(num_key_value_heads=2, head_dim=8, max_position_embeddings=32, **SMALL, **SIZES)
    )


def mixtral() -> MixtralForCausalLM:
    """A mixture of experts, whose plan cuts matrices that are several in one."""
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(num_local_experts=4, num_key_value_heads=4, max_position_embeddings=32, **SMALL, **SIZES)
    )


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "odd": lambda: llama(vocab_size=53, intermediate_size=47, hidden_size=36, num_attention_heads=3),
    "gpt2": gpt2,
    "qwen3": qwen3,
    "mixtral": mixtral,
}


class Net(TrainModule):
    """Trains on a cross entropy of its own."""

    def __init__(self, model: Any, optimizer: str) -> None:
        super().__init__()
        self.lm, self.optimizer = model, optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.lm(input_ids=batch[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        if self.optimizer == "muon":
            matrices, rest = optim.split(self)
            return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-2)]
        trained = [p for p in self.parameters() if p.requires_grad]
        if (
            self.optimizer == "sgd"
        ):  # AdamW makes steps of the noise in gradients that are zero, such as those of biases of keys
            return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        return torch.optim.AdamW(trained, lr=1e-2)


State = dict[str, Tensor]


def folder() -> Path:
    return Path(os.environ[FOLDER])


def load(name: str, **sizes: Any) -> Any:
    """A saved model, whole or sharded by transformers."""
    options = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
    return AutoModelForCausalLM.from_pretrained(folder() / name, **options)


def train(
    model: Any,
    strategy: Any,
    run: str,
    samples: int,
    steps: int = 4,
    resume: str | None = None,
    optimizer: str = "adamw",
    kind: type[Net] = Net,
    **settings: Any,
) -> State:
    """Train, and return the whole weights on every rank.

    Args:
        run: the run's folder.
        samples: of a micro-batch on this rank; a window has two.
    """
    options = {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2, **settings}
    callbacks = [EMA(decay=0.9), ModelCheckpoint(every="2 steps")]
    fit = Fit(
        strategy=strategy, accelerator="cpu", max_steps=steps, seed=0, root_dir=folder() / "runs", name=run, callbacks=callbacks, **options
    )  # fmt: skip
    module = kind(model.train(), optimizer)
    fit.run(module, DataLoader(TOKENS, batch_size=samples), resume=resume)
    return {name: value.clone() for name, value in fit.state_dict(module, everywhere=True).items()}


def distance(state: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    assert state.keys() == other.keys()
    return max((state[name].float() - other[name].float()).abs().max().item() for name in state)


def adapted(model: Any, *targets: str, seed: int = 5) -> Any:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads an attribute that transformers is renaming
        return get_peft_model(model, LoraConfig(r=4, target_modules=list(targets)))


def refusal(prepare: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as error:
        prepare()
    return str(error.value)


def prepare(model: Any, strategy: Any, **settings: Any) -> Any:
    return Engine(accelerator="cpu", strategy=strategy, **settings).prepare(model)


# -- on two ranks -----------------------------------------------------------------------------------------------------------------------


def quick_fsdp() -> dict[str, Any]:
    """Two steps beside one process, to the bit, and a strategy that cannot take the model."""
    options = {"steps": 2, "accumulate_grad_batches": 1, "gradient_clip_val": None}
    state = train(load("llama", fsdp_size=2), "fsdp", "quick", 4, **options)
    return {
        "distance": distance(state, torch.load(folder() / "quick.pt")),
        "ddp": refusal(lambda: prepare(load("llama", fsdp_size=2), "ddp")),
    }


def compared(name: str, strategy: str, samples: int, **sizes: Any) -> dict[str, float]:
    """What the adopted model's weights differ by: from one process and from the strategy's own shards, and after resumes."""
    kind = f"{strategy}_{name}"
    options = {"optimizer": "sgd"} if name == "gpt2" else {}
    whole = train(load(name, **sizes), strategy, kind, samples, **options)
    own = train(load(name), strategy, f"{kind}_own", samples, **options)
    train(load(name, **sizes), strategy, f"{kind}_half", samples, steps=2, **options)
    train(load(name), strategy, f"{kind}_own_half", samples, steps=2, **options)
    resumed = train(load(name, **sizes), strategy, f"{kind}_half", samples, resume="last", **options)
    train(load(name, **sizes), strategy, f"{kind}_for_own", samples, steps=2, **options)
    by_own = train(load(name), strategy, f"{kind}_for_own", samples, resume="last", **options)
    of_own = train(load(name, **sizes), strategy, f"{kind}_own_half", samples, resume="last", **options)
    train(load(name, **sizes), strategy, f"{kind}_for_single", samples, steps=2, **options)
    single = torch.load(folder() / f"{name}.pt")
    return {
        "from single": distance(whole, single),
        "own from single": distance(own, single),
        "from own": distance(whole, own),
        "resumed": distance(whole, resumed),
        "continued by own": distance(whole, by_own),
        "continuing own": distance(whole, of_own),
    }


def rank_fsdp() -> dict[str, dict[str, float]]:
    plans = {"gpt2": {"fsdp_plan": GPT2_PLAN}}
    return {
        name: compared(name, "fsdp", 2, fsdp_size=2, **plans.get(name, {})) for name in ("llama", "tied", "odd", "gpt2")
    }


def rank_tp() -> dict[str, dict[str, float]]:
    return {name: compared(name, "tp", 4, tp_size=2) for name in ("llama", "tied")}


def rank_tp_plan() -> str:
    """The argument from before ``DistributedConfig``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = AutoModelForCausalLM.from_pretrained(folder() / "llama", tp_plan="auto")
    prepare(model, "tp")
    return type(model.lm_head.weight).__name__


def rank_norms_of_heads() -> float:
    return distance(train(load("qwen3", tp_size=2), "tp", "heads", 4), train(load("qwen3"), "fsdp", "heads_own", 2))


def rank_formats() -> dict[str, float]:
    cases: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
        "bf16-mixed": ("fsdp", 2, {"fsdp_size": 2, "fsdp_mixed_precision": True}, {"precision": "bf16-mixed"}),
        "bf16-mixed, tp": ("tp", 4, {"tp_size": 2}, {"precision": "bf16-mixed"}),
        "bf16-true": ("fsdp", 2, {"fsdp_size": 2}, {"precision": "bf16-true"}),
        "64-true, tp": ("tp", 4, {"tp_size": 2}, {"precision": "64-true"}),
        "recomputation": ("fsdp", 2, {"fsdp_size": 2}, {"activation_checkpointing": "full"}),
        "muon": ("fsdp", 2, {"fsdp_size": 2}, {"optimizer": "muon"}),
        "muon, tp": ("tp", 4, {"tp_size": 2}, {"optimizer": "muon"}),
    }
    return {
        name: distance(
            train(load("llama", **sizes), strategy, f"format_{name}", samples, **settings),
            train(load("llama"), strategy, f"format_{name}_own", samples, **settings),
        )
        for name, (strategy, samples, sizes, settings) in cases.items()
    }


def rank_used_before() -> float:
    """A model that was evaluated before its training."""
    model = load("llama", fsdp_size=2)
    with torch.no_grad():
        model(input_ids=TOKENS[:2])
    return distance(train(model, "fsdp", "used", 2), train(load("llama"), "fsdp", "used_own", 2))


class Hidden(Net):
    """Trains the model without its output layer, and an output layer of its own."""

    def __init__(self, model: Any, optimizer: str) -> None:
        super().__init__(model, optimizer)
        torch.manual_seed(int(os.environ["RANK"]))
        self.head = torch.nn.Linear(32, 50)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.lm.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch[:, 1:].flatten())


def rank_left_out() -> float:
    """A part of the model that no pass reaches, in one block of ``fully_shard`` with one that every pass reaches."""
    return distance(
        train(load("llama", fsdp_size=2), "fsdp", "hidden", 2, kind=Hidden),
        train(load("llama"), "fsdp", "hidden_own", 2, kind=Hidden),
    )


DIVIDED = ("q_proj", "v_proj", "gate_proj")


def rank_adapters() -> dict[str, Any]:
    """Adapters that begin with other values on each rank; under ``tp`` those of layers whose outputs are divided."""
    rank, targets = int(os.environ["RANK"]), ("q_proj", "down_proj")
    state = train(adapted(load("llama", fsdp_size=2), *targets, seed=rank), "fsdp", "adapter", 2)
    own = train(adapted(load("llama"), *targets, seed=0), "fsdp", "adapter_own", 2)
    train(adapted(load("llama", fsdp_size=2), *targets, seed=rank), "fsdp", "adapter_half", 2, steps=2)
    resumed = train(adapted(load("llama", fsdp_size=2), *targets, seed=9), "fsdp", "adapter_half", 2, resume="last")
    trained = [value for name, value in state.items() if "lora_B" in name]
    divided, by_tp = adapted(load("llama"), *DIVIDED), adapted(load("llama", tp_size=2), *DIVIDED)
    values = dict(divided.named_parameters())
    with torch.no_grad():  # peft draws other numbers for layers of another size
        for name, parameter in by_tp.named_parameters():
            if "lora_A" in name:
                parameter.copy_(values[name])
    return {
        "from own": distance(state, own),
        "resumed": distance(state, resumed),
        "trained": all(bool(value.any()) for value in trained),
        "tp": distance(
            train(by_tp, "tp", "adapter_tp", 4, optimizer="sgd"),
            train(divided, "fsdp", "adapter_tp_own", 2, optimizer="sgd"),
        ),
        "tp, divided inputs": refusal(lambda: prepare(adapted(load("llama", tp_size=2), "down_proj"), "tp")),
    }  # fmt: skip


def by_hf_module(model: Any, strategy: str, run: str, samples: int) -> tuple[Fit, HFModule, State]:
    rows = [{"input_ids": row, "labels": row} for row in TOKENS]
    fit = Fit(
        strategy=strategy, accelerator="cpu", max_steps=4, seed=0, root_dir=folder() / "runs", name=run, accumulate_grad_batches=2,
        gradient_clip_val=1.0, callbacks=ModelCheckpoint(),
    )  # fmt: skip
    module = HFModule(model.train(), lr=1e-2)
    fit.run(module, DataLoader(rows, batch_size=samples))
    return fit, module, {name: value.clone() for name, value in fit.state_dict(module, everywhere=True).items()}


def rank_without_logits() -> dict[str, float]:
    cases: dict[str, tuple[str, str, int, dict[str, int]]] = {
        "fsdp": ("llama", "fsdp", 2, {"fsdp_size": 2}),
        "fsdp, tied": ("tied", "fsdp", 2, {"fsdp_size": 2}),
        "tp": ("llama", "tp", 4, {"tp_size": 2}),
    }
    return {
        name: distance(
            by_hf_module(without_logits(load(saved, **sizes)), strategy, f"no_logits_{name}", samples)[2],
            by_hf_module(load(saved), strategy, f"logits_{name}", samples)[2],
        )
        for name, (saved, strategy, samples, sizes) in cases.items()
    }


def rank_published() -> dict[str, float]:
    """What ``save_pretrained`` writes on all ranks, and on one inside ``gathered``, beside the weights."""
    distances = {}
    for strategy, samples, sizes in (("fsdp", 2, {"fsdp_size": 2}), ("tp", 4, {"tp_size": 2})):
        fit, module, state = by_hf_module(load("llama", **sizes), strategy, f"published_{strategy}", samples)
        model: Any = module.model
        model.save_pretrained(folder() / f"{strategy}_by_all")
        with fit.gathered(module):
            if fit.is_main_process:
                model.save_pretrained(folder() / f"{strategy}_by_main")
        torch.distributed.barrier()
        for how in ("by_all", "by_main"):
            saved = AutoModelForCausalLM.from_pretrained(folder() / f"{strategy}_{how}")
            distances[f"{strategy} {how}"] = distance({f"model.{n}": v for n, v in saved.state_dict().items()}, state)
        if fit.is_main_process:
            torch.save(state, folder() / f"published_{strategy}.pt")
    return distances


def rank_engine() -> float:
    """A loop of one's own."""
    states = []
    for sizes in ({"fsdp_size": 2}, {}):
        engine, model = (
            Engine(accelerator="cpu", strategy="fsdp", accumulate_grad_batches=2, seed=0),
            load("llama", **sizes).train(),
        )
        model, optimizer, loader = engine.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(TOKENS, batch_size=2)
        )
        for batch in loader:
            with engine.accumulate(model):
                engine.backward(model(input_ids=batch, labels=batch).loss)
                if engine.sync_gradients:
                    engine.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        states.append(engine.get_state_dict(model))
        engine.release()
    return distance(states[0], states[1]) if states[0] else 0.0


FSDP2, TP2 = {"fsdp_size": 2}, {"tp_size": 2}
MIXED, OFFLOADED = {**FSDP2, "fsdp_mixed_precision": True}, {**FSDP2, "fsdp_cpu_offload": True}
Contradiction = tuple[str, dict[str, Any], Any, str, tuple[str, ...]]
CONTRADICTIONS: dict[str, Contradiction] = {
    "bf16": (
        "llama",
        FSDP2,
        "fsdp",
        "bf16-mixed",
        ("'bf16-mixed' was asked for", "their own dtype", "_mixed_precision=True"),
    ),
    "fp16": ("llama", FSDP2, "fsdp", "16-mixed", ("'16-mixed' was asked for", "use precision='bf16-mixed'")),
    "fp32": (
        "llama",
        MIXED,
        "fsdp",
        "32-true",
        ("'32-true' was asked for", "in bf16", "leave fsdp_mixed_precision out"),
    ),
    "ddp": (
        "llama",
        TP2,
        "ddp",
        "32-true",
        ("DistributedConfig(tp_size=2)", "needs whole parameters", "use strategy='tp'"),
    ),
    "tp": ("llama", FSDP2, "tp", "32-true", ("asked for tp=2", "has dp_shard=2", "use strategy='fsdp'")),
    "fsdp": ("llama", TP2, "fsdp", "32-true", ("asked for dp_shard=2", "has tp=2", "use strategy='tp'")),
    "pp": ("llama", FSDP2, "pp", "32-true", ("asked for pp=2", "has dp_shard=2", "use strategy='fsdp'")),
    "replicas": ("llama", FSDP2, FSDP(dp_replicate=2), "32-true", ("asked for dp_replicate=2", "has dp_shard=2")),
    "offload": ("llama", OFFLOADED, "fsdp", "32-true", ("fsdp_cpu_offload=True", "FSDP(cpu_offload=True)")),
    "blocks": ("llama", FSDP2, FSDP(blocks="Block"), "32-true", ("blocks='Block'", "leave blocks out")),
    "plan": ("llama", TP2, MeshParallel(tp=2, dp_shard=1, plan={"a": "colwise"}), "32-true", ("leave plan out",)),
    "experts": (
        "mixtral",
        {"tp_size": 2, "ep_size": 2},
        "tp",
        "32-true",
        ("DistributedConfig(tp_size=2, ep_size=2)", "its experts"),
    ),
    "packed": ("mixtral", TP2, "tp", "32-true", ("experts.gate_up_proj", "several pieces", "Use fsdp_size")),
}
"""The model, how transformers shards it, the strategy, the precision, and parts of the error."""


def rank_contradictions() -> dict[str, str]:
    return {
        name: refusal(partial(prepare, load(saved, **sizes), strategy, precision=precision))
        for name, (saved, sizes, strategy, precision, _) in CONTRADICTIONS.items()
    }


def rank_sharded_by_others() -> dict[str, str]:
    """Models to which the user has applied torch's own functions, and those of versions of transformers that shard in another way."""
    from torch.distributed.fsdp import fully_shard

    by_user = load("llama")
    fully_shard(by_user)
    by_older = load("llama")
    by_older._tp_size = 2
    twice = load("llama", fsdp_size=2)
    prepare(twice, "fsdp")
    return {
        "twice": refusal(lambda: prepare(Net(twice, "sgd"), "fsdp")),
        "by user": refusal(lambda: prepare(by_user, "fsdp")),
        "by an older version": refusal(lambda: prepare(by_older, "fsdp")),
        "by an older version, ddp": refusal(lambda: prepare(by_older, "ddp")),
    }


# -- on four ranks ----------------------------------------------------------------------------------------------------------------------


def mesh_layouts() -> dict[str, dict[str, float]]:
    """Hybrid sharding, and both kinds together."""
    cases: dict[str, tuple[dict[str, int], Callable[[], Any], int]] = {
        "hybrid": ({"fsdp_size": 2, "dp_replicate_size": 2}, lambda: FSDP(dp_replicate=2), 1),
        "both": ({"fsdp_size": 2, "tp_size": 2}, lambda: MeshParallel(dp_shard=2, tp=2), 2),
        "replicas of tp": ({"dp_replicate_size": 2, "tp_size": 2}, lambda: MeshParallel(dp_replicate=2, dp_shard=1, tp=2), 2),
    }  # fmt: skip
    found = {}
    # transformers' function in place of the forward method of an embedding returns a view, which nobody changes.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    for name, (sizes, strategy, samples) in cases.items():
        state = train(load("llama", **sizes), strategy(), name, samples)
        own = train(load("llama"), strategy(), f"{name}_own", samples)
        train(load("llama", **sizes), strategy(), f"{name}_half", samples, steps=2)
        resumed = train(load("llama", **sizes), strategy(), f"{name}_half", samples, resume="last")
        single = torch.load(folder() / "llama.pt")
        found[name] = {
            "from single": distance(state, single),
            "from own": distance(state, own),
            "resumed": distance(state, resumed),
        }
    return found


def mesh_refusals() -> dict[str, str]:
    both = {"fsdp_size": 2, "tp_size": 2}
    return {
        "norms of heads": refusal(lambda: prepare(load("qwen3", **both), MeshParallel(dp_shard=2, tp=2))),
        "tied": refusal(lambda: prepare(load("tied", **both), MeshParallel(dp_shard=2, tp=2))),
        "adapter": refusal(lambda: prepare(adapted(load("llama", **both), "q_proj"), MeshParallel(dp_shard=2, tp=2))),
        "other mesh": refusal(lambda: prepare(load("llama", **both), "fsdp")),
        "hybrid": refusal(lambda: prepare(load("llama", fsdp_size=2, dp_replicate_size=2), "fsdp")),
    }


# -- what they found --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, name)
        for kind, build in MODELS.items():
            build().save_pretrained(Path(name) / kind)
        yield Path(name)


@pytest.fixture(scope="module")
def single(saved: Path) -> Path:
    """The weights of one process, in the files ``llama.pt`` and so on."""
    for kind in ("llama", "tied", "odd", "gpt2"):
        options = {"optimizer": "sgd"} if kind == "gpt2" else {}
        torch.save(
            train(load(kind), "single", f"single_{kind}", 4, accumulate_grad_batches=2, **options), saved / f"{kind}.pt"
        )
    return saved


@pytest.fixture(scope="module")
def ran(single: Path) -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2, **{FOLDER: str(single)})


@pytest.fixture(scope="module")
def ran_on_four(single: Path) -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 4, "mesh_", **{FOLDER: str(single)})


def test_two_steps_have_the_bits_of_one_process(saved: Path) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": None}
    torch.save(train(load("llama"), "single", "quick_single", 4, steps=2, **options), saved / "quick.pt")
    for found in ranks_of_file(__file__, 2, "quick_", **{FOLDER: str(saved)})["fsdp"]:
        assert found["distance"] == 0.0
        assert "DistributedConfig(fsdp_size=2)" in found["ddp"]
        assert "use strategy='fsdp'" in found["ddp"]


@pytest.mark.slow
def test_fsdp_trains_as_our_own_shards_do_and_resumes_to_the_bit(ran: dict[str, list[Any]]) -> None:
    for found in ran["fsdp"]:
        for name, distances in found.items():
            # transformers gathers and reduces a tied weight in two blocks, and so adds its gradients in another order.
            of_order = 0.0 if name in ("llama", "odd") else 2e-6
            assert distances.pop("resumed") == 0.0, name
            assert {key: value for key, value in distances.items() if "single" not in key and value > of_order} == {}, (
                name
            )
            assert distances["from single"] <= max(2e-6, 2 * distances["own from single"]), name


@pytest.mark.slow
def test_tensor_parallelism_is_as_near_to_one_process_as_our_own(ran: dict[str, list[Any]]) -> None:
    for found in ran["tp"]:
        for name, distances in found.items():
            assert distances["from single"] <= distances["own from single"], name
            assert {key: value for key, value in distances.items() if "single" not in key and value > 0.0} == {}, name
    assert ran["tp_plan"] == ["DTensor", "DTensor"]


@pytest.mark.slow
def test_gradients_of_heads_are_summed_once_in_a_window(ran: dict[str, list[Any]]) -> None:
    assert max(ran["norms_of_heads"]) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp_llama", "fsdp_tied", "tp_llama"])
def test_one_process_continues(ran: dict[str, list[Any]], single: Path, kind: str) -> None:
    name = kind.partition("_")[2]
    state = train(load(name), "single", f"{kind}_for_single", 4, resume="last", accumulate_grad_batches=2)
    assert distance(state, torch.load(single / f"{name}.pt")) < 5e-5


@pytest.mark.slow
def test_formats_recomputation_and_whole_matrices_as_with_our_own_shards(ran: dict[str, list[Any]]) -> None:
    for found in ran["formats"]:
        assert found == dict.fromkeys(found, 0.0)
    assert ran["used_before"] == ran["left_out"] == [0.0, 0.0]
    assert ran["engine"] == [0.0, 0.0]


@pytest.mark.slow
def test_an_adapter_is_trained_saved_and_continued(ran: dict[str, list[Any]]) -> None:
    for found in ran["adapters"]:
        assert found["from own"] == found["resumed"] == 0.0
        assert found["trained"]
        assert found["tp"] < 2e-6
        assert "down_proj.lora_A" in found["tp, divided inputs"]
        assert "Target others" in found["tp, divided inputs"]


@pytest.mark.slow
def test_without_logits(ran: dict[str, list[Any]]) -> None:
    for found in ran["without_logits"]:
        assert max(found.values()) < 5e-5


@pytest.mark.slow
def test_published_weights(ran: dict[str, list[Any]], single: Path) -> None:
    for found in ran["published"]:
        assert found == dict.fromkeys(found, 0.0)
    for strategy in ("fsdp", "tp"):
        export_checkpoint(single / "runs" / f"published_{strategy}", single / f"exported_{strategy}")
        exported = AutoModelForCausalLM.from_pretrained(single / f"exported_{strategy}")
        assert type(exported).__name__ == "LlamaForCausalLM"
        state = {f"model.{name}": value for name, value in exported.state_dict().items()}
        assert distance(state, torch.load(single / f"published_{strategy}.pt")) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_are_errors(ran: dict[str, list[Any]], name: str) -> None:
    for found in ran["contradictions"]:
        for text in CONTRADICTIONS[name][-1]:
            assert text in found[name]


@pytest.mark.slow
def test_what_others_have_sharded_is_an_error(ran: dict[str, list[Any]]) -> None:
    for found in ran["sharded_by_others"]:
        assert "was prepared before" in found["twice"]
        assert "Calls of fully_shard and parallelize_module belong to the strategy" in found["by user"]
        for name in ("by an older version", "by an older version, ddp"):
            assert "upgrade to transformers 5.20 or later" in found[name]


@pytest.mark.slow
def test_hybrid_shards_and_both_kinds_together(ran_on_four: dict[str, list[Any]]) -> None:
    for found in ran_on_four["layouts"]:
        for name, distances in found.items():
            assert distances["from own"] == distances["resumed"] == 0.0, name
            assert distances["from single"] < 2e-5, name
    for found in ran_on_four["refusals"]:
        assert "Qwen3RMSNorm layers" in found["norms of heads"]
        assert "share a parameter" in found["tied"]
        assert "q_proj.lora_B" in found["adapter"]
        assert "use MeshParallel(dp_shard=2, tp=2)" in found["other mesh"]
        assert "use FSDP(dp_replicate=2, dp_shard=2)" in found["hybrid"]
