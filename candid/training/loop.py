"""Training: one loop for one process, several, and several machines."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch import nn

from candid._support.config import to_dict
from candid._support.distributed import StopFlag, first_error, launch, stopping_on_signals, summed
from candid._support.errors import CandidError, NonFiniteError
from candid._support.files import remove_unfinished
from candid._support.randomness import generator
from candid.data.datasets import Dataset
from candid.data.images import Preprocessing
from candid.data.loader import Batch, Plan, named_batches, training_batches
from candid.data.splits import Split
from candid.inference.metrics import bits_per_dimension
from candid.inference.predictions import to_float
from candid.inference.runner import Passes
from candid.models import checkpoint
from candid.models.flow.loss import Losses
from candid.models.protocol import require_latent
from candid.training.display import TrainingDisplay
from candid.training.losses import losses_of, sums_over
from candid.training.optimiser import (
    build_optimiser,
    first_nonfinite_gradient,
    is_over,
    learning_rate,
    set_learning_rate,
)
from candid.training.options import TrainConfig
from candid.training.run_folder import Row, RunFolder, State
from candid.training.setup import Model, batch_norms, build_model, open_data, start_actnorm
from candid.training.tensorboard import Board
from candid.trust.held_out import calibrate_saved

EVALUATION_BATCH = 250
AVERAGED_BATCHES = 100
"""Batches of each process over which batch-norm statistics are averaged at the end."""
TELL_SECONDS = 10.0
AfterEpoch = Callable[[RunFolder, list[Row]], object]


@dataclass
class Outcome:
    """How a run ended."""

    finished: bool
    results: dict[str, Any]
    """Figures of the best model on the validation and test images, if it finished."""


def train(
    config: TrainConfig,
    out: str | Path,
    *,
    resume: bool = False,
    devices: int | None = None,
    progress: TrainingDisplay | None = None,
    after_epoch: AfterEpoch | None = None,
) -> Outcome:
    """Train as ``config`` says, into the run folder ``out``.

    A run that was stopped or killed goes on with ``resume=True`` and ends with the same bits as one that
    was not (same machine, same number of processes). ``after_epoch`` gets the folder and all epochs'
    figures, in the first process, after the last epoch and before at most every ten seconds.
    """
    folder = RunFolder(Path(out))
    if folder.exists and not resume:
        raise CandidError(
            f"'{out}' already has a run: add --resume to go on with it, or choose another --out."
        )
    fabric = launch(devices, config.precision)
    first = fabric.is_global_zero
    show = progress if first and progress is not None else TrainingDisplay(quiet=True)
    data, preprocessing = open_data(config, show)
    plan = Plan(len(data.train), config.batch, fabric.world_size * config.accumulate, config.seed)
    model = build_model(config, data.class_names)
    state = folder.load_state() if resume else None
    if state is None and config.actnorm_from_data and config.start is None:
        start_actnorm(model, data, preprocessing, plan)
    if first:
        remove_unfinished(folder.path)
    if first:
        folder.create(config)
    if first and data.skipped:
        folder.write_text("skipped.txt", "\n".join(data.skipped) + "\n")
        show.log(f"left out {len(data.skipped)} images that can't be used: {folder.path / 'skipped.txt'}")
    run = _Run(fabric, config, folder, data, preprocessing, plan, model, show, after_epoch if first else None)
    if state is not None:
        run.restore(state)
        results = folder.results
        if run.is_over and results is not None and results.get("step", run.step) == run.step:
            show.log(f"this run is finished: {folder.path}")
            return Outcome(True, results)
    with stopping_on_signals() as stop, show:
        if not run.train(stop):
            show.log(f"stopped after step {run.step}; go on with: candid train --resume --out {folder.path}")
            return Outcome(False, {})
        return Outcome(True, run.finish())


class _Run:
    """The parts of a run, and where it stands."""

    def __init__(
        self,
        fabric: Fabric,
        config: TrainConfig,
        folder: RunFolder,
        data: Dataset,
        preprocessing: Preprocessing,
        plan: Plan,
        model: Model,
        show: TrainingDisplay,
        after_epoch: AfterEpoch | None,
    ) -> None:
        self.fabric, self.config, self.folder, self.show = fabric, config, folder, show
        self.data, self.preprocessing, self.plan = data, preprocessing, plan
        self.after_epoch: AfterEpoch = after_epoch or (lambda *_: None)
        self.board: Board | None = None
        self.model = model
        self.wrapped, self.optimiser = fabric.setup(model, build_optimiser(model, config))
        self.parts = range(
            fabric.global_rank * config.accumulate, (fabric.global_rank + 1) * config.accumulate
        )
        self.step, self.best = 0, math.inf
        self.saved_at, self.told_at = time.monotonic(), -math.inf
        self.rows: list[Row] = []
        self.tally = [0.0] * 4  # of the epoch under way: sums of loss, L_X, L_Y over its steps, seconds
        self.stopping = False
        self.error: CandidError | None = None  # of this process, to be raised in all of them

    def restore(self, state: State) -> None:
        """Go on from there, if the data are still the same."""
        state.check_data(list(self.data.class_names), len(self.data.train))
        self.model.load_state_dict(state.model)
        self.optimiser.load_state_dict(state.optimiser)
        self.step, self.rows, self.tally, self.best = state.step, state.rows, state.tally, state.best

    def train(self, stop: StopFlag) -> bool:
        """Go through the steps that are left; False if it was told to stop."""
        config, per_epoch = self.config, self.plan.steps_per_epoch
        steps = config.epochs * per_epoch
        batches = training_batches(
            self.data.train, self.preprocessing, self.plan, self.step, steps, self.parts, config.workers
        )
        self.show.begin(config.epochs, steps, self.step, self.plan.batch)
        if config.tensorboard and self.fabric.is_global_zero:
            self.board = Board(self.folder.path / "tensorboard", self.step)
        while not self.is_over:
            start = time.monotonic()
            losses = self._optimise(batches, stop)
            self.tally = [a + b for a, b in zip(self.tally, [*losses, time.monotonic() - start], strict=True)]
            self.show.advance(self._figures(losses))
            if self.step % per_epoch == 0:
                self._end_epoch()
            elif self.stopping or time.monotonic() - self.saved_at > 60 * config.save_minutes:
                self._save()
            if self.stopping:
                self._raise_together()
                return False
        return True

    @property
    def is_over(self) -> bool:
        steps = self.config.epochs * self.plan.steps_per_epoch
        return self.step >= steps or is_over(self.config, self._val_losses)

    def _optimise(self, batches: Iterator[Batch], stop: StopFlag) -> list[float]:
        """One step of the optimiser; the mean losses over all processes."""
        self._to_training_mode()
        rate = learning_rate(self.config, self.step, self.plan.steps_per_epoch, self._val_losses)
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
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        if not math.isfinite(float(norm)):
            raise self._diverged(
                f"The gradient of '{first_nonfinite_gradient(self.model)}' became non-finite"
            )
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.step += 1
        return sums

    def _losses(self, batches: Iterator[Batch], part: int) -> Losses | None:
        """Of the next batch; None, with the reason in ``self.error``, if they can't be had."""
        device, config = self.fabric.device, self.config
        noise = generator(config.seed, self.step, part, 3, device=device)
        try:
            images, labels = next(batches)
            x, y = to_float(images, device), labels.to(device, non_blocking=True)
            losses = losses_of(self.wrapped, x, y, config, noise)
            if torch.isfinite(losses.total):
                return losses
            self.error = self._diverged("The loss became non-finite")
        except NonFiniteError as error:
            self.error = self._diverged(str(error))
        except CandidError as error:
            self.error = error
        return None

    def _agree(self, losses: Losses | None, stop: StopFlag) -> list[float]:
        """The losses averaged over the processes; an error or a signal in one of them reaches all."""
        values = torch.zeros(3) if losses is None else torch.stack(losses).detach().float().cpu()
        flags = torch.tensor([self.error is not None, stop.signal is not None]).float()
        report = summed(self.fabric, torch.cat((values, flags)))
        if report[3]:
            self._raise_together()
        self.stopping |= bool(report[4])
        return (report[:3] / self.fabric.world_size).tolist()

    def _raise_together(self) -> None:
        error = first_error(self.fabric, self.error)
        if error is not None:
            raise error

    def _diverged(self, what: str) -> NonFiniteError:
        saved = (
            f"the last good checkpoint is kept in '{self.folder.path}'"
            if self.folder.has_state
            else "nothing was saved yet"
        )
        return NonFiniteError(
            f"Step {self.step + 1} (epoch {self.step // self.plan.steps_per_epoch + 1}): {what.rstrip('.')}; "
            f"{saved}. Start anew with a lower --learning-rate, a longer --burn-in or a lower --clip."
        )

    def _to_training_mode(self) -> None:
        self.model.train()
        if self.config.means_only:
            for module in batch_norms(self.model):
                module.eval()

    def _figures(self, losses: list[float]) -> Row:
        loss, l_x, l_y = losses
        row = {"loss": loss, "cross_entropy": l_y}
        if self.model.density_of == "pixels":
            row["bits_per_dim"] = (
                l_x / math.log(2) + require_latent(self.model, "Bits per dimension").bits_offset
            )
        return row

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
            **{f"train_{k}": v for k, v in self._figures([s / steps for s in sums]).items()},
            **{f"val_{k}": v for k, v in val.items()},
            "images_per_second": self.plan.batch * steps / seconds,
            "seconds": seconds,
        }
        self.rows.append(row)
        self.tally = [0.0] * 4
        self._save(val)
        self._raise_together()
        self.show.epoch(row)
        if self.board is not None:
            self.board.epoch(row)

    def _evaluate(self, split: Split) -> Row:
        """Figures of the bare model on a split, the work shared by the processes."""
        fabric, model = self.fabric, self.model.eval()
        batches = named_batches(
            split,
            self.preprocessing,
            EVALUATION_BATCH,
            fabric.global_rank,
            fabric.world_size,
            self.config.workers,
        )
        own = torch.zeros(3, dtype=torch.float64)
        try:
            own = sums_over(model, batches)
        except CandidError as error:
            self.error = error
        self._raise_together()
        sums = summed(fabric, own)
        accuracy, entropy, log_density = (sums / len(split)).unbind()
        figures = {"accuracy": float(accuracy), "cross_entropy": float(entropy)}
        beta = self.config.beta
        if model.density_of is None:
            return {"loss": float(entropy), **figures}
        figures["bits_per_dim"] = bits_per_dimension(log_density, model.dimensions)
        l_x = (figures["bits_per_dim"] - require_latent(model, "Bits per dimension").bits_offset) * math.log(
            2
        )
        loss = float(entropy) if math.isinf(beta) else (l_x + beta * float(entropy)) / (1 + beta)
        return {"loss": loss, **figures}

    def _save(self, val: Row | None = None) -> None:
        """The state; at the end of an epoch, whose figures are ``val``, the model, too."""
        is_best = val is not None and val["loss"] < self.best
        if val is not None:
            self.best = min(self.best, val["loss"])
            self.model.metadata["training"] = self._record(val)
        if self.fabric.is_global_zero:
            try:
                if val is not None:
                    self.folder.save_model(self.model, is_best=is_best)
                    self.folder.write_rows(self.rows)
                self.folder.save_state(
                    State(
                        self.model.state_dict(),
                        self.optimiser.state_dict(),
                        self.step,
                        self.rows,
                        self.tally,
                        self.best,
                        list(self.data.class_names),
                        len(self.data.train),
                    )
                )
                if val is not None and (self.is_over or time.monotonic() - self.told_at > TELL_SECONDS):
                    self.after_epoch(self.folder, self.rows)
                    self.told_at = time.monotonic()
            except (CandidError, OSError) as error:
                self.error = error if isinstance(error, CandidError) else CandidError(str(error))
        self.saved_at = time.monotonic()

    def _record(self, val: Row) -> dict[str, Any]:
        config = to_dict(self.config)
        config["beta"] = str(config["beta"])
        return {
            "config": config,
            "step": self.step,
            "epoch": self.step // self.plan.steps_per_epoch,
            "val": val,
        }

    def finish(self) -> dict[str, Any]:
        """Average the batch-norm statistics, save, and measure the best model."""
        if not self.config.means_only:
            self._average_statistics()
        val = self._evaluate(self.data.val)
        self._save(val)
        self._raise_together()
        if val["loss"] > self.best:
            best = checkpoint.load_any(self.folder.best)
            self.model.load_state_dict(best.state_dict())
            val = self._evaluate(self.data.val)
        seconds = sum(row["seconds"] for row in self.rows)
        results: dict[str, Any] = {"val": val, "seconds": seconds, "step": self.step}
        if self.data.test is not None:
            results["test"] = self._evaluate(self.data.test)
        show = self.show
        passes = Passes(self.model, self.fabric, None, self.config.workers, show)
        calibrate_saved(passes, self.data.train, self.data.val, self.preprocessing, self.folder.best)
        if self.fabric.is_global_zero:
            self.folder.write_results(results)
        return results

    @torch.no_grad()
    def _average_statistics(self) -> None:
        """Running means and variances as averages over many batches with the final weights."""
        self._to_training_mode()
        norms = batch_norms(self.model)
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # torch then averages all batches alike
        start = self.step
        stop = start + min(AVERAGED_BATCHES, self.plan.steps_per_epoch)
        batches = training_batches(
            self.data.train, self.preprocessing, self.plan, start, stop, self.parts, self.config.workers
        )
        try:
            for i, (images, _) in enumerate(batches):
                x = to_float(images, self.fabric.device)
                noise = generator(self.config.seed, start, i, 4, self.parts[0], device=self.fabric.device)
                self.model(x) if self.config.baseline else self.model(x, noise)
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
        """The first process's running statistics to all: its own are what a checkpoint holds."""
        if self.fabric.world_size > 1:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)
