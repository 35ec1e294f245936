# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed.muon.cli``, the same as ``ds_muon``."""

import contextlib
import sys

# DeepSpeed prints warnings at its import. Since then its output goes to stderr (deepspeed_muon.py).
with contextlib.redirect_stdout(sys.stderr):
    from deepspeed.muon.cli.main import main

sys.stdout = sys.__stdout__
raise SystemExit(main())
