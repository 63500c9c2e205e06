"""FileRun: a run whose updates learn from the rows of a file, in a seeded order, as `mlx_parallm_train --sft` makes.

step ─▶ rows ─▶ tokens ─▶ update ─▶ (held-out loss ─▶ best version, early stopping)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from mlx_parallm.app.training_run import FINAL, STEPS, Filled, TrainingRun, run_facts
from mlx_parallm.core.requests import Signal
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.errors import ConfigError, RequestError, TrainingFailedError
from mlx_parallm.extras.files.data import Batch, ExampleFile, FileSettings, TrainingData
from mlx_parallm.extras.files.encoding import Encoded, Encoder, check_usable
from mlx_parallm.extras.files.forms import Example, FileKind
from mlx_parallm.extras.files.held_out import LOSS, HeldOut, perplexity
from mlx_parallm.rl.objectives import loss_of, prepare
from mlx_parallm.rl.recording import given_groups
from mlx_parallm.rl.rewards import RewardHistory
from mlx_parallm.rl.status import UpdateReport
from mlx_parallm.rl.tracking import Record

SIGNALS: Mapping[FileKind, Signal] = {
    FileKind.SFT: Signal.CORRECTIONS,
    FileKind.DPO: Signal.PREFERENCES,
    FileKind.KTO: Signal.LATE_FEEDBACK,
}
"""What the updates of each kind of file learn from; see `rl.objectives`."""

_FILE, _BEST, _BEST_STEP, _EVALUATED = "file", "held_out_best", "held_out_best_step", "held_out_step"
"""Keys of an update's progress: the fingerprint of the file; the lowest held-out loss so far, and the step that it was
of; and the last step whose held-out loss is known."""

_TRIED = 100
"""Rows that are encoded before the first step, to see whether the file can be used with this model."""
_LEAST_USABLE = 0.1
_SHOWN_TOKENS = 20
_EVALUATIONS = 10
"""Held-out losses of a run, if nobody says how often."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileRunSettings:
    """How a run on a file is made.

    Attributes:
        longest: most tokens of a row.
        cuts: whether longer rows are cut off; otherwise they are left out.
        every: updates between two held-out losses; None: about ten in a run.
        patience: the run ends after so many held-out losses in a row that are no new low, and goes back to its best
            version; None: it makes all its steps, and ends with the last version.
    """

    longest: int = 2048
    cuts: bool = False
    every: int | None = None
    patience: int | None = None


