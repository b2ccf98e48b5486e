"""A run as text, Markdown or JSON."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.layers import (
    BASELINE,
    LIMIT,
    NORMKIT,
    RESTLESS,
    BenchmarkRun,
    LayerRow,
    LayerTable,
    StepCost,
)

OUTSIDE = "*"
MISSING = "–"

# what is shown of a cell, given that of nn.BatchNorm2d
Show = Callable[[StepCost, StepCost], str]


def _times(ours: float | None, baseline: float | None) -> str:
    if ours is None:
        return MISSING
    ratio = f"{ours / baseline:5.2f}x" if baseline else MISSING
    return f"{1000 * ours:8.3f} {ratio}"


def _grids(table: LayerTable) -> list[tuple[str, Show]]:
    """The grids to show for a table: what each says, and its cells."""
    on_gpu = any(cell.peak_bytes is not None for row in table.rows for cell in row.cells.values())
    grids: list[tuple[str, Show]] = [
        (
            "Training step: forward, and backward to the input and all parameters. "
            f"Milliseconds, and times {BASELINE} in the same turns"
            + (" (events around steps: launches and waiting for the host included)" * on_gpu),
            lambda cell, base: _times(cell.seconds, base.seconds),
        )
    ]
    if on_gpu:
        grids += [
            (
                "The same step replayed as a CUDA graph: GPU time alone. "
                f"Milliseconds, and times {BASELINE}",
                lambda cell, base: _times(cell.replay_seconds, base.replay_seconds),
            ),
            (
                "Peak memory of a step beyond input and gradient, MiB",
                lambda cell, base: (
                    MISSING if cell.peak_bytes is None else f"{cell.peak_bytes / 2**20:.1f}"
                ),
            ),
            (
                "Kernels launched by a step",
                lambda cell, base: MISSING if cell.kernels is None else str(cell.kernels),
            ),
        ]
    grids.append(
        (
            "Kept for backward, bytes per byte of input (each storage once, parameters left out)",
            lambda cell, base: f"{cell.saved_per_input_byte:.2f}",
        )
    )
    return grids


def _lines(table: LayerTable, show: Show) -> list[list[str]]:
    """Header and rows of a grid."""
    columns = table.contestants
    lines = [["layer", *columns]]
    for row in table.rows:
        name = row.layer + ("" if row.family else OUTSIDE)
        if not row.cells:
            lines.append([name, *[MISSING] * len(columns)])
            continue
        base = row.cells[BASELINE]
        shown = (show(row.cells[c], base) if c in row.cells else MISSING for c in columns)
        lines.append([name, *shown])
    return lines


def _floor(table: LayerTable, floor: float) -> str:
    """How far a GPU is from eight passes over memory at the rate of a copy."""
    near = [_near(row, floor) for row in table.rows]
    return (
        f"Memory floor, 8 passes at the measured copy rate: {1000 * floor:.3f} ms. "
        "Replay of the normkit layer over floor: " + ", ".join(text for text in near if text)
    )


def _near(row: LayerRow, floor: float) -> str:
    cell = row.cells.get(NORMKIT)
    if cell is None or cell.replay_seconds is None:
        return ""
    return f"{row.layer} {cell.replay_seconds / floor:.2f}x"


def _notes(table: LayerTable) -> list[str]:
    notes = [f"{row.layer}: {row.note}" for row in table.rows if row.note]
    if any(not row.family for row in table.rows):
        notes.append(
            f"{OUTSIDE} outside the family: not three passes forward and five backward, "
            f"so not held to {LIMIT}x"
        )
    if table.unrest > RESTLESS:
        notes.append(
            f"The machine was busy: {BASELINE} took up to {table.unrest:.1f} times as long beside "
            "one layer as beside another. Repeat this when it is idle"
        )
    if table.floor is None:
        notes.append(f"Kernels launched, peak memory, graph replay: {MISSING} (on a GPU only)")
    else:
        notes.append(_floor(table, table.floor))
    return notes


def environment(run: BenchmarkRun) -> str:
    return ", ".join(f"{name} {value}" for name, value in run.environment.items())


def text(table: LayerTable) -> str:
    """A table for the terminal."""
    output = [f"== {table.spec} =="]
    for title, show in _grids(table):
        lines = _lines(table, show)
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        output += ["", title + ":"]
        for line in lines:
            first, *rest = (f"{c:>{w}}" for c, w in zip(line, widths, strict=True))
            output.append("  ".join([line[0].ljust(len(first)), *rest]))
    return "\n".join([*output, "", *_notes(table)])


def markdown(run: BenchmarkRun) -> str:
    output = ["# normkit benchmark", "", f"    {run.command}", ""]
    output += [environment(run), "", run.summary(), ""]
    if len(run.tables) > 1:
        title = f"A training step of each layer in each setting, times {BASELINE} in the same turns"
        output += [f"## {title}", "", *_markdown_grid(_glance(run)), ""]
    for table in run.tables:
        output += [f"## {table.spec}", ""]
        for title, show in _grids(table):
            output += [title + ".", "", *_markdown_grid(_lines(table, show)), ""]
        output += [f"- {note}" for note in _notes(table)] + [""]
    output += [f"- {remark}" for remark in run.remarks]
    return "\n".join(output).rstrip() + "\n"


def _glance(run: BenchmarkRun) -> list[list[str]]:
    """Each layer's time over that of the baseline: a column for each table."""
    specs = [str(table.spec) for table in run.tables]
    lines = [["layer", *specs]]
    for rows in zip(*(table.rows for table in run.tables), strict=True):
        name = rows[0].layer + ("" if rows[0].family else OUTSIDE)
        shown = (MISSING if row.ratio is None else f"{row.ratio:.2f}" for row in rows)
        lines.append([name, *shown])
    return lines


def _markdown_grid(lines: list[list[str]]) -> list[str]:
    header, *rest = lines
    rule = ["---", *["---:"] * (len(header) - 1)]
    grid = (header, rule, *rest)
    return ["| " + " | ".join(" ".join(cell.split()) for cell in line) + " |" for line in grid]


def commit() -> str:
    """What is measured, as git knows it."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    here = Path(__file__).parent
    found = subprocess.run(command, cwd=here, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def as_json(run: BenchmarkRun) -> str:
    """Every number, unrounded: one record a layer, contestant and setting."""
    results: list[dict[str, Any]] = [
        {
            "shape": list(table.spec.shape),
            "format": table.spec.format,
            "dtype": str(table.spec.dtype).removeprefix("torch."),
            "layer": row.layer,
            "family": row.family,
            "contestant": contestant,
            **vars(cell),
            "times_batch_norm": cell.seconds / row.cells[BASELINE].seconds,
            "floor_seconds": table.floor,
        }
        for table in run.tables
        for row in table.rows
        for contestant, cell in row.cells.items()
    ]
    whole = {
        "environment": run.environment,
        "summary": run.summary(),
        "remarks": run.remarks,
        "results": results,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"
