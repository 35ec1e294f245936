# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed.muon.cli``, the same as ``ds_muon``."""

import contextlib
import sys

# DeepSpeed prints warnings when it is imported. For the same reason deepspeed_muon.py has set sys.stdout to stderr.
with contextlib.redirect_stdout(sys.stderr):
    from deepspeed.muon.cli.main import main

sys.stdout = sys.__stdout__
raise SystemExit(main())
