"""The claims of the five papers that are measured here: in what order, and what each expects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from normkit.lab.experiment import Cell, Experiment, Run, Variant
from normkit.lab.experiment.reading import read

CLAIMS = Path(__file__).parents[2] / "experiments" / "claims"
BETTER, WORSE, EQUIVALENT = "better", "worse", "equivalent"
SLIGHT = "slight"  # a difference may be there, but a small one


@dataclass(frozen=True)
class Claim:
    """What a paper says, and which comparisons of which experiment decide it.

    ``expected`` is by variant; ``cell`` keeps it to the cells with these values (a tuple: with one
    of them). A ``measure`` is compared instead of the metric, see ``judge.measured``. A claim
    ``over`` several values is only as good as the number of them that were run.
    """

    letter: str
    text: str
    file: str = ""  # in experiments/claims, without .toml
    expected: Mapping[str, str] = field(default_factory=dict)
    baseline: str = ""  # if it is not the experiment's
    cell: Mapping[str, object] = field(default_factory=dict)
    measure: str = ""
    source: str = ""  # if it is not what the file says
    epoch: int = 0  # judged after this one; 0: where the experiment judges
    losses: bool = False  # the note speaks of training, even if nothing is contradicted
    over: tuple[str, str] = ("", "")  # a key of the grid, or "variant", and its values in words
    first_steps: bool = False  # told by the layers and by plain torch: see collapse.py
    note: str = ""  # what the runs say beside the numbers; figures are computed, never typed here


WARM, COLD = {"train.warmup": 1}, {"train.warmup": 0}
NEAR, FAR = ({"norm.mean_spread": spread, "norm.std_spread": spread} for spread in (1.0, 4.0))

OUR_OWN = "our own question, no claim of a paper"

ALL = (
    Claim("a", "in a narrow ResNet-20 γ = 0.1 with c = 100 beats γ = 1 at a learning rate of 0.1",
          "a-small-start-scale", {"γ 0.1, c 100": BETTER},
          note="The narrow ResNet-20 learns more slowly with it, on training images too; (c) has "
               "the halves. Without warm-up it is the other way round on the paper's network "
               "(a-resnet18), and on this one with four times the channels (a-wider): there γ = 1 "
               "learns more slowly. With warm-up the ResNet-18 gains less than half a point "
               "(a-resnet18). In three times the epochs no difference is shown (a-longer)."),
    Claim("a", "in a ResNet-18, the paper's network, γ = 0.1 with c = 100 beats γ = 1",
          "a-resnet18", {"γ 0.1, c 100": BETTER}, losses=True,
          note="Without warm-up γ = 1 is behind from the first epoch on, on training images too. "
               "With it the two are level, and neither is shown to be above γ = 0.1 without: small "
               "scales stand in for warm-up here."),
    Claim("a", "in a ResNet-20 of four times the channels γ = 0.1 with c = 100 beats γ = 1",
          "a-wider", {"γ 0.1, c 100": BETTER}, source=OUR_OWN, losses=True),
    Claim("a", "in a narrow ResNet-20 γ = 0.1 with c = 100 beats γ = 1 in fifteen epochs",
          "a-longer", {"γ 0.1, c 100": BETTER}, source=OUR_OWN, losses=True),
    Claim("b", "γ = 0.1 and 0.05 with c = 100 beat γ = 1 at a learning rate of 0.01",
          "b-lower-rate", {"γ 0.1, c 100": BETTER, "γ 0.05, c 100": BETTER},
          over=("train.epochs", "lengths of training"),
          note="The smaller the start, the more slowly it learns, on training images too."),
    Claim("c", "slow scales alone (c = 100) help", "c-each-half", {"γ 1, c 100": BETTER}),
    Claim("c", "small start scales alone (γ = 0.1, c = 1) help",
          "c-each-half", {"γ 0.1, c 1": BETTER}, source=OUR_OWN,
          note="With warm-up it learns more slowly, on training images too, as in (a)."),
    Claim("c", "small start scales (γ = 0.1) do worse without c = 100",
          "c-each-half", {"γ 0.1, c 1": WORSE}, baseline="γ 0.1, c 100",
          source="Revisiting BN (Davis & Frank 2021), section 4.4",
          note="The paper says so in words, of all its learning rates; here it is 0.1 alone."),
    Claim("d", "a batch norm before the network equals offline statistics",
          "d-input-norm", {"offline": EQUIVALENT, "fixed": EQUIVALENT}),
    Claim("e", "at a learning rate of 0.1 A1 and A2 differ only slightly from the standard form",
          "e-forms-of-the-scale", {"a1": SLIGHT, "a2": SLIGHT}, cell={"train.lr": 0.1},
          losses=True,
          note="Both are above the standard form here, as in the paper's table (there by 0.09 and "
               "0.15 points), and have a lower training loss. The means of all three are lower "
               "than with γ = 1 (a); of A1 and A2 that is shown with warm-up only."),
    Claim("e", "at 0.01 and 0.001 the standard form is clearly better than A1 and A2",
          "e-forms-of-the-scale", {"a1": WORSE, "a2": WORSE}, cell={"train.lr": (0.01, 0.001)},
          over=("train.lr", "learning rates")),
    Claim("f", "RBN without the sample's statistics is as good as RBN",
          "f-gates-without-samples", {"rbn−": EQUIVALENT}, baseline="rbn"),
    Claim("f", "IEBN without the sample's statistics is as good as IEBN",
          "f-gates-without-samples", {"iebn−": EQUIVALENT}, baseline="iebn"),
    Claim("f", "RBN and IEBN are behind the paper's own method (γ < 1, c = 100), with and without "
               "the sample's statistics",
          "f-gates-without-samples",
          {"rbn": WORSE, "rbn−": WORSE, "iebn": WORSE, "iebn−": WORSE}, baseline="γ 0.1, c 100",
          source="Revisiting BN (Davis & Frank 2021), section 4.5 and table 6",
          note="The paper takes the best of three γ for each data set and rate; here it is 0.1, "
               "which is behind γ = 1 in a narrow ResNet-20, too (a)."),
    Claim("g", "UBN beats BN at the end", "g-ubn", {"ubn": BETTER}),
    Claim("g", "UBN beats BN early, after two epochs", "g-ubn", {"ubn": BETTER}, epoch=2),
    Claim("g", "each rectification alone beats BN", "g-rectifications",
          {"bn + normalization": BETTER, "bn + affine": BETTER, "bn + statistics": BETTER},
          note="The affine part alone is a depthwise convolution in each norm: `bnet`."),
    Claim("g", "UBN beats BN whatever the threshold", "g-threshold",
          {"ubn, τ = 0.025": BETTER, "ubn, τ = 0.15": BETTER, "ubn, τ = 0.25": BETTER},
          over=("variant", "thresholds"),
          note="Runs at τ = 0.15 are those of g-ubn."),
    Claim("g", "UBN beats BN at every batch size", "g-batch-sizes", {"ubn": BETTER},
          over=("train.batch", "batch sizes"),
          note="Runs with batches of 128 are those of g-ubn. Of the batch size itself the paper "
               "says that accuracy does not depend on it in a distinct way."),
    Claim("h", "features of different images are less alike with UBN during training",
          "g-ubn", {"ubn": BETTER}, measure="condensation",
          source="UBN (Wang et al. 2024), figures 1 and 2",
          note="Features of neither network are alike: UBN acts on cosines above τ = 0.15, and its "
               "figures call features condensed above 0.3. Images are centred here; "
               "h-uncentred-images has them as they are."),
    Claim("h", "where images are not centred, features are less alike with UBN",
          "h-uncentred-images", {"ubn": BETTER}, measure="condensation",
          note="The cosine starts high and falls with both. UBN has the higher accuracy with "
               "centring (g-ubn) and without (h-uncentred-images), and less alike features in "
               "neither."),
    Claim("i", "the estimation shift of BN's deviations grows with depth",
          "i-estimation-shift", {"bn": BETTER}, measure="esm_std_trend",
          note="With few images the first norm has the largest shift by far, and the last norms "
               "less than those in the middle. With many it grows up to the last few norms."),
    Claim("i", "a group norm in every other layer lowers the error from few images",
          "i-estimation-shift", {"gnbn": BETTER}),
    Claim("i", "a group norm in every other layer keeps the estimation shift of the others small",
          "i-estimation-shift", {"gnbn": BETTER}, measure="esm_std"),
    Claim("j", "a batch-free norm in each bottleneck beats BN, wherever it stands",
          "j-xbn-positions",
          {"xbn, first": BETTER, "xbn, second": BETTER, "xbn, third": BETTER},
          over=("variant", "positions"), losses=True,
          first_steps=True,
          note="Without warm-up the rate is too high for the first steps of this network: the "
               "loss more than doubles within ten, and is that of one answer after 60. BN does "
               "the same, and so does plain torch in float32 (one seed, 60 steps; of XBN the "
               "second position): that is the schedule, neither bfloat16, these layers nor the "
               "method. XBN is longer in leaving it, which is its own, and more than half of its "
               "deficit is there in training already; no float32 run goes on so far. GN alone "
               "also learns more slowly without warm-up in a ResNet-20, and with WS does not "
               "(l-ws-bcn). With warm-up training losses end near BN's, and what XBN lacks is "
               "lost mostly from training to test images, as GN alone loses it in a ResNet-20. "
               "Why is not known: the control, GN in this network, was not run. In the first "
               "stage groups have one channel in the first and second position and four in the "
               "third, as in the paper's ResNet-50."),
    Claim("j", "a batch-free norm in every second, fourth or eighth bottleneck beats BN",
          "j-xbn-positions",
          {"xbn, every 2nd": BETTER, "xbn, every 4th": BETTER, "xbn, every 8th": BETTER},
          note="Without warm-up the first epoch is the slower the more blocks are batch-free, with "
               "the stem and one block slower than BN already. What every eighth loses is lost "
               "mostly on test images."),
    Claim("j", "the second position is better than the first and the third", "j-xbn-positions",
          {"xbn, first": WORSE, "xbn, third": WORSE}, baseline="xbn, second",
          source="Estimation shift (Huang et al. 2022), table 1"),
    Claim("j", "every fourth or eighth block alone is worse than every block", "j-xbn-positions",
          {"xbn, every 4th": WORSE, "xbn, every 8th": WORSE}, baseline="xbn, second",
          source="Estimation shift (Huang et al. 2022), figure 7"),
    Claim("k", "with a batch-free norm in each block wrong running statistics cost less",
          "k-disturbed-statistics", {"xbn, gn": BETTER, "xbn, in": BETTER},
          measure="disturbance",
          note="Batch-free norms cost accuracy to begin with, an instance norm more than a group "
               "norm, so that less can be lost. As a share of it they lose less too."),
    Claim("k", "wrong running statistics cost less with an instance norm than with a group norm",
          "k-disturbed-statistics", {"xbn, in": BETTER}, baseline="xbn, gn",
          measure="disturbance"),
    Claim("l", "WS helps GN", "l-ws-bcn", {"gn + ws": BETTER}, baseline="gn"),
    Claim("l", "WS helps BN", "l-ws-bcn", {"bn + ws": BETTER}),
    Claim("l", "BCN + WS beats GN + WS", "l-ws-bcn", {"bcn + ws": BETTER}, baseline="gn + ws"),
    Claim("l", "BCN + WS beats BN", "l-ws-bcn", {"bcn + ws": BETTER}),
    Claim("l", "BCN + WS beats BN in a ResNet-18", "l-resnet18", {"bcn + ws": BETTER},
          first_steps=True,
          note="Without warm-up the rate is too high for the first steps of BCN + WS in this "
               "network: the loss more than doubles within ten, and the network gives one answer. "
               "By their training accuracy all ten runs, micro or not, were there in the first "
               "epoch, and two left it. BN learns more slowly without warm-up here, too, but "
               "learns. It is the method at this rate, not bfloat16 or these layers: "
               "plain torch in float32 takes nearly the same first 60 steps (one seed, not micro; "
               "which runs recover was not compared). With the rate rising over an epoch the loss "
               "falls over these steps, and no run was lost, micro or not. In a ResNet-20 none "
               "was with either schedule (l-ws-bcn, m-worker-batch)."),
    Claim("l", "in a ResNet-18 the micro-batch form of BCN + WS beats BN with two images a worker",
          "l-resnet18", {"bcn + ws, micro": BETTER}, baseline="bn, 2 a worker",
          note="The micro-batch form moves its estimates once a step from all 128 images. Its fair "
               "rival is SyncBN, the same as bn: with warm-up it is ahead of that too, where the "
               "paper has it 0.23 points behind. Without warm-up the mean loss of the first epoch "
               "is above that of one answer, of BN with two images too; only BN's falls then."),
    Claim("l", "WS helps GN more than WN does", "l-weight-norms",
          {"gn + ws": BETTER}, baseline="gn + wn"),
    Claim("l", "WS helps GN more than CWN does", "l-weight-norms",
          {"gn + ws": BETTER}, baseline="gn + cwn"),
    Claim("l", "the mean matters more than the deviation", "l-weight-norms",
          {"minus mean": BETTER}, baseline="over std"),
    Claim("m", "with two images a worker GN, BGN and BCN + WS (micro) beat BN", "m-worker-batch",
          {"gn": BETTER, "bgn": BETTER, "bcn + ws": BETTER}, cell={"train.worker_batch": 2},
          source="BGN (Zhou et al. 2020), figure 1 and table 2; of BCN WS/BCN (Qiao et al. 2019), "
                 "table 8",
          note="GN and BGN are behind on training images already, and learn more slowly without "
               "warm-up, which BN does not in this network (in a ResNet-18 it does, l-resnet18). "
               "By its rule BGN has one group for two images, all channels of both. BCN (micro) "
               "moves its estimates once a step from all 128 images, which BN with two images a "
               "worker cannot: its fair rival is SyncBN, the same as bn at 128 images."),
    Claim("m", "with one image a worker GN, BGN and BCN + WS (micro) beat BN", "m-worker-batch",
          {"gn": BETTER, "bgn": BETTER, "bcn + ws": BETTER}, cell={"train.worker_batch": 1},
          source=f"{OUR_OWN}: batches of the BGN paper end at two", losses=True,
          note="In training BN of one image is an instance norm, and learns more than GN and BGN; "
               "on test images its running statistics take most of that away. BGN and GBGN lose in "
               "the same way, but less, BGN the least. The runs of BCN (micro), and of GN, are the "
               "same as at two images a worker."),
    Claim("m", "BGN with its rule beats GBGN at two images a worker", "m-worker-batch",
          {"bgn": BETTER}, baseline="gbgn", cell={"train.worker_batch": 2},
          note="BGN is behind on training images already. GBGN has a quarter of the channels as "
               "groups here, and BGN one group by its rule: the number of groups is compared with "
               "the method."),
    Claim("m", "BGN with its rule beats BN at 128 images a worker too", "m-worker-batch",
          {"bgn": BETTER}, cell={"train.worker_batch": 128},
          note="It is behind on training images already; the paper has it 0.18 points above BN. "
               "The rule's 512 groups are for the maps of a ResNet-50. Here they make each row of "
               "a channel's map a group of its own, in all three stages."),
    Claim("m", "BGN with its rule beats BN at eight images a worker too", "m-worker-batch",
          {"bgn": BETTER}, cell={"train.worker_batch": 8},
          note="It is behind on training images already. Its rule has 16 groups for eight images, "
               "in the paper too; the paper has it 0.58 points above BN."),
    Claim("m", "with two images a worker BGN with its rule beats GN, LN, IN and PN",
          "m-worker-batch", {"gn": WORSE, "ln": WORSE, "in": WORSE, "pn": WORSE}, baseline="bgn",
          cell={"train.worker_batch": 2},
          note="Means of GN and IN are higher, those of LN and PN lower. By its rule BGN has one "
               "group here: a layer norm over two images."),
    Claim("n", "WS keeps the channels of a group alike (StatDiff)", "l-ws-bcn",
          {"gn + ws": BETTER}, baseline="gn", measure="stat_diff",
          source="WS/BCN (Qiao et al. 2019), figure 6"),
    Claim("o", "channels with random means and deviations, of spread 1, cost accuracy",
          "o-singularities", {"shifted": WORSE}, cell=NEAR, losses=True),
    Claim("o", "channels of spread 4 cost accuracy too, or training fails", "o-singularities",
          {"shifted": WORSE}, cell=FAR, losses=True,
          note="The paper calls accuracies under 70 % failures; BN itself is at about that here."),
    Claim("o", "a spread of the means alone costs accuracy", "o-singularities",
          {"shifted": WORSE}, cell={"norm.mean_spread": (1.0, 4.0), "norm.std_spread": 0.0},
          losses=True),
    Claim("o", "a spread of the deviations alone costs accuracy", "o-singularities",
          {"shifted": WORSE}, cell={"norm.mean_spread": 0.0, "norm.std_spread": (1.0, 4.0)},
          losses=True,
          note="Deviations are what makes training fail: with a spread of 4 every run was lost, "
               "whatever the means; with less none was, at any spread of the means. They are drawn "
               "as exp of a normal number, at spread 4 a third of them off by a factor of exp(4) "
               "or more."),
    Claim("p", "XBN and BCN mind damaged test images less than BN",
          "p-damaged-images", {"xbn": BETTER, "bcn + ws": BETTER}, measure="corruption",
          source=OUR_OWN,
          note="More than half of what XBN has left above BN is contrast alone: norms that take "
               "statistics from each image undo it, and BN does once it is adapted. GN + WS has no "
               "less left than XBN in the mean, and more accuracy on images as they are."),
    Claim("p", "XBN and BCN mind damaged images less also when statistics are adapted to them",
          "p-damaged-images", {"xbn": BETTER, "bcn + ws": BETTER},
          measure="corruption_adapted", source=OUR_OWN),
)  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """Runs of an experiment that are trained together, headline claims first."""

    file: str
    seeds: int = 99  # no more than these of the experiment's
    cell: Mapping[str, object] = field(default_factory=dict)
    variants: tuple[str, ...] = ()  # all, if none is named


XBN_CLAIMED = (
    "bn", "xbn, first", "xbn, second", "xbn, third",
    "xbn, every 2nd", "xbn, every 4th", "xbn, every 8th",
)  # fmt: skip
WORKERS_CLAIMED = ("bn", "gn", "bgn", "gbgn", "bcn + ws")

# by value: the headlines with all their seeds; every claim on one schedule, and the other values
# that claims are over; of some the other schedule
FIRST_STAGES = (
    Stage("a-small-start-scale"),
    Stage("g-ubn"),
    Stage("l-ws-bcn"),
    Stage("m-worker-batch", cell=WARM),
    Stage("c-each-half"),
    Stage("e-forms-of-the-scale", cell=WARM),
    Stage("j-xbn-positions", cell=WARM, variants=XBN_CLAIMED),
    Stage("a-longer"),
    Stage("a-wider"),
    Stage("k-disturbed-statistics", cell=WARM),
    Stage("p-damaged-images", cell=WARM),
    Stage("l-weight-norms", cell=WARM),
    Stage("b-lower-rate", cell={**WARM, "train.epochs": 5}),
    Stage("h-uncentred-images", cell=WARM),
    Stage("g-rectifications", cell=WARM),
    Stage("f-gates-without-samples", cell=WARM),
    Stage("o-singularities", cell={**WARM, **NEAR}),
    Stage("o-singularities", cell={**WARM, **FAR}),
    Stage("d-input-norm", cell=WARM),
    Stage("g-threshold", cell=WARM, variants=("bn", "ubn, τ = 0.025", "ubn, τ = 0.25")),
    Stage("g-batch-sizes", cell={**WARM, "train.batch": 512}),
    Stage("g-batch-sizes", cell=WARM),
    Stage("a-resnet18", cell=COLD),
    Stage("l-resnet18", cell=COLD),
    Stage("i-estimation-shift"),
    Stage("l-weight-norms"),
    Stage("g-rectifications"),
    Stage("f-gates-without-samples"),
    Stage("d-input-norm"),
    Stage("e-forms-of-the-scale", cell={**COLD, "train.lr": 0.1}),
    Stage("o-singularities", cell={**COLD, **NEAR}),
    Stage("o-singularities", cell={**COLD, **FAR}),
)
# then the claims that have no row on one of their schedules, the other rows of claims, and last
# what no claim asks for
STAGES = (
    *FIRST_STAGES,
    Stage("b-lower-rate", cell={**COLD, "train.epochs": 5}),
    Stage("a-resnet18"),
    Stage("m-worker-batch", cell={"train.worker_batch": (1, 2, 128)}, variants=WORKERS_CLAIMED),
    Stage("l-resnet18"),
    Stage("k-disturbed-statistics"),
    Stage("p-damaged-images"),
    Stage("j-xbn-positions", variants=XBN_CLAIMED),
    Stage("h-uncentred-images"),
    Stage("o-singularities"),
    Stage("e-forms-of-the-scale"),
    Stage("m-worker-batch"),
    Stage("g-threshold", variants=("bn", "ubn, τ = 0.025", "ubn, τ = 0.15", "ubn, τ = 0.25")),
    Stage("g-batch-sizes"),
    Stage("b-lower-rate", cell={**WARM, "train.epochs": (2, 12)}),
    Stage("b-lower-rate"),
    Stage("g-threshold"),
    Stage("j-xbn-positions"),
)


@cache
def experiment_of(file: str) -> Experiment:
    return read(CLAIMS / f"{file}.toml")


def is_in(cell: Cell, wanted: Mapping[str, object]) -> bool:
    values = dict(cell)
    return all(
        values.get(key) in (value if isinstance(value, tuple) else (value,))
        for key, value in wanted.items()
    )


def stage_runs(stage: Stage) -> list[tuple[Variant, Run]]:
    """Every run of a stage once; seeds outermost, so that pairs are complete."""
    experiment = experiment_of(stage.file)
    runs: dict[str, tuple[Variant, Run]] = {}
    for seed in experiment.seeds[: stage.seeds]:
        for variant in experiment.variants:
            if stage.variants and variant.name not in stage.variants:
                continue
            if is_in(variant.cell, stage.cell):
                [run] = variant.runs((seed,))
                runs.setdefault(run.id, (variant, run))
    return list(runs.values())


def ordered_runs(stages: tuple[Stage, ...] = STAGES) -> list[Run]:
    """Every run once, in the order of the stages."""
    return list({run.id: run for stage in stages for _, run in stage_runs(stage)}.values())
