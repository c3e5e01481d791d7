"""Headless Chromium for tests, driven by Selenium through the system's chromedriver; tests are skipped where there is none."""
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

#: No sandbox (tests may run as root), no first run, nothing that looks for other machines.
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1400,1000",
)
NAMES = ("chromium", "chromium-browser", "google-chrome")


def why_no_browser() -> str:
    """Empty if there is one."""
    if not any(map(shutil.which, NAMES)):
        return "there is no Chromium on this machine (Debian: chromium)"
    return "" if shutil.which("chromedriver") else "there is no chromedriver on this machine (Debian: chromium-driver)"


@contextmanager
def browser() -> Iterator[webdriver.Chrome]:
    """A new profile each time; it is gone afterwards."""
    if why_no_browser():
        pytest.skip(why_no_browser())
    options = webdriver.ChromeOptions()
    options.binary_location = next(path for path in map(shutil.which, NAMES) if path)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
        try:
            yield driver
        finally:
            driver.quit()


def requested_urls(driver: webdriver.Chrome) -> list[str]:
    """All that the page asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"]


def complaints(driver: webdriver.Chrome) -> list[str]:
    """Warnings and errors of the console since the last call, failed requests included."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")]
