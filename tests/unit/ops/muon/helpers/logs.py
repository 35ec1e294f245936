# SPDX-License-Identifier: Apache-2.0
"""What the package logs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(level: int = logging.NOTSET) -> Iterator[list[str]]:
    """The messages of the package from this level on that are logged meanwhile, on this rank."""
    said: list[str] = []
    handler, logger = logging.Handler(level), logging.getLogger("deepspeed.muon")
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
