"""The training loop: one for a single process, several processes, and several machines."""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from candid._support.errors import CandidError, CheckpointError, NonFiniteError, require_extra
from candid._support.numbers import Array
from candid._support.options import to_dict
from candid._support.processes import StopFlag, first_error, summed
from candid._support.progress import Row, TrainingDisplay
from candid._support.randomness import generator
from candid.data.batches import NamedBatch, named_batches
from candid.data.images import to_float
from candid.data.splits import Split, training_keys
from candid.inference.metrics import bits_per_dimension
from candid.inference.runner import Runner
from candid.judging.calibrate import attach_held_out
from candid.models import checkpoint, saving
from candid.models.flow.classifier import GenerativeClassifier
from candid.models.flow.mixture import Losses, information_bottleneck_loss
from candid.models.protocol import Model
from candid.training.loader import Batch, training_batches
from candid.training.options import TrainOptions
from candid.training.refit import can_refit, refit_mixture
from candid.training.run_folder import RESTORE, AfterEpoch, RunFolder, State, data_digest
from candid.training.setup import (
    Setup,
    batch_norms,
    build_optimiser,
    clip_gradients,
    first_nonfinite_gradient,
    in_unit_range,
    is_over,
    learning_rate,
    set_learning_rate,
)

EVALUATION_BATCH = 250
AVERAGED_BATCHES = 100
"""Batches of each process over which batch-norm statistics are averaged at the end."""
TELL_SECONDS = 10.0


