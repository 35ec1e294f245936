# SPDX-License-Identifier: Apache-2.0
"""The largest attention logit of each head, against loops over single pairs; the factors of QK-clip."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon.qk_clip import logits
from deepspeed.muon.qk_clip.logits import Visible, clip_factors, largest_logits

GENERATOR = torch.Generator().manual_seed(0)
QUERY = torch.randn(2, 4, 21, 5, generator=GENERATOR)
KEY = torch.randn(2, 2, 21, 5, generator=GENERATOR)
MASK = torch.rand(2, 1, 21, 21, generator=GENERATOR) > 0.5
DOCUMENT = torch.tensor([0] * 8 + [1] * 13)
BIASES = torch.rand(MASK.shape, generator=GENERATOR)


def sees(case: dict[str, Any], sample: int, i: int, j: int) -> bool:
    """By the words of :class:`Visible`."""
    i += case.get("shift", 0)
    left, right = case.get("window", (-1, -1))
    return (
        not (case.get("is_causal") and j > i)
        and not (0 <= left < i - j)
        and not (0 <= right < j - i)
        and not ("documents" in case and DOCUMENT[i] != DOCUMENT[j])
        and not ("mask" in case and not MASK[sample, 0, i, j])
    )


def norms(query: Tensor, key: Tensor) -> Tensor:
    return query.norm() * key.norm()


def expected(case: dict[str, Any], queries: Any = range(21), product: Any = torch.dot) -> Tensor:
    found = torch.full((4,), -math.inf)
    for sample, head, i, j in itertools.product(range(2), range(4), queries, range(21)):
        if sees(case, sample, i, j):
            found[head] = max(found[head], 0.5 * product(QUERY[sample, head, i], KEY[sample, head // 2, j]))
    return found


CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"is_causal": True},
    "later": {"is_causal": True, "shift": -3},
    "window": {"is_causal": True, "window": (2, 0)},
    "both sides": {"window": (1, 3)},
    "documents": {"is_causal": True, "documents": (DOCUMENT, DOCUMENT)},
    "mask": {"mask": MASK},
    "floats": {"mask": torch.where(MASK, BIASES, torch.finfo(torch.float32).min)},
    "floats, -inf": {"mask": torch.where(MASK, BIASES, -math.inf)},
    "floats, -1e9": {"mask": torch.where(MASK, BIASES, -1e9)},
    "floats, -1e4": {"mask": torch.where(MASK, BIASES - 4000.0, -1e4).bfloat16()},
    "floats, fp16": {"mask": torch.where(MASK, BIASES, -1e4).half()},
    "causal mask": {"mask": MASK, "is_causal": True},
}


@pytest.mark.parametrize("chunk", [2**24, 2 * 4 * 21 * 5])
@pytest.mark.parametrize("case", CASES)
def test_the_largest_logit_is_that_of_all_pairs(case: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits, "CHUNK", chunk)
    settings, visible = CASES[case], Visible(**CASES[case])
    exact = largest_logits(QUERY, KEY, 0.5, visible)
    assert torch.allclose(exact, expected(settings), atol=1e-5)
    sampled = [largest_logits(QUERY, KEY, 0.5, visible, "sampled", turn) for turn in range(logits.SHARE)]
    assert torch.allclose(sampled[3], expected(settings, range(3, 21, logits.SHARE)), atol=1e-5)
    assert torch.allclose(torch.stack(sampled).amax(0), exact, atol=1e-5), "every query has its turn"
    bound = largest_logits(QUERY, KEY, 0.5, visible, "bound")
    assert (bound >= exact).all() and torch.allclose(bound, expected(settings, product=norms), atol=1e-5)


def test_a_logit_beyond_fp16_is_finite_there() -> None:
    query, key = (300 * torch.ones(1, 1, 1, 2, dtype=torch.float16) for _ in range(2))
    assert largest_logits(query, key, 1.0, Visible()).item() == 180000.0


def test_factors_take_logits_to_the_threshold() -> None:
    factors = clip_factors([50.0, 400.0, 99.0, 200.0, math.inf, math.nan], 3, tau=100.0, alpha=0.25)
    assert factors.rotary == [1.0, 0.25, 1.0, 0.5, 1.0, 1.0]
    assert factors.query == pytest.approx([1.0, 0.25**0.25, 1.0, 0.5**0.25, 1.0, 1.0])
    assert factors.key == pytest.approx([0.25**0.75, 0.5**0.75, 1.0])
