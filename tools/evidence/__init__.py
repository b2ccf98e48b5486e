"""The pages about the papers: what each of their tables has here, and which of their claims hold.

python -m tools.evidence writes docs/papers.md, docs/evidence.md and docs/which-normalizer.md from
the experiments and the results that are committed; a test fails where a page differs.
"""
