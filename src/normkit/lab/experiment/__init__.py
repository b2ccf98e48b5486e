"""What an experiment is, and how its file is read and checked.

``records`` says what an experiment, a variant and a run are; ``reading`` makes them of a TOML
file, and ``checks`` tries data and models before anything is trained.
"""

from normkit.lab.experiment.records import PROTOCOL as PROTOCOL
from normkit.lab.experiment.records import Cell as Cell
from normkit.lab.experiment.records import Data as Data
from normkit.lab.experiment.records import Experiment as Experiment
from normkit.lab.experiment.records import Model as Model
from normkit.lab.experiment.records import ModelStep as ModelStep
from normkit.lab.experiment.records import Options as Options
from normkit.lab.experiment.records import OwnCode as OwnCode
from normkit.lab.experiment.records import Published as Published
from normkit.lab.experiment.records import Run as Run
from normkit.lab.experiment.records import Setting as Setting
from normkit.lab.experiment.records import TaskSpec as TaskSpec
from normkit.lab.experiment.records import Train as Train
from normkit.lab.experiment.records import Variant as Variant
from normkit.lab.experiment.records import Watch as Watch
from normkit.lab.experiment.records import variant_label as variant_label
