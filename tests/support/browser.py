"""Headless Chromium for tests of pages."""

import shutil

import pytest

CHROMIUM = shutil.which("chromium")
try:
    from playwright import sync_api
except ImportError:
    sync_api = None

# Chromium runs as root in containers without a GPU, and must not make requests of its own.
ARGUMENTS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking".split()
ARGUMENTS += "--disable-component-update --disable-sync".split()
PHONE = {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 3, "has_touch": True}


def require_browser(required):
    """Skips the tests of a module without Chromium or Playwright, unless ``required`` names the former."""
    if "chromium" in required:
        return
    if sync_api is None:
        pytest.skip("the Python package playwright is missing", allow_module_level=True)
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH", allow_module_level=True)
