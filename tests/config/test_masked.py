"""Settings for people, checkpoints and loggers: every one with its origin, and no secret among them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.internals import resolved_settings

from callbacks import CSVLogger, ModelCheckpoint
from engine import DDP, Callback, Fit, TrainModule
from engine.cli.main import main
from engine.config.masked import plain_value, with_origins
from engine.config.secret_text import HIDDEN, without_secrets
from engine.config.settings import Settings

BATCHES = [torch.ones(2, 1) for _ in range(4)]


class Net(TrainModule):
    def __init__(self, api_key: str = "", width: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(1, width)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


KEYS = ("key", "api_key", "apiKey", "HF_TOKEN", "db-password", "secret", "aws.credentials")
OTHERS = {"max_tokens": 512, "tokenizer": "bpe", "keep": "x", "keyword": "y", "monkey": "z"}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (dict.fromkeys(KEYS, "abc"), dict.fromkeys(KEYS, HIDDEN)),
        ({"token": ["a", "b"]}, {"token": [HIDDEN, HIDDEN]}),
        (OTHERS, OTHERS),
        ({"token": None, "key": "", "password": True}, {"token": None, "key": "", "password": True}),
        (
            {"credentials": {"user": "a", "more": ["b"]}, "password": 1234},
            {"credentials": {"user": HIDDEN, "more": [HIDDEN]}, "password": HIDDEN},
        ),
        (
            {"key": {"class_path": "net:Key", "init_args": {"n": 1}}},
            {"key": {"class_path": "net:Key", "init_args": {"n": 1}}},
        ),
        ({"key_dim": 64, "secrets": "a", "accesskey": "b"}, {"key_dim": 64, "secrets": HIDDEN, "accesskey": HIDDEN}),
        ("https://host/?token=abc&x=1", f"https://host/?token={HIDDEN}&x=1"),
        ("https://user:p@ss@host/x", f"https://{HIDDEN}@host/x"),
        ("-H 'Authorization: Basic dXNlcjpwYXNz'", f"-H '{HIDDEN}'"),
        ({"a": {"b": [{"secret": "x"}]}}, {"a": {"b": [{"secret": HIDDEN}]}}),
        ("s3://user:pass@host/runs?x=1", f"s3://{HIDDEN}@host/runs?x=1"),
        ("https://token@host/a", f"https://{HIDDEN}@host/a"),
        ("https://host/a?sig=1&access_token=abc&x=2", f"https://host/a?sig={HIDDEN}&access_token={HIDDEN}&x=2"),
        ("command line strategy.config.token=abc", f"command line strategy.config.token={HIDDEN}"),
        ("{name: a, api_key: abc, x: 1}", f"{{name: a, api_key: {HIDDEN}, x: 1}}"),
        ("hf_abcdefghijklmnopqrst", HIDDEN),
        ("ghp_0123456789abcdefghij and more", f"{HIDDEN} and more"),
        ("Bearer abc.def", HIDDEN),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----", HIDDEN),
        ("mailto me@host, 600 seconds, file fit.yaml:3", "mailto me@host, 600 seconds, file fit.yaml:3"),
    ],
)
def test_secrets(given: Any, shown: Any) -> None:
    assert without_secrets(given) == shown


SECRET = "S3cr3tV4lue9x"
SECRET_NAMES = (
    "pass", "db_pass", "DB_PASS", "dbpass", "pw", "pwd", "cred", "creds", "pin", "cookie", "cookies", "secretstr",
    "SECRETSTR", "clientSecret", "PGPASSWORD", "password1", "HFToken", "hftoken", "token2", "api_keys", "sessionid",
    "jwt", "auth", "basic_auth", "oauth", "sig", "signature", "sas", "webhook_url", "dsn", "connection_string", "otp",
    "passkey", "access_tokens", "mnemonic",
)  # fmt: skip
LEAKS: list[Any] = [
    *({name: SECRET} for name in SECRET_NAMES),
    f"https://a.blob.core.windows.net/c?sv=2022&sig={SECRET}&se=1",
    f"https://b.s3.amazonaws.com/k?X-Amz-Credential={SECRET}&X-Amz-Signature={SECRET}",
    f"https://storage.googleapis.com/b?X-Goog-Signature={SECRET}",
    f"https://hooks.slack.com/services/T0/B0/{SECRET}",
    f"https://discord.com/api/webhooks/123/{SECRET}",
    f"https://acme.webhook.office.com/webhookb2/{SECRET}/IncomingWebhook/x",
    f"https://outlook.office.com/webhook/{SECRET}",
    f"https://api.telegram.org/bot12345:{SECRET}/sendMessage",
    f"https://open.feishu.cn/open-apis/bot/v2/hook/{SECRET}",
    f"https://chat.example.com/hooks/{SECRET}",
    f"https://maker.ifttt.com/trigger/e/with/key/{SECRET}",
    f"https://user:p/{SECRET}@host/x",
    f"root:{SECRET}@tcp(127.0.0.1:3306)/db",
    f"local-0123456789{SECRET}",
    f"wandb_v1_{SECRET}",
    f"wandb login {SECRET}",
    f"Basic {SECRET}==",
    ["--password", SECRET],
    ["--api-key", SECRET, "--lr", "1"],
    [("password", SECRET)],
    ["mysql", "-u", "root", f"-p{SECRET}"],
    ["sshpass", "-p", SECRET, "ssh"],
    [{"name": "DB_PASSWORD", "value": SECRET}],
    f"train.py --hf_token {SECRET} --lr 1",
    f"mysql -u root -p{SECRET} db",
    f"curl -u me:{SECRET} https://host",
    f"openssl -passin pass:{SECRET}",
    f'{{"password": "{SECRET}"}}',
    f"Config(user='a', password='b {SECRET}",
    f"password: correct horse {SECRET}",
    f"-H 'Cookie: a=b; sid={SECRET}'",
    {f"https://host/?token={SECRET}": 1},
    {"db": {"pass": {"value": SECRET}}},
]


@pytest.mark.parametrize("values", LEAKS, ids=str)
def test_hides_rather_too_much(values: Any) -> None:
    shown = str(without_secrets(values))
    assert SECRET not in shown
    assert HIDDEN in shown


def test_numbers_and_hashes_are_secret_by_name() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    values = {"pin": 1234, "db_pass": 99, "wandb": commit, "git_commit": commit}
    assert without_secrets(values) == {"pin": HIDDEN, "db_pass": HIDDEN, "wandb": HIDDEN, "git_commit": commit}


def test_usual_values_are_shown() -> None:
    values = {
        "pin_memory": True,
        "pin_memory_device": "cuda",
        "filter": {"kind": "lowpass", "lowpass": "x", "num_passes": 2},
        "keys": ["image", "label"],
        "features": ["token", "pos", "lemma"],
        "tokens_per_batch": "4096",
        "session": "morning",
        "author": "me",
        "betas": [0.9, 0.95],
        "data": "https://huggingface.co/datasets/a/b?split=train",
        "image": "ghcr.io/x/y:tag@sha256:abc",
        "repository": "git@github.com:a/b.git",
        "command": "train.py --lr 1e-3 -p 4 --pin-memory true",
        "text": "Basic understanding: max_tokens=512",
    }
    assert without_secrets(values) == values


@pytest.mark.parametrize(
    "unit",
    [
        "a",
        "a.",
        "-eyJ",
        "a=",
        "a='",
        "a:",
        "://",
        "a ",
        "Bearer ",
        "authorization: ",
        "passw",
        "webhook",
        "x://a:",
        "mysql -p",
        "--token ",
    ],
)
def test_a_long_text_takes_no_time(unit: str) -> None:
    """A hyperparameter may be a document, or a file in base64: the time grows with its length alone, not with the square."""
    began = time.process_time()
    without_secrets({"prompt": unit * (200_000 // len(unit))})
    assert time.process_time() - began < 10


def test_every_setting_is_json_with_its_origin(tmp_path: Path) -> None:
    given = {"callbacks": [CSVLogger(), ModelCheckpoint()], "root_dir": tmp_path}
    resolved = resolved_settings(given, {"FIT_MAX_TIME": "1 min"}, None, ["strategy={name: ddp, bucket_cap_mb: 3}"])
    found = with_origins(resolved.settings, resolved.origins)
    assert json.loads(json.dumps(found)) == found
    assert list(found) == list(Settings.__dataclass_fields__)
    assert found["max_time"] == {"value": "60 seconds", "origin": "environment FIT_MAX_TIME"}
    assert found["callbacks"] == {
        "value": ["callbacks.loggers.csv:CSVLogger", "callbacks.model_checkpoint:ModelCheckpoint"],
        "origin": "code",
    }
    assert found["root_dir"] == {"value": str(tmp_path), "origin": "code"}
    assert found["strategy"]["value"] == {"name": "ddp", "bucket_cap_mb": 3}
    assert found["strategy"]["origins"]["bucket_cap_mb"].startswith("command line strategy=")


def test_other_values_are_text() -> None:
    assert plain_value(object()) == "builtins:object"
    assert plain_value(torch.bfloat16) == "torch.bfloat16"
    assert plain_value(float("nan")) == "nan"
    assert plain_value({1: (Path("a"), None)}) == {"1": ["a", None]}


class Seen(Callback):
    config: dict[str, Any]

    def on_fit_start(self, run: Any, module: Any) -> None:
        self.config = run.config


def test_checkpoints_and_loggers_hold_what_was_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fit.yaml").write_text("strategy:\n  name: ddp\n  bucket_cap_mb: 5\nmax_steps: 3\n")
    monkeypatch.setenv("FIT_LOG_EVERY_N_STEPS", "1")
    seen = Seen()
    fit = Fit(accelerator="cpu", devices=1, callbacks=[CSVLogger(), ModelCheckpoint(), seen])
    fit.run(Net(api_key="abc"), BATCHES)
    manifest = json.loads((tmp_path / "runs/checkpoints/step=00000003/manifest.json").read_text())
    config = manifest["config"]
    assert config == seen.config
    expected = {"name": "ddp", "bucket_cap_mb": 5.0, "find_unused_parameters": False, "comm_hook": None}
    assert {key: config["strategy"]["value"][key] for key in expected} == expected
    assert config["strategy"]["origins"] == {"name": "file fit.yaml:2", "bucket_cap_mb": "file fit.yaml:3"}
    assert config["max_steps"] == {"value": 3, "origin": "file fit.yaml:4"}
    assert config["log_every_n_steps"] == {"value": 1, "origin": "environment FIT_LOG_EVERY_N_STEPS"}
    assert config["accelerator"] == {"value": "cpu", "origin": "code"}
    assert manifest["hparams"] == {"api_key": HIDDEN, "width": 1}
    again = resolved_settings({}, {}, Path("runs/config.yaml"))
    assert again.settings == replace(fit.settings, callbacks=(), strategy=config["strategy"]["value"])
    assert main(["checkpoint", "show", "runs"]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["bucket_cap_mb", "5.0", "file", "fit.yaml:3"] in shown
    assert ["api_key", HIDDEN] in shown
    assert (
        Net.load_from_checkpoint(tmp_path / "runs/checkpoints/step=00000003").hparams.api_key == "abc"
    )  # what the module needs is kept


def test_the_strategy_that_was_chosen_is_told(tmp_path: Path) -> None:
    for given, name, value in (("auto", "single", None), (DDP(bucket_cap_mb=2), "ddp", 2)):
        seen = Seen()
        Fit(
            accelerator="cpu",
            devices=1,
            max_steps=1,
            root_dir=tmp_path,
            strategy=given,
            precision="bf16",
            callbacks=[seen],
        ).run(Net(), BATCHES)
        assert seen.config["strategy"]["value"]["name"] == name
        assert seen.config["strategy"]["value"].get("bucket_cap_mb") == value
        assert seen.config["precision"]["value"] == "bf16-mixed"


def test_a_new_run_keeps_the_older_config(tmp_path: Path) -> None:
    def run(**settings: Any) -> None:
        Fit(
            accelerator="cpu",
            devices=1,
            root_dir=tmp_path,
            callbacks=[CSVLogger(), ModelCheckpoint(every="2 steps")],
            **settings,
        ).run(Net(), BATCHES, resume="auto" if settings["max_steps"] == 4 else None)

    run(max_steps=2, seed=1)
    first = (tmp_path / "config.yaml").read_text()
    run(max_steps=4, seed=1)  # continues: the file is that of the run as it is now
    assert sorted(path.name for path in tmp_path.glob("config*")) == ["config.yaml"]
    assert "max_steps: 4  # code" in (tmp_path / "config.yaml").read_text()
    run(max_steps=1, seed=2)
    assert "max_steps: 4  # code" in (tmp_path / "config.yaml").read_text()
    assert "max_steps: 1  # code" in (tmp_path / "version_1" / "config.yaml").read_text()
    assert "max_steps: 2  # code" in first


def test_env_tells_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FIT_STRATEGY", "{name: deepspeed, stage: 1, nvme_path: password=abc}")
    monkeypatch.setenv("FIT_ROOT_DIR", "s3://me:pass@host/runs")
    Path("fit.yaml").write_text("model: {width: 3}\n")  # a file of 'fit run'
    assert main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    strategy = report["settings"]["strategy"]
    assert strategy["value"]["stage"] == 1
    assert strategy["value"]["nvme_path"] == f"password={HIDDEN}"
    assert strategy["origins"]["stage"] == "environment FIT_STRATEGY"
    assert report["settings"]["root_dir"]["value"] == f"s3:/{HIDDEN}@host/runs"
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert "abc" not in text
    assert "me:pass" not in text
    assert ["stage", "1", "environment", "FIT_STRATEGY"] in [line.split() for line in text.splitlines()]
    monkeypatch.setenv("FIT_STRATEGY", "{name: deepspeed, stagee: 1}")
    assert main(["env"]) == 1
    assert "did you mean 'stage'" in capsys.readouterr().out
