# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine: network namespaces joined by a slow link. Needs root and iproute2."""

import contextlib
import os
import subprocess
from collections.abc import Iterator

from benchmarks import report
from benchmarks.ranks import Place


@contextlib.contextmanager
def two_hosts(rate: str) -> Iterator[list[tuple[str, ...]]]:
    """Prefixes of commands that run on either host; in the end both go, with what still runs in them.

    Args:
        rate: of the link as tc writes it, such as 1gbit.
    """
    names = [f"dsmuon{os.getpid()}-{host}" for host in "ab"]

    def ip(*words: str) -> str:
        return subprocess.run(["ip", *words], check=True, stdout=subprocess.PIPE, text=True).stdout

    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"10.213.0.{number}/24", "dev", "link0")
            for device in ("lo", "link0"):
                ip("-n", name, "link", "set", device, "up")
            # A packet that the sender offloads whole has up to 64 KiB, so the token bucket must hold more than one.
            limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "link0", *limit], check=True)
        yield [("ip", "netns", "exec", name) for name in names]
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                for pid in ip("netns", "pids", name).split():
                    subprocess.run(["kill", "-9", pid])
                ip("netns", "delete", name)


def places(world: int, hosts: list[tuple[str, ...]]) -> list[Place]:
    """Where each rank runs: the first half on the first host, each on one core of its host's share of the machine."""
    per_host, found = world // len(hosts), []
    for rank in range(world):
        prefix = *hosts[rank // per_host], "taskset", "--cpu-list", str(rank * report.cores() // world)
        environment = {"LOCAL_RANK": str(rank % per_host), "LOCAL_WORLD_SIZE": str(per_host)}
        found.append(Place(prefix, environment | {"GLOO_SOCKET_IFNAME": "link0", "MASTER_ADDR": "10.213.0.1"}))
    return found
