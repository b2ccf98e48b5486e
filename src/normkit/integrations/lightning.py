"""A callback for Lightning's Trainer: norms watched in training, and calibrated at the end."""

from __future__ import annotations

from typing import Any

from normkit.core.optional_dependencies import require
from normkit.integrations.training import NormMonitor

pytorch: Any = require("lightning.pytorch", "lightning", "normkit.integrations.lightning")


class LightningCallback(pytorch.Callback):
    """Measures of the norms in the Trainer's loggers, update rates, calibration at the end.

        trainer = Trainer(callbacks=[LightningCallback(every=100, calibrate=True)])

    Options are those of ``NormMonitor``. Scalars go to every logger as norms/MEASURE/PATH, with the
    step of training in which they were measured; ``monitor.observer`` keeps the records, and
    ``monitor.calibration`` what has changed at the end, to be printed or undone. Calibration calls
    the module with the inputs of a batch: where ``forward`` is not the way through the network, or
    a batch is no pair, say ``forward=lambda module, batch: module.net(batch["image"])``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.monitor = NormMonitor(**options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        optimizer = trainer.optimizers[0] if trainer.optimizers else None
        self.monitor.start(
            pl_module, optimizer, trainer.global_step, trainer.accumulate_grad_batches
        )

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.monitor.before_forward()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        # reading values waits for the device: only where loggers would do that, too
        if trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0:
            self._log(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._log(trainer)
        self.monitor.finish(trainer.train_dataloader)

    def on_exception(self, *_: Any) -> None:
        self.monitor.stop()

    def _log(self, trainer: Any) -> None:
        for step, values in self.monitor.scalars().items():
            for logger in trainer.loggers:
                logger.log_metrics(values, step=step)
