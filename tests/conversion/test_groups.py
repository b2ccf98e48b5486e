"""Numbers of groups for networks whose norms have many sizes."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.errors import OptionError

SIZES = (16, 24, 64, 144)


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in zip((3, *SIZES), SIZES, strict=False):
        layers += [nn.Conv2d(before, after, 1), nn.BatchNorm2d(after)]
    return nn.Sequential(*layers).eval()


def groups_of(model: nn.Module) -> list[int]:
    norms = [m for m in model.modules() if hasattr(m, "groups") and hasattr(m, "channels")]
    return [norm.groups for norm in norms]


IMAGES = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("fit", [None, IMAGES])
def test_the_error_names_every_norm_and_what_would_do(fit: torch.Tensor | None) -> None:
    """Only the first of them was named, with a number that did not divide the others."""
    model = network()
    with pytest.raises(OptionError) as error:
        nk.convert(model, "gn", groups=32, fit=fit, example=False)
    words = str(error.value)
    assert "3 of 4 norms: 1 (16), 3 (24), 7 (144)" in words
    assert "groups=8, which divides all; or channels_per_group=8" in words
    assert 'group_policy="gcd", which gives these 16 to 24 groups' in words
    assert [type(m) for m in model] == [type(m) for m in network()]


@pytest.mark.parametrize("fit", [None, IMAGES])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"groups": 8}, [8, 8, 8, 8]),
        ({"channels_per_group": 8}, [2, 3, 8, 18]),
        ({"channels_per_group": 16, "group_policy": "gcd"}, [1, 3, 4, 9]),
        ({"groups": 32, "group_policy": "gcd"}, [16, 24, 32, 16]),
        ({}, [4, 6, 32, 16]),
    ],
)
def test_what_the_error_proposes_works(
    options: dict[str, Any], expected: list[int], fit: torch.Tensor | None
) -> None:
    plan = nk.plan_conversion(model := network(), "gn", fit=fit, example=False, **options)
    plan.apply()
    assert groups_of(model) == expected
    bent = [note for note in plan.notes if "does not divide" in note]
    assert bool(bent) == (options.get("groups") == 32)
    assert all("3 of 4 norms" in note and "16 to 24 groups" in note for note in bent)
    alone = [note for note in plan.notes if "instance norm" in note]
    assert bool(alone) == (options.get("groups") == 32)


def test_every_layer_with_groups_takes_channels_per_group() -> None:
    for target in ("bcn", "bgn", "gbgn", "gw", "torch_gn"):
        with warnings.catch_warnings(action="error"):  # of bgn: there is a choice of groups
            model = nk.convert(network(), target, channels_per_group=8, example=False)
        norms = [m for m in model if type(m) is not nn.Conv2d]
        assert [getattr(n, "groups", None) or n.num_groups for n in norms] == [2, 3, 8, 18], target
    with pytest.raises(OptionError, match="ln has no option 'channels_per_group'"):
        nk.convert(network(), "ln", channels_per_group=8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"channels_per_group": 16}, r"channels_per_group=16 does not .* 1 of 4 norms: 3 \(24\)"),
        ({"channels_per_group": 0}, "positive integer, got 0"),
        ({"channels_per_group": 4, "groups": 4}, "got both: 4 and 4"),
        ({"groups": [32, 3]}, "give images"),
        ({"groups": 0}, "positive integer, got 0"),
    ],
)
def test_wishes_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        nk.convert(network(), "gn", example=False, **options)


def test_a_choice_of_groups_leaves_no_norm_behind() -> None:
    """With groups=[32, 9] the norms of 16 and of 24 channels stayed batch norms, in a plan that
    looked like any other: half of each network."""
    model = network()
    with pytest.raises(OptionError, match=r"\[32, 9\] does not .* 2 of 4 norms: 1 \(16\), 3"):
        nk.convert(model, "gn", groups=[32, 9], fit=IMAGES)
    plan = nk.plan_conversion(
        copy.deepcopy(model), "gn", groups=[32, 9], group_policy="gcd", fit=IMAGES
    )
    assert plan.count() == 4
    tried = {step.path: step.reason.partition("groups ")[2] for step in plan.steps}
    assert re.match("32: [^,]*, 1: ", tried["5"])  # 9 and 64 have no divisor but 1
