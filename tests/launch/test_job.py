"""What ``fit launch`` makes of its options and of torchrun's variables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine.cli.options import launch
from engine.distributed import addresses
from engine.launch.job import Job, LaunchError, check_devices, cores, make_job

SCRIPT = str(Path(__file__).resolve())


def job(*options: object, environ: dict[str, str] | None = None) -> Job:
    return make_job(launch().parse_args([*map(str, options), SCRIPT, "--epochs", "3"]), environ or {})


def test_defaults() -> None:
    found = job("--nproc", 2)
    assert found.command == (sys.executable, "-u", SCRIPT, "--epochs", "3")
    assert (found.nproc, found.min_nodes, found.max_nodes, found.endpoint, found.node_rank) == (2, 1, 1, None, None)
    assert (found.max_restarts, found.run_id, found.elastic) == (0, None, False)
    assert found.variables == {"OMP_NUM_THREADS": str(max(1, cores() // 2))}
    assert job("--nproc", 2, environ={"OMP_NUM_THREADS": "7"}).variables == {}
    assert job("--nproc", "cpu").nproc == cores()


def test_torchruns_variables_are_defaults() -> None:
    static = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "4",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "head",
        "PET_MASTER_PORT": "23456",
    }
    found = job(environ=static)
    assert (found.nproc, found.min_nodes, found.max_nodes, found.node_rank, found.endpoint) == (
        4,
        2,
        2,
        1,
        ("head", 23456),
    )
    elastic = {
        "PET_NNODES": "1:4",
        "PET_NPROC_PER_NODE": "1",
        "PET_RDZV_ENDPOINT": "head:1",
        "PET_RDZV_ID": "a",
        "PET_MAX_RESTARTS": "5",
    }
    found = job(environ=elastic | {"PET_RDZV_BACKEND": "c10d"})
    assert (found.min_nodes, found.max_nodes, found.endpoint, found.run_id, found.max_restarts) == (
        1,
        4,
        ("head", 1),
        "a",
        5,
    )
    found = job(
        "--nnodes", 3, "--nproc", 2, "--rdzv", "[::1]:7", "--rdzv-id", "b", "--max-restarts", 1, environ=elastic
    )
    assert (found.nproc, found.max_nodes, found.endpoint, found.run_id, found.max_restarts) == (
        2,
        3,
        ("::1", 7),
        "b",
        1,
    )
    assert job("--nnodes", 2, "--rdzv", "head").endpoint == ("head", 29400)


@pytest.mark.parametrize(
    ("options", "environ", "message"),
    [
        (("--nproc", "0"), {}, r"--nproc 0: it must be at least 1"),
        (("--nproc", "gpus"), {}, r"--nproc 'gpus': a number, auto, gpu or cpu is needed; did you mean 'gpu'"),
        (("--nnodes", "4:2"), {}, r"--nnodes '4:2': MIN:MAX with MIN > MAX; did you mean 2:4"),
        (("--nnodes", "2"), {}, r"--nnodes 2: several machines need a common address: --rdzv HOST:PORT"),
        ((), {"PET_NNODES": "2"}, r"PET_NNODES=2: several machines need a common address"),
        (
            ("--nnodes", "2", "--rdzv", "h:1", "--node-rank", "2"),
            {},
            r"--node-rank 2: the machines are numbered 0 to 1 \(--nnodes 2\)",
        ),
        (
            ("--nnodes", "1:2", "--rdzv", "h:1"),
            {"PET_NODE_RANK": "0"},
            r"PET_NODE_RANK 0 with --nnodes 1:2: .* leave it out",
        ),
        (("--nnodes", "2", "--rdzv", "h:70000"), {}, r"--rdzv 'h:70000': a port is a number from 1 to 65535"),
        (("--nnodes", "2", "--rdzv", "::1"), {}, r"--rdzv '::1': HOST:PORT is needed, or \[IPv6\]:PORT"),
        ((), {"PET_MASTER_PORT": "1"}, r"PET_MASTER_PORT='1' without PET_MASTER_ADDR"),
        (
            (),
            {"PET_RDZV_ENDPOINT": "a:1", "PET_MASTER_ADDR": "b"},
            r"PET_RDZV_ENDPOINT='a:1' and PET_MASTER_ADDR='b'.* different addresses",
        ),
        (
            (),
            {"PET_RDZV_ENDPOINT": "a:1", "PET_RDZV_BACKEND": "etcd"},
            r"PET_RDZV_BACKEND='etcd': only c10d and static",
        ),
        (("--max-restarts", "x"), {}, r"--max-restarts 'x': a whole number is needed"),
        (("--grace", "0"), {}, r"--grace 0: it must be more than 0 seconds"),
        (("--show", "first"), {}, r"--show 'first': a whole number is needed"),
        (("--config", "nope.yaml"), {}, r"--config nope.yaml: there is no such file"),
        ((), {"FIT_PRECISION": "bf17"}, r"the settings are invalid on every rank: .*FIT_PRECISION"),
    ],
)
def test_what_cannot_be(options: tuple[str, ...], environ: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        job(*options, environ=environ)


def test_the_configuration_is_checked_and_named_absolutely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good.yaml").write_text("max_epochs: 3\n")
    Path("bad.yaml").write_text("max_epoch: 3\n")
    assert job("--nproc", 1, "--config", "good.yaml", environ={"FIT_CONFIG": "/other"}).variables["FIT_CONFIG"] == str(
        tmp_path / "good.yaml"
    )
    with pytest.raises(LaunchError, match=r"max_epoch.*did you mean 'max_epochs'"):
        job("--nproc", 1, "--config", "bad.yaml")


def test_each_process_needs_its_own_gpu() -> None:
    assert check_devices("--nproc", 2, 2, "auto") == 2
    assert check_devices("--nproc", 4, 0, "auto") == 4  # no GPU at all: the CPU
    assert check_devices("--nproc", 4, 2, "cpu") == 4
    with pytest.raises(LaunchError, match=r"--nproc 4: torch sees 2 GPU\(s\).* Use --nproc gpu, or train on the CPU"):
        check_devices("--nproc", 4, 2, "auto")


def test_addresses_of_this_machine() -> None:
    assert addresses.address_towards("127.0.0.1", 1) == "127.0.0.1"
    assert addresses.is_own("localhost")
    assert not addresses.is_own("192.0.2.1")  # reserved for documentation
    assert not addresses.is_own("no-such-host.invalid")
    assert addresses.interface("127.0.0.1") == "lo"
    assert addresses.interface("192.0.2.1") is None
    assert ("lo", "127.0.0.1") in list(addresses.interfaces())
    assert [addresses.is_loopback(each) for each in ("localhost", "127.0.1.1", "::1", "10.0.0.1", "head")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    own = addresses.default_address()
    assert own is None or (addresses.is_own(own) and not addresses.is_loopback(own))


def test_a_misspelt_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launch().parse_args(["--nporc=2", SCRIPT])
    assert "unrecognized arguments: --nporc=2; did you mean '--nproc'?" in capsys.readouterr().err
