"""A pipeline over several hosts, started with exactly what the chart renders: arguments, environment, names, probes."""

import json
import os
import re
import shutil
import signal
import sys
import time

import pytest

import chart
from conftest import program
from hosts import Hosts

HERE = chart.ROOT / "tests/deploy"
MODEL = chart.ROOT / "tests/models/demo"
PROMPT = "Repeat: able buffer cache error thread lock\nCopy:"
START_SECONDS = 60

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces want root and iproute2"
)


def wait_for(condition, what):
    """Waits until a condition holds."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.1)
    pytest.fail(f"{what} did not come within {START_SECONDS} s")


def expand(text, environment):
    """What the kubelet makes of $(NAME)."""
    return re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], text)


class Cluster:
    """Hosts that play the pods of a rendered chart."""

    def __init__(self, place, settings=()):
        self.place = place
        self.objects = chart.render("values-laptop.yaml", settings=[f"model.path={MODEL}", *settings])
        self.hosts = Hosts()
        sets = [item for item in self.objects if item["kind"] == "StatefulSet"]
        workloads = {item["metadata"]["labels"]["app.kubernetes.io/component"]: item["spec"]["replicas"] for item in sets}
        self.stages = [f"stage-{index}" for index in range(workloads["stage"])]
        standby = [f"standby-{number}" for number in range(workloads.get("standby", 0))]
        for name in ["coordinator", *self.stages, *standby, "client"]:
            self.hosts.add(name)
        services = [item["metadata"]["name"] for item in self.objects if item["kind"] == "Service"]
        self.hosts.know({name: "coordinator" for name in services if name.endswith("-coordinator")})

    def container(self, name):
        """The container that a host runs."""
        return chart.of_component(self.objects, name.partition("-")[0])["spec"]["containers"][0]

    def start(self, name):
        """Starts a pod's container."""
        container, ordinal = self.container(name), name.rpartition("-")[2]
        fields = {
            "status.podIP": self.hosts.addresses[name],
            "metadata.labels['apps.kubernetes.io/pod-index']": ordinal,
        }
        environment = {}
        for variable in container.get("env", []):
            source = variable.get("valueFrom")
            environment[variable["name"]] = fields[source["fieldRef"]["fieldPath"]] if source else variable["value"]
        arguments = [expand(argument, environment) for argument in container["args"]]
        return self.hosts.start(name, [program(), *arguments], environment, self.place / f"{name}.log")

    def probe(self, name, which):
        """Whether a probe of the container succeeds, asked over the network."""
        container = self.container(name)
        probe = container[which]
        if "httpGet" in probe:
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            probe = {"httpGet": {**probe["httpGet"], "port": ports[probe["httpGet"]["port"]]}}
        address, question = self.hosts.addresses[name], json.dumps(probe)
        return self.hosts.call("client", sys.executable, HERE / "probe.py", address, question).returncode == 0

    def serves(self, name):
        """Whether a stage of the pipeline answers at this host, and the pipeline is ready."""
        state = json.loads(self.curl("/pipeline").stdout)
        addresses = [stage.get("metrics") for stage in state["stages"]]
        return f"{self.hosts.addresses[name]}:7002" in addresses and self.probe("coordinator", "readinessProbe")

    def curl(self, path, *options):
        """Asks the API from the client's host."""
        url = f"http://{self.hosts.addresses['coordinator']}:8000{path}"
        return self.hosts.call("client", "curl", "--silent", "--show-error", "--max-time", "30", *options, url)

    def complete(self, **fields):
        """One completion."""
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, **fields}
        done = self.curl("/v1/completions", "--json", json.dumps(body))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def logs(self):
        """What the processes said, for a failure's report."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.place.glob("*.log")))


@pytest.fixture
def cluster(tmp_path):
    """A cluster whose pods are not started yet."""
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        made.hosts.close()
        print(made.logs())


@pytest.fixture
def cluster_with_standby(tmp_path):
    """As `cluster`, with one stage that stands by."""
    made = Cluster(tmp_path, ["stages.standby=1"])
    try:
        yield made
    finally:
        made.hosts.close()
        print(made.logs())


def test_a_request_runs_over_hosts_that_share_only_a_network(cluster):
    # Stages first: they are alive, and unready, while nobody answers their call.
    for name in cluster.stages:
        cluster.start(name)
    for name in cluster.stages:
        wait_for(lambda name=name: cluster.probe(name, "startupProbe"), f"the start of {name}")
        assert cluster.probe(name, "livenessProbe")
        assert not cluster.probe(name, "readinessProbe")

    cluster.start("coordinator")
    wait_for(lambda: cluster.probe("coordinator", "readinessProbe"), "the pipeline")
    for name in ["coordinator", *cluster.stages]:
        for which in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert cluster.probe(name, which), f"{name}: {which}"

    answer = json.loads(cluster.complete())
    assert answer["choices"][0]["text"].startswith(" able buffer cache error thread lock"), answer

    state = json.loads(cluster.curl("/pipeline").stdout)
    for index, stage in enumerate(state["stages"]):
        address = cluster.hosts.addresses[f"stage-{index}"]
        assert stage["index"] == index
        assert stage["metrics"] == f"{address}:7002", stage
        shown = cluster.hosts.call("client", "curl", "--silent", f"http://{address}:7002/metrics").stdout
        steps = re.search(rf'^baton_stage_steps_total{{stage="{index}"}} (\d+)$', shown, re.MULTILINE)
        assert steps and int(steps[1]) > 0, shown


def test_pods_stop_when_they_are_told(cluster):
    names = ["coordinator", *cluster.stages]
    for name in names:
        cluster.start(name)
    wait_for(lambda: cluster.probe("coordinator", "readinessProbe"), "the pipeline")
    processes = {name: cluster.hosts.processes[name] for name in names}
    processes["coordinator"].send_signal(signal.SIGTERM)
    # The stages go with the coordinator, and Kubernetes starts them again for the next one.
    for name, process in processes.items():
        assert process.wait(timeout=10) == 0, name


def test_a_standby_takes_a_lost_stages_place(cluster_with_standby):
    cluster = cluster_with_standby
    for name in ["coordinator", *cluster.stages, "standby-0"]:
        cluster.start(name)
    wait_for(lambda: cluster.probe("coordinator", "readinessProbe"), "the pipeline")
    before = json.loads(cluster.complete())["choices"][0]["text"]
    for which in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert cluster.probe("standby-0", which), which
    cluster.hosts.processes["stage-1"].kill()
    cluster.hosts.processes["stage-1"].wait()
    wait_for(lambda: cluster.probe("standby-0", "livenessProbe") and cluster.serves("standby-0"), "the standby's place")
    assert json.loads(cluster.complete())["choices"][0]["text"] == before
