# SPDX-License-Identifier: Apache-2.0
"""Capture what the package logs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(level: int = logging.NOTSET) -> Iterator[list[str]]:
    """Yield a list that collects the package's messages of at least this level, on this rank, within the context."""
    said: list[str] = []
    handler, logger = logging.Handler(level), logging.getLogger("deepspeed.muon")
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
