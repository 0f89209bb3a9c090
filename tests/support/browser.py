"""Pages: in Chromium without a window, driven over its debugging pipe (the Chrome DevTools Protocol), and a report read without a browser."""

from __future__ import annotations

import base64
import gzip
import json
import os
import select
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

PATIENCE_S = 120.0
HIT = "document.title='hit';window.hit=1"
HOSTILE = {
    "end of a script": f"</script><script>{HIT}</script>",
    "end of a title": f"</title></style></textarea><script>{HIT}</script>",
    "image": f'<img src=x onerror="{HIT}">',
    "attribute": f'"><svg onload="{HIT}">',
    "event": f"' onmouseover='{HIT}' autofocus onfocus='{HIT}",
    "address": f"javascript:{HIT}",
    "link": f'<a href="javascript:{HIT}">here</a><iframe srcdoc="<script>parent.{HIT}</script>">',
    "template": f"${{{HIT}}}`{{{{points}}}}{{{{body}}}}{{{{constructor.constructor(`{HIT}`)()}}}}",
    "comment": f"--><script>{HIT}</script><!--<script>",
    "lines": f"a\u2028{HIT}\u2029//\n'\\\"",
    "bidi": "\u202egnp.exe\u2066 \u200f",
    "escape": "\x1b[31mred\x1b]0;hit\x07",
    "entity": "&lt;b&gt;&amp;&#x3c;b",
    "prototype": "__proto__",
    "constructor": "constructor",
}
"""Names that try to run a script, or to end what they stand in. A script that runs sets ``window.hit``."""

_NOISE = (
    "--no-first-run",
    "--disable-gpu",
    "--disable-extensions",
    "--disable-background-networking",
    "--hide-scrollbars",
)


def program() -> str | None:
    """Its path; ``None``: it is not installed (Debian's package ``chromium``)."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One tab. ``events``: what the page did, as the protocol's messages."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._rest, self._number, self._session = b"", 0, {}
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._writing, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self.events.append(answer)

    def evaluate(self, code: str) -> Any:
        """The value of a JavaScript expression, of a promise what it resolves to."""
        answer = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def unharmed(self) -> bool:
        """Whether nothing of :data:`HOSTILE` has become more than text in the page, also when all of it is touched."""
        self.evaluate(
            "document.querySelectorAll('details').forEach(each => each.open = true);"
            "for (const each of document.querySelectorAll('*')) {"
            "  each.dispatchEvent(new Event('mouseover')); each.dispatchEvent(new Event('focus')); if (each.href) each.click?.(); }"
        )
        self.evaluate("new Promise(resolve => setTimeout(resolve, 50))")
        found: bool = self.evaluate(
            "window.hit === undefined && document.title !== 'hit'"
            " && !document.querySelector('img, iframe, a:not(.skip, [download]), [onload], [onfocus]')"
        )
        return found

    def open(
        self,
        page: Path,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        policy: bool = True,
        drawn: bool = True,
    ) -> float:
        """Load a file and wait until its curves are drawn; return how long that took (s).

        Args:
            policy: ``False``: its Content-Security-Policy does not count.
            drawn: ``False``: it has no curves.
        """
        self.call("Page.setBypassCSP", enabled=not policy)
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        began = time.perf_counter()
        address = page.resolve().as_uri()
        self.call("Page.navigate", url=address)
        state = "document.documentElement?.dataset.drawn" if drawn else "document.readyState === 'complete'"
        while not self.evaluate(f"location.href === {json.dumps(address)} && {state}"):
            assert time.perf_counter() - began < PATIENCE_S, self.complaints()
            time.sleep(0.02)
        return time.perf_counter() - began

    def complaints(self) -> list[Any]:
        """What the console shows, and exceptions that nobody caught."""
        methods = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [event["params"] for event in self.events if event["method"] in methods]

    def requests(self) -> list[str]:
        """The addresses that the page has asked for, itself included."""
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]

    def screenshot(self, path: Path, height: float = float("inf")) -> None:
        """The page, or as much of it as is ``height`` pixels high, as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(height, size["height"]), "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def press(self, key: str) -> None:
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reading], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium does not answer"
            more = os.read(self._reading, 1 << 20)
            assert more, "Chromium has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser of its own, with a profile of its own, that ends with the block."""
    path = program()
    assert path is not None
    from_us, to_them = os.pipe()
    from_them, to_us = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", *_NOISE, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        # It reads from descriptor 3 and writes to 4.
        shell = f'exec "$@" 3<&{from_us} 4>&{to_us}'
        process = subprocess.Popen(
            ["bash", "-c", shell, "chromium", path, *options, "about:blank"],
            pass_fds=(from_us, to_us),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        try:
            yield Browser(from_them, to_them)
        finally:
            os.close(to_them)
            os.close(from_them)
            process.kill()
            process.wait()


class Page(HTMLParser):
    """A report's data, text and tables.

    ``tables``: by caption, rows of cells; ``text``: what a person reads; ``series``: run and name -> steps, seconds (or ``None``) and values.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._within: list[str] = []
        self._scripts: dict[str | None, str] = {}
        self._caption = ""
        self._rows: list[list[str]] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert not {"<", ">", "&"} & set(self._scripts["data"])  # nothing that could end the element, or begin another
        self.data = json.loads(self._scripts["data"])
        points = gzip.decompress(base64.b64decode(self._scripts["points"]))
        self.series: dict[tuple[str, str], tuple[list[float], list[float] | None, list[float]]] = {}
        for chart in self.data["charts"]:
            for one in chart["series"]:
                x, t, y = (None if one[key] is None else _array(points, *one[key]) for key in "xty")
                self.series[self.data["runs"][one["run"]], one["name"]] = (x or [], t, y or [])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br"):
            self._within.append(tag)
        if tag == "table":
            self._caption, self._rows = "", []
        if tag == "tr":
            self._rows.append([])
        if tag in ("th", "td"):
            self._rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._within.pop() == tag
        if tag == "table":
            self.tables[self._caption] = self._rows

    def handle_data(self, data: str) -> None:
        if "script" in self._within:
            name = self.tags[-1][1].get("id")
            self._scripts[name] = self._scripts.get(name, "") + data
        elif "style" not in self._within:
            self.text += data
            if "caption" in self._within:
                self._caption += data
            elif {"th", "td"} & set(self._within):
                self._rows[-1][-1] += data


def _array(points: bytes, offset: int, count: int, size: int) -> list[float]:
    return list(struct.unpack_from(f"<{count}{'d' if size == 8 else 'f'}", points, offset))


def series(path: Path, name: str) -> tuple[list[float], list[Any]]:
    """Steps and values of the only run's curve of this name."""
    page = Page(path)
    (run,) = page.data["runs"]
    steps, _, values = page.series[run, name]
    return steps, values
