# SPDX-License-Identifier: Apache-2.0
"""The logger ``deepspeed.muon``: level INFO, to stderr unless the application configures logging; lists in texts."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

#: :func:`log_if_slow` logs what takes at least this many seconds.
SLOW = 2.0

logger = logging.getLogger("deepspeed.muon")

if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)
if not logger.hasHandlers():
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
    logger.addHandler(_handler)
    logger.propagate = False


@contextmanager
def log_if_slow(what: str, is_logging_rank: bool) -> Iterator[None]:
    """Log "``what`` took 2.3 s" if the ``with`` block takes at least :data:`SLOW` seconds and this rank logs."""
    began = time.perf_counter()
    yield
    if (took := time.perf_counter() - began) >= SLOW and is_logging_rank:
        logger.info("deepspeed-muon: %s took %.1f s", what, took)


def listed(names: Sequence[str], most: int) -> str:
    """Return the first ``most`` names as a text, separated by commas, with "..." at the end if there are more."""
    return ", ".join([*names[:most], *(["..."] if len(names) > most else [])])