class Run:
    """One training run: its parts, and where it stands.

    Args:
        setup: Options, data, model and processes of the run.
        folder: Where the run is written.
        display: What shows the epochs.
        after_epoch: Is called in the first process, after the last epoch and before at most every ten
            seconds, with the folder and the metrics of all epochs.
    """

    def __init__(
        self,
        setup: Setup,
        folder: RunFolder,
        display: TrainingDisplay,
        after_epoch: AfterEpoch | None = None,
    ) -> None:
        self.fabric, self.options, self.model = setup.fabric, setup.options, setup.model
        self.data, self.preprocessing, self.plan = setup.data, setup.preprocessing, setup.plan
        self.folder, self.display = folder, display
        self.after_epoch: AfterEpoch = after_epoch or (lambda *_: None)
        self.writer: TensorBoardWriter | None = None
        self.data_digest = data_digest(self.data)
        self.bits_offset: float | None = None
        if "invert" in self.model.can:
            self.bits_offset = cast(GenerativeClassifier, self.model).bits_offset
        self.wrapped, self.optimiser = self.fabric.setup(
            self.model, build_optimiser(self.model, self.options)
        )
        share, rank = self.options.grad_accumulation, self.fabric.global_rank
        self.parts = range(rank * share, (rank + 1) * share)
        self.step, self.best = 0, math.inf
        self.saved_at, self.told_at = time.monotonic(), -math.inf
        self.rows: list[Row] = []
        self.tally = [0.0] * 4  # of the current epoch: sums of loss, L_X, L_Y over its steps, seconds
        self.stopping = False
        self.error: CandidError | None = None  # of this process, to be raised in all of them

    def restore(self, state: State) -> None:
        """Continue from ``state``, if the data are still the same."""
        state.check_data(self.data, self.data_digest)
        try:
            self.model.load_state_dict(state.model)
            self.optimiser.load_state_dict(state.optimiser)
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"The state in '{self.folder.path}' does not fit its model: {RESTORE}"
            ) from error
        self.step, self.rows, self.tally, self.best = state.step, state.rows, state.tally, state.best

    def train(self, stop: StopFlag) -> bool:
        """Run the remaining steps; return False if the run was told to stop."""
        options, per_epoch = self.options, self.plan.steps_per_epoch
        steps = options.epochs * per_epoch
        batches = training_batches(
            self.data.train, self.preprocessing, self.plan, self.step, steps, self.parts, options.workers
        )
        self.display.begin(options.epochs, steps, self.step, self.plan.batch)
        if options.tensorboard and self.fabric.is_global_zero:
            self.writer = TensorBoardWriter(self.folder.path / "tensorboard", self.step)
        while not self.is_over:
            start = time.monotonic()
            losses = self._optimise(batches, stop)
            self.tally = [a + b for a, b in zip(self.tally, [*losses, time.monotonic() - start], strict=True)]
            self.display.advance(training_metrics(losses, self.bits_offset))
            if self.step % per_epoch == 0:
                self._end_epoch()
            elif self.stopping or time.monotonic() - self.saved_at > 60 * options.save_minutes:
                self._save()
            if self.stopping:
                self._raise_together()
                return False
        return True

    @property
    def is_over(self) -> bool:
        steps = self.options.epochs * self.plan.steps_per_epoch
        return self.step >= steps or is_over(self.options, self._val_losses)

    def _optimise(self, batches: Iterator[Batch], stop: StopFlag) -> list[float]:
        """Make one step of the optimiser and return the mean losses over all processes."""
        self._to_training_mode()
        rate = learning_rate(self.options, self.step, self.plan.steps_per_epoch, self._val_losses)
        set_learning_rate(self.optimiser, rate)
        sums = [0.0] * 3
        for part in self.parts:
            more = part != self.parts[-1] and self.fabric.world_size > 1
            with self.fabric.no_backward_sync(self.wrapped) if more else nullcontext():
                losses = self._losses(batches, part)
                agreed = self._agree(losses, stop)
                if losses is not None:
                    self.fabric.backward(losses.total / len(self.parts))
            sums = [a + b / len(self.parts) for a, b in zip(sums, agreed, strict=True)]
        norm = clip_gradients(self.model, self.options)
        if not math.isfinite(float(norm)):
            raise self._diverged(
                f"The gradient of '{first_nonfinite_gradient(self.model)}' became non-finite"
            )
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.step += 1
        return sums

    def _losses(self, batches: Iterator[Batch], part: int) -> Losses | None:
        """Return the losses of the next batch; None, with the reason in ``self.error``, if there are none."""
        device, options = self.fabric.device, self.options
        noise = generator(options.seed, self.step, part, 3, device=device)
        try:
            images, labels = next(batches)
            x, y = in_unit_range(images, device), labels.to(device, non_blocking=True)
            losses = losses_of(self.wrapped, x, y, options, noise)
            if torch.isfinite(losses.total):
                return losses
            self.error = self._diverged("The loss became non-finite")
        except NonFiniteError as error:
            self.error = self._diverged(str(error))
        except CandidError as error:
            self.error = error
        return None

    def _agree(self, losses: Losses | None, stop: StopFlag) -> list[float]:
        """Return the losses averaged over the processes; an error or a signal in one of them reaches all."""
        values = torch.zeros(3) if losses is None else torch.stack(losses).detach().float().cpu()
        flags = np.array([self.error is not None, stop.signal is not None], np.float32)
        report = summed(self.fabric, np.concatenate((values.numpy(), flags)))
        if report[3]:
            self._raise_together()
        self.stopping |= bool(report[4])
        means: list[float] = (report[:3] / self.fabric.world_size).tolist()
        return means

    def _raise_together(self) -> None:
        error = first_error(self.fabric, self.error)
        if error is not None:
            raise error

    def _diverged(self, what: str) -> NonFiniteError:
        saved = (
            f"the last good checkpoint is in '{self.folder.path}'"
            if self.folder.has_state
            else "nothing was saved yet"
        )
        return NonFiniteError(
            f"Step {self.step + 1} (epoch {self.step // self.plan.steps_per_epoch + 1}): {what.rstrip('.')}; "
            f"{saved}. Start again with a lower --learning-rate, a longer --warmup or a lower --clip."
        )

    def _to_training_mode(self) -> None:
        self.model.train()
        if self.options.means_only:
            for module in batch_norms(self.model):
                module.eval()

    @property
    def _val_losses(self) -> list[float]:
        return [row["val_loss"] for row in self.rows]

    def _end_epoch(self) -> None:
        steps = self.plan.steps_per_epoch
        *sums, seconds = self.tally
        self._share_statistics()
        val = self._evaluate(self.data.val)
        row = {
            "epoch": self.step // steps,
            "step": self.step,
            "learning_rate": self.optimiser.param_groups[0]["lr"],
            **{
                f"train_{k}": v
                for k, v in training_metrics([s / steps for s in sums], self.bits_offset).items()
            },
            **{f"val_{k}": v for k, v in val.items()},
            "images_per_second": self.plan.batch * steps / seconds,
            "seconds": seconds,
        }
        self.rows.append(row)
        self.tally = [0.0] * 4
        self._save(val)
        self._raise_together()
        self.display.epoch(row)
        if self.writer is not None:
            self.writer.epoch(row)

    def _evaluate(self, split: Split) -> Row:
        """Return the metrics of the bare model on a split; the processes share the work."""
        fabric, model = self.fabric, self.model.eval()
        rank, world, workers = fabric.global_rank, fabric.world_size, self.options.workers
        batches = named_batches(split, self.preprocessing, EVALUATION_BATCH, rank, world, workers)
        sums = np.zeros(3)
        try:
            sums = sums_over(model, batches)
        except CandidError as error:
            self.error = error
        self._raise_together()
        means = summed(fabric, sums) / len(split)
        return validation_metrics(means, model, self.bits_offset, self.options.beta)

    def _save(self, val: Row | None = None) -> None:
        """Save the state; at the end of an epoch, whose metrics are ``val``, also the model."""
        is_best = val is not None and val["loss"] < self.best
        if val is not None:
            self.best = min(self.best, val["loss"])
            self.model.metadata["training"] = self._record(val)
        if self.fabric.is_global_zero:
            try:
                if val is not None:
                    self.folder.save_model(self.model, is_best=is_best)
                    self.folder.write_rows(self.rows)
                weights, moments = self.model.state_dict(), self.optimiser.state_dict()
                names, images = list(self.data.class_names), len(self.data.train)
                state = State(weights, moments, self.step, self.rows, self.tally, self.best, names, images)
                self.folder.save_state(state, self.options, self.data_digest)
                if val is not None and (self.is_over or time.monotonic() - self.told_at > TELL_SECONDS):
                    self.after_epoch(self.folder, self.rows)
                    self.told_at = time.monotonic()
            except (CandidError, OSError) as error:
                self.error = error if isinstance(error, CandidError) else CandidError(str(error))
        self.saved_at = time.monotonic()

    def _record(self, val: Row) -> dict[str, Any]:
        options = to_dict(self.options)
        return {
            "config": options | {"beta": str(options["beta"])},
            "step": self.step,
            "epoch": self.step // self.plan.steps_per_epoch,
            "val": val,
        }

    def finish(self) -> dict[str, Any]:
        """Average the batch-norm statistics, save, and measure the best model."""
        if not self.options.means_only:
            self._average_statistics()
        val = self._evaluate(self.data.val)
        self._save(val)
        self._raise_together()
        if val["loss"] > self.best:
            self.model = checkpoint.load(self.folder.best).to(self.fabric.device)
        self._refit()
        val = self._evaluate(self.data.val)
        seconds = sum(row["seconds"] for row in self.rows)
        results: dict[str, Any] = {"val": val, "seconds": seconds, "step": self.step}
        if self.data.test is not None:
            results["test"] = self._evaluate(self.data.test)
        runner = Runner(self.model, self.fabric, None, self.options.workers, self.display)
        attach_held_out(runner, self.data.train, self.data.val, self.preprocessing)
        if self.fabric.is_global_zero:
            self._attach_keys()
            saving.save(self.model, self.folder.best)
            self.folder.write_results(results)
        return results

    def _refit(self) -> None:
        """Refit the mixture to the held-out images, unless that was done or can't be."""
        model, held_out, workers = cast(GenerativeClassifier, self.model), self.data.val, self.options.workers
        if can_refit(model) and model.config.flow.span is None:
            result = refit_mixture(model, self.fabric, held_out, self.preprocessing, workers, self.display)
            self.display.log(str(result))

    def _attach_keys(self) -> None:
        """Add hashes of the training images to the model, so that evaluation can recognise them."""
        workers, model = self.options.workers, self.model
        keys = training_keys(self.data.train, model.preprocessing, workers, self.display)
        if keys is not None and model.held_out:
            model.held_out["training_keys"] = keys

    @torch.no_grad()
    def _average_statistics(self) -> None:
        """Set running means and variances to averages over many batches with the final weights."""
        self._to_training_mode()
        norms = batch_norms(self.model)
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # torch then averages all batches alike
        start = self.step
        stop = start + min(AVERAGED_BATCHES, self.plan.steps_per_epoch)
        batches = training_batches(
            self.data.train, self.preprocessing, self.plan, start, stop, self.parts, self.options.workers
        )
        try:
            for i, (images, _) in enumerate(batches):
                x = in_unit_range(images, self.fabric.device)
                noise = generator(self.options.seed, start, i, 4, self.parts[0], device=self.fabric.device)
                self.model(x) if self.options.baseline else self.model(x, noise)
        except CandidError as error:
            self.error = error
        self._raise_together()
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            for statistic in (norm.running_mean, norm.running_var):
                if self.fabric.world_size > 1 and statistic is not None:
                    dist.all_reduce(statistic)
                    statistic /= self.fabric.world_size

    def _share_statistics(self) -> None:
        """Give the first process's running statistics to all: a checkpoint stores these."""
        if self.fabric.world_size > 1:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)