@dataclass(kw_only=True)
class FileRun(TrainingRun):
    """Each step makes one update from the next rows. A row that cannot be used is left out of its batch."""

    data: TrainingData
    settings: FileRunSettings = FileRunSettings()
    encoder: Encoder = field(init=False)
    held_out: HeldOut | None = field(default=None, init=False)
    best: tuple[float, int] = field(default=(math.inf, 0), init=False)
    """The lowest held-out loss, and the step that it is of."""
    evaluated: int = field(default=-1, init=False)
    """The last step whose held-out loss is known; -1: none."""
    shown: str = field(default="", init=False)
    """The first usable row as text: context ▸ what is trained."""
    start_loss: float | None = field(default=None, init=False)
    """The held-out loss before the first step of this process, if it was due."""

    @property
    def of_file(self) -> FileSettings:
        return self.data.settings

    def facts(self) -> Mapping[str, str]:
        file, settings, training = self.data.file, self.of_file, self.config.rl_training
        rows = f"{len(file.trained):,} rows" + (f", {file.left_out_count:,} left out" if file.left_out_count else "")
        known = run_facts(self.config, self.options, self.served)
        own = {
            "file": f"{file.name}: {rows}, {self._epochs_text}",
            "update": f"{settings.kind.value}, {settings.batch_size} rows, "
            f"learning rate {training.optimizer.learning_rate:g}",
            "trained": self._trained_text,
            "for example": self.shown,
            **self._held_out_facts,
        }
        kept = {name: text for name, text in known.items() if name not in ("environment", "reward", *own)}
        return {"model": kept.pop("model"), "file": own.pop("file"), "adapter": kept.pop("adapter"), **own, **kept}

    @property
    def _epochs_text(self) -> str:
        epochs = self.options.steps / self.data.steps_an_epoch
        return f"{self.options.steps} steps, {epochs:.3g} {'pass' if epochs == 1 else 'passes'}"

    @property
    def _trained_text(self) -> str:
        long = "cut off" if self.settings.cuts else "left out"
        what = "answers of the assistant, and what ends them" if self.encoder.chats else "answers, or plain texts"
        return f"{what}; rows of more than {self.settings.longest} tokens are {long}"

    @property
    def _held_out_facts(self) -> Mapping[str, str]:
        if self.held_out is None:
            return {"held out": "no row"}
        patience = self.settings.patience
        ends = "" if patience is None else f"; the run ends after {patience} without a new low"
        now = "" if self.start_loss is None else f", loss {self.start_loss:.4f} now"
        return {"held out": f"{len(self.data.held_out)} rows, every {self._every} steps{now}{ends}"}

    # -- begin and end ---------------------------------------------------------------------------

    async def _open(self, done: int, taken: int) -> None:
        """Raises ConfigError: the file cannot be used with this model, or is another one than that of the run."""
        progress = self.service.loop().training.progress
        if done and progress.get(_FILE) != self.data.fingerprint:
            raise ConfigError(
                f"{self.of_file.flag}: this run began with other rows or settings of batches; continue with the same "
                f"file, --batch-size, --held-out and --seed, or begin in a new folder with --init-from "
                f"{self.served.run.path if self.served.run else 'DIR'}"
            )
        longest = min(self.settings.longest, self.served.card.context_length)
        self.settings = replace(self.settings, longest=longest)
        self.encoder = Encoder(self.served.tokenizer, longest, self.settings.cuts)
        self._try_rows()
        self._open_held_out()
        self.best = (progress.get(_BEST, math.inf), int(progress.get(_BEST_STEP, 0)))
        self.evaluated = int(progress.get(_EVALUATED, -1))
        if self.held_out is None:
            self.service.loop().training.checkpoints.set_best(None)
        elif self._is_due(done) and self.evaluated < done:
            await self._evaluate_start(done)
        self._stop_early(done)

    async def _evaluate_start(self, done: int) -> None:
        """The held-out loss of the version that this process starts from."""
        metrics = await self._evaluate(done)
        self.start_loss = metrics[LOSS]
        version = self.service.loop().training.versions.latest
        fields = {"adapter": version.name, "version": version.version}
        self.tracking.write(Record("evaluation", done, metrics, fields))

    def _try_rows(self) -> None:
        """Encodes some rows. Raises ConfigError: hardly any of them can be used."""
        file = self.data.file
        tried = file.trained[:_TRIED].tolist()
        if reason := check_usable(self.of_file.kind, self.encoder, file.example(tried[0])):
            raise ConfigError(f"{self.of_file.flag}: {reason}")
        failures = []
        for number in tried:
            try:
                encoded = self.encoder.encode(file.example(number))
                self.shown = self.shown or self._shown(encoded[0][0])
            except (ValueError, RecursionError, RequestError) as error:
                failures.append(f"{file.place(number)}: {error}")
        if len(failures) >= (1 - _LEAST_USABLE) * len(tried):
            raise ConfigError(
                f"{self.of_file.flag}: {len(failures)} of the first {len(tried)} rows cannot be used; {failures[0]}"
            )

    def _shown(self, turn: Encoded) -> str:
        """The end of the context and the beginning of what is trained, as text."""
        decode, most = self.served.tokenizer.decode, _SHOWN_TOKENS
        context, trained = decode(turn.prompt_ids[-most:]), decode(turn.completion_ids[:most])
        before, after = (" …" if len(ids) > most else "" for ids in (turn.prompt_ids, turn.completion_ids))
        return f"{before.strip()}{context} ▸ {trained}{after}".replace("\n", "⏎")

    def _open_held_out(self) -> None:
        data = self.data
        given = list(self._given(data.held_out_file, data.held_out, "held-out"))
        if not given:
            return
        signal, loss = SIGNALS[self.of_file.kind], self.service.parts.config.loss
        groups = tuple(replace(group, signal=signal) for group in given_groups(given))
        samples = prepare(groups, loss, RewardHistory()).batch.samples
        kind, adapter = self.of_file.kind, self.service.default_adapter
        self.held_out = HeldOut(self.service.parts.learner, adapter, kind, samples, loss_of(signal, loss))

    async def _fill(self, is_last: bool) -> Filled:
        return Filled()

    # -- a step ----------------------------------------------------------------------------------

    async def _updated(self, progress: Mapping[str, float], chosen: object) -> UpdateReport:
        step = int(progress[STEPS])
        batch = self.data.batch(step)
        given = list(self._given(self.data.file, batch.rows, str(step)))
        if not given:
            training = self.service.loop().training
            return training.reports.skipped(training.live, "no_trajectories", "none of its rows can be used")
        report = await self.service.update(
            given=given, signal=SIGNALS[self.of_file.kind], progress={**progress, **self._state}
        )
        if report.status not in ("published", "trained"):
            return report
        report = replace(report, metrics={**report.metrics, **self._metrics(report, given, batch)})
        if self.held_out is not None and (self._is_due(step) or step == self.options.steps):
            report = replace(report, metrics={**report.metrics, **await self._evaluate(step)})
        return await self._ended_well(step, report)

    @property
    def _state(self) -> Mapping[str, float]:
        best, step = self.best
        known = {_BEST: best, _BEST_STEP: float(step), _EVALUATED: float(self.evaluated)}
        return {_FILE: self.data.fingerprint, **(known if self.evaluated >= 0 else {})}

    def _metrics(self, report: UpdateReport, given: Sequence[GivenTrajectory], batch: Batch) -> Mapping[str, float]:
        trained = sum(each.trained_tokens for each in given)
        seconds = report.metrics.get("seconds", 0.0)
        own = {
            "epoch": float(batch.epoch),
            "rows": float(len(batch.rows)),
            "left_out": float(self.data.file.left_out_count),
            "tokens_per_second": trained / seconds if seconds else 0.0,
        }
        if self.of_file.kind is FileKind.SFT:
            own["perplexity"] = perplexity(report.metrics["loss"])
        return own

    # -- held-out losses -------------------------------------------------------------------------

    @property
    def _every(self) -> int:
        return self.settings.every or max(1, ceil(self.options.steps / _EVALUATIONS))

    def _is_due(self, step: int) -> bool:
        return step % self._every == 0

    async def _evaluate(self, step: int) -> Mapping[str, float]:
        """The held-out loss after a step. If it is a new low, the version is the best one."""
        assert self.held_out is not None
        metrics = await self.held_out.metrics()
        self.evaluated = step
        if metrics[LOSS] < self.best[0]:
            self.best = (metrics[LOSS], step)
            await self.service.loop().mark_best()
        return metrics

    def _stop_early(self, step: int) -> bool:
        """Makes this step the last one if there was no new low for too long."""
        patience = self.settings.patience
        if patience is None or step < self.best[1] + patience * self._every or step >= self.options.steps:
            return False
        self.options = replace(self.options, steps=step)
        return True

    async def _ended_well(self, step: int, report: UpdateReport) -> UpdateReport:
        """The report of a step, and what follows from its held-out loss."""
        stops = self.held_out is not None and self._stop_early(step)
        loss, best = self.best
        if self.settings.patience is None or self.held_out is None or step < self.options.steps or step == best:
            return report
        await self.service.rollback()
        live = self.service.loop().training.live
        why = f"no new low of the held-out loss since step {best}" if stops else "all steps are made"
        metrics = {**report.metrics, "stopped_early": float(stops), "best_step": float(best), "best_loss": loss}
        reason = f"{why}; the run ends with {live}, its best version, of held-out loss {loss:.4f} (tags best, {FINAL})"
        return replace(report, adapter=live, reason=reason, metrics=metrics)

    def _check_run(self) -> None:
        file = self.data.file
        if file.left_out_count > max(_TRIED, len(file.trained) * (1 - _LEAST_USABLE)):
            count = file.left_out_count
            raise TrainingFailedError(f"{count} rows of {file.name} cannot be used; the log names the first")

    # -- rows as trajectories --------------------------------------------------------------------

    def _given(self, file: ExampleFile, rows: Iterable[int], name: str) -> Iterator[GivenTrajectory]:
        """What these rows teach. `name`: begins the names of their groups."""
        for number in rows:
            try:
                example = file.example(number)
                answers = self.encoder.encode(example)
            except (ValueError, RecursionError, RequestError) as error:
                file.leave_out(number, error)
                continue
            yield from _trajectories(example, answers, f"{name}-{number}")


def _trajectories(example: Example, answers: Sequence[Sequence[Encoded]], group: str) -> Iterator[GivenTrajectory]:
    """The turns of each answer, as one episode. The chosen one of a pair, and a good one, have the larger reward."""
    pair = len(answers) == 2
    for place, turns in enumerate(answers):
        reward = 1.0 - place if pair else example.label
        for turn in turns:
            yield GivenTrajectory(
                turn.prompt_ids,
                turn.completion_ids,
                reward,
                group,
                mask=turn.mask,
                episode_id=f"{group}-{place}",
                owner="",
            )
