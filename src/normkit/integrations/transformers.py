"""A callback for the Trainer of Hugging Face's transformers."""

from __future__ import annotations

from typing import Any

from normkit.core.optional_dependencies import require
from normkit.integrations.training import NormMonitor

library: Any = require("transformers", "transformers", "normkit.integrations.transformers")


class TransformersCallback(library.TrainerCallback):
    """Measures of the norms beside the Trainer's logs, update rates, calibration at the end.

        trainer = Trainer(..., callbacks=[TransformersCallback(every=100, calibrate=True)])

    Options are those of ``NormMonitor``, and ``writer``: a SummaryWriter, or anything that has
    ``add_scalar``. Without one, the values stand in ``trainer.state.log_history``, which is saved
    with every checkpoint. ``monitor.observer`` keeps the records, and ``monitor.calibration`` what
    has changed at the end; a checkpoint that was saved before does not have that.
    """

    def __init__(self, writer: Any = None, **options: Any) -> None:
        self.writer = writer
        self.monitor = NormMonitor(**options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        batches = args.gradient_accumulation_steps
        self.monitor.start(given["model"], given.get("optimizer"), state.global_step, batches)

    def on_step_begin(self, *_: Any, **given: Any) -> None:
        self.monitor.before_forward()

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._log(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._log(state)
        self.monitor.finish(given.get("train_dataloader"))

    def _log(self, state: Any) -> None:
        for step, values in self.monitor.scalars().items():
            if self.writer is None:
                state.log_history.append({**values, "step": step})
            for name, value in values.items() if self.writer is not None else ():
                self.writer.add_scalar(name, value, step)
