"""Training: from a run to its result.

    train(run) = Training(run), step() until it is finished, result()

    feed ──rows of a plan──> step: images, loss, gradients, update ──> history, read once an epoch

A step waits for nothing and keeps its tensors in place, so that a GPU replays it as one graph.
``choosing`` decides where that is done and how many runs take turns; the results are the same.
"""

from normkit.lab.train.choosing import side_by_side as side_by_side
from normkit.lab.train.loop import train as train
from normkit.lab.train.progress import Progress as Progress
from normkit.lab.train.together import train_together as train_together
from normkit.lab.train.training import Training as Training
