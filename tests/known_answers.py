"""The answer of every activation layer, and the option sets under which it must be given.

A new normalizer needs one line in each table. The answers themselves are in ``answers/``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from answers import batch, gated, grouped, mixed, sample
from answers.pooling import Answer, Array, Options, State

ANSWERS: dict[str, Callable[[Array, State, Options, bool], Answer]] = {
    "batch_renorm": batch.batch_renorm,
    "bcn": grouped.bcn,
    "bgn": grouped.bgn,
    "bn": batch.bn,
    "bnet": gated.bnet,
    "dn": mixed.dn,
    "dyt": sample.dyt,
    "frozen_bn": batch.frozen_bn,
    "gbgn": grouped.gbgn,
    "ghost_bn": batch.ghost_bn,
    "gn": sample.gn,
    "gw": sample.gw,
    "ibn": mixed.ibn,
    "iebn": gated.iebn,
    "in": sample.instance_norm,
    "input_norm": batch.input_norm,
    "ln": sample.ln,
    "pn": sample.pn,
    "rbn": gated.rbn,
    "rms": sample.rms,
    "shifted_bn": batch.shifted_bn,
    "sn": mixed.sn,
    "ssn": mixed.ssn,
    "ubn": gated.ubn,
}

SHAPES = {
    "contiguous": (6, 8, 4, 4),
    "channels_last": (6, 8, 4, 4),
    "table": (6, 8),
    "line": (6, 8, 10),
    "volume": (6, 8, 2, 3, 2),
}
ALL = tuple(SHAPES)
MAPS = ("contiguous", "channels_last", "line", "volume")  # more than one position
IMAGES = ("contiguous", "channels_last")


@dataclass(frozen=True)
class Case:
    """Options of a layer, layouts it accepts with them, and buffers set to chosen values."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    layouts: tuple[str, ...] = ALL
    state: Mapping[str, float | tuple[float, ...]] = field(default_factory=dict)
    samples: int = 6


def _shared(layouts: tuple[str, ...] = ALL, **fixed: Any) -> list[Case]:
    """What every layer with running statistics must get right."""
    return [
        Case("defaults", {**fixed}, layouts),
        Case("no_affine", {**fixed, "affine": False}, layouts),
        Case("eps", {**fixed, "eps": 0.1}, layouts),
        Case("momentum", {**fixed, "momentum": 0.7}, layouts),
        Case("cumulative", {**fixed, "momentum": None}, layouts),
        Case("virtual_batch", {**fixed, "virtual_batch": 3}, layouts),
        Case("virtual_batch_ragged", {**fixed, "virtual_batch": 4}, layouts),
        Case("virtual_batch_larger", {**fixed, "virtual_batch": 50}, layouts),
    ]


def _untracked(layouts: tuple[str, ...] = ALL, **fixed: Any) -> list[Case]:
    return [
        Case("no_running_stats", {**fixed, "track_running_stats": False}, layouts),
        Case("biased_running_var", {**fixed, "running_var_correction": 0}, layouts),
        Case(
            "biased_virtual_batch",
            {**fixed, "running_var_correction": 0, "virtual_batch": 4},
            layouts,
        ),
    ]


def _frozen_or_not(name: str, layouts: tuple[str, ...] = ALL, **options: Any) -> list[Case]:
    """A UBN case on both sides of the threshold: a score of 0 cannot pass it in one step."""
    return [
        Case(f"{name}_condensed", options, layouts, {"score": 0.9}),
        Case(f"{name}_frozen", options, layouts, {"score": -3.0}),
    ]


FLAT = ("contiguous", "channels_last", "table")  # what a kernel of two axes accepts

