"""Hosts of one machine: network namespaces on one switch, each with an address of its own. Nothing outside them is touched.

Names are known as in a cluster: `/etc/netns/NAME/hosts` is `/etc/hosts` within namespace NAME.
"""

import os
import shutil
import subprocess
from pathlib import Path

NETWORK = "10.77.31"


def ip(*arguments):
    """Runs `ip`."""
    subprocess.run(["ip", *map(str, arguments)], check=True, capture_output=True, text=True, timeout=30)


class Hosts:
    """A switch and the hosts behind it."""

    def __init__(self):
        self.mark = f"baton{os.getpid()}"
        self.switch = f"{self.mark}-switch"
        self.addresses = {}
        self.processes = {}
        ip("netns", "add", self.switch)
        try:
            ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
            ip("-n", self.switch, "link", "set", "switch", "up")
        except subprocess.CalledProcessError:
            ip("netns", "delete", self.switch)
            raise

    def namespace(self, name):
        """The namespace of a host."""
        return f"{self.mark}-{name}"

    def add(self, name):
        """A host with an address of its own, which is returned."""
        space, number = self.namespace(name), len(self.addresses) + 1
        ip("netns", "add", space)
        self.addresses[name] = address = f"{NETWORK}.{number}"
        ip("-n", self.switch, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("-n", self.switch, "link", "set", f"port{number}", "master", "switch", "up")
        ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
        ip("-n", space, "link", "set", "eth0", "up")
        ip("-n", space, "link", "set", "lo", "up")
        return address

    def know(self, names):
        """Lets every host resolve these names: name -> host."""
        lines = ["127.0.0.1 localhost", *(f"{self.addresses[host]} {name}" for name, host in names.items())]
        for host in self.addresses:
            place = Path("/etc/netns") / self.namespace(host)
            place.mkdir(parents=True, exist_ok=True)
            (place / "hosts").write_text("\n".join(lines) + "\n")

    def start(self, name, command, environment, log):
        """Starts a process on a host. Its output goes to the file `log`."""
        within = ["ip", "netns", "exec", self.namespace(name), *map(str, command)]
        with log.open("w") as output:
            process = subprocess.Popen(
                within, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
            )
        self.processes[name] = process
        return process

    def call(self, name, *command, timeout=60):
        """Runs a command on a host to its end."""
        within = ["ip", "netns", "exec", self.namespace(name), *map(str, command)]
        return subprocess.run(within, capture_output=True, text=True, timeout=timeout, check=False)

    def close(self):
        """Ends the processes and takes the hosts away."""
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
        for name in self.addresses:
            ip("netns", "delete", self.namespace(name))
            shutil.rmtree(Path("/etc/netns") / self.namespace(name), ignore_errors=True)
        ip("netns", "delete", self.switch)
