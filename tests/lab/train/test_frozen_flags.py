"""Test suites of torch forbid to set cuDNN's flags; training sets them all the same."""

from __future__ import annotations

import pytest
import torch

from normkit.core.precision import deterministic_cudnn


def test_where_flags_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs failed in any process that had imported torch.testing's internals."""
    names = torch.backends.ContextProp.__set__.__globals__
    monkeypatch.setitem(names, "flags_frozen", lambda: True)
    with pytest.raises(RuntimeError, match="not allowed"):
        torch.backends.cudnn.benchmark = False
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    for wanted in (True, False):
        with deterministic_cudnn(wanted):
            assert torch.backends.cudnn.deterministic is wanted
            assert torch.backends.cudnn.benchmark is not wanted
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == before
