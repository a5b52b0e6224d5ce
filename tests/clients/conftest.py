"""Gives the client tests a server: the one at BATON_URL, or a pipeline of three stages started for them.

The program is `BATON_BIN`, or what `cargo build --bin baton` made.
"""

import os
import re
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 90


def program():
    """The `baton` to start."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    path = Path(os.environ.get("BATON_BIN", target / "debug/baton"))
    if not path.exists():
        pytest.exit(f"{path} does not exist; build it first: cargo build --bin baton", returncode=1)
    return path


def is_ready(url):
    """Whether all stages make progress."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def start(place):
    """Starts a pipeline; returns its process and address once it is ready."""
    model = ROOT / "tests/models/share-4-3"
    arguments = [program(), "up", "--model", model, "--split", "4,2,4", "--port", "0", "--threads", "1"]
    stdout, stderr = place / "stdout", place / "stderr"
    with stdout.open("w") as output, stderr.open("w") as errors:
        process = subprocess.Popen(arguments, stdout=output, stderr=errors)
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        found = re.search(r"http://127\.0\.0\.1:\d+(?=\D)", stdout.read_text())
        if found and is_ready(found[0]):
            return process, found[0]
        time.sleep(0.05)
    stop(process)
    pytest.exit(f"baton up did not become ready:\n{stderr.read_text()}", returncode=1)


def stop(process):
    """Ends the pipeline; its stages end with it."""
    process.terminate()
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def pytest_configure(config):
    if "BATON_URL" in os.environ or config.option.collectonly:
        return
    config.baton_output = tempfile.TemporaryDirectory()
    config.baton, os.environ["BATON_URL"] = start(Path(config.baton_output.name))


def pytest_unconfigure(config):
    process = getattr(config, "baton", None)
    if process:
        stop(process)
