"""The code of docs/export.md and docs/training-libraries.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.integration
@pytest.mark.parametrize(
    ("page", "packages"),
    [
        ("export.md", ["onnx", "onnxruntime", "onnxscript", "safetensors"]),
        ("training-libraries.md", ["lightning", "transformers", "accelerate", "timm"]),
    ],
)
def test_the_code_of_a_page_runs(
    page: str, packages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in packages:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    text = (DOCS / page).read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": __name__}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, page, "exec"), names)
