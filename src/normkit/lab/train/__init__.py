"""Training: from a run to its result.

    train(run) = Training(run), step() until it is finished, result()

    feed ──rows of a plan──> step: images, loss, gradients, update ──> history, read once an epoch

A step waits for nothing and keeps its tensors in place, so that a GPU replays it as one graph.
``cuda_graph`` decides where that is done and how many runs take turns; the results are the same.
What belongs to classification, its loss, metrics and evaluation, is in ``evaluate``.
"""

from normkit.lab.train.cuda_graph import side_by_side as side_by_side
from normkit.lab.train.loop import train as train
from normkit.lab.train.loop import train_together as train_together
from normkit.lab.train.training import Progress as Progress
from normkit.lab.train.training import Training as Training
