# SPDX-License-Identifier: Apache-2.0
"""Every case of docs/reference/wrong-configurations.md gets its message, before anything is allocated."""

import re

from helpers.distributed import run
from helpers.paths import ROOT
from helpers.wrong_configs import attempt_all, table


def test_each_is_refused_in_our_words_before_anything_is_allocated() -> None:
    results = run(attempt_all, 1)[0]
    assert len({title for title, _, _ in results}) == len(results) >= 60
    for title, message, allocated in results:
        assert re.match(r"(MuonConfigError|UnsupportedError|ValueError): ", message), (title, message)
        keys = re.findall(r'"(\w[\w-]*)":', title)
        assert not keys or any(key in message for key in keys), (title, message)
        assert not allocated, title
    assert table(results) in (ROOT / "docs" / "reference" / "wrong-configurations.md").read_text(), (
        "run python docs/generate.py"
    )