def losses_of(
    model: nn.Module, x: Tensor, y: Tensor, options: TrainOptions, noise: torch.Generator
) -> Losses:
    """Return the information-bottleneck loss; for a ResNet, the same cross-entropy alone."""
    if not options.baseline:
        return information_bottleneck_loss(model, x, y, options.beta, options.label_smoothing, noise)
    l_y = F.cross_entropy(model(x), y, label_smoothing=options.label_smoothing)
    return Losses(l_y, torch.zeros_like(l_y), l_y)


def sums_over(model: Model, batches: Iterable[NamedBatch]) -> Array:
    """Return sums over images: right ones, cross-entropies, log densities (or 0), (3,) in float64."""
    frozen = model.frozen()
    logits, labels, densities = [torch.zeros(0, len(model.class_names))], [torch.zeros(0).long()], []
    for images, y, _ in batches:
        outputs = frozen.outputs(to_float(images))
        logits.append(torch.from_numpy(outputs.logits))
        labels.append(torch.from_numpy(y))
        if outputs.log_density_terms is not None:
            densities.append(torch.from_numpy(outputs.log_density_terms).sum(1))
    scores, targets = torch.cat(logits), torch.cat(labels)
    right = (scores.argmax(1) == targets).sum()
    entropy = F.cross_entropy(scores.double(), targets, reduction="sum")
    total = torch.cat(densities).sum() if densities else torch.zeros(())
    return torch.stack([right.double(), entropy, total.double()]).numpy()


