"""A headless Chromium, driven through pipes with the DevTools protocol: no port, no driver, no download."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium")
MISSING = "no Chromium: install it (apt-get install chromium) and run these tests again"
_SECONDS = 120.0  # for one answer, on a machine that does other work
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
_QUIET = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")


class Browser:
    """One tab. `requests` are the addresses that its page asked for, `complaints` what its console shows."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        os.write(
            self._write, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, page: Path, width: int, scheme: str = "light") -> None:
        """Open a file, and wait until it is loaded."""
        self.requests, self.complaints, self._events = [], [], []
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        loader = self.call("Page.navigate", url=page.absolute().as_uri())["loaderId"]
        loaded = {"name": "load", "loaderId": loader}  # an event of an earlier page may still be on its way
        while not any(loaded.items() <= event["params"].items() for event in self._events if "params" in event):
            self._note(self._next())
        self.value("1")  # what the page complained about so far arrives before the answer

    def value(self, expression: str) -> Any:
        """Return what a JavaScript expression gives in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, file: Path, top: float = 0, height: float | None = None) -> None:
        """Write the page, from `top` on, as a PNG file."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": top, "width": size["width"], "height": height or size["height"] - top, "scale": 1}
        data = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))

    def _note(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        if event["method"] == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])
        if event["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.complaints.append(json.dumps(event["params"]))

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium did not answer for {_SECONDS:.0f} s"
            found = os.read(self._read, 1 << 20)
            assert found, "Chromium has ended"
            self._buffer += found
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start Chromium with its files in `folder`, and end it after the block."""
    assert PROGRAM, MISSING
    (from_us, to_it), (from_it, to_us) = os.pipe(), os.pipe()
    flags = [*_FLAGS, *_QUIET, "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}"]
    command = ["bash", "-c", f'exec "$@" 3<&{from_us} 4>&{to_us}', "bash", PROGRAM, *flags]
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(command, pass_fds=(from_us, to_us), stdout=log, stderr=log)
    os.close(from_us)
    os.close(to_us)
    try:
        tab = Browser(from_it, to_it)
        yield tab
    finally:
        process.kill()
        process.wait()
        os.close(to_it)
        os.close(from_it)
