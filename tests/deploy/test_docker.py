"""Dockerfiles, compose file and what it mounts. No engine is needed: linters, schemas and the program's own help judge."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import chart
from conftest import program

DOCKER = chart.ROOT / "deploy/docker"
DOCKERFILES = sorted(DOCKER.glob("Dockerfile*"))
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
BIN = Path(sys.executable).parent


def run(*command):
    """Runs a linter and shows what it says."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path):
    run(BIN / "hadolint", path)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_run_as_the_charts_user(path):
    text = path.read_text()
    final = text[text.rindex("\nFROM ") :]
    values = yaml.safe_load((chart.CHART / "values.yaml").read_text())["podSecurityContext"]
    assert re.findall(r"^USER (\S+)$", final, re.MULTILINE) == [f"{values['runAsUser']}:{values['runAsGroup']}"]
    assert 'ENTRYPOINT ["/usr/local/bin/baton"]' in final


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_is_there_and_rust_is_new_enough(path):
    text = path.read_text()
    for source in re.findall(r"^COPY (?!--from)(\S+) ", text, re.MULTILINE):
        assert (chart.ROOT / source).exists(), source
    wanted = tomllib.loads((chart.ROOT / "Cargo.toml").read_text())["workspace"]["package"]["rust-version"]
    (given,) = re.findall(r"^FROM rust:([\d.]+)-", text, re.MULTILINE)
    assert tuple(map(int, given.split("."))) >= tuple(map(int, wanted.split(".")))


def test_the_compose_file_is_valid():
    run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", DOCKER / "compose.yaml")


def test_the_program_knows_the_arguments_of_the_compose_file():
    checked = 0
    for name, service in COMPOSE["services"].items():
        if not service["image"].startswith("baton:"):
            continue
        command, *arguments = service["command"]
        known = subprocess.run([program(), command, "--help"], capture_output=True, text=True, check=True).stdout
        flags = set(re.findall(r"--[a-z][a-z-]*", known))
        assert {argument.partition("=")[0] for argument in arguments} <= flags, name
        checked += 1
    stages = int(re.search(r"--stages=(\d+)", " ".join(COMPOSE["services"]["coordinator"]["command"]))[1])
    assert checked == 1 + stages


def test_baton_runs_unprivileged_in_compose():
    for name, service in COMPOSE["services"].items():
        assert "privileged" not in service, name
        if service["image"].startswith("baton:"):
            assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name


def test_what_compose_mounts_is_there():
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (DOCKER / source).exists(), source


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool comes with Debian's prometheus")
def test_prometheus_takes_its_config():
    run("promtool", "check", "config", chart.ROOT / "deploy/prometheus/prometheus.yaml")
