"""Weights as others read them: safetensors' own reader and transformers'."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from support.checkpoints import Tied, save, save_on_two_ranks, tied_batches, train_and_save
from support.ranks import ranks_of
from torch import nn

from engine import TrainModule
from engine.checkpoint.export import export_checkpoint, export_tensors, published
from engine.checkpoint.files import DamagedCheckpoint
from engine.checkpoint.tensor_files import TensorFiles

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Tied, Path]:
    torch.manual_seed(0)
    module = Tied()
    path = train_and_save(tmp_path / "run", module)
    module.eval()
    return module, path


def test_load_file_reads_it_and_tied_weights_are_there_once(trained: tuple[Tied, Path], tmp_path: Path) -> None:
    module, path = trained
    done = export_checkpoint(path, tmp_path / "out")
    assert done.files == [str(tmp_path / "out" / "model.safetensors")]
    assert done.tied == {"model.up.weight": "model.embed.weight"}
    found = load_file(done.files[0])
    assert set(found) == set(module.state_dict()) - {"model.up.weight"}
    assert done.tensors == len(found)
    assert done.bytes == sum(t.nbytes for t in found.values())
    assert all(torch.equal(found[name], module.state_dict()[name]) for name in found)
    other = Tied().eval()
    assert load_model(other, done.files[0]) == (set(), [])
    assert torch.equal(other(tied_batches()[0]), module(tied_batches()[0]))


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_dtypes(trained: tuple[Tied, Path], tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    module, path = trained
    found = load_file(export_checkpoint(path, tmp_path / "out", dtype=name).files[0])
    assert found.pop("model.norm.num_batches_tracked").dtype is torch.int64
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    # Rounded once, as torch rounds.
    assert all(torch.equal(tensor, module.state_dict()[key].to(dtype)) for key, tensor in found.items())


def test_a_number_that_fp16_does_not_have_is_an_error(tmp_path: Path) -> None:
    module = Tied()
    with torch.no_grad():
        module.model["head"].bias[0] = 1e6
        module.register_buffer("mask", torch.full((2,), -torch.inf))
    path = train_and_save(tmp_path / "run", module)
    with pytest.raises(
        ValueError, match=r"'model.head.bias' has the number 998001, and fp16 ends at 65504"
    ):  # 1e6 after two steps of decay
        export_checkpoint(path, tmp_path / "out", dtype="fp16", max_shard_size=1)
    assert not list((tmp_path / "out").iterdir())  # nor the files before it
    found = load_file(export_checkpoint(path, tmp_path / "out", dtype="fp16", exclude=["*.bias"]).files[0])
    assert found["mask"].tolist() == [-torch.inf, -torch.inf]  # what was infinite before is not lost


def test_shards_and_their_index(trained: tuple[Tied, Path], tmp_path: Path) -> None:
    module, path = trained
    done = export_checkpoint(path, tmp_path / "out", max_shard_size="120B")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(done.files) > 2
    found: dict[str, Any] = {}
    for file in done.files:
        here = load_file(file)
        assert len(here) == 1 or sum(t.nbytes for t in here.values()) <= 120
        assert {index["weight_map"][name] for name in here} == {Path(file).name}
        found |= here
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == done.bytes == sum(t.nbytes for t in found.values())
    assert all(torch.equal(found[name], module.state_dict()[name]) for name in found)


def test_one_file_is_in_memory_at_a_time(
    trained: tuple[Tied, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    read = TensorFiles.read_into

    def counted(files: TensorFiles, targets: Any) -> None:
        sizes.append(sum(tensor.nbytes for tensor in targets.values()))
        read(files, targets)

    monkeypatch.setattr(TensorFiles, "read_into", counted)
    done = export_checkpoint(trained[1], tmp_path / "out", max_shard_size=96)
    assert sum(sizes) == done.bytes
    assert max(sizes) <= 96


def test_names_are_chosen_and_stripped(trained: tuple[Tied, Path], tmp_path: Path) -> None:
    _, path = trained
    done = export_checkpoint(
        path, tmp_path / "a", include=["model.*.weight"], exclude=["*embed*"], prefix_strip="model."
    )
    # The first name of the tied weight is not wanted, the other one is.
    assert set(load_file(done.files[0])) == {"up.weight", "norm.weight", "head.weight"}
    assert "model.embed.weight" in done.left_out
    for arguments, message in (
        ({"include": ["nothing*"]}, "the pattern 'nothing\\*' matches none of the model's names, such as model"),
        ({"exclude": ["*"]}, "no tensor of the model's .* is selected"),
        ({"prefix_strip": "module."}, "no name starts with 'module.'"),
        ({"dtype": "int8"}, "dtype='int8' is unknown; possible: bf16, fp16, fp32"),
        ({"max_shard_size": "big"}, "max_shard_size='big' is not a size"),
    ):
        with pytest.raises(ValueError, match=message):
            export_checkpoint(path, tmp_path / "b", **arguments)  # type: ignore[arg-type]
    assert not list((tmp_path / "b").glob("*"))


def test_two_names_that_become_one_are_refused(tmp_path: Path) -> None:
    class Clash(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) + self.head.weight.sum() + self.head.bias.sum()

    path = train_and_save(tmp_path / "run", Clash())
    with pytest.raises(ValueError, match=r"would have the name of"):
        export_checkpoint(path, tmp_path / "out", prefix_strip="model.")


def test_what_is_there_already_stays(trained: tuple[Tied, Path], tmp_path: Path) -> None:
    export_checkpoint(trained[1], tmp_path / "out")
    with pytest.raises(FileExistsError, match=r"holds model\.safetensors already"):
        export_checkpoint(trained[1], tmp_path / "out")
    with pytest.raises(FileExistsError, match=r"holds model\.safetensors already"):
        export_tensors({"a": torch.ones(1)}, tmp_path / "out")


@pytest.mark.usefixtures("checkpoints_in_folders")
def test_a_damaged_checkpoint_is_not_exported(trained: tuple[Tied, Path], tmp_path: Path) -> None:
    file = next((trained[1] / "model").glob("*.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(DamagedCheckpoint, match=file.name):
        export_checkpoint(trained[1], tmp_path / "out")


def test_from_a_folder_and_to_a_url(trained: tuple[Tied, Path], tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    done = export_checkpoint(trained[1].parent, "memory://exported/here", max_shard_size=100)
    memory = fsspec.filesystem("memory")
    assert {path.rpartition("/")[2] for path in memory.ls("/exported/here", detail=False)} == {
        *(file.rpartition("/")[2] for file in done.files), "model.safetensors.index.json",
    }  # fmt: skip
    with pytest.raises(FileExistsError, match="memory://exported/here is not empty"):
        export_checkpoint(trained[1], "memory://exported/here")
    memory.rm("/exported", recursive=True)


def test_shards_of_two_ranks_become_whole(tmp_path: Path) -> None:
    ranks_of(save_on_two_ranks, 2, tmp_path)
    path = next((tmp_path / "checkpoints").iterdir())
    assert len(list((path / "model").glob("*.safetensors"))) == 2
    found = load_file(export_checkpoint(path, tmp_path / "out").files[0])
    module = Tied.load_from_checkpoint(path).eval()
    assert all(torch.equal(found[name], module.state_dict()[name]) for name in found)
    assert found["model.head.weight"].shape == (6, 4)
    assert found["model.head.weight"].abs().sum() > 0


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.filterwarnings("ignore")
def test_transformers_reads_it(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    shape: dict[str, Any] = {"vocab_size": 13, "bos_token_id": 0, "eos_token_id": 1}
    if family == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=16, **shape)
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=2,
            num_attention_heads=2,
            hidden_size=8,
            intermediate_size=16,
            max_position_embeddings=16,
            pad_token_id=None,
            **shape,
        )

    class Language(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.AutoModelForCausalLM.from_config(config)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    tokens = torch.randint(0, 13, (2, 8))
    module = Language()
    path = train_and_save(tmp_path / "run", module, [tokens, tokens])
    out = tmp_path / "out"
    export_checkpoint(path, out, prefix_strip="model.", max_shard_size="2KB")
    assert len(list(out.glob("model-*.safetensors"))) > 1
    config.save_pretrained(out)
    other, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    module.eval()
    assert torch.equal(other.eval()(tokens).logits, module.model(tokens).logits)


def test_the_example_of_a_gpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import gpt

    size = gpt.Size(layers=2, heads=2, width=16, context=8, batch_size=2, lr=1e-3, max_steps=2)
    module = gpt.GPT(size, 2)
    data = [torch.randint(1, 256, (2, 9), dtype=torch.uint8) for _ in range(2)]
    path = train_and_save(tmp_path / "run", module, data)
    found = load_file(export_checkpoint(path, tmp_path / "out").files[0])
    other = gpt.GPT(size, 2)
    missing, unexpected = other.load_state_dict(found, strict=False)
    assert (missing, unexpected) == (["head.weight"], [])  # tied to the embedding
    tokens = data[0].long()[:, :-1]
    assert torch.equal(other(tokens), module(tokens))
    assert not torch.equal(gpt.GPT(size, 2)(tokens), module(tokens))
    sys.modules.pop("gpt")


# -- files that a module publishes: written as they were given, and never outside of the folder or as code -----------------------------

PUBLISHED = {
    "config.json": b'{"dtype": "float32"}',
    "spiece.model": bytes(range(256)),
    "chat_template.jinja": "{{ ä }}".encode(),
}


def published_in(folder: Path, entry: Any, **more: Any) -> Path:
    """A checkpoint whose module has published ``entry``."""
    return Path(save(folder / "step", shared={"user": {"published": entry}, "registered": []}, **more))


def test_files_are_written_beside_the_weights(tmp_path: Path) -> None:
    done = export_checkpoint(published_in(tmp_path, published(PUBLISHED, prefix="body.")), tmp_path / "out")
    assert {
        path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.name in PUBLISHED
    } == PUBLISHED
    assert [Path(each).name for each in done.published] == list(PUBLISHED)
    assert [Path(each).name for each in done.files] == ["model.safetensors"]
    with pytest.raises(FileExistsError, match=r"model\.safetensors"):
        export_checkpoint(tmp_path / "step", tmp_path / "out")


def test_the_configuration_names_the_dtype_of_the_tensors(tmp_path: Path) -> None:
    export_checkpoint(published_in(tmp_path, published(PUBLISHED)), tmp_path / "out", dtype="bf16")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"dtype": "bfloat16"}


def test_an_object_that_an_engine_registered(tmp_path: Path) -> None:
    path = save(tmp_path / "step", shared={"registered": [{"other": 1}, published(PUBLISHED)]})
    export_checkpoint(path, tmp_path / "out")
    assert (tmp_path / "out" / "spiece.model").exists()


def test_only_the_names_that_are_published_are_exported(tmp_path: Path) -> None:
    entry = published({}, stem="adapter_model", names={"body.bias": "bias"})
    done = export_checkpoint(published_in(tmp_path, entry), tmp_path / "out", max_shard_size=1)
    assert [Path(each).name for each in done.files] == ["adapter_model.safetensors"]
    assert done.tensors == 1
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="has no 'lost'"):
        export_checkpoint(published_in(tmp_path / "other", published({}, names={"lost": "lost"})), tmp_path / "b")


@pytest.mark.parametrize(
    "name", ["modeling.py", "../x.json", ".x.json", "a/b.json", "model.safetensors.index.json", "x", "model.bin"]
)
def test_no_other_file_is_published(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be published"):
        published({name: b"x"})
    entry = published({"x.json": b"x"})
    entry["files"] = {name: entry["files"]["x.json"]}
    with pytest.raises(DamagedCheckpoint, match="published"):
        export_checkpoint(published_in(tmp_path, entry), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change",
    [{"stem": "../x"}, {"stem": 1}, {"names": {"body.bias": 1}}, {"files": {"x.json": "text"}}, {"files": {"x.json": torch.zeros(2)}}],
)  # fmt: skip
def test_an_entry_of_another_form_is_damage(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpoint):
        export_checkpoint(published_in(tmp_path, published({"x.json": b"x"}) | change), tmp_path / "out")


@pytest.mark.parametrize("text", [b"[]", b"null", b"3", b"", b"[" * 100_000, b"\xff", b'"a"', b'{"a": NaN}'])
def test_a_configuration_that_is_none_is_damage(text: bytes, tmp_path: Path) -> None:
    path = published_in(
        tmp_path,
        published({"config.json": text})
        if text
        else {**published(PUBLISHED), "files": {"config.json": torch.zeros(0, dtype=torch.uint8)}},
    )
    with pytest.raises(DamagedCheckpoint, match=r"the published config\.json"):
        export_checkpoint(path, tmp_path / "out", dtype="bf16")


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError, match=r"config\.json"):
        export_checkpoint(published_in(tmp_path, published(PUBLISHED)), tmp_path / "out")
    assert not (tmp_path / "elsewhere").exists()
