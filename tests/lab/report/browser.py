"""A headless Chromium that is told what to do through a pair of pipes.

The DevTools protocol in its smallest form: a call is a line of JSON that ends with a zero byte,
and so is an answer. Nothing but the standard library is needed.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
PATIENCE = 60.0  # seconds
# Chromium reads from 3 and writes to 4, whatever numbers our pipes have
STARTER = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(given), fcntl.F_DUPFD, 10) for given in sys.argv[1:3]]
os.dup2(pipes[0], 3)
os.dup2(pipes[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def found() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in one window. What it writes to its console, and what it asks for, is kept."""

    def __init__(self, program: str, folder: Path) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        command = [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", STARTER, str(theirs_in), str(theirs_out), *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out, self._rest, self._calls = ours_in, ours_out, b"", 0
        self.console: list[str] = []
        self.asked_for: list[str] = []
        self.events: list[str] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._calls += 1
        said = {"id": self._calls, "method": method, "params": parameters}
        if self._session is not None:
            said["sessionId"] = self._session
        os.write(self._out, json.dumps(said).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while True:
            heard = self._hear(until)
            if heard.get("id") == said["id"]:
                if "error" in heard:
                    raise RuntimeError(f"{method}: {heard['error']}")
                return heard["result"]

    def _hear(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(until - time.monotonic(), 0))
            read = os.read(self._in, 1 << 20) if ready else b""
            if not read:
                raise TimeoutError("the browser does not answer")
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\0")
        heard: dict[str, Any] = json.loads(line)
        self._note(heard)
        return heard

    def _note(self, heard: dict[str, Any]) -> None:
        method, said = heard.get("method", ""), heard.get("params", {})
        self.events.append(method)
        if method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            texts = [str(each.get("value", each.get("description"))) for each in said["args"]]
            self.console.append(" ".join(texts))
        elif method == "Runtime.exceptionThrown":
            self.console.append(str(said["exceptionDetails"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.console.append(said["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked_for.append(said["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.console.append(f"a dialog: {said['message']}")

    def window(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        scale = 2 if phone else 1
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, page: Path) -> None:
        """Load a page, and wait until its script has drawn everything."""
        self.console.clear()
        self.asked_for.clear()
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        until = time.monotonic() + PATIENCE
        while "Page.loadEventFired" not in self.events:
            self._hear(until)

    def evaluate(self, expression: str) -> Any:
        said = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in said:
            raise RuntimeError(str(said["exceptionDetails"]))
        return said["result"].get("value")

    def picture(self, path: Path) -> Path:
        """The whole page, however long."""
        said = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(said["data"]))
        return path

    def paper(self, path: Path) -> Path:
        said = self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        path.write_bytes(base64.b64decode(said["data"]))
        return path

    def close(self) -> None:
        os.close(self._out)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._in)