CASES: dict[str, list[Case]] = {
    "bn": [
        *_shared(),
        *_untracked(),
        Case("a1", {"form": "a1"}),
        Case("a2", {"form": "a2"}),
        Case("a2_virtual_batch", {"form": "a2", "virtual_batch": 4}),
        Case("a2_no_affine", {"form": "a2", "affine": False}),
    ],
    "input_norm": [
        *_shared(),
        *_untracked(),
        Case("a2", {"form": "a2"}),
        Case("scale", {"sigma_act": 0.7, "scale_init": 0.1}),
        Case("fixed", {"mode": "fixed"}),
        Case("none", {"mode": "none"}),
        Case(
            "dataset",
            {
                "mode": "dataset",
                "mean": tuple(0.1 * k for k in range(8)),
                "std": tuple(0.3 + 0.1 * k for k in range(8)),
            },
        ),
    ],
    "frozen_bn": [Case("defaults"), Case("eps", {"eps": 0.1})],
    "ghost_bn": [
        *_shared(),
        *_untracked(virtual_batch=4),
        Case("three", {"virtual_batch": 3}),
        Case("ragged", {"virtual_batch": 4}),
        Case("a1", {"virtual_batch": 4, "form": "a1"}),
    ],
    "batch_renorm": [
        *_shared(),
        Case("start", state={"num_batches_tracked": 100}),
        Case("middle", state={"num_batches_tracked": 15_000}),
        Case("r_only", state={"num_batches_tracked": 30_000}),
        Case("end", state={"num_batches_tracked": 50_000}),
        Case("no_ramp", {"r_ramp": None, "d_ramp": None, "r_max": 1.2, "d_max": 0.3}),
        Case("own_ramp", {"r_ramp": (0, 10), "d_ramp": (2, 4), "r_max": 1.5}),
        Case("ramp_virtual_batch", {"virtual_batch": 4}, state={"num_batches_tracked": 15_000}),
    ],
    "shifted_bn": [
        *_shared(mean_spread=0.5, std_spread=0.5, seed=2),
        *_untracked(mean_spread=0.5, std_spread=0.5),
        Case("mean_only", {"mean_spread": 1.0}),
        Case("none"),
    ],
    "rbn": [
        *_shared(),
        *_untracked(),
        Case("no_centering", {"centering": False}),
        Case("minus", {"minus": True}),
        Case("minus_virtual_batch", {"minus": True, "virtual_batch": 4}),
    ],
    "iebn": [*_shared(), *_untracked(), Case("minus", {"minus": True})],
    "bnet": [
        *_shared(FLAT),
        *_untracked(FLAT),
        Case("k1", {"kernel_size": 1}, FLAT),
        Case("k5", {"kernel_size": 5}, FLAT),
        Case("dirac", {"init": "dirac"}, FLAT),
        Case("line", {"dims": 1}, ("line", "table")),
        Case("volume", {"dims": 3}, ("volume", "table")),
    ],
    "ubn": [
        *_frozen_or_not("defaults", FLAT),
        *_frozen_or_not("paper", FLAT, preset="paper"),
        *_frozen_or_not("authors", FLAT, preset="authors"),
        *_frozen_or_not("score_of_batch", FLAT, score_norm="batch"),
        *_frozen_or_not("three_samples", FLAT, max_samples=3),
        *_frozen_or_not("all_samples", FLAT, max_samples=None),
        *_frozen_or_not("ema", FLAT, train_stats="ema"),
        *_frozen_or_not("raw", FLAT, stats_from="raw"),
        *_frozen_or_not("ema_raw", FLAT, train_stats="ema", stats_from="raw"),
        *_frozen_or_not("gate_before", FLAT, gate="before"),
        *_frozen_or_not("update_in_eval", FLAT, update_in_eval=True),
        *_frozen_or_not("line", ("line", "table"), dims=1),
        *_frozen_or_not("volume", ("volume", "table"), dims=3),
        *_frozen_or_not("plain_affine", affine_conv=False),
        *_frozen_or_not("no_affine", affine=False),
        *_frozen_or_not("virtual_batch", FLAT, virtual_batch=4),
        *_frozen_or_not("statistics_only", centering=False, scaling=False, affine_conv=False),
        Case("tau_above", {"tau": 1.0}, FLAT, {"score": 0.99}),
        Case("tau_below", {"tau": -1.01}, FLAT, {"score": 0.0}),
        Case("decay", {"score_decay": 0.5}, FLAT, {"score": 0.4}),
        Case("no_fct", {"fct": False}, FLAT, {"score": 0.0}),
        Case("no_centering", {"centering": False}, FLAT, {"score": 0.9}),
        Case("no_scaling", {"scaling": False}, FLAT, {"score": 0.9}),
        Case("k5", {"kernel_size": 5}, FLAT, {"score": 0.9}),
        Case("cumulative", {"momentum": None}, FLAT, {"score": 0.9}),
        Case("twenty_samples", {}, FLAT, {"score": 0.9}, samples=20),
        Case("biased", {"running_var_correction": 0}, FLAT, {"score": 0.9}),
        Case("eps", {"eps": 0.1}, FLAT, {"score": 0.9}),
        Case("no_running_stats", {"track_running_stats": False, "fct": False}, FLAT),
        Case(
            "all_off",
            {"fct": False, "centering": False, "scaling": False, "affine_conv": False},
            ALL,
            {"score": 0.0},
        ),
    ],
    "gn": [
        Case("defaults"),
        Case("two_groups", {"groups": 2}),
        Case("one_group", {"groups": 1}),
        Case("a_group_per_channel", {"groups": 8}, MAPS),
        Case("clip", {"groups": 32, "group_policy": "clip_to_channels"}, MAPS),
        Case("gcd", {"groups": 6, "group_policy": "gcd"}),
        Case("largest_divisor", {"groups": 7, "group_policy": "largest_divisor"}),
        Case("eps", {"groups": 4, "eps": 0.1}),
        Case("no_affine", {"groups": 4, "affine": False}),
    ],
    "ln": [Case("defaults"), Case("eps", {"eps": 0.1}), Case("no_affine", {"affine": False})],
    "rms": [Case("defaults"), Case("eps", {"eps": 0.1}), Case("no_affine", {"affine": False})],
    "dyt": [
        Case("defaults"),
        Case("alpha", {"alpha_init": 2.0}),
        Case("no_affine", {"affine": False}),
    ],
    "in": [
        Case("defaults", layouts=MAPS),
        Case("eps", {"eps": 0.1}, MAPS),
        Case("no_affine", {"affine": False}, MAPS),
    ],
    "pn": [
        Case("defaults"),
        Case("unbiased", {"unbiased": True}),
        Case("eps", {"eps": 0.1}),
        Case("no_affine", {"affine": False}),
    ],
    "gw": [
        Case("defaults", layouts=MAPS),
        Case("four", {"groups": 4}),
        Case("two_no_eps", {"groups": 2, "eps": 0.0}, MAPS),
        Case("clipped", {"groups": 64, "group_policy": "clip_to_channels"}, MAPS),
        Case("one_iteration", {"groups": 4, "iterations": 1}),
        Case("twelve_iterations", {"groups": 4, "iterations": 12}, MAPS),
        Case("eigh", {"groups": 4, "method": "eigh"}, MAPS),
        Case("eigh_eps", {"groups": 2, "method": "eigh", "eps": 0.1}),
        Case("no_affine", {"groups": 4, "affine": False}, MAPS),
    ],
    "ibn": [
        *_shared(MAPS),
        *_untracked(MAPS),
        Case("quarter", {"ratio": 0.25}, MAPS),
        Case("rounded_down", {"ratio": 0.7}, MAPS),
        Case("all_in", {"ratio": 1.0}, MAPS),
        Case("all_bn", {"ratio": 0.0}),
    ],
    "sn": [
        *_shared(),
        Case("unbiased", {"unbiased": True}, MAPS),
        Case("unbiased_virtual_batch", {"unbiased": True, "virtual_batch": 4}, MAPS),
        Case("without_bn", {"use_bn": False}),
        Case("no_running_stats", {"track_running_stats": False}),
    ],
    "ssn": [
        *(Case(f"radius_{r}", state={"radius": r}) for r in (0.0, 0.2, 0.4, 0.5, 0.6, 0.75)),
        Case("radius_full", state={"radius": (2 / 3) ** 0.5}),
        Case("virtual_batch", {"virtual_batch": 4}, state={"radius": 0.5}),
        Case("without_bn", {"use_bn": False}, state={"radius": 0.5}),
        Case("unbiased", {"unbiased": True}, MAPS, {"radius": 0.5}),
        Case("no_affine", {"affine": False, "eps": 0.1}, state={"radius": 0.5}),
        Case("momentum", {"momentum": 0.7}, state={"radius": 0.5}),
        Case("no_running_stats", {"track_running_stats": False}, state={"radius": 0.5}),
        Case("annealed", {"anneal_steps": 14}),
        Case("anneal_done", {"anneal_steps": 3}),
        Case(
            "chosen",
            state={"radius": 0.5, "mean_choice": (0, 1, 0), "var_choice": (1, 0, 0)},
        ),
    ],
    "dn": [
        Case("defaults"),
        *(Case(start, {"start": start}, MAPS) for start in ("ln", "in", "gn")),
        Case("four_groups", {"start": "gn", "groups": 4}),
        Case("bn", {"start": "bn", "batch": 2}),
        Case("pairs_of_samples", {"start": "bn", "batch": 2, "momentum": 0.5}),
        Case("far_channels", state={"channel_gates": (-1, -1, 1)}),
        Case("split_channels", {"batch": 2}, state={"channel_gates": (1, -1, 1)}),
        Case(
            "far_samples",
            {"batch": 4},
            state={"channel_gates": (-1, 1, -1), "batch_gates": (-1, 1)},
            samples=8,
        ),
        Case("both", {"batch": 4}, state={"batch_gates": (1, -1)}, samples=8),
        Case("eps", {"eps": 0.1, "running_var_correction": 0}),
        Case("no_running_stats", {"batch": 2, "start": "bn", "track_running_stats": False}),
        Case("no_affine", {"affine": False}),
    ],
    "bgn": [
        *_shared(groups=8),
        *_untracked(groups=4),
        Case("one_group", {"groups": 1}),
        Case("two_groups", {"groups": 2}),
        Case("two_groups_ragged", {"groups": 2, "virtual_batch": 4}),
        Case("strips", {"groups": 32}, IMAGES),
        Case("strips_virtual_batch", {"groups": 32, "virtual_batch": 4}, IMAGES),
        Case("uneven_few", {"groups": 3}),
        Case("uneven_many", {"groups": 11}, MAPS),
        Case("uneven_virtual_batch", {"groups": 11, "virtual_batch": 4}, MAPS),
        Case("almost_one_each", {"groups": 77}, MAPS),
        Case("exact_or_error", {"groups": 4, "remainder": "error"}),
        Case("largest_divisor", {"groups": 11, "remainder": "largest_divisor"}, IMAGES),
    ],
    "gbgn": [
        Case("defaults"),
        Case("two_groups", {"groups": 2}),
        Case("one_example", {"groups": 2, "examples_per_group": 1}),
        Case("three_examples", {"groups": 4, "examples_per_group": 3}),
        Case("ragged", {"groups": 4, "examples_per_group": 4}),
        Case("too_many_examples", {"groups": 4, "examples_per_group": 100}),
        Case("eval_weight", {"groups": 2, "eval_weight": 0.3}),
        Case("own_moments", {"groups": 2, "eval_weight": 1.0}),
        Case("momentum", {"groups": 2, "momentum": 0.5}),
        Case("cumulative", {"groups": 2, "momentum": None}),
        Case("eps", {"groups": 2, "eps": 0.1}),
        Case("no_affine", {"groups": 2, "affine": False}),
        Case("virtual_batch", {"groups": 2, "virtual_batch": 4}),
        Case("gcd", {"groups": 6, "group_policy": "gcd"}),
        Case("no_running_stats", {"groups": 2, "track_running_stats": False}),
    ],
    "bcn": [
        *_shared(groups=2),
        *_untracked(groups=2),
        Case("defaults_groups"),
        Case("per_channel", {"groups": 4, "affine_per": "channel"}),
        Case("one_group", {"groups": 1}),
        Case("gcd", {"groups": 6, "group_policy": "gcd"}),
        Case("micro", {"groups": 2, "micro": True, "update_rate": 0.1}),
        Case("micro_still", {"groups": 2, "micro": True, "update_rate": 0.0}),
        Case("micro_full", {"groups": 4, "micro": True, "update_rate": 1.0}),
        Case(
            "micro_by_step",
            {"groups": 2, "micro": True, "update_rate": 0.3, "update_every": "step"},
        ),
        Case(
            "micro_per_channel",
            {"groups": 2, "micro": True, "update_rate": 0.3, "affine_per": "channel"},
        ),
    ],
}
