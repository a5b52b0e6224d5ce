"""Ten minutes of load on one pipeline: every request is answered, and no process grows.

    cargo build --release --bin baton
    python3 tests/soak.py target/release/baton [SECONDS]

Starts `baton up --stages 4` with the demo model, loads it with `baton bench serve`, and reads the resident memory of every process
every second. The first fifth of the time is for warming up. Ends with 1 when a process's median over the last fifth is more than 3% and
2 MiB above that over the second one, or when a request failed.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

GROWTH, SLACK = 1.03, 2 << 20
# The prefix cache is full early: it is part of the pool, which is allocated at the start.
LOAD = "--concurrency 64 --prompt-tokens 16-700 --output-tokens 16-200 --ignore-eos --temperature 0.7".split()


def resident(pid):
    """Bytes of memory of a process; none when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return None
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def processes(pid):
    """The coordinator and its stages, by name."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = {child for task in tasks for child in (task / "children").read_text().split()} | set(children)
    found = {"coordinator": pid}
    for child in children:
        words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        found[f"stage {words[words.index('--index') + 1]}"] = int(child)
    return dict(sorted(found.items()))


def wait_until_ready(server, output):
    """The address of a server that is ready."""
    for _ in range(600):
        found = re.search(r"http://127\.0\.0\.1:\d+(?=\D)", output.read_text())
        try:
            if found and urllib.request.urlopen(f"{found[0]}/ready", timeout=5).status == 200:
                return found[0]
        except OSError:
            pass
        if server.poll() is not None:
            break
        time.sleep(0.1)
    sys.exit("baton up did not become ready")


def main():
    binary, seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 600.0
    with tempfile.TemporaryDirectory() as place:
        output = Path(place, "stdout")
        with output.open("w") as stdout:
            server = subprocess.Popen([binary, "up", "--stages", "4", "--port", "0", "--threads", "1"], stdout=stdout)
        try:
            url = wait_until_ready(server, output)
            found = processes(server.pid)
            assert len(found) == 5, found
            command = [binary, "bench", "serve", "--url", url, "--seconds", str(seconds), "--json", *LOAD]
            load = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            reading, samples = True, {name: [] for name in found}

            def read():
                while reading:
                    for name, pid in found.items():
                        samples[name].append(resident(pid))
                    time.sleep(1)

            reader = threading.Thread(target=read)
            reader.start()
            report = json.loads(load.communicate()[0])
            reading = False
            reader.join()
            pipeline = json.load(urllib.request.urlopen(f"{url}/pipeline", timeout=5))
        finally:
            server.terminate()
            server.wait()
    print(f"{report['completed']} requests answered, {report['failed']} failed, {report['seconds']:.0f} s")
    blocks = pipeline["kv_blocks"]
    print(f"blocks free: {blocks['free']} of {blocks['total']}; preemptions: {pipeline['preemptions']}")
    good = report["failed"] == 0 and blocks["free"] == blocks["total"]
    for name, values in samples.items():
        if None in values:
            sys.exit(f"{name} ended")
        fifth = len(values) // 5
        early, late = statistics.median(values[fifth : 2 * fifth]), statistics.median(values[-fifth:])
        flat = late <= max(early * GROWTH, early + SLACK)
        print(f"{name}: {early / 2**20:.1f} MiB, then {late / 2**20:.1f} MiB{'' if flat else ', it grows'}")
        good = good and flat
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
