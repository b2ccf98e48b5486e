"""Comparing normalizers with evidence: from one file, by many runs, to one report.

    experiment.toml ──reading──> Experiment ──> Runs ──sweep, train──> Results, in a store
    Results ──statistics──> Comparisons ──report──> one page

Training never computes statistics, statistics never train, and the report computes nothing:
between the stages travel the frozen records of ``experiment`` and ``results``.
"""
