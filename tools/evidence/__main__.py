"""Write the pages about the papers from what is committed.

python -m tools.evidence              docs/papers.md, docs/evidence.md, docs/which-normalizer.md
"""

from __future__ import annotations

from pathlib import Path

from tools.evidence.papers import papers_page

DOCS = Path(__file__).parents[2] / "docs"


def main() -> int:
    (DOCS / "papers.md").write_text(papers_page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
