# SPDX-License-Identifier: Apache-2.0
"""Choose the port on which the ranks of a launch meet."""

import os
import random
import socket
from contextlib import suppress

WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
"""Of pytest. Each has ports of its own, because rank 0 listens only seconds after its port was chosen."""


def free_port() -> int:
    """Return a port on which nothing listens, below those that Linux takes for outgoing connections, such as gloo's."""
    while True:
        port = random.SystemRandom().randrange(20_000 + WORKER, 32_000, WORKERS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
