"""The kernels compile for a GPU, also where there is none: what the interpreter forgives, the
compiler does not. A process of its own, for Triton decides when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

COMPILE = """
import os
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import normkit as nk
from normkit.engine.activations import NAMES
from normkit.engine.families import depthwise, fused, pixel, pointwise
from normkit.engine.triton import launch

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32"}
compiled = set()


def compile(self, *tensors):
    types = [TYPES[(tensors[0] if t is None else t).dtype] for t in tensors]
    names, values = self.kernel.arg_names, [*types, *self.numbers, *self.all_constants(0)]
    signature, constants = {}, {}
    for place, (name, value) in enumerate(zip(names, values, strict=True)):
        fixed = place >= len(types) + len(self.numbers) or (type(value) is int and value == 1)
        kind = "fp32" if type(value) is float else "i32"
        signature[name] = value if place < len(types) else "constexpr" if fixed else kind
        if place >= len(types) and fixed:
            constants[(place,)] = value
    key = self.kernel.__name__, str(signature), str(constants)
    if key not in compiled:
        compiled.add(key)
        source = ASTSource(self.kernel, signature, constants)
        options = {"num_warps": self.warps, "launch_pdl": True}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        overlaps = names[-1] == "OVERLAP" and values[-1] is True
        assert ("griddepcontrol.wait" in made.asm["ptx"]) == overlaps, names


launch.Launch.__call__ = compile
launch.overlaps = lambda index: True
os.environ["TRITON_INTERPRET"] = "1"  # Triton has been imported: for the dispatch alone
nk.use_backend("triton")
for name in sys.argv[1:]:
    layer = nk.make(name, 16)
    x = torch.randn(2, 16, 4, 4, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    layer(x.requires_grad_(), None, "relu").sum().backward()
    if name in ("bn", "gn"):  # more than a program holds
        large = torch.randn(1, 16, 136, 136, dtype=torch.bfloat16)
        layer(large.requires_grad_(), None, "relu").sum().backward()
    if not layer.uses_moments():  # short rows, parameters that are learned, and none at all
        short = torch.randn(4, 16, 7, 7, dtype=torch.bfloat16).requires_grad_()
        like = nk.BN(16).eval() if layer.has_eps else nk.DyT(16, affine=False)
        for one in (layer, like):
            for given in (x, short):
                one(given, given, "relu").sum().backward()
                one(given).sum().backward()
                with torch.no_grad():
                    one(given)
    if name == "bn":
        short = torch.randn(512, 16, 7, 7, requires_grad=True)  # rows that no vector divides
        layer(short, None, "relu").sum().backward()
        for activation in NAMES:
            layer(x, None, activation).sum().backward()
print(*sorted({name for name, *_ in compiled}))
"""


def test_kernels_compile_for_a_gpu(tmp_path):
    """One process: layers share kernels, and to start one takes as long as some of these."""
    names = "bn gn batch_renorm rbn bcn sn ubn bnet pn frozen_bn dyt"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE, *names.split()],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    compiled = ran.stdout.split()
    assert {"moments_kernel", "flat_moments_kernel"} <= set(compiled)
    assert len(compiled) > 10
