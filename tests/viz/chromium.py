"""A headless Chromium, driven through a pipe with nothing but the standard library."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# The window is so low that Plotly's charts are far below it: the page loads Plotly, which takes longer than all the rest
# of it, once they come near. Tests of the charts scroll there.
_WIDTH, _HEIGHT = 1400, 1200
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    f"--disable-component-update --disable-sync --remote-debugging-pipe --window-size={_WIDTH},{_HEIGHT}"
)


READY = "document.documentElement?.dataset.ready === 'true'"

# Scripts of a page put work off with timers, for as long as the user goes on. What settles the page does not wait for
# them: it calls what is put off, in the order in which it would be, until nothing is, and then lets the page be drawn.
_TIMERS = """(() => {
  const { setTimeout: begin, clearTimeout: end } = window;
  const waiting = new Map();
  window.setTimeout = (work, delay = 0, ...rest) => {
    const call = () => { waiting.delete(id); work(...rest); };
    const id = begin(call, delay);
    waiting.set(id, { call, due: performance.now() + delay });
    return id;
  };
  window.clearTimeout = (id) => { waiting.delete(id); end(id); };
  const drawn = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  window.settle = async () => {
    do {
      while (waiting.size) {
        const [id, { call }] = [...waiting].reduce((a, b) => (b[1].due < a[1].due ? b : a));
        end(id);
        call();
      }
      await drawn();
    } while (waiting.size);
  };
})()"""
# Until nothing waits to be drawn or said any more.
SETTLE = "settle()"


class _Browser:
    """One Chromium; every page is in a profile of its own."""

    def __init__(self) -> None:
        self.pages: dict[str, Page] = {}
        self._count = 0
        self._buffer = b""
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def in_child() -> None:  # Chromium speaks on the descriptors 3 and 4
            first, second = os.dup(to_browser), os.dup(from_browser)
            os.dup2(first, 3)
            os.dup2(second, 4)

        assert EXECUTABLE is not None
        self.process = subprocess.Popen(
            [EXECUTABLE, *_FLAGS.split(), f"--user-data-dir={self._folder.name}", "about:blank"],
            preexec_fn=in_child,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)

    def close(self) -> None:
        os.close(self._write)
        os.close(self._read)
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._folder.cleanup()

    def call(self, method: str, seconds: float, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Return the answer to a request, which may take so many seconds; pages note what comes before it."""
        self._count += 1
        number = self._count
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(seconds)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            if (page := self.pages.get(answer.get("sessionId", ""))) is not None:
                page.note(answer.get("method"), answer.get("params", {}))

    def _receive(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], seconds)
            assert ready, "Chromium does not answer"
            piece = os.read(self._read, 1 << 16)
            assert piece, "Chromium has gone"
            self._buffer += piece
        message, self._buffer = self._buffer.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(message)
        return answer


_browser: _Browser | None = None


def _running() -> _Browser:
    """Return the browser that all pages of this process share: it takes longer to start than to show most of them."""
    global _browser
    if _browser is not None and _browser.process.poll() is not None:
        close()
    if _browser is None:
        _browser = _Browser()
    return _browser


def close() -> None:
    """End the browser, if pages have started one."""
    global _browser
    if _browser is not None:
        _browser.close()
        _browser = None


class Page:
    """One page: what it logged as an error, what it tried to load, and how to ask it something.

    It is there once the JavaScript condition `ready` holds, which may take up to `seconds`; so may every answer.
    `settle` are seconds that the browser gets to itself before it opens the page.
    """

    def __init__(
        self,
        path: Path,
        *,
        fragment: str = "",
        dark: bool = False,
        ready: str = READY,
        seconds: float = 30,
        settle: float = 0,
    ) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._seconds = seconds
        self._session: str | None = None
        self._browser = _running()
        self._profile = self._call("Target.createBrowserContext")["browserContextId"]
        target = self._call(
            "Target.createTarget", url="about:blank", browserContextId=self._profile, width=_WIDTH, height=_HEIGHT
        )["targetId"]
        self._session = str(self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        self._browser.pages[self._session] = self
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self._call("Page.addScriptToEvaluateOnNewDocument", source=_TIMERS)
        self._features = [{"name": "prefers-color-scheme", "value": "dark"}] if dark else []
        self.use_medium("")
        time.sleep(settle)
        self._call("Page.navigate", url=path.as_uri() + fragment)
        self.wait_for(ready)
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        del self._browser.pages[self._session]
        self._session = None
        self._call("Target.disposeBrowserContext", browserContextId=self._profile)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, of a promise its result."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def read(self, expression: str) -> Any:
        """Return what JavaScript says, by way of JSON."""
        return json.loads(self.evaluate(f"JSON.stringify({expression})"))

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript condition holds."""
        end = time.monotonic() + self._seconds
        while not self.evaluate(condition):
            assert time.monotonic() < end, f"never true: {condition}; errors: {self.errors}"
            time.sleep(0.05)

    def use_medium(self, name: str) -> None:
        """Let the styles of a medium hold, such as "print"; those of the screen with an empty name."""
        self._call("Emulation.setEmulatedMedia", media=name, features=self._features)

    def print(self) -> None:
        """Print the page, to a file that nobody reads."""
        self._call("Page.printToPDF")

    def key(self, name: str, selector: str) -> None:
        """Press a key while an element has the focus."""
        self.evaluate(f"document.querySelector({selector!r}).focus()")
        self._call("Input.dispatchKeyEvent", type="keyDown", key=name)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=name)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send a mouse event, such as "mouseMoved", at a point of the window."""
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._seconds, self._session, **parameters)

    def note(self, method: str | None, parameters: dict[str, Any]) -> None:
        """Keep what the browser says of this page, where tests ask for that."""
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description", details["text"])))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.errors.append(str([a.get("value", a.get("description")) for a in parameters["args"]]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"][:200])
