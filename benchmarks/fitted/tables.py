"""Tables in Markdown, from the rows of a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean, stdev

from benchmarks.fitted.finetuning import CHOOSING, METHODS, best_rate
from benchmarks.fitted.pacs import DOMAINS
from benchmarks.fitted.rows import Row

NAMES = {
    "bn": "BN kept", "frozen": "BN frozen", "gn": "gn, as carried", "fitted": "gn, fitted",
    "distilled": "gn, fitted and distilled",
}  # fmt: skip


NONE = "–"  # not measured
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # of Student's t, by the number of values


def tables(rows: Sequence[Row]) -> str:
    return "\n\n".join(f"### {title}\n{text}" for title, text in sections(rows).items() if text)


def sections(rows: Sequence[Row]) -> dict[str, str]:
    return {
        "Lite0 on PACS, right after conversion": _after_conversion(rows),
        "Lite0 on PACS, over sets of images that are fitted on": _draws(rows),
        "The starts of fine-tuning, over seeds": _starts(rows),
        "Fine-tuning": _fine_tuning(rows),
        "Fine-tuning, differences of paired seeds": _differences(rows),
        "Fine-tuning, by learning rate": _by_rate(rows),
        "ResNet-18 on CIFAR-10, right after conversion": _cifar(rows),
        f"Not measured ({NONE})": _missing(rows),
    }


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    body = [f"| {' | '.join(line)} |" for line in lines]
    if not body:
        return ""
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *body])


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation, and how many there are if they are not five."""
    if not values:
        return ""
    text = percent(mean(values))
    if len(values) > 1:
        text += f" ± {100 * stdev(values):.1f}"
    return text if len(values) == 5 else f"{text} ({len(values)})"


def _select(rows: Iterable[Row], **wanted: object) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def _seen(rows: Iterable[Row], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))


# -------------------------------------------------------------------- right after conversion


def _after_conversion(rows: Sequence[Row]) -> str:
    rows = _select(rows, kind="pacs")
    domains = [domain for domain in DOMAINS if _select(rows, domain=domain)]

    def cell(target: str, how: str, domain: str) -> str:
        own = _select(rows, target=target, domain=domain)
        values = [row["test"] for row in own if row.get("how") == how]
        if not values and how != "plain" and any("refused" in row for row in own):
            return "refused"
        return percent(values[-1]) if values else ""

    lines = []
    targets = _seen(rows, "target")
    for target in sorted(targets, key=lambda name: name != "bn"):
        hows = [""] if target == "bn" else ["plain", "fitted", "fitted, all", "distilled"]
        for how in hows:
            cells = [cell(target, how, domain) for domain in domains]
            if any(cells):
                lines.append([target, how, *(each or NONE for each in cells)])
    table = markdown(["", "", *domains], lines)
    refusals = {r["target"]: r["refused"] for r in rows if "refused" in r}
    return "\n".join([table, *(f"\n{name}: {why}" for name, why in refusals.items())])


def _draws(rows: Sequence[Row]) -> str:
    """Mean and deviation over sets, and the mean as a share of batch norm's accuracy."""
    lines = []
    for domain in DOMAINS:
        whole = [r["test"] for r in _select(rows, kind="pacs", domain=domain, target="bn")]
        own = _select(rows, kind="draw", domain=domain)
        for target in _seen(own, "target"):
            for how in _seen(_select(own, target=target), "how"):
                values = _by_seed(_select(own, target=target, how=how))
                share = percent(mean(values) / whole[-1]) if whole else NONE
                lines.append([domain, target, how, spread(values), share])
    return markdown(["domain", "", "", "accuracy", "of bn"], lines)


def _starts(rows: Sequence[Row]) -> str:
    rows = _select(rows, kind="start")
    return markdown(
        ["", *DOMAINS],
        [
            [how, *(spread(_by_seed(_select(rows, how=how, domain=d))) for d in DOMAINS)]
            for how in _seen(rows, "how")
        ],
    )


def _by_seed(rows: Iterable[Row]) -> list[float]:
    """One value a seed, the last if one was measured again after an interruption."""
    return list({row["seed"]: row["test"] for row in rows}.values())


