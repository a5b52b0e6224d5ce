"""What the deployment tests share."""

import os
from pathlib import Path

import pytest

import chart


def program():
    """The `baton` to start: `BATON_BIN`, or what `cargo build --bin baton` made."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", chart.ROOT / "target"))
    path = Path(os.environ.get("BATON_BIN", target / "debug/baton"))
    if not path.exists():
        pytest.exit(f"{path} does not exist; build it first: cargo build --bin baton", returncode=1)
    return path


def pytest_sessionstart():
    """Says what is missing, once."""
    if not chart.HELM.exists():
        pytest.exit(f"{chart.HELM} does not exist; install it first: tests/deploy/install-helm", returncode=1)
