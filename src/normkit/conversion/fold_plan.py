"""A folding before and while it is done."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from normkit.conversion.absorbing import absorb
from normkit.conversion.certificate import rounding
from normkit.conversion.differing import difference, leaves
from normkit.conversion.fixed_maps import FixedMap, fixed_map
from normkit.conversion.pairing import Pair
from normkit.conversion.plain_weights import plain_form
from normkit.conversion.probing import Probe
from normkit.errors import NormkitError, NothingToDo
from normkit.inspection import Site, survey, undisturbed
from normkit.layers.norm_act import NormAct

NARROW = (torch.float16, torch.bfloat16)
# relative, in float64: far above its rounding, and far below what any mistake makes of a model
IN_DOUBLE = 1e-8


@dataclass(eq=False)
class FoldPlan:
    """Which norms are folded into which layers, and why the others are not."""

    model: nn.Module
    probe: Probe  # the input with which it was seen, and is checked
    weights: tuple[str, ...]  # layers whose computed weight becomes a plain one
    folded: dict[str, Pair] = field(default_factory=dict)  # by the path of the norm
    left: dict[str, str] = field(default_factory=dict)  # likewise, the reason
    difference: float | None = None  # max |folded − model| / max |model|, once applied

    @property
    def seen(self) -> bool:
        """Whether a run of the model has shown what feeds what; else it was guessed."""
        return self.probe.example is not None

    def apply(self) -> nn.Module:
        """The folded copy, once it is known to give the same output."""
        if not (self.folded or self.weights):
            reasons = "; ".join(f"{path}: {why}" for path, why in list(self.left.items())[:3])
            raise NothingToDo(f"fold found nothing to fold. {reasons or 'There are no norms.'}")
        if self.seen:
            self._check()
        else:
            warnings.warn(
                f"fold could not check the result: {self.probe.text}. What feeds what was guessed "
                "from the order of registration. Try example=x with an input of the model.",
                stacklevel=3,
            )
        return self._folded(_copied(self.model))

    def _folded(self, model: nn.Module) -> nn.Module:
        """Fold a copy of the model, in place."""
        sites = {site.path: site for site in survey(model)}
        for path in self.weights:
            _put(model, _paths(model, path), plain_form(model.get_submodule(path)))
        for path, pair in self.folded.items():
            found = fixed_map(sites[path], pair.axes)
            assert isinstance(found, FixedMap)
            absorb(model.get_submodule(pair.layer), found.scale, found.shift)
            _remove(model, sites[path], found.then)
        return model

    def _check(self) -> None:
        """Compare in float32 or wider: the rounding of narrower types would hide a mistake."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        narrow = any(t.dtype in NARROW for t in tensors)
        self.difference, allowed = self._measured(torch.float32 if narrow else None)
        if self.difference <= allowed or self._is_rounding():
            return
        raise NormkitError(
            f"The folded model differs by {self.difference:.1e} relative, where rounding "
            f"explains {allowed:.0e}, so it is not given out; the model is as it was. "
            "Print plan_fold(model) to see what was folded."
        )

    def _is_rounding(self) -> bool:
        """Whether a difference all but vanishes in float64: some models blow up last digits."""
        try:
            found, _ = self._measured(torch.float64)
        except Exception:  # not every device and not every model can do that
            return False
        return found <= IN_DOUBLE

    def _measured(self, dtype: torch.dtype | None) -> tuple[float, float]:
        """How far model and folded model are apart in a type, and what rounding explains."""
        model, probe = self.model, self.probe
        if dtype is not None:
            model = _copied(model).to(dtype)
            example = tree_map_only(Tensor, lambda t: _as(t, dtype), probe.example)
            probe = Probe(example, probe.text, probe.given)
        new = self._folded(_copied(model))
        with undisturbed(model), undisturbed(new):
            before, after = (leaves(_run_alike(probe, each)) for each in (model, new))
        allowed = max((rounding(t.dtype) for t in before), default=0.0)
        return difference(before, after), allowed

    def __str__(self) -> str:
        how = f"seen with {self.probe.text}" if self.seen else f"guessed: {self.probe.text}"
        lines = [
            f"{len(self.folded)} norm(s) folded, {len(self.left)} left, "
            f"{len(self.weights)} computed weight(s) made plain; {how}."
        ]
        lines += [f"  {path} into {pair.layer}" for path, pair in self.folded.items()]
        lines += [f"  {path} left: {why}" for path, why in self.left.items()]
        lines += [f"  {path} gets a plain weight" for path in self.weights]
        if self.difference is not None:
            lines.append(f"The output differs by {self.difference:.1e} relative.")
        return "\n".join(lines)


def _remove(model: nn.Module, site: Site, then: nn.Module | None) -> None:
    """Leave of a norm what remains: nothing, a convolution, its drop layer and activation."""
    if isinstance(site.module, NormAct):
        site.module.norm = then or nn.Identity()
        return
    rest = [part for part in (then, site.drop, site.act) if part is not None]
    new = rest[0] if len(rest) == 1 else nn.Sequential(*rest) if rest else nn.Identity()
    if len(rest) != 1:
        new.training = site.module.training
    _put(model, site.paths, new)


def _paths(model: nn.Module, path: str) -> tuple[str, ...]:
    """Every path of the module at a path."""
    module = model.get_submodule(path)
    return tuple(p for p, m in model.named_modules(remove_duplicate=False) if m is module)


def _put(model: nn.Module, paths: tuple[str, ...], new: nn.Module) -> None:
    for path in paths:
        above, _, name = path.rpartition(".")
        model.get_submodule(above)._modules[name] = new


def _run_alike(probe: Probe, model: nn.Module) -> object:
    torch.manual_seed(0)  # for models that draw numbers in eval mode; undone by ``undisturbed``
    return probe.run(model)


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        said = str(error).strip().partition(".")[0]
        raise NormkitError(
            f"fold gives a copy, and this model cannot be copied: {type(error).__name__}: {said}. "
            "Perhaps it keeps tensors of its last forward: run it under torch.no_grad()."
        ) from error
