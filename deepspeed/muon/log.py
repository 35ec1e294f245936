# SPDX-License-Identifier: Apache-2.0
"""The logger ``deepspeed.muon``: INFO, on stderr unless the application has set up logging."""

import logging

logger = logging.getLogger("deepspeed.muon")

if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)
if not logger.hasHandlers():
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
    logger.addHandler(_handler)
    logger.propagate = False
