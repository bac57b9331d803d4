"""`make picture`: make the README's picture anew, Dagster's page of the demo's pipeline after `make demo`.

make ui on a free port -> headless Chromium -> docs/images/flights-in-dagster.png
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "images" / "flights-in-dagster.png"
PAGE = "/locations/weir/asset-groups/flights/lineage"
SHOWN = ("checkpoint", "aircraft_legs", "airport_hourly")
SIZE = {"width": 1680, "height": 900}
_PATIENCE = 240_000.0  # milliseconds


def take(base: str) -> None:
    """Take the picture of the page, once everything that it is to show is there."""
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport=SIZE, base_url=base)
        page.set_default_timeout(_PATIENCE)
        page.goto(PAGE)
        page.get_by_text("Hide navigation").click()  # which Dagster remembers: the graph is as large as the page then
        page.reload()
        for text in SHOWN:
            expect(page.get_by_text(text).first).to_be_visible(timeout=_PATIENCE)
        expect(page.get_by_text("Loading")).to_have_count(0, timeout=_PATIENCE)
        PICTURE.parent.mkdir(exist_ok=True)
        page.screenshot(path=PICTURE)
        browser.close()


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pages = subprocess.Popen(
        [sys.executable, "-m", "weir.local.ui"],
        cwd=ROOT,
        env={**os.environ, "PORT": str(port)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert pages.stdout is not None
    try:
        while pages.poll() is None:
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
        take(f"http://127.0.0.1:{port}")
    finally:
        pages.terminate()
        pages.wait()
    print(f"{PICTURE}: {PICTURE.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
