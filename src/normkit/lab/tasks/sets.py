"""What [data] asks for, and what tells that two settings ask for the same."""

from __future__ import annotations

from dataclasses import replace

import torch

from normkit.lab import data
from normkit.lab.data import Sets
from normkit.lab.data.datasets import own_sets
from normkit.lab.experiment.records import Run, Setting
from normkit.lab.own_code import is_reference


def is_own(name: str) -> bool:
    """Whether [data] names a function of somebody's own, not a set of the lab.

    >>> is_own("mydata.py:make"), is_own("torchvision.datasets:FakeData"), is_own("synthetic:1x8")
    (True, True, False)
    """
    return is_reference(name) and "." in name.partition(":")[0]


def data_sets(setting: Setting, device: torch.device | str = "cpu") -> Sets:
    """What [data] asks for: a set of the lab, or what the author's own function makes."""
    if is_own(setting.data.name):
        return own_sets(setting.data, setting.code.folder, device)
    return data.load(setting.data, device)


_kept: dict[str, Sets] = {}  # the last one: what is asked about a set comes together


def own_loaded(setting: Setting) -> Sets:
    """The sets of the author's own function, to be asked about."""
    key = sets_key(setting)
    if key not in _kept:
        sets = data_sets(setting)
        _kept.clear()
        _kept[key] = sets
    return _kept[key]


def sets_key(setting: Setting) -> str:
    """The same for settings that are trained on the same sets; nothing is read for it."""
    stated = replace(setting.data, fingerprint=setting.data.fingerprint or "not looked at")
    same = Run(Setting(data=stated, task=setting.task, code=setting.code), 0)
    return f"{same.id} {setting.data.path} {setting.code.folder}"
