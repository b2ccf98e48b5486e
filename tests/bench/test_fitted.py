"""The benchmark of fitted conversion: choosing rates, going on, runs that share a process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.fitted import finetuning, rows
from benchmarks.fitted.__main__ import _jobs, _parser
from benchmarks.fitted.cifar import Conversions
from benchmarks.fitted.conversions import refusal
from benchmarks.fitted.finetuning import FineTune, Slot, best_rate, drawn, fine_tune, schedule
from benchmarks.fitted.pacs import CLASSES, Pacs
from benchmarks.fitted.tables import chosen, sections, tables
from normkit.errors import NormkitError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


class Backbone(nn.Sequential):
    num_features = 8

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )


@pytest.fixture
def pacs() -> Pacs:
    images = torch.randint(0, 256, (40, 3, 6, 6), dtype=torch.uint8)
    labels = torch.arange(40) % CLASSES
    return Pacs(images, labels, {"photo": torch.arange(20), "sketch": torch.arange(20, 40)})


def row(**entries: object) -> rows.Row:
    common = {"kind": "finetune", "method": "bn", "batch": 2, "domain": "photo"}
    return {**common, **entries}


def test_the_parts_of_a_domain_share_no_image(pacs: Pacs) -> None:
    parts = [pacs.part("sketch", name).tolist() for name in ("train", "validation", "test")]
    assert sorted([*parts[0], *parts[1], *parts[2]]) == list(range(20, 40))
    assert pacs.part("sketch", "rest").tolist() == parts[1] + parts[2]


def test_every_epoch_takes_each_image_once() -> None:
    part = torch.arange(100, 110)
    order, flips = drawn(part, seed=3, steps=10, batch=2)
    assert sorted(order[:5].flatten().tolist()) == sorted(order[5:].flatten().tolist())
    assert sorted(order[:5].flatten().tolist()) == part.tolist()
    assert flips.shape == order.shape
    assert torch.equal(order, drawn(part, seed=3, steps=10, batch=2)[0])
    assert not torch.equal(order, drawn(part, seed=4, steps=10, batch=2)[0])


def test_the_rate_rises_and_falls_to_zero() -> None:
    shares = schedule(100)
    top = int(shares.argmax())
    assert 8 <= top <= 11
    assert bool((shares[:top].diff() > 0).all())
    assert bool((shares[top:].diff() < 0).all())
    assert shares.max() <= 1
    assert shares[-1] < 1e-3


def test_the_validation_part_chooses_and_the_test_part_is_reported() -> None:
    tried = [
        row(lr=lr, seed=seed, validation=validation, test=test)
        for lr, validation, test in ((0.1, 0.9, 0.2), (0.2, 0.5, 0.99))
        for seed in (0, 1)
    ]
    more = [row(lr=0.1, seed=2, validation=0.0, test=0.5)]  # of a seed that chooses nothing
    assert best_rate(tried) == 0.1
    assert chosen([*tried, *more]) == (0.1, [0.2, 0.2, 0.5])
    assert chosen(tried[:1]) is None  # the other seed is missing
    assert "| 2 | photo | 30.0 ± 17.3 (3) @ 0.1 |" in tables([*tried, *more])


def test_sets_of_images_are_compared_with_batch_norm() -> None:
    measured = [
        {"kind": "pacs", "domain": "photo", "target": "bn", "how": "", "test": 0.8},
        *(
            {"kind": "draw", "domain": "photo", "target": "gn:1", "how": how, "seed": s, "test": t}
            for how, s, t in (("fitted", 0, 0.7), ("fitted", 1, 0.9), ("distilled", 0, 0.8))
        ),
    ]
    table = sections(measured)["Lite0 on PACS, over sets of images that are fitted on"]
    assert "| photo | gn:1 | fitted | 80.0 ± 14.1 (2) | 100.0 |" in table
    assert "| photo | gn:1 | distilled | 80.0 (1) | 100.0 |" in table


def test_a_run_in_a_used_slot_is_the_run_alone(pacs: Pacs) -> None:
    model = finetuning.network(Backbone().eval(), "bn")
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def trained(slot: Slot, run: FineTune) -> dict[str, torch.Tensor]:
        slot.begin(run, start)
        while slot.advance():
            pass
        assert slot.result() is not None
        return {name: tensor.clone() for name, tensor in slot.model.state_dict().items()}

    run = FineTune("photo", 0.01, 1)
    alone = trained(Slot(model, pacs, batch=2, steps=12), run)
    used = Slot(model, pacs, batch=2, steps=12)
    trained(used, FineTune("sketch", 0.5, 0))
    again = trained(used, run)
    assert not torch.equal(alone["0.0.weight"], start["0.0.weight"])
    for name, tensor in alone.items():
        assert torch.equal(tensor, again[name]), name


def test_frozen_norms_stay_and_converted_ones_learn(pacs: Pacs) -> None:
    for method, path in (("frozen", "0.1.running_mean"), ("gn", None)):
        model = finetuning.network(Backbone().eval(), method)
        slot = Slot(model, pacs, batch=4, steps=3)
        slot.begin(FineTune("photo", 0.01, 0), model.state_dict())
        while slot.advance():
            pass
        before, after = model.state_dict(), slot.model.state_dict()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert "1.weight" in changed
        assert "0.0.weight" in changed
        assert ("0.1.weight" in changed) == (method == "gn")
        assert path not in changed


def test_all_runs_once_also_after_an_interruption(pacs: Pacs, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    states = {("fitted", d, s): None for d in ("photo", "sketch") for s in finetuning.SEEDS}
    body = finetuning.network(Backbone().eval(), "gn")[0].state_dict()

    def start(method: str, domain: str, seed: int) -> dict[str, torch.Tensor]:
        assert (method, domain, seed) in states
        return dict(body)

    def train(stop: object = lambda: False) -> bool:
        return fine_tune(
            Backbone().eval(), pacs, "fitted", 2, 2, out,
            domains=("photo", "sketch"), start=start, slots=3, rates=(0.1, 0.01), stop=stop,
        )  # fmt: skip

    asked = iter(range(1000))
    assert not train(stop=lambda: next(asked) > 4)
    early = rows.read(out)
    assert 0 < len(early) < 14
    assert train()
    keys = [(r["domain"], r["lr"], r["seed"]) for r in rows.read(out)]
    assert len(keys) == len(set(keys)) == 14  # 2 domains: 2 rates × 2 seeds, and 3 seeds more
    assert rows.read(out)[: len(early)] == early


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    rows.append(out, {"kind": "pacs", "test": 0.5})
    with out.open("a") as file:
        file.write('{"kind": "pa')
    assert rows.read(out, kind="pacs") == [{"kind": "pacs", "test": 0.5}]


def test_jobs_wait_only_for_jobs_before_them() -> None:
    jobs = _jobs(_parser().parse_args([]))
    assert len(jobs) == len(set(jobs))
    places = {job: number for number, job in enumerate(jobs)}
    starts = [places[job] for job in jobs if job[0] == "start"]
    assert len(starts) == 20
    fitted = [places[job] for job in jobs if job[1:2] in [("fitted",), ("distilled",)]]
    assert max(starts) < min(fitted)
    assert places["cifar-train",] < min(places[job] for job in jobs if job[0] == "cifar")


def test_groups_that_the_fit_chooses_are_asked_for_with_images_only() -> None:
    """The first run on a GPU asked for groups="fit" without images, and noted a refusal."""
    model = nn.Sequential(*Backbone(), nn.Linear(8, 3)).eval()
    network = object.__new__(Conversions)
    network.model, network.device = model, torch.device("cpu")
    network.images = torch.randn(20, 3, 6, 6)
    network.test = [(network.images, torch.arange(20) % 3)]
    emitted: list[rows.Row] = []
    network.measure("gn:fit", 4, emitted.append)
    assert [each.get("how") for each in emitted] == ["fitted", "fitted", "distilled, norms", None]
    assert emitted[-1]["end"]
    assert "refused" not in emitted[-1]


def test_want_of_memory_is_no_refusal(tmp_path: Path) -> None:
    """Thirteen processes used up a GPU's memory, and the table said that targets were refused."""
    assert refusal(NormkitError("There is no scale.")) == "There is no scale."
    with pytest.raises(NormkitError):
        refusal(NormkitError("The model fails on batch 1: cusolver error: INTERNAL_ERROR"))
    out = tmp_path / "results.jsonl"
    rows.append(out, {"kind": "pacs", "domain": "photo", "target": "ln", "how": "plain", "test": 1})
    rows.note_missing(out, "pacs photo ln", "out of memory")
    rows.note_missing(out, "pacs photo bn", "out of memory")
    rows.note_missing(out, "pacs photo bn", "")  # it was done later
    rows.note_missing(out, "pacs photo in", "")  # it never failed
    text = tables(rows.read(out))
    assert "- out of memory: pacs photo ln" in text.splitlines()
    assert "refused" not in text


def test_pages_have_the_tables_of_the_committed_results() -> None:
    older, today = RESULTS / "fitted-h200.jsonl", RESULTS / "fitted-h200-photos-72e3b3f.jsonl"
    assert sorted(RESULTS.glob("fitted-*.jsonl")) == sorted([older, today])
    all_tables, page = (
        (ROOT / "docs" / f"fitted-{name}.md").read_text() for name in ("tables", "conversion")
    )
    for path in (older, today):
        assert f"--table benchmarks/results/{path.name}\n```" in all_tables
        assert tables(rows.read(path)) in all_tables
    assert sections(rows.read(older))["Fine-tuning"] in page
    drawn_sets = "Lite0 on PACS, over sets of images that are fitted on"
    assert sections(rows.read(today))[drawn_sets] in page
