"""torch.export of layers, for batches of any size."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch.export import Dim, export

from cases import CHANNELS, build, every, inputs, label
from normkit import catalog

# runs of samples are cut in one place for all layers: one without moments in eval mode, one with
RUNS = [("bn", {"virtual_batch": 2}), ("sn", {"virtual_batch": 2})]
# options that eval mode does not read, or reads as numbers only
UNREAD = {"virtual_batch", "momentum", "r_ramp", "d_ramp", "mean_spread", "std_spread"}
UNREAD |= {"minus", "init", "tau", "kernel_size", "ratio", "unbiased"}
READ = [case for case in every() if not case[1] or not case[1].keys() <= UNREAD]


def exported(layer, x):
    sizes = ({0: 2 * Dim("half", min=1, max=32)},)  # even, for dn links pairs of samples
    return export(layer, (x,), dynamic_shapes=sizes).module()


@pytest.mark.parametrize("case", [*READ, *RUNS], ids=label)
def test_any_batch_in_eval_mode(case):
    """ghost_bn and layers with virtual_batch could not be exported: they compared the batch with
    the size of its runs, which has no meaning in eval mode."""
    if case[1].get("preset") == "authors":
        pytest.skip("eval mode updates the score, from 16 samples or fewer: two programs")
    layer = build(case).eval()
    program = exported(copy.deepcopy(layer), inputs(6))
    for size in (2, 4, CHANNELS, 10):
        x = inputs(size)
        torch.testing.assert_close(program(x), layer(x))


def test_a_batch_of_any_size_without_a_bound():
    """A map was compared with the size of its tables, so that no program was made, or one that
    refused as many samples as there are channels."""
    layer = catalog.make("bn", CHANNELS, dtype=torch.float64).eval()
    program = export(layer, (inputs(6),), dynamic_shapes=({0: Dim("n")},)).module()
    for size in (2, CHANNELS, 9):
        x = inputs(size)
        torch.testing.assert_close(program(x), layer(x))


def test_a_program_of_ubn_in_a_file():
    """In eval mode it had an empty block without gradients, which torch.export.save refused."""
    layer, x = catalog.make("ubn", 16).eval(), torch.randn(2, 16, 4, 4)
    file = io.BytesIO()
    torch.export.save(export(layer, (x,)), file)
    file.seek(0)
    torch.testing.assert_close(torch.export.load(file).module()(x), layer(x))


# a program for training is seldom asked for, and torch.compile traces all layers for any size: one
# of each way to keep statistics
TRAINED = [("bn", {}), ("dn", {}), ("ubn", {"preset": "paper"}), ("sn", {}), ("gbgn", {})]


@pytest.mark.parametrize("case", TRAINED, ids=label)
def test_any_batch_in_training(case):
    """dn never updated its statistics: the number of values was a symbol, which is no int."""
    layer = build(case)
    program = exported(copy.deepcopy(layer), inputs(6))
    for size in (4, CHANNELS, 10):
        x = inputs(size)
        torch.testing.assert_close(program(x), layer(x))
    kept = dict(program.named_buffers())
    for key, buffer in layer.named_buffers():
        if key in kept:
            torch.testing.assert_close(kept[key], buffer, equal_nan=True, msg=key)
