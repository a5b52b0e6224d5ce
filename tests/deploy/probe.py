"""Asks what a kubelet asks. Arguments: an address and a probe as JSON. Exit status 0: the probe succeeds."""

import json
import sys
import urllib.error
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def http(address, found):
    """An httpGet probe: any answer below 400."""
    try:
        with urllib.request.urlopen(f"http://{address}:{found['port']}{found['path']}", timeout=5) as response:
            return response.status < 400
    except (urllib.error.URLError, OSError):
        return False


def health(address, found):
    """A grpc probe: SERVING."""
    with grpc.insecure_channel(f"{address}:{found['port']}") as channel:
        request = health_pb2.HealthCheckRequest(service=found.get("service", ""))
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
        except grpc.RpcError:
            return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING


if __name__ == "__main__":
    place, probe = sys.argv[1], json.loads(sys.argv[2])
    succeeds = http(place, probe["httpGet"]) if "httpGet" in probe else health(place, probe["grpc"])
    sys.exit(0 if succeeds else 1)
