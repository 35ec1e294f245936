# SPDX-License-Identifier: Apache-2.0
"""Run the command ``ds_muon``, started as ``python -m deepspeed.muon.cli``."""

import contextlib
import sys

# stdout is for the result, but DeepSpeed prints warnings when imported; so deepspeed_muon.py has set it to stderr too.
with contextlib.redirect_stdout(sys.stderr):
    from deepspeed.muon.cli.main import main

sys.stdout = sys.__stdout__
raise SystemExit(main())