def validation_metrics(means: Array, model: Model, bits_offset: float | None, beta: float) -> Row:
    """Return loss, accuracy, cross-entropy and bits/dim from the means of what :func:`sums_over` sums."""
    accuracy, entropy, _ = means.tolist()
    metrics = {"accuracy": accuracy, "cross_entropy": entropy}
    if bits_offset is None:
        return {"loss": entropy, **metrics}
    metrics["bits_per_dim"] = bits_per_dimension(means[2:], model.dimensions)
    l_x = (metrics["bits_per_dim"] - bits_offset) * math.log(2)
    loss = entropy if math.isinf(beta) else (l_x + beta * entropy) / (1 + beta)
    return {"loss": loss, **metrics}


def training_metrics(losses: list[float], bits_offset: float | None) -> Row:
    """Return mean losses of steps (loss, L_X, L_Y) under the names and in the units that people read."""
    loss, l_x, l_y = losses
    row = {"loss": loss, "cross_entropy": l_y}
    return row if bits_offset is None else row | {"bits_per_dim": l_x / math.log(2) + bits_offset}


class TensorBoardWriter:
    """Writes one scalar for each metric of an epoch; hides what a killed run wrote beyond its state."""

    def __init__(self, folder: Path, step: int) -> None:
        require_extra("tensorboard", "tensorboard", "The option --tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=step + 1)

    def epoch(self, row: Row) -> None:
        for key, value in row.items():
            self.writer.add_scalar(key, value, int(row["step"]))
        self.writer.flush()
