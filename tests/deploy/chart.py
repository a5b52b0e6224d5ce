"""Renders the chart with helm and takes the objects apart."""

import os
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/baton"
HELM = Path(os.environ.get("BATON_HELM", ROOT / ".cache/helm/helm"))
VALUES = sorted(path.name for path in CHART.glob("values-*.yaml"))
RELEASE = "demo"


def helm(*arguments):
    """Runs helm; returns the finished process."""
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, timeout=60, check=False)


def render(*values, settings=()):
    """The objects of the chart for these values files and `--set` settings."""
    arguments = [part for name in values for part in ("-f", CHART / name)]
    arguments += [part for setting in settings for part in ("--set", setting)]
    done = helm("template", RELEASE, CHART, *arguments)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def pod_template(item):
    """The pod template of a workload, or None for other objects."""
    match item["kind"]:
        case "Deployment" | "StatefulSet":
            return item["spec"]["template"]
        case "LeaderWorkerSet":
            return item["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    return None


def of_component(objects, component):
    """The pod template of a component."""
    templates = filter(None, map(pod_template, objects))
    label = "app.kubernetes.io/component"
    return next(template for template in templates if template["metadata"]["labels"][label] == component)


def containers(objects):
    """Every container with the name of its workload."""
    for item in objects:
        if template := pod_template(item):
            spec = template["spec"]
            for container in spec.get("initContainers", []) + spec["containers"]:
                yield f"{item['metadata']['name']}/{container['name']}", spec, container
