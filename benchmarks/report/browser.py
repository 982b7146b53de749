"""Chromium without a window, driven through the DevTools protocol over two pipes: no driver, no package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """One page. `errors` collects exceptions and console errors; `requests` the addresses it asked for."""

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        binary = find_chromium()
        if binary is None:
            raise FileNotFoundError("no Chromium was found; on Debian or Ubuntu: apt install chromium")
        self._profile = tempfile.TemporaryDirectory(prefix="oomph-browser-", ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # The browser expects its pipes as descriptors 3 and 4.
        script = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        flags = (
            "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
            "--disable-background-networking --disable-component-update --disable-sync --hide-scrollbars "
            "--disable-extensions --disable-default-apps --metrics-recording-only --remote-debugging-pipe"
        ).split()
        command = [binary, *flags, f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, *command, "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._loaded = False
        self.errors: list[str] = []
        self.requests: list[str] = []
        pages = self.send("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        with contextlib.suppress(EOFError, OSError):
            self.send("Browser.close")
        os.close(self._write)
        os.close(self._read)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._profile.cleanup()

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 16)
            if not part:
                raise EOFError("Chromium ended")
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        given = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                details = given["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if given["type"] in ("error", "warning", "assert"):
                self.errors.append(" ".join(str(one.get("value", one)) for one in given["args"]))
            case "Log.entryAdded" if given["entry"]["level"] in ("error", "warning"):
                self.errors.append(given["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(given["request"]["url"])
            case "Page.loadEventFired":
                self._loaded = True
        return message

    def open(self, file: Path) -> float:
        """Load the file and return the milliseconds until its scripts have run and it is drawn."""
        self._loaded = False
        self.send("Page.navigate", url=file.resolve().as_uri())
        while not self._loaded:
            self._receive()
        drawn = "new Promise(done => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))"
        return float(self.value(drawn))

    def value(self, expression: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", expression))
        return answer["result"].get("value")

    def click(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """A real click, at a fraction of the element's width and height."""
        box = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); "
            "return [b.left, b.top, b.width, b.height]; })()"
        )
        at = {"x": box[0] + x * box[2], "y": box[1] + y * box[3], "button": "left", "clickCount": 1}
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=at["x"], y=at["y"])
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, **at)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def key(self, key: str) -> None:
        codes = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Enter": 13}
        for kind in ("keyDown", "keyUp"):
            given: dict[str, Any] = {"type": kind, "key": key, "windowsVirtualKeyCode": codes.get(key, 0)}
            if len(key) == 1 and kind == "keyDown":
                given["text"] = key
            self.send("Input.dispatchKeyEvent", **given)

    def prefer(self, scheme: str) -> None:
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, file: Path) -> None:
        answer = self.send("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(answer["data"]))
