"""New layers as their papers start them, in a model that is trained from scratch.

``convert`` gives a new layer what the old one has learned, which is right for a trained model. Here
nothing has been learned yet: the layer starts as its own constructor would start it. What the
network's author has set on purpose is kept: an eps or momentum that is not torch's default, and
scales that start at another value than 1, such as zero in the last norm of a block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normkit.catalog import ENTRIES
from normkit.conversion import Plan
from normkit.inspection import Site
from normkit.layers.base import Normalizer
from normkit.layers.norm_act import NormAct

USUAL = {"eps": 1e-5, "momentum": 0.1}  # of torch's batch norms


def derive(seed: int, *what: str) -> int:
    """A seed for one purpose: the same whatever else a variant does."""
    text = "\n".join((str(seed), *what))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


@contextmanager
def drawn(seed: int) -> Iterator[None]:
    """Torch's random numbers on the CPU start from a seed, and go on afterwards as if not."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def start_fresh(
    model: nn.Module, plan: Plan, sites: Mapping[str, Site], asked: Mapping[str, Any], seed: int
) -> None:
    """Start every layer that an applied plan has converted as its constructor would.

    ``sites`` are the norms as they were. Each layer draws from the seed and its own path, so that
    two variants that have the same layer somewhere start it with the same numbers.
    """
    for step in plan.steps:
        if step.action != "convert":
            continue
        there = model.get_submodule(step.path)
        old = there.norm if isinstance(there, NormAct) else there
        if not isinstance(old, Normalizer) or type(old) not in ENTRIES.values():
            continue  # torch's own layers start in one way only
        with drawn(derive(seed, step.path)):
            new = _made(old, sites[step.path], asked, derive(seed, step.path, "seed"))
        _keep_scales(new, sites[step.path].module, asked)
        new.train(old.training)
        for path in (step.path,) if isinstance(there, NormAct) else step.paths:
            parent, _, name = (f"{path}.norm" if there is not old else path).rpartition(".")
            model.get_submodule(parent)._modules[name] = new


def _made(old: Normalizer, site: Site, asked: Mapping[str, Any], seed: int) -> Normalizer:
    known = type(old).options()
    anchor = next(iter(old.parameters()), None)
    said: dict[str, Any] = {
        name: value
        for name, usual in USUAL.items()
        # a layer that has no use for a momentum, such as micro-batch bcn, has not taken it over
        if (value := getattr(site, name)) not in (None, usual) and getattr(old, name, 0) == value
    }
    if not old.affine:
        said["affine"] = False
    if "dims" in known:
        said["dims"] = old.dims
    if "seed" in known:
        said["seed"] = seed
    if anchor is not None:
        said |= {"device": anchor.device, "dtype": anchor.dtype}
    made: Normalizer = type(old)(old.channels, **{**said, **asked})
    return made


@torch.no_grad()
def _keep_scales(new: Normalizer, was: nn.Module, asked: Mapping[str, Any]) -> None:
    """Multiply the new scales by those that the network's constructor has set.

    A ``scale_init`` that is asked for counts for every layer instead, as in revisiting-bn.
    """
    scale = getattr(was, "weight", None)
    if not isinstance(scale, Tensor) or scale.dim() != 1 or bool((scale == 1).all()):
        return
    if "scale_init" in asked or not isinstance(new.weight, Tensor):
        return
    last = getattr(new, "group_weight", None)
    if isinstance(last, Tensor) and not scale.any():
        last.zero_()  # of bcn the last scale: a zero before its group norm would be divided by eps
        return
    new.weight.mul_(scale.reshape(-1, *(1,) * (new.weight.dim() - 1)))
    if isinstance(new.bias, Tensor) and not scale.any():
        new.bias.zero_()  # kernels have a bias that is drawn
