"""Headless Chromium, driven over its debugging pipe: JSON messages that end in a NUL byte. Needs no driver."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
)

PATIENCE = 60.0

# Chromium reads from descriptor 3 and writes to 4. By way of higher ones, as one of ours may be 3 or 4 itself.
ONTO_3_AND_4 = """
import fcntl, os, sys
for source, target in [(fcntl.fcntl(int(sys.argv[place]), fcntl.F_DUPFD, 10), place + 2) for place in (1, 2)]:
    os.dup2(source, target)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def require_chromium() -> str:
    """The program. Without it a test is skipped, but in continuous integration (CI=true) it fails."""
    program = shutil.which("chromium")
    if program is None:
        missing = "Chromium is not in PATH; `make browser` installs it."
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    return program


class Browser:
    """One page of a running Chromium.

    Attributes:
        problems: What the page complained about: console messages and exceptions.
        requests: Addresses that the page asked for.
    """

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._unread, self._number = write, read, b"", 0
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        answer = self._wait(lambda message: message.get("id") == self._number)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _wait(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first message that is wanted; what comes before it is noted."""
        while True:
            while b"\0" not in self._unread:
                assert select.select([self._read], [], [], PATIENCE)[0], "Chromium does not answer"
                piece = os.read(self._read, 2**20)
                assert piece, "Chromium has closed its pipe"
                self._unread += piece
            text, _, self._unread = self._unread.partition(b"\0")
            message = json.loads(text)
            self._note(message)
            if wanted(message):
                return message

    def _note(self, message: dict[str, Any]) -> None:
        method, about = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif method in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.problems.append(json.dumps(about))

    def open(self, page: Path, fragment: str = "", *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page and wait until it is there."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")  # or a new fragment alone would not load the page again
        self._wait(lambda message: message.get("method") == "Page.loadEventFired")
        self.problems.clear()
        self.requests.clear()
        self.call("Page.navigate", url=page.as_uri() + fragment)
        self._wait(lambda message: message.get("method") == "Page.loadEventFired")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event, as of a real mouse: `Moved`, `Pressed` or `Released`."""
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def key(self, name: str) -> None:
        """Press a key and let it go."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """What the page looks like."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))

    def pdf(self) -> bytes:
        """What the page looks like on paper."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])


@contextmanager
def chromium(program: str, profile: Path) -> Iterator[Browser]:
    """A browser that ends with the block."""
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    command = [sys.executable, "-SE", "-c", ONTO_3_AND_4, f"{theirs_in}", f"{theirs_out}", program, *FLAGS]
    command += ["--remote-debugging-pipe", f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        command,
        pass_fds=(theirs_in, theirs_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        os.close(ours_out)
        os.close(ours_in)
        process.terminate()
        process.wait(timeout=30)
