"""The parts of a run. Each can be measured alone, and none twice for one version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

import normkit as nk
from benchmarks import training_loop
from benchmarks.gpu import compiled, host, networks, single
from normkit.lab.data import load
from normkit.timing import InputSpec

Rows = list[dict[str, Any]]
Job = tuple[str, list[str]]  # of a part, what one process prepares

NETWORK, LAYERS, HOST, COMPILED, LAB = "network ", "layers ", "host", "compiled", "lab"
FIRST = "128x256x56x56 channels_last"  # where straightforward versions are measured as well
WRITTEN = ("bn", "gn", "bgn", "rbn", "bcn", "sn", "ubn", "bnet", "pn")  # of these
# layers that have kernels of their own are measured at all shapes, the others at two
ALL = (FIRST, "128x1024x14x14 channels_last")
MOST = (
    "bn",
    "gn",
    "ln",
    "in",
    "bgn",
    "rbn",
    "iebn",
    "bcn",
    "batch_renorm",
    "sn",
    "ubn",
    "bnet",
    "pn",
)
SHAPES = (
    FIRST,
    "32x256x56x56 channels_last",
    "128x1024x14x14 channels_last",
    "128x2048x7x7 channels_last",
    "2x256x200x304 channels_last",
    "128x2048x7x7 contiguous",
    "128x1024x14x14 contiguous",
    "128x256x56x56 contiguous",
    "128x64x112x112 channels_last",
)
SMALL, REST = tuple(networks.CASES)[:4], tuple(networks.CASES)[4:]
TRIAL_SHAPE = "4x32x6x6"
# seconds on an H200 with kernels on disk: for whoever has little time
SECONDS = {COMPILED: 15, HOST: 12, NETWORK: 14, LAYERS: 9, LAB: 40}
LAB_IMAGES = 12_800


def layer_names(part: str) -> list[str]:
    names = nk.names("activation")
    everything = part == HOST or part.removeprefix(LAYERS) in ALL
    return names if everything else [name for name in names if name in MOST]


@dataclass(frozen=True)
class Machine:
    """On what, and how thoroughly."""

    device: torch.device
    turns: int = 7
    trial: bool = False  # tiny shapes, to see that all of it runs

    def spec(self, name: str) -> InputSpec:
        shape, memory = name.removeprefix(LAYERS).split()
        sizes = tuple(int(size) for size in (TRIAL_SHAPE if self.trial else shape).split("x"))
        return InputSpec(sizes, memory, torch.bfloat16, self.device)

    def case(self, name: str) -> networks.Case:
        case = networks.CASES[name.removeprefix(NETWORK)]
        return case.tiny() if self.trial else case

    def compiled_case(self) -> networks.Case:
        return compiled.CASE.tiny() if self.trial else compiled.CASE


def names() -> list[str]:
    """All parts, in the order in which they are measured."""
    return [
        COMPILED,
        *(f"{NETWORK}{name}" for name in SMALL),
        HOST,
        *(f"{LAYERS}{shape}" for shape in SHAPES[:5]),
        *(f"{NETWORK}{name}" for name in REST),
        *(f"{LAYERS}{shape}" for shape in SHAPES[5:]),
        LAB,
    ]


def estimate(part: str) -> int:
    if part == f"{LAYERS}{FIRST}":
        return 20
    if part == f"{NETWORK}resnet50-256":
        return 35
    return next(seconds for start, seconds in SECONDS.items() if part.startswith(start))


def all_jobs(wanted: list[str], machine: Machine) -> list[Job]:
    """Of all parts, in their order."""
    return [job for part in wanted for job in jobs(part, machine)]


def jobs(part: str, machine: Machine) -> list[Job]:
    """What can be compiled before, each in any process."""
    if part.startswith(NETWORK):
        return [(part, variants) for variants in machine.case(part).norms().values()]
    if part.startswith(LAYERS):
        names = layer_names(part)
        own, traced = ([n for n in names if (n in MOST) == here] for here in (True, False))
        found = [(part, own), (part, traced[::2]), (part, traced[1::2])]
        return [job for job in found if job[1]]
    return [(part, layer_names(part)[i::3]) for i in range(3)] if part == HOST else []


def prepare(job: Job, machine: Machine) -> None:
    part, which = job
    if part.startswith(NETWORK):
        networks.prepare(machine.case(part), which, machine.device)
    elif part.startswith(LAYERS):
        single.prepare(which, machine.spec(part))
    else:
        host.measure(which, machine.device, 1, length=1)


def measure(part: str, machine: Machine, log: Callable[[str], None]) -> Rows:
    if part.startswith(NETWORK):
        return networks.measure(machine.case(part), machine.device, machine.turns, log)
    if part.startswith(LAYERS):
        written = WRITTEN if part == f"{LAYERS}{FIRST}" else ()
        return single.measure(layer_names(part), machine.spec(part), min(3, machine.turns), written)
    if part == LAB:
        return lab_rows(machine)
    length = 2 if machine.trial else host.LENGTH
    return host.measure(layer_names(part), machine.device, min(5, machine.turns), length)


def lab_rows(machine: Machine) -> Rows:
    """The lab's training loop: a ResNet-18 for 32×32 images, seconds an epoch and run."""
    size = ["--data", f"synthetic:3x32x32x10x{LAB_IMAGES}", "--model", "torchvision:resnet18"]
    size += ["--stem", "cifar", "--precision", "bf16"]
    if machine.trial:
        size = ["--data", "synthetic:1x8x8x3x32", "--model", "native:small_cnn", "--crop", "1"]
        size += ["--precision", "float32", "--batch", "16"]
    many = ["--norms", "torch,bn", "--epochs", "1" if machine.trial else "2", "--abreast", "1,2,4"]
    options = training_loop.parse([*size, *many, "--device", machine.device.type])
    sets = load(training_loop.setting_of(options, training_loop.TORCH).data, machine.device)
    return [asdict(row) for row in training_loop.measured(options, sets, machine.device)]
