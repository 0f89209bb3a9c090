"""``fit report``: what it prints and writes, and its exit statuses."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from support.browser import Page

from engine.cli.main import main


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A root_dir with two runs."""
    for name, loss in (("", 1.0), ("version_1", 2.0)):
        (tmp_path / "root" / name).mkdir(parents=True, exist_ok=True)
        events = (
            {"event": "start", "stage": "fit", "time": 1.0, "step": 0},
            {"event": "values", "stage": "fit", "time": 2.0, "step": 1, "values": {"loss": loss}},
        )
        (tmp_path / "root" / name / "report.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    return tmp_path / "root"


def test_one_run_and_several(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs / "version_1")]) == 0
    assert capsys.readouterr().out == f"{runs / 'version_1' / 'report.html'}\n"
    assert main(["report", str(runs), "--out", str(tmp_path / "new" / "all.html")]) == 0
    assert Page(tmp_path / "new" / "all.html").data["runs"] == ["root", "root/version_1"]
    assert main(["report", str(runs)]) == 0
    assert (runs / "comparison.html").exists()


def test_the_table_of_runs_as_csv(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["report", str(runs), "--csv", str(tmp_path / "new" / "runs.csv")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'new' / 'runs.csv'}\n"
    head, *lines = (tmp_path / "new" / "runs.csv").read_text().splitlines()
    assert head == "run,last loss,status,steps,training time (s),started"
    assert [line.split(",")[:2] for line in lines] == [["root", "1.0"], ["root/version_1", "2.0"]]
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(runs), "--csv", "-"]) == 0
    assert capsys.readouterr() == ((tmp_path / "new" / "runs.csv").read_bytes().decode(), "")
    assert not list(tmp_path.glob("**/*.html"))
    assert not (tmp_path / "-").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["root", "--csv", "a.csv", "--out", "a.html"], "--out and --csv are different answers: give one of them"),
        (["root", "--csv", "a.csv", "--serve"], "--csv and --serve are different answers"),
        (["nowhere", "--serve", "0"], "nowhere does not exist"),
        (["nowhere", "--csv", "a.csv"], "nowhere does not exist"),
        (["nowhere"], "nowhere does not exist"),
        (["root", "--out", "page.pdf"], "--out page.pdf: the page needs a name that ends in .html"),
        (["root", "--max-points", "3"], "at least 100 points"),
    ],
)
def test_wrong_arguments(
    runs: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.parent)
    assert main(["report", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_served_page_follows_and_ends(runs: Path, number: int) -> None:
    """From another process: the page, its version once a run has logged more, an end by a signal without a word, and an occupied port."""
    command = [sys.executable, "-m", "engine.cli.main", "report", str(runs), "--serve"]
    with subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            line = process.stdout.readline()
            url, port = re.fullmatch(r"(http://127\.0\.0\.1:(\d+)/) follows the runs; Ctrl-C ends it\n", line).groups()  # type: ignore[union-attr]
            text = urlopen(url).read().decode()
            assert "connect-src 'self'" in text
            before = urlopen(f"{url}version").read()
            assert f'"live":"{before.decode()}"' in text
            with (runs / "report.jsonl").open("a") as file:
                file.write('{"event": "values", "stage": "fit", "time": 3.0, "step": 7, "values": {"loss": 0.5}}\n')
            assert urlopen(f"{url}version").read() != before
            assert '<td class="number" data-value="7">7</td>' in urlopen(url).read().decode()
            for path, headers, status in (("x", {}, 404), ("../", {}, 404), ("", {"Host": "attacker.example"}, 403)):
                with pytest.raises(HTTPError) as refused:
                    urlopen(Request(url + path, headers=headers))
                assert refused.value.code == status
                refused.value.close()
            assert main(["report", str(runs), "--serve", port]) == 2  # from this process
            process.send_signal(number)
            assert process.wait(30) == 0
            assert (process.stdout.read(), process.stderr.read()) == ("", "")
        finally:
            process.kill()


def test_the_page_needs_no_torch() -> None:
    """So the address of --serve, and a page, come at once."""
    code = "import engine.cli.report, callbacks; callbacks.ReportServer, callbacks.write_report; import sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_an_occupied_port_is_an_error_that_says_what_to_do(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        assert main(["report", str(runs), "--serve", str(port)]) == 2
    assert (
        f"port {port} of 127.0.0.1 is in use by another process: give another one, --serve 8321, or --serve 0"
        in capsys.readouterr().err
    )
    for port in ("65536", "-1", "runs"):
        with pytest.raises(SystemExit):
            main(["report", str(runs), "--serve", port])


def test_a_place_that_cannot_be_written(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs), "--out", str(runs / "report.jsonl" / "x.html")]) == 1
    assert "report.jsonl" in capsys.readouterr().err
