"""The report in headless Chromium, where one is installed: it opens from disk, asks nothing of a network, fits a phone,
and all of its text is large and dark enough to read."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

from cosmos_core.observe import report
from tests.conftest import wait_until
from tests.unit.observed_runs import finished_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-quic", "--remote-debugging-port=0"]  # fmt: skip
# Contrast as WCAG 2.2 defines it, 1.4.3; 4.5 is asked of usual text.
UNREADABLE = """
(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
  const painted = (colors) => {
    for (const color of ['white', ...colors]) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); }
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const linear = (c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = (element) => {
    const colors = [];
    for (let e = element; e; e = e.parentElement) colors.unshift(getComputedStyle(e).backgroundColor);
    return colors;
  };
  const found = [];
  for (const element of document.querySelectorAll('main *:not(svg *)')) {
    const text = [...element.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data.trim()).join('');
    if (!text || !element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const layers = behind(element);
    const [a, b] = [light(painted([...layers, style.color])), light(painted(layers))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5 || parseFloat(style.fontSize) < 10.5)
      found.push([text.slice(0, 40), element.className, contrast.toFixed(1), style.fontSize]);
  }
  return found;
})()
"""


class Tab:
    """One page, spoken to by the DevTools protocol (https://chromedevtools.github.io/devtools-protocol)."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._number = connection, 0
        self.requested: list[str] = []

    def tell(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the answer to a command; what is requested meanwhile is noted."""
        self._number += 1
        self._connection.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=30))
            if message.get("method") == "Network.requestWillBeSent":
                self.requested.append(message["params"]["request"]["url"])
            if message.get("id") == self._number:
                assert "error" not in message, message
                found: dict[str, Any] = message["result"]
                return found

    def value(self, expression: str) -> Any:
        return self.tell("Runtime.evaluate", expression=expression, returnByValue=True)["result"]["value"]

    def show(self, page: Path, width: int, scheme: str) -> None:
        self.tell("Network.enable")
        self.tell(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 640
        )
        self.tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.tell("Page.navigate", url=page.as_uri())
        loaded = "document.readyState === 'complete' && !!document.querySelector('main')"
        wait_until(lambda: self.value(loaded), 30, "the page is there")


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    profile = tmp_path / "profile"
    browser = subprocess.Popen([CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        file = profile / "DevToolsActivePort"
        wait_until(lambda: file.exists() and file.read_text().count("\n"), 60, "Chromium listens")
        port = file.read_text().splitlines()[0]
        [found, *_] = [each for each in httpx.get(f"http://127.0.0.1:{port}/json").json() if each["type"] == "page"]
        with connect(found["webSocketDebuggerUrl"], max_size=None) as connection:
            yield Tab(connection)
    finally:
        browser.terminate()
        browser.wait(30)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_report_is_readable_from_disk_alone(tab: Tab, tmp_path: Path, width: int, scheme: str) -> None:
    page = tmp_path / "report.html"
    page.write_text(report.build_report(finished_run(tmp_path, has_curves=True)), encoding="utf-8")
    tab.show(page, width, scheme)
    assert {url.partition(":")[0] for url in tab.requested} <= {"file", "data"}
    assert tab.value("document.documentElement.scrollWidth") <= width, "the page is wider than the screen"
    assert tab.value("document.querySelectorAll('section').length") > 3
    assert tab.value(UNREADABLE) == []
