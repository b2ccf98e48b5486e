"""Callbacks of training libraries, with the real ones: what they log, what they leave behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import normkit as nk
from normkit.errors import NothingToDo, OptionError
from normkit.integrations.training import NormMonitor

STEPS = 4


def network(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), norm, nn.ReLU()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 2),
    )


def data() -> TensorDataset:
    return TensorDataset(2 * torch.randn(32, 3, 8, 8) + 1, torch.randint(0, 2, (32,)))


def exact(net: nn.Sequential, images: torch.Tensor) -> None:
    """The statistics are those of all images together."""
    x = net[0](images).transpose(0, 1).flatten(1)
    torch.testing.assert_close(net[1].running_mean, x.mean(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net[1].running_var, x.var(1), rtol=1e-3, atol=1e-5)


class TestMonitor:
    def train(
        self, model: nn.Module, monitor: NormMonitor, call: Any = None, **position: int
    ) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        monitor.start(model, optimizer, **position)
        for images, labels in DataLoader(data(), 8):
            monitor.before_forward()
            F.cross_entropy((call or model)(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    def test_scalars_come_once_and_bear_the_whole_path(self) -> None:
        """The part that is called is not the model: it is found."""
        model = nn.ModuleDict({"net": network(nk.BN(8)), "loss": nn.CrossEntropyLoss()})
        monitor = NormMonitor(every=2, measures=["esm_mean"])
        self.train(model, monitor, model["net"])
        assert {k: list(v) for k, v in monitor.scalars().items()} == {
            0: ["norms/esm_mean/net.1"],
            2: ["norms/esm_mean/net.1"],
        }
        assert monitor.scalars() == {}
        monitor.stop()
        assert not model["net"]._forward_hooks
        assert not model["net"]._forward_pre_hooks

    def test_steps_are_those_of_the_optimizer(self) -> None:
        """Not of this process, for a training that was resumed, and not of micro-batches."""
        monitor = NormMonitor(every=1, measures=["esm_mean"])
        self.train(network(nk.BN(8)), monitor, first_step=10, batches_a_step=2)
        assert list(monitor.scalars()) == [10, 11]
        monitor.stop()

    def test_calibration_from_the_batches_of_training(self) -> None:
        model, monitor = network(nk.BN(8)), NormMonitor(every=None, calibrate=True, images=16)
        self.train(model, monitor)
        images = data().tensors[0]
        assert monitor.finish(images.split(8)).images == 16
        exact(model, images[:16])
        monitor.calibration.undo()
        with pytest.raises(OptionError, match="calibrate=loader"):
            monitor.finish(None)

    def test_update_rates_follow_a_scheduler(self) -> None:
        model, monitor = network(nk.BCN(8, groups=2, micro=True)), NormMonitor(every=None)
        self.train(model, monitor)
        assert model[1].rate.item() == pytest.approx(0.1 * 0.5 ** (STEPS - 1))
        assert monitor.finish() is None
        assert not model._forward_pre_hooks

    def test_a_model_without_norms(self) -> None:
        with pytest.raises(NothingToDo):
            NormMonitor().start(nn.Sequential(nn.Linear(2, 2)), None)


@pytest.mark.integration
class TestLightning:
    @pytest.fixture
    def module(self) -> Any:
        pytorch = pytest.importorskip("lightning.pytorch")

        class Module(pytorch.LightningModule):
            def __init__(self, norm: nn.Module) -> None:
                super().__init__()
                self.net = network(norm)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.net(x)

            def training_step(self, batch: Any, index: int) -> torch.Tensor:
                return F.cross_entropy(self.net(batch[0]), batch[1])  # not by way of forward

            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
                return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        return Module

    def fit(self, module: Any, folder: Path, set_: TensorDataset, **options: Any) -> Any:
        from lightning.pytorch import Trainer
        from lightning.pytorch.loggers import TensorBoardLogger

        from normkit.integrations.lightning import LightningCallback

        callback = LightningCallback(**options)
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            callbacks=[callback],
            logger=TensorBoardLogger(folder, name="", version=""),
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(module, DataLoader(set_, 8))
        return callback

    def test_scalars_and_calibration(self, module: Any, tmp_path: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        net, set_ = module(nk.BN(8)), data()
        callback = self.fit(net, tmp_path, set_, every=1, measures=["esm_mean"], calibrate=True)
        exact(net.net, set_.tensors[0])
        assert "norm" in str(callback.monitor.calibration)
        events = EventAccumulator(str(tmp_path)).Reload()
        assert [e.step for e in events.Scalars("norms/esm_mean/net.1")] == list(range(STEPS))
        assert not net.net._forward_hooks

    def test_update_rates(self, module: Any, tmp_path: Path) -> None:
        net = module(nk.BCN(8, groups=2, micro=True))
        self.fit(net, tmp_path, data(), every=None)
        assert net.net[1].rate.item() == pytest.approx(0.1 * 0.5 ** (STEPS - 1))


class Pictures(Dataset):
    def __init__(self, set_: TensorDataset) -> None:
        self.set = set_

    def __len__(self) -> int:
        return len(self.set)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        image, label = self.set[index]
        return {"pixel_values": image, "labels": label}


class Classifier(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.net = network(norm)

    def forward(self, pixel_values: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        logits = self.net(pixel_values)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


@pytest.mark.integration
class TestTransformers:
    def fit(self, model: nn.Module, folder: Path, set_: TensorDataset, **options: Any) -> Any:
        transformers = pytest.importorskip("transformers")
        from normkit.integrations.transformers import TransformersCallback

        callback = TransformersCallback(**options)
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=1,
            per_device_train_batch_size=8,
            learning_rate=0.1,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model, arguments, train_dataset=Pictures(set_), callbacks=[callback]
        )
        trainer.train()
        return trainer, callback

    def test_scalars_and_calibration(self, tmp_path: Path) -> None:
        model, set_ = Classifier(nk.BN(8)), data()
        options = {"every": 2, "measures": ["esm_mean"], "calibrate": True}
        trainer, callback = self.fit(model, tmp_path, set_, **options)
        rows = [row for row in trainer.state.log_history if "norms/esm_mean/net.1" in row]
        assert [row["step"] for row in rows] == [0, 2]
        assert json.dumps(rows)
        exact(model.net, set_.tensors[0])
        assert callback.monitor.calibration.images == 32

    def test_a_writer_and_update_rates(self, tmp_path: Path) -> None:
        seen: list[tuple[Any, ...]] = []

        class Writer:
            def add_scalar(self, *scalar: Any) -> None:
                seen.append(scalar)

        model = Classifier(nk.BCN(8, groups=2, micro=True))
        options = {"every": 2, "measures": ["esm_mean"]}
        self.fit(model, tmp_path, data(), writer=Writer(), **options)
        assert [(name, step) for name, _, step in seen] == [
            ("norms/esm_mean/net.1", 0),
            ("norms/esm_mean/net.1", 2),
        ]
        # transformers lets the rate fall linearly to 0; the last step is at a quarter of it
        assert model.net[1].rate.item() == pytest.approx(0.025)


@pytest.mark.integration
def test_accelerate() -> None:
    """Followed before prepare(), which wraps the optimizer; calibrated with the prepared loader."""
    accelerate = pytest.importorskip("accelerate")
    model, set_ = network(nk.BCN(8, groups=2, micro=True)), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nk.follow_learning_rate(model, optimizer)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(set_, 8))
    with nk.observe(model, every=1, measures=["esm_mean"]) as observer:
        for images, labels in loader:
            accelerator.backward(F.cross_entropy(prepared(images), labels))
            optimizer.step()
            optimizer.zero_grad()
    assert model[1].rate.item() == pytest.approx(0.1)
    assert len(observer.series("1", "esm_mean")) == STEPS
    nk.calibrate(accelerator.unwrap_model(prepared), loader)
    x = model[0](set_.tensors[0]).transpose(0, 1).flatten(1)
    torch.testing.assert_close(model[1].running_mean, x.mean(1), rtol=1e-4, atol=1e-5)


@pytest.mark.integration
def test_timm_trains_a_converted_model(tmp_path: Path) -> None:
    """The pieces of timm's train script, which its package does not ship: a registered model that
    is converted, its optimizers with our parameter groups, scheduler, EMA and checkpoints."""
    timm = pytest.importorskip("timm")
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.models import load_checkpoint, register_model
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import CheckpointSaver, ModelEmaV3

    def resnet_of_this_test(pretrained: bool = False, **options: Any) -> nn.Module:
        model = timm.create_model("resnet10t", pretrained=pretrained, **options)
        return nk.convert(model, "bcn", groups=2)

    register_model(resnet_of_this_test)
    model = timm.create_model("resnet_of_this_test", num_classes=2)
    assert any(isinstance(m, nk.BCN) for m in model.modules())
    optimizer = create_optimizer_v2(nk.param_groups(model, lr=0.05, weight_decay=1e-4), opt="lamb")
    scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=2)
    ema, loss = ModelEmaV3(model, decay=0.5), LabelSmoothingCrossEntropy(0.1)
    saver = CheckpointSaver(model, optimizer, model_ema=ema, checkpoint_dir=str(tmp_path))
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(0, 2, (8,))
    before = [p.clone() for p in model.parameters()]
    for epoch in range(2):
        loss(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model)
        scheduler.step(epoch + 1)
        saver.save_checkpoint(epoch, metric=float(epoch))
    assert not all(map(torch.equal, before, model.parameters()))
    twin = timm.create_model("resnet_of_this_test", num_classes=2)
    load_checkpoint(twin, str(tmp_path / "last.pth.tar"), use_ema=False, weights_only=False)
    torch.testing.assert_close(twin.eval()(images), model.eval()(images))
