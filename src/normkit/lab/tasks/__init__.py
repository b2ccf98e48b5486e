"""What is learned: one file a task, from its batches to its metrics.

    class Contrastive(Task):                         # in mytask.py, beside the experiment's file
        metrics = {"nearest": TaskMetric()}          # the first one is the task's own score

        def loss(self, model, batch):                # a number, or several by name
            first, second = batch
            return contrast(model(first), model(second))

        def evaluation(self, part):                  # add(model, batch) for each, then values()
            return NearestNeighbours(self)

``task = "mytask.py:Contrastive"`` in the experiment's file. The lab does the rest: optimizer,
schedule, several runs side by side, interruption, statistics, pages. ``base`` says what a task may
decide; ``classification`` is the first one.
"""

from normkit.lab.results import TaskMetric as TaskMetric
from normkit.lab.tasks.base import Evaluation as Evaluation
from normkit.lab.tasks.base import Task as Task
from normkit.lab.tasks.find import load_sets as load_sets
from normkit.lab.tasks.find import make_task as make_task
from normkit.lab.tasks.find import task_class as task_class
from normkit.lab.tasks.find import task_names as task_names
from normkit.lab.tasks.sets import sets_key as sets_key
