"""The experiments that are shipped: one file a table or figure, readable at every scale."""

from __future__ import annotations

from pathlib import Path

import pytest

from normkit.lab.experiment.checks import check_models
from normkit.lab.experiment.reading import read, scales

FOLDER = Path(__file__).parents[3] / "experiments"
FILES = sorted(FOLDER.glob("*.toml"))
SCALES = [(path, scale) for path in FILES for scale in scales(path)]


def called(value: object) -> str:
    return value.stem if isinstance(value, Path) else str(value)


@pytest.mark.parametrize("path", FILES, ids=called)
def test_there_is_the_published_protocol_and_one_for_a_single_gpu(path: Path) -> None:
    assert {"paper", "lab"} <= set(scales(path))


@pytest.mark.parametrize(("path", "scale"), SCALES, ids=called)
def test_every_scale_reads_and_says_how_it_differs(path: Path, scale: str) -> None:
    experiment = read(path, scale)
    assert experiment.title != experiment.name
    assert experiment.question.endswith("?")
    assert experiment.source
    assert len(experiment.difference) > 20
    assert experiment.runs()


@pytest.mark.parametrize("path", FILES, ids=called)
def test_small_scales_take_small_data(path: Path) -> None:
    """What runs in minutes or hours must not ask for a data set that few people have."""
    small = {"digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "camvid"}
    for scale in set(scales(path)) - {"paper"}:
        names = {variant.setting.data.name for variant in read(path, scale).variants}
        assert names <= small
        if scale == "desk":
            assert not any(name.startswith("cifar") for name in names)


@pytest.mark.parametrize("path", [path for path in FILES if "desk" in scales(path)], ids=called)
def test_the_models_of_the_desk_can_be_made(path: Path) -> None:
    check_models(read(path, "desk"))