def _cifar(rows: Sequence[Row]) -> str:
    rows = [row for row in _select(rows, kind="cifar") if "test" in row or "refused" in row]
    whole = [row["test"] for row in _select(rows, target="bn")]
    lines = []
    for row in rows:
        if "refused" in row:
            lines.append([row["target"], "refused: " + row["refused"], "", "", "", ""])
            continue
        share = percent(row["test"] / whole[-1]) if whole and whole[-1] else ""
        images = str(row["images"] or "")
        seconds = f"{row['seconds']:.1f}" if "seconds" in row else ""
        lines.append([row["target"], row["how"], images, percent(row["test"]), share, seconds])
    lines.sort(key=lambda line: (line[0] != "bn", line[0]))
    return markdown(["", "", "images", "accuracy", "of bn", "seconds"], lines)


# -------------------------------------------------------------------- fine-tuning


def _cells(rows: Sequence[Row]) -> list[tuple[int, str]]:
    rows = _select(rows, kind="finetune")
    batches = sorted({row["batch"] for row in rows})
    return [(b, d) for b in batches for d in DOMAINS if _select(rows, batch=b, domain=d)]


def chosen(rows: Sequence[Row]) -> tuple[float, list[float]] | None:
    """The rate that the validation part chooses, and the test accuracies of all its seeds.

    ``rows`` are those of one method, batch size and domain.
    """
    tried = [row for row in rows if row["seed"] in CHOOSING]
    counts = {lr: sum(row["lr"] == lr for row in tried) for lr in {row["lr"] for row in tried}}
    if not tried or min(counts.values()) < len(CHOOSING):
        return None
    lr = best_rate(tried)
    return lr, list(_seeds(rows, lr).values())


def _seeds(rows: Iterable[Row], lr: float) -> dict[int, float]:
    """One test accuracy a seed, the last if one was measured again after an interruption."""
    return {row["seed"]: row["test"] for row in rows if row["lr"] == lr}


def _fine_tuning(rows: Sequence[Row]) -> str:
    lines = []
    for batch, domain in _cells(rows):
        line = [str(batch), domain]
        for method in METHODS:
            own = _select(rows, kind="finetune", batch=batch, domain=domain, method=method)
            best = chosen(own)
            line.append(NONE if best is None else f"{spread(best[1])} @ {best[0]:g}")
        lines.append(line)
    return markdown(["batch", "domain", *(NAMES[method] for method in METHODS)], lines)


def _differences(rows: Sequence[Row]) -> str:
    """In points, with the 95 % interval over the seeds that both have."""
    pairs = [(new, old) for new in ("fitted", "distilled") for old in ("frozen", "bn")]
    lines = []
    for batch, domain in _cells(rows):
        cells = []
        for pair in pairs:
            values = []
            for method in pair:
                own = _select(rows, kind="finetune", batch=batch, domain=domain, method=method)
                best = chosen(own)
                values.append({} if best is None else _seeds(own, best[0]))
            gaps = [
                100 * (values[0][seed] - values[1][seed]) for seed in values[0].keys() & values[1]
            ]
            cells.append(_interval(gaps))
        if set(cells) != {NONE}:
            lines.append([str(batch), domain, *cells])
    names = [f"{NAMES[new]} − {NAMES[old]}" for new, old in pairs]
    return markdown(["batch", "domain", *names], lines)


def _interval(values: Sequence[float]) -> str:
    if len(values) not in T95:
        return NONE
    half = T95[len(values)] * stdev(values) / len(values) ** 0.5
    text = f"{mean(values):+.1f} ± {half:.1f}"
    return text if len(values) == 5 else f"{text} ({len(values)})"


def _by_rate(rows: Sequence[Row]) -> str:
    """Test accuracy at each rate, in the mean of the seeds that all rates have."""
    rates = sorted({row["lr"] for row in _select(rows, kind="finetune")})
    lines = []
    for batch, domain in _cells(rows):
        for method in METHODS:
            own = _select(rows, kind="finetune", batch=batch, domain=domain, method=method)
            cells = []
            for lr in rates:
                values = [r["test"] for r in own if r["lr"] == lr and r["seed"] in CHOOSING]
                cells.append(percent(mean(values)) if values else NONE)
            if set(cells) != {NONE}:
                lines.append([str(batch), domain, NAMES[method], *cells])
    return markdown(["batch", "domain", "", *(f"{lr:g}" for lr in rates)], lines)


# -------------------------------------------------------------------- what there is not


def _missing(rows: Sequence[Row]) -> str:
    """Jobs that failed and were not done later, by reason."""
    last = {row["job"]: row["why"] for row in _select(rows, kind="missing")}
    reasons = [why for why in dict.fromkeys(last.values()) if why]
    lines = [
        f"- {why}: {', '.join(job for job, reason in last.items() if reason == why)}"
        for why in reasons
    ]
    return "\n".join(lines)
