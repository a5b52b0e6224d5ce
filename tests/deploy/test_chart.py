"""The chart: renders for every values file, every object is valid, every container is probed, limited and unprivileged."""

import json
import re
import subprocess

import jsonschema
import kubernetes_validate
import pytest
from cloudcoil.models.prometheus_operator import v1 as monitors

import chart
from conftest import program

VERSIONS = ["1.32.0", "1.35.0", kubernetes_validate.latest_version()]
LWS = json.loads((chart.ROOT / "tests/deploy/lws.schema.json").read_text())


@pytest.fixture(scope="module", params=chart.VALUES)
def objects(request):
    """The objects of one values file."""
    return chart.render(request.param)


def unknown(given, understood, path=""):
    """Paths of what was given and is not in what a lenient model understood of it."""
    if isinstance(given, dict):
        for key, value in given.items():
            if key not in understood:
                yield f"{path}.{key}"
            else:
                yield from unknown(value, understood[key], f"{path}.{key}")
    elif isinstance(given, list):
        for number, (one, other) in enumerate(zip(given, understood, strict=True)):
            yield from unknown(one, other, f"{path}[{number}]")


def check_monitor(item):
    """Checks an object of Prometheus Operator."""
    model = getattr(monitors, item["kind"]).model_validate(item)
    understood = model.model_dump(by_alias=True, exclude_unset=True, mode="json")
    assert list(unknown(item, understood)) == []


def check_lws(item, version):
    """Checks a LeaderWorkerSet: its own fields, then the pod template with Kubernetes' schema."""
    jsonschema.validate(item, LWS)
    template = {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": {"name": "stage"},
        "template": chart.pod_template(item),
    }
    kubernetes_validate.validate(template, version, strict=True)


def check(item, version):
    """Checks one object with the schema of its kind."""
    group = item["apiVersion"].rpartition("/")[0]
    if group == "monitoring.coreos.com":
        check_monitor(item)
    elif group == "leaderworkerset.x-k8s.io":
        check_lws(item, version)
    else:
        kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(objects, version):
    for item in objects:
        check(item, version)


@pytest.mark.parametrize(
    "item",
    [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"prots": []}},
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PodMonitor",
            "metadata": {"name": "a"},
            "spec": {"selector": {}, "podMetricsEndpoints": [{"prot": "metrics"}]},
        },
        {
            "apiVersion": "leaderworkerset.x-k8s.io/v1",
            "kind": "LeaderWorkerSet",
            "metadata": {"name": "a"},
            "spec": {"leaderWorkerTemplate": {"sice": 3, "workerTemplate": {"spec": {"containers": []}}}},
        },
    ],
    ids=lambda item: item["kind"],
)
def test_the_checks_notice_a_wrong_field(item):
    with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError, AssertionError)):
        check(item, VERSIONS[-1])


def test_every_container_has_three_probes(objects):
    for name, _, container in chart.containers(objects):
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert probe in container, f"{name} has no {probe}"
            found = container[probe]
            if "grpc" in found:
                assert found["grpc"]["port"] in ports.values(), f"{name}: {probe} asks a port that is not open"
            else:
                assert found["httpGet"]["port"] in ports, f"{name}: {probe} asks a port that is not open"


def test_every_container_is_limited_and_unprivileged(objects):
    for name, pod, container in chart.containers(objects):
        for bound in ("requests", "limits"):
            assert {"cpu", "memory"} <= container["resources"][bound].keys(), f"{name}: {bound}"
        security = container["securityContext"]
        assert security["privileged"] is False, name
        assert security["allowPrivilegeEscalation"] is False, name
        assert security["readOnlyRootFilesystem"] is True, name
        assert security["capabilities"]["drop"] == ["ALL"], name
        assert set(security["capabilities"].get("add", [])) <= {"IPC_LOCK"}, name
        assert security["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0, name
        assert pod["automountServiceAccountToken"] is False, name
        assert not any(pod.get(field) for field in ("hostNetwork", "hostPID", "hostIPC")), name


def test_every_pod_stops_in_order(objects):
    for name, pod, container in chart.containers(objects):
        pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert 0 < pause < pod["terminationGracePeriodSeconds"], name


def test_services_policies_and_budgets_find_their_pods(objects):
    pods = [template["metadata"]["labels"] for template in filter(None, map(chart.pod_template, objects))]
    open_ports = {
        port for _, _, container in chart.containers(objects) for port in (p["name"] for p in container["ports"])
    }
    for item in objects:
        spec = item.get("spec", {})
        match item["kind"]:
            case "Service":
                selector = spec["selector"]
                assert {port["targetPort"] for port in spec["ports"]} <= open_ports
            case "PodDisruptionBudget":
                selector = spec["selector"]["matchLabels"]
            case "NetworkPolicy":
                selector = spec["podSelector"].get("matchLabels", {})
            case _:
                continue
        assert any(selector.items() <= labels.items() for labels in pods), f"{item['kind']} {item['metadata']['name']}"


def test_stages_dial_the_services_that_are_there(objects):
    services = {item["metadata"]["name"]: item["spec"] for item in objects if item["kind"] == "Service"}
    for _, _, container in chart.containers(objects):
        for argument in container["args"]:
            if found := re.fullmatch(r"--coordinator=http://([^:]+):(\d+)", argument):
                service = services[found[1]]
                assert int(found[2]) in [port["port"] for port in service["ports"]]
                assert service["publishNotReadyAddresses"] is True


def test_the_program_knows_every_argument(objects):
    for name, _, container in chart.containers(objects):
        command, *arguments = container["args"]
        known = subprocess.run([program(), command, "--help"], capture_output=True, text=True, check=True).stdout
        flags = set(re.findall(r"--[a-z][a-z-]*", known))
        for argument in arguments:
            assert argument.partition("=")[0] in flags, f"{name}: {argument}"


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("pipeline.stages=0", "/pipeline/stages"),
        ("stages.backend=cuda", "/stages/gpu/count"),
        ("stages.colour=red", "'colour' not allowed"),
        ("pipeline.split=3\\,3", "does not name pipeline.stages = 3"),
        ("model.source=pvc", "model.pvc.claimName is empty"),
        ("podSecurityContext.runAsUser=0", "/podSecurityContext/runAsUser"),
        ("stages.resources.limits.memory=null", "'memory'"),
    ],
)
def test_a_bad_value_is_refused_by_name(setting, says):
    done = chart.helm("template", chart.RELEASE, chart.CHART, "--set", setting)
    assert done.returncode != 0
    assert says in done.stderr


@pytest.mark.parametrize(
    ("settings", "volume"),
    [
        (["model.source=pvc", "model.pvc.claimName=glm"], "persistentVolumeClaim"),
        (["model.source=hostPath", "model.hostPath.path=/mnt/glm"], "hostPath"),
        (["model.source=image", "model.image.reference=registry.example/glm:1"], "image"),
    ],
)
def test_the_model_is_mounted_read_only(settings, volume):
    objects = chart.render(settings=settings)
    for item in objects:
        check(item, VERSIONS[-1])
    for name, pod, container in chart.containers(objects):
        assert [v for v in pod["volumes"] if v["name"] == "model" and volume in v], name
        assert {"name": "model", "mountPath": "/models", "readOnly": True} in container["volumeMounts"], name
