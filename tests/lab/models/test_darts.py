"""Networks of an architecture search: the published sizes, cells that are read and refused."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
import torch

from normkit import survey
from normkit.errors import NormkitError
from normkit.lab.experiment import Setting
from normkit.lab.experiment.records import Model, ModelStep
from normkit.lab.models.build import build
from normkit.lab.models.darts import DartsNetwork, SearchNetwork, drop_path
from normkit.lab.models.genotypes import OPERATIONS, PUBLISHED, Genotype, strongest
from normkit.lab.models.variant import build_variant

SMALL = {
    "normal": [["sep_conv_3x3", 0], ["skip_connect", 1]],
    "reduce": [["max_pool_3x3", 0], ["dil_conv_3x3", 1]],
}


def weights(model: torch.nn.Module) -> int:
    named = model.named_parameters()
    return sum(p.numel() for n, p in named if "auxiliary" not in n and n != "architecture")


def test_the_networks_have_as_many_weights_as_those_of_darts() -> None:
    """3.3 million stand in DARTS's tables, 1.930618 in logs of its search program."""
    assert round(weights(DartsNetwork(10, (3, 32, 32), auxiliary=True)) / 1e6, 1) == 3.3
    assert weights(SearchNetwork(10, (3, 32, 32))) == 1_930_618


def test_a_small_network_answers_and_its_auxiliary_head_in_training_alone() -> None:
    model = build(
        Model("native:darts", options={"genotype": SMALL, "cells": 3, "channels": 4}
              | {"auxiliary": True, "drop_path": 0.5}),
        classes=5,
        shape=(1, 9, 9),  # odd sides, at every reduction
    )  # fmt: skip
    images = torch.randn(3, 1, 9, 9)
    # bgn-table-3 and 4 leave this norm, of maps of one position, out for IN
    last = model.get_submodule("auxiliary.layers.6")
    assert isinstance(last, torch.nn.BatchNorm2d)
    assert last.num_features == 768
    logits, further = model(images)
    assert logits.shape == further.shape == (3, 5)
    assert model.eval()(images).shape == (3, 5)


def test_drop_path_grows_with_training_and_keeps_the_mean() -> None:
    model = DartsNetwork(5, (1, 8, 8), genotype=SMALL, cells=3, channels=4, drop_path=0.5)
    images = torch.randn(4, 1, 8, 8)
    first = [model(images) for _ in range(2)]
    assert torch.equal(*first)  # nothing is left out in the first epoch
    model.set_progress(0.8)
    assert float(model.drop_rate) == pytest.approx(0.4)
    later = [model(images) for _ in range(4)]
    assert not all(torch.equal(later[0], each) for each in later[1:])
    many = drop_path(torch.ones(4000, 1, 1, 1), torch.tensor(0.4))
    assert many.unique().tolist() == pytest.approx([0, 1 / 0.6])
    # the mean of 4,000 draws: five standard errors of sqrt(0.4 / 0.6 / 4000)
    assert float(many.mean()) == pytest.approx(1, abs=5 * (0.4 / 0.6 / 4000) ** 0.5)


def test_a_search_ends_with_the_strongest_edges() -> None:
    operations = ("none", "max_pool_3x3", "skip_connect")
    table = torch.zeros(5, 3)  # of two nodes: 2 edges, then 3
    table[:, 0] = 9.0  # none is never chosen, however strong it is
    table[0, 1], table[1, 2] = 1.0, 2.0
    table[2, 2], table[3, 1], table[4, 1] = 1.0, 0.5, 3.0
    assert strongest(table, operations) == (
        ("max_pool_3x3", 0),
        ("skip_connect", 1),
        ("skip_connect", 0),
        ("max_pool_3x3", 2),
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_genotype_comes_back_from_its_text(name: str) -> None:
    text = Genotype.of(name).to_toml()
    assert Genotype.of(tomllib.loads(text)["genotype"]) == PUBLISHED[name]
    assert len(Genotype.of(name).lines()) == 8


@pytest.mark.parametrize(
    ("genotype", "message"),
    [
        ("darts-v3", r"no genotype 'darts-v3'.*darts-v2"),
        ({**SMALL, "normal": [["sep_conv_3x4", 0], ["skip_connect", 1]]},
         r"genotype\.normal, edge 1: there is no operation 'sep_conv_3x4'.*sep_conv_3x3"),
        ({**SMALL, "normal": [["none", 0], ["skip_connect", 1]]}, "no operation 'none'"),
        ({**SMALL, "reduce": [["skip_connect", 0], ["skip_connect", 2]]},
         r"genotype\.reduce, edge 2 begins at state 2, expected one of 0 to 1"),
        ({**SMALL, "reduce": [["skip_connect", 0]]}, "has 1 edges, expected 2 for each node"),
        ({"normal": SMALL["normal"]}, "expected a name such as 'darts-v2', or a table"),
        ({**SMALL, "normal": "skip_connect"}, "expected a list of edges"),
    ],
)  # fmt: skip
def test_a_genotype_that_is_none_is_refused(genotype: Any, message: str) -> None:
    with pytest.raises(NormkitError, match=message):
        build(Model("native:darts", options={"genotype": genotype}), 10, (3, 8, 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operations": ["skip_connect", "conv_7x7"]}, "no operation 'conv_7x7'"),
        ({"operations": ["none", "skip_connect"]}, "at least two different ones"),
        ({"cells": 2}, "cells is 2, expected 3 or more"),
    ],
)
def test_a_search_without_a_choice_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(NormkitError, match=message):
        build(Model("native:darts_search", options=options), 10, (3, 8, 8))


@pytest.mark.parametrize("norm", ["gn", "bgn", "bcn"])
def test_every_norm_of_a_search_network_is_converted(norm: str) -> None:
    options = {"cells": 3, "channels": 4, "nodes": 1, "operations": OPERATIONS[:5]}
    given = {"groups": 4} if norm == "bgn" else {}
    model = build_variant(
        Setting(
            model=Model("native:darts_search", options=options),
            steps=(ModelStep("norm", norm, options=given),),
        ),
        10,
        (1, 8, 8),
        seed=1,
    )
    assert {site.kind for site in survey(model)} == {norm}
    model(torch.randn(4, 1, 8, 8)).square().sum().backward()
    assert model.architecture.grad.abs().sum() > 0  # type: ignore[union-attr, operator]
