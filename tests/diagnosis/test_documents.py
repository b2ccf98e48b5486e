"""The code of docs/diagnosis.md: a detector, a segmentation network, a model with two inputs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "diagnosis.md"


def test_the_code_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """First users had no example of a model that is no classifier, and gave up at the loss."""
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(block, names)
        said = capsys.readouterr().out
        assert "Diagnosis of" in said
        assert "The loss is" in said
        assert "How much worse the model is" not in said  # losses were compared


def test_the_code_of_the_page_on_detectors_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchvision")
    names: dict[str, Any] = {}
    text = (DOCS / "detectors.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)
    said = capsys.readouterr().out
    assert "frozen, by nk.freeze(model, 'statistics'), they would be nearer" in said
    assert "['classification_head.conv', 'regression_head.conv']" in said
