# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed.muon.cli``, the same as ``ds_muon``."""

from deepspeed.muon.cli.main import main

raise SystemExit(main())
