"""The examples as a user runs them: other processes, from another folder."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(folder, *command, timeout=300):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def accuracy(text):
    found = re.findall(r"test accuracy: ([\d.]+)%", text)
    assert found, text
    return [float(value) for value in found]


def test_raw_loop_differs_from_plain_pytorch_in_four_lines():
    marks = re.findall(r"# changed: line (\d) of 4", (EXAMPLES / "raw_loop.py").read_text())
    assert marks == ["1", "2", "3", "4"]


def test_digits_for_one_epoch(tmp_path):
    pytest.importorskip("sklearn")
    text = run(tmp_path, EXAMPLES / "digits.py", "--max-epochs", 1, "--devices", 1)
    assert accuracy(text)[0] > 50
    assert (tmp_path / "runs" / "digits" / "metrics.csv").exists()


@pytest.mark.slow
@pytest.mark.parametrize("tracker", ["tensorboard", "mlflow"])
def test_tracking_and_its_resume(tmp_path, tracker):
    pytest.importorskip("sklearn")
    pytest.importorskip(tracker)
    command = [EXAMPLES / "tracking.py", "--tracker", tracker, "--max-epochs"]
    assert "completed at step 40" in run(tmp_path, *command, 1)
    assert "completed at step 80" in run(tmp_path, *command, 2, "--resume")
    found = tmp_path / "mlflow.db" if tracker == "mlflow" else tmp_path / "runs" / "tracking" / "tensorboard"
    assert found.exists()


@pytest.mark.slow
def test_finetune_for_two_epochs(tmp_path):
    pytest.importorskip("sklearn")
    text = run(tmp_path, EXAMPLES / "finetune.py", "--max-epochs", 2, "--unfreeze-at", 1)
    assert accuracy(text)[0] > 80
    assert (tmp_path / "runs" / "finetune" / "exported" / "model.safetensors").exists()


@pytest.mark.slow
def test_optuna_ends_bad_trials_early(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("optuna")
    text = run(tmp_path, EXAMPLES / "optuna_digits.py", "--trials", 6, "--max-epochs", 2)
    completed, pruned = map(int, re.search(r"(\d+) trials completed, (\d+) pruned", text).groups())
    assert completed + pruned == 6
    assert pruned > 0
    assert float(re.search(r"best validation accuracy: ([\d.]+)%", text)[1]) > 50


def test_gpt_for_a_few_steps(tmp_path):
    text = run(tmp_path, EXAMPLES / "gpt.py", "--max-steps", 4)
    assert re.search(r"[\d,]+ tokens/s", text)
    assert float(re.search(r"([\d.]+) bits per byte", text)[1]) < 8


@pytest.mark.slow
def test_texts_to_a_model_killed_on_two_processes_and_continued_on_one(tmp_path):
    def last_line(text):
        found = re.search(r"([\d.]+) bits per byte after (\d+) rows of modules, (\d+) rows of packages\n$", text)
        assert found, text
        return [float(value) for value in found.groups()]

    def saved_steps():
        return [int(file.parent.name.removeprefix("step=")) for file in folder.glob("runs/**/step=*/manifest.json")]

    script, folder = EXAMPLES / "pretrain.py", tmp_path / "killed"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, script, "--devices", "2", "--max-steps", "1000"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while process.poll() is None and max(saved_steps(), default=0) < 10:
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    steps = max(saved_steps()) + 10
    continued = last_line(run(folder, script, "--devices", 1, "--max-steps", steps, "--resume"))
    (tmp_path / "undisturbed").mkdir()
    undisturbed = last_line(run(tmp_path / "undisturbed", script, "--devices", 1, "--max-steps", steps))
    assert continued[1:] == undisturbed[1:]
    assert sum(continued[1:]) == 16 * steps


@pytest.mark.slow
def test_causal_lm_and_its_recipes(tmp_path):
    pytest.importorskip("transformers")
    options = ["--label-smoothing", 0.1, "--neftune", 5, "--group-by-length", "--devices", 2]
    text = run(tmp_path, EXAMPLES / "causal_lm.py", "--max-steps", 30, *options)
    assert float(re.search(r"perplexity: ([\d.]+)", text)[1]) < 500  # of 1000 words
    names = {path.name for path in (tmp_path / "runs" / "causal_lm" / "exported").iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"} <= names


STRATEGIES = {"tp": 2, "pp": 2}
"""Those that need methods of the module, and their ranks; the example is under DDP without the argument, and tests/parity has all."""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gpt_under_every_strategy_by_its_argument_alone(tmp_path, strategy):
    text = run(
        tmp_path, EXAMPLES / "gpt.py", "--max-steps", 12, "--strategy", strategy, "--devices", STRATEGIES[strategy]
    )
    # 12 steps of a right training come to about 5.6 bits from 8, on the way to the 4.7 that byte frequencies alone give.
    assert 5 < float(re.search(r"([\d.]+) bits per byte", text)[1]) < 5.9


@pytest.mark.slow
def test_digits_on_two_processes(tmp_path):
    pytest.importorskip("sklearn")
    text = run(tmp_path, EXAMPLES / "digits.py")
    assert len(accuracy(text)) == 1
    assert accuracy(text)[0] >= 97


@pytest.mark.slow
def test_digits_resumes(tmp_path):
    pytest.importorskip("sklearn")
    run(tmp_path, EXAMPLES / "digits.py", "--max-epochs", 1, "--devices", 1)
    text = run(tmp_path, EXAMPLES / "digits.py", "--max-epochs", 3, "--resume", "--devices", 1)
    assert "epoch 1/2:" in text
    assert "epoch 0/2:" not in text
    assert accuracy(text)[0] > 80


@pytest.mark.slow
def test_raw_loop_on_two_processes(tmp_path):
    pytest.importorskip("sklearn")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    found = accuracy(run(tmp_path, *launcher, EXAMPLES / "raw_loop.py"))
    assert len(found) == 2
    assert min(found) >= 95


@pytest.mark.slow
def test_gan_draws_after_two_optimizer_steps_a_batch(tmp_path):
    pytest.importorskip("sklearn")
    text = run(tmp_path, EXAMPLES / "gan.py", "--max-epochs", 3).splitlines()
    assert re.match(
        r"120 steps; the discriminator is right for \d+% of the images", text[-1]
    )  # 20 batches of 64 in an epoch
    assert {len(line) for line in text[-9:-1]} == {6 * 16 + 5 * 3}


@pytest.mark.slow
def test_text_classification_is_far_better_than_chance(tmp_path):
    text = run(tmp_path, EXAMPLES / "text_classification.py", "--max-epochs", 2)
    accuracy, f1 = map(float, re.search(r"accuracy: ([\d.]+)%, F1: ([\d.]+)%", text).groups())
    assert accuracy > 55  # 36 % of the pieces are of the largest package
    assert f1 > 35


def read_again(adapter, root):
    """The loss of the adapter that examples/qlora.py has exported, as peft reads it."""
    from peft import PeftModel

    from engine import Fit
    from engine.huggingface import HFModule

    spec = importlib.util.spec_from_file_location("qlora", EXAMPLES / "qlora.py")
    qlora = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(qlora)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = HFModule(PeftModel.from_pretrained(qlora.quantized(None), str(adapter)))
        fit = Fit(accelerator="cpu", devices=1, root_dir=root)
        return fit.validate(module, DataLoader(qlora.rows(None)[-256:], batch_size=16))[0]["val/loss"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_qlora_resumes_to_the_same_adapter(tmp_path, strategy):
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")

    def trained(name, *runs):
        (tmp_path / name).mkdir()
        for options in runs:
            command = ["-W", "ignore", EXAMPLES / "qlora.py", "--devices", 2, "--strategy", strategy, *options]
            text = run(tmp_path / name, *command)
        return text, (tmp_path / name / "runs" / "qlora" / "adapter-12" / "adapter_model.safetensors").read_bytes()

    text, whole = trained("whole", ["--max-steps", 12])
    resumed = trained("resumed", ["--max-steps", 6], ["--max-steps", 12, "--resume"])
    assert resumed[1] == whole
    loss = float(re.search(r"^loss: ([\d.]+)", text, re.MULTILINE)[1])
    assert loss < 5.5  # of 256 bytes that are equally likely: 5.545
    assert read_again(tmp_path / "whole" / "runs" / "qlora" / "adapter-12", tmp_path) == pytest.approx(loss, abs=1e-5)
    # 4 layers of 7 matrices; in each rank * (inputs + outputs) fp32 numbers: 4 of 128 to 128, 3 between 128 and 256.
    matrices = 4 * 8 * (4 * 256 + 3 * 384) * 4
    sizes = [
        int(number.replace(",", ""))
        for number in re.search(r"checkpoint with optimizer: ([\d,]+), .*: ([\d,]+)\n", text).groups()
    ]
    assert matrices < sizes[1] < 1.1 * matrices
    assert (
        3 * matrices < sizes[0] < 3 * matrices + 200_000
    )  # with two moments of AdamW, and without the base's 594,560 bytes


@pytest.mark.slow
def test_lora_learns_beside_a_base_that_stays(tmp_path):
    pytest.importorskip("peft")
    text = run(tmp_path, "-W", "ignore", EXAMPLES / "lora.py", "--pretrain-steps", 60, "--max-steps", 40, "--rank", 4)
    # In each of 2 layers: rank * (inputs + outputs) of q_proj and v_proj (64 to 64), up_proj (64 to 128), down_proj (128 to 64).
    assert f"trainable: {2 * 4 * (128 + 128 + 192 + 192):,} of" in text
    before, after = map(float, re.search(r"on prose: ([\d.]+) before, ([\d.]+) after", text).groups())
    assert after < before - 0.1
    assert "the base is unchanged: True" in text
    assert (tmp_path / "runs" / "lora" / "adapter" / "adapter_model.safetensors").stat().st_size < 100_000
