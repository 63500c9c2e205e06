"""The section `rl_training` and most of those in it: how adapters are trained on trajectories. The string below a field
is its description.

The trainer and the training loop read `RLTrainingConfig.resolved(...)`, in which no loss setting is null or auto.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator

from mlx_parallm.config.divergence import DivergenceConfig
from mlx_parallm.config.loss import Algorithm, LossConfig, ResolvedLoss
from mlx_parallm.config.types import (
    SERVE,
    TRAIN,
    ApiKey,
    File,
    Flag,
    Integer,
    Number,
    Section,
    Text,
    fields_of,
    lower,
    optional_names,
)


class CompetitionConfig(Section):
    """Comparisons of a version of an adapter with the live one, by the rewards of live requests. A comparison that is
    started with POST /v1/training/compare may set its own share, smallest_effect, max_rewards and max_hours."""

    automatic: bool = False
    """Compare every version that training makes with the one before, and go back to that one unless the new version is
    better. Until the comparison ends, no further update is made.
    """
    share: Number = Field(default=0.2, gt=0, le=0.5)
    """Share of the requests that get the candidate, by user or session where requests name one."""
    smallest_effect: Number = Field(default=0.05, gt=0)
    """Smallest difference of the mean rewards that matters. A comparison ends without a winner when differences as
    large as this are ruled out.
    """
    error_rate: Number = Field(default=0.05, gt=0, le=0.5)
    """Largest probability that two versions of the same mean reward are called different, however long they are
    compared and however often somebody looks.
    """
    max_rewards: Integer = Field(default=2000, ge=1)
    """Rewarded requests of the candidate after which a comparison ends without a winner."""
    max_hours: Number = Field(default=24.0, gt=0)
    """Time in hours after which a comparison ends without a winner."""
    lowest_reward: Number = -1.0
    """Smallest reward that a request can get. A smaller one counts as this."""
    highest_reward: Number = 1.0
    """Largest reward that a request can get. A larger one counts as this."""

    @model_validator(mode="after")
    def _has_a_range(self) -> Self:
        span = self.highest_reward - self.lowest_reward
        if span <= 0:
            raise ValueError("highest_reward must be above lowest_reward")
        if self.smallest_effect >= span:
            raise ValueError(f"smallest_effect must be below the range of the rewards, {span:g}")
        return self


class TinkerConfig(Section):
    """The Tinker API (/api/v1), with which clients train adapters of their own. A server that trains has it."""

    max_models: Integer = Field(default=4, ge=0)
    """Largest number of models that Tinker clients may train at the same time. Each needs memory for its weights, its
    gradients and its optimizer's state. 0 lets clients sample only. One of several keys may have at most four for each
    that stays free.
    """
    max_sessions: Integer = Field(default=64, ge=1)
    """Largest number of Tinker sessions at the same time. One of several keys may have at most four for each that stays
    free.
    """
    session_timeout_s: Number = Field(default=300.0, gt=0)
    """Time in seconds after which a session whose client has fallen silent is ended, with its models. Clients say every
    10 s that they are there.
    """


class PeopleConfig(Section):
    """Preferences, corrections and late feedback, each of which has updates and a loss of its own."""

    update_frequency: Integer = Field(default=16, ge=1)
    """Number of preferences, of corrections or of answers with late feedback in one update. Feedback that comes before
    its answer was dropped counts towards rl_training.update_frequency.
    """


class CurriculumConfig(Section):
    """Tasks are sampled by what the last tasks of their level taught, so that those too easy or too hard are rare."""

    enabled: Annotated[bool, Flag("--curriculum")] = False
    """Draw the tasks of rl_training.environment by how often their levels teach something. A task's level is the column
    `level` of its row in a file, or what its environment gives it. Tasks without levels come in the environment's
    order.
    """
    floor: Number = Field(default=0.2, ge=0, le=1)
    """Share of the tasks that is sampled from all levels as often as the environment has them, whatever they teach. 1
    samples all tasks so.
    """
    memory: Integer = Field(default=10, ge=1)
    """Number of the last tasks of a level that count. Older ones are forgotten exponentially."""


class JudgeConfig(Section):
    """The language model behind the rewards judge and rank."""

    url: Annotated[Text | None, Flag("--judge-url", "URL")] = None
    """Base URL of an OpenAI-compatible API, such as https://api.example.org/v1. null means this server itself, with its
    base model; mlx_parallm_train serves nothing, so there a judge needs a URL.
    """
    model: Annotated[Text | None, Flag("--judge-model", "NAME")] = None
    """Model that the judge's server is asked for. null means the base model, which only this server has by that name.
    """
    instruction: Text | None = None
    """What a good answer is, in plain words for the model. null means a general instruction.
    """
    api_key: ApiKey | None = Field(default=None, repr=False)
    """Secret that is sent to url as a bearer token. null means none. Prefer the environment variable, because flags and
    files are easily seen by others.
    """

    @model_validator(mode="after")
    def _url_is_complete(self) -> Self:
        if self.url is None:
            return self
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).netloc:
            raise ValueError("url must begin with http:// or https://, such as https://api.example.org/v1")
        if self.model is None:
            raise ValueError("url needs model, the name that its server gives the judge")
        return self


class TeacherConfig(Section):
    """The model that distillation imitates: an adapter or the base model here, or a model of another server."""

    adapter: Annotated[Text | None, Flag("--teacher-adapter", "NAME")] = None
    """Adapter of this server that teaches, such as tone or tone@3. null means the base model."""
    prompt: Annotated[Text | None, Flag("--teacher-prompt", "TEXT_OR_@FILE")] = None
    """Text that only the teacher sees, before the prompt of each sample, with the special tokens of the chat template
    if it is a message. A value that begins with @ names a file that has the text. null means none.
    """
    url: Annotated[Text | None, Flag("--teacher-url", "URL")] = None
    """Base URL of another server that teaches, such as http://127.0.0.1:8001/v1. It must answer completions of token
    ids with prompt_logprobs, as vLLM and this server do, and its model must have the same tokenizer. null means this
    server.
    """
    model: Annotated[Text | None, Flag("--teacher-model", "NAME")] = None
    """Model that the other server is asked for. Needed with url."""
    api_key: ApiKey | None = Field(default=None, repr=False)
    """Secret that is sent to url as a bearer token. null means none. Prefer the environment variable, because flags and
    files are easily seen by others.
    """
    timeout_s: Number = Field(default=60.0, gt=0)
    """Longest wait for the teacher's log-probabilities of one sample, in seconds. A sample without them is left out."""

    @property
    def is_set(self) -> bool:
        """Whether there is a teacher that differs from the base model as it is."""
        return any(value is not None for value in (self.adapter, self.prompt, self.url))

    @model_validator(mode="after")
    def _url_is_complete(self) -> Self:
        if self.url is None:
            if self.model is not None:
                raise ValueError("model is a model of another server: set url too, or adapter in its place")
            return self
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).netloc:
            raise ValueError("url must begin with http:// or https://, such as http://127.0.0.1:8001/v1")
        if self.model is None:
            raise ValueError("url needs model, the name that its server gives the teacher")
        if self.adapter is not None:
            raise ValueError("url and adapter name two teachers: leave one of them out")
        return self


class LearningRateSchedule(StrEnum):
    """How the learning rate changes after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class TrackerName(StrEnum):
    """Where the figures of training go, besides the JSONL file; `extras.trackers` has them."""

    TENSORBOARD = "tensorboard"
    TRACKIO = "trackio"
    WANDB = "wandb"


class OptimizerConfig(Section):
    """AdamW with bias correction, in float32."""

    learning_rate: Annotated[Number, Flag("--learning-rate", "NUMBER", common=True)] = Field(default=1e-5, gt=0, le=1)
    """Peak learning rate. LoRA needs about ten times that of full fine-tuning, small models more."""
    schedule: Annotated[LearningRateSchedule, BeforeValidator(lower)] = LearningRateSchedule.CONSTANT
    """Learning rate after the warm-up: constant, or falling to 0 (linear or cosine)."""
    warmup_updates: Integer = Field(default=0, ge=0)
    """Number of updates over which the learning rate rises from 0."""
    decay_updates: Integer = Field(default=1000, ge=1)
    """Number of updates after the warm-up until a linear or cosine learning rate reaches 0. Each of several minibatches
    counts. Later updates change nothing, though their versions are published: for training without an end, take the
    schedule constant.
    """
    beta1: Number = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean gradient."""
    beta2: Number = Field(default=0.95, ge=0, lt=1)
    """Decay of the mean squared gradient."""
    eps: Number = Field(default=1e-8, gt=0)
    """Added to the square root of the mean squared gradient."""
    weight_decay: Number = Field(default=0.0, ge=0)
    """Decoupled weight decay, as a multiple of the learning rate."""
    max_grad_norm: Number = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    max_kl_step: Number | None = Field(default=0.2, gt=0)
    """Largest KL divergence of the policy before an update from the one after it, in nats per token. An update that
    moved the policy further is moved back until it does not, which takes one more forward pass over a quarter of the
    tokens each time. AdamW's first steps move every number by the learning rate, however small its gradient is.
    cross_entropy, dpo, kto and Tinker's optim_step are not measured. null means no limit.
    """

    @property
    def last_step(self) -> int | None:
        """The last optimizer step that the schedule gives a learning rate above 0; None: it never ends."""
        constant = self.schedule is LearningRateSchedule.CONSTANT
        return None if constant else self.warmup_updates + self.decay_updates

    def at(self, learning_rate: float | None) -> OptimizerConfig:
        """These settings with a learning rate that does not change; None: these settings."""
        if learning_rate is None:
            return self
        constant = {"schedule": LearningRateSchedule.CONSTANT, "warmup_updates": 0}
        return self.model_copy(update={"learning_rate": learning_rate, **constant})


class GateConfig(Section):
    """When a new version does not go live, besides those that diverged (rl_training.divergence)."""

    eval_floor: Number | None = None
    """Smallest mean reward of an evaluation. Versions whose evaluation is due (evaluation.every) are then evaluated
    before they go live, and do not go live below it. null means no floor.
    """


class PlateauConfig(Section):
    """A plateau: nearly all answers earn the same part of the reward and none earns more, so that their rewards teach
    nothing."""

    explore_updates: Integer = Field(default=10, ge=0)
    """Number of updates that look for a way out: the best answers seen so far are learnt again or, if none was better,
    short answers are preferred to long ones. After that, a plateau is only reported. 0: from the beginning.
    """
    updates: Integer = Field(default=2, ge=1)
    """Number of updates whose answers must earn the same."""
    full_reward: Number = 1.0
    """Reward of a perfect answer: answers that all earn it are on no plateau. It is the highest reward seen so far, if
    that is more.
    """


class EvaluationConfig(Section):
    """Held-out tasks that versions in training do from time to time. Nothing is trained on their answers. Their mean
    reward decides which version is the best one."""

    every: Annotated[Integer | None, Flag("--eval-every", "UPDATES")] = Field(default=None, ge=1)
    """Number of updates between two evaluations. The version that training starts from is evaluated too. null means no
    evaluation.
    """
    tasks: Annotated[Text | None, Flag("--eval-tasks", "FILE_OR_NAME")] = None
    """Held-out tasks, in any form that rl_training.environment has. null means tasks of rl_training.environment, which
    mlx_parallm_train then does not train on.
    """
    size: Annotated[Integer, Flag("--eval-size", "TASKS")] = Field(default=64, ge=2)
    """Largest number of held-out tasks. They are the same in every run."""
    samples: Integer = Field(default=1, ge=1, le=128)
    """Number of answers to each task, or of its episodes."""
    temperature: Number = Field(default=0.0, ge=0)
    """Temperature of the answers. 0 takes the most likely token each time; give another one if samples is above 1."""
    max_tokens: Integer | None = Field(default=None, ge=1)
    """Largest number of tokens of an answer. null means rl_training.max_completion_tokens."""

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.tasks is not None and self.every is None:
            raise ValueError("tasks are named, but not how often to evaluate; set every (--eval-every) too")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError("the samples of a task are equal at temperature 0; raise temperature, or set samples 1")
        return self


class RLTrainingConfig(Section):
    """Training while serving."""

    enabled: Annotated[bool, Flag("--enable-rl-training", only=SERVE, common=True)] = False
    """Train adapters on collected trajectories. A server.mode that trains turns this key on, and vice versa."""
    algorithm: Annotated[Algorithm, BeforeValidator(lower), Flag("--rl-algorithm", "NAME")] = Algorithm.GRPO
    """Loss: grpo, bnpo, dapo, dr_grpo, gspo, cispo, ppo, importance_sampling, dpo (preferences),
    kto (thumbs up or down), distillation (see teacher), or cross_entropy (imitation).
    """
    update_frequency: Annotated[Integer, Flag("--update-frequency", "TRAJECTORIES", only=SERVE)] = Field(
        default=100, ge=1
    )
    """Number of trajectories in one update. Only groups with a learning signal count: their rewards differ, or come
    from feedback. Groups without one are dropped. When four times this number of trajectories has been collected, an
    update is made from those that have a signal, even if there are fewer; its step is smaller accordingly.
    """
    trajectory_buffer_size: Annotated[Integer, Flag("--trajectory-buffer-size", "TRAJECTORIES")] = Field(
        default=1000, ge=1
    )
    """Largest number of trajectories kept for training. Above it, the oldest groups of the key that has the most are
    dropped."""
    max_staleness: Annotated[Integer, Flag("--max-staleness", "VERSIONS")] = Field(default=1, ge=0)
    """Largest number of versions published since a trajectory was sampled. Older trajectories are dropped."""
    group_timeout_s: Number = Field(default=300.0, gt=0)
    """Time in seconds that a group waits for its scoring function. Then it is trained on the feedback that it has."""
    feedback_timeout_s: Number | None = Field(default=None, gt=0)
    """Time in seconds that trajectories without a scoring function wait for feedback. null means until
    trajectory_buffer_size or max_staleness drops them.
    """
    max_completion_tokens: Annotated[Integer, Flag("--max-tokens", "TOKENS", short_in=TRAIN, common=True)] = Field(
        default=1024, ge=1
    )
    """Largest number of tokens of a completion in mlx_parallm_train, and of those that a server samples by itself. The
    loss of dr_grpo is divided by it.
    """
    rollout_temperature: Annotated[Number, Flag("--temperature", "NUMBER", short_in=TRAIN, common=True)] = Field(
        default=1.0, gt=0
    )
    """Temperature at which mlx_parallm_train, or a server by itself, samples. Its samples are trained on at the same
    temperature."""
    server_rollouts: Annotated[bool, Flag("--server-rollouts", only=SERVE)] = True
    """Whether a server that trains on `environment` samples rollouts of its tasks by itself, beside requests. false: it
    only looks up the answers that requests leave out.
    """
    rollout_group_size: Annotated[Integer, Flag("--rollout-group-size", "N", only=SERVE)] = Field(default=8, ge=2)
    """Number of answers or episodes that a server samples by itself for each task. mlx_parallm_train has --group-size
    instead.
    """
    rollout_timeout_s: Annotated[Number, Flag("--rollout-timeout", "SECONDS")] = Field(default=120.0, gt=0)
    """Longest time in seconds that an environment may take for its next task, and for one episode besides the model's
    answers. An episode that takes longer is dropped.
    """
    draw_ahead_after_s: Number | None = Field(default=0.5, gt=0)
    """Time in seconds after the last answer was sampled, after which the rollouts of the next update are sampled while
    those of this one wait for rewards or for the tools of their episodes. They are trained on one version later. null
    means never: sampling and waiting take turns.
    """
    system_prompt: Annotated[Text | None, Flag("--system-prompt", "TEXT_OR_@FILE", short_in=TRAIN)] = None
    """System message of the tasks of the environment and of evaluations: a text, or @FILE for the text of a file. A
    task that has its own system message keeps it. null means none.
    """
    scoring_processes: Integer = Field(default=2, ge=1, le=64)
    """Number of processes that run scoring functions. If there are several, one client's jobs with the same function
    and metadata always leave one of them free.
    """
    scoring_batch_size: Integer = Field(default=32, ge=1)
    """Largest number of trajectories that one client's scoring function scores in a row while others wait. Slow scoring
    functions score fewer.
    """
    scoring_timeout_s: Number = Field(default=30.0, gt=0)
    """Longest time in seconds to score a group, without the time to load the scorer. The members of a group whose
    scorer takes longer are dropped, but for those that clients have rewarded. exact, regex, json_schema and length are
    also limited to 1 s of processor time for each sample.
    """
    trajectory_log: Annotated[File | None, Flag("--trajectory-log", "FILE")] = None
    """JSONL file to which each trajectory is appended after it was trained on or dropped. The line gives its reward and
    which of the two happened. null means no file.
    """
    training_time_share: Annotated[Number | None, Flag("--training-time-share", "SHARE")] = Field(
        default=None, gt=0, le=1
    )
    """Share of device time that updates get while there are requests. They also get all idle time. null means 0.12, or
    0.5 in the mode training_priority.
    """
    train_on_battery: Annotated[bool, Flag("--train-on-battery")] = False
    """Train while the machine runs on battery or saves energy (Low Power Mode of macOS). Otherwise automatic updates
    and the server's own rollouts wait until it does not.
    """
    micro_batch_tokens: Annotated[Integer | None, Flag("--micro-batch-tokens", "TOKENS")] = Field(default=None, ge=1)
    """Largest number of prompt and completion tokens in one micro-step of training; one sample may have more. A larger
    number is faster and takes more memory. A micro-step is cut between layers to keep to max_decode_stall_ms. null
    means 256 to 8192, as the machine's memory and max_decode_stall_ms allow.
    """
    minibatches: Integer = Field(default=1, ge=1, le=64)
    """Number of optimizer steps that an update makes. Each takes whole groups, a part of the update's trajectories; the
    policy ratios of all of them are to the policy before the first step. An update of fewer groups makes fewer steps.
    """
    gradient_checkpointing: bool | None = None
    """Recompute each layer in the backward pass. It takes less memory and a fifth more time. null recomputes the layers
    of those micro-steps whose activations would take more than a quarter of the memory for requests and training.
    """
    max_skips: Integer = Field(default=3, ge=1)
    """Training pauses after this many updates in a row were skipped or held, because they had failed or diverged."""
    seed: Annotated[Integer, Flag("--seed", "SEED")] = Field(default=0, ge=0, lt=2**32)
    """Seed of the initial weights of new adapters. In mlx_parallm_train also the seed of tasks and samples."""
    environment: Annotated[Text | None, Flag("--environment", "FILE_OR_NAME", common=True)] = None
    """A JSONL or parquet file of tasks, or the id of a hub data set with such a file. mlx_parallm_train trains on them,
    or on reasoning_gym:<task>, verifiers:<id>, the built-in words, hints and calculator, FILE.py:NAME, or an
    environment of another package. A server that trains samples rollouts of them by itself, unless server_rollouts is
    false, and looks up the answers that requests leave out.
    """
    reward: Annotated[Text | None, Flag("--reward", "FILE.py:NAME", common=True)] = None
    """Reward of the tasks: FILE.py:NAME is a function of a file, judge and rank ask a language model, and any scoring
    function will do; or a weighted sum such as 0.8*rewards.py:correct + 0.2*judge. mlx_parallm_train scores every task
    with it. In a server it is what requests mean by the scoring_function `reward`.
    """
    trackers: Annotated[tuple[TrackerName, ...], BeforeValidator(optional_names), Flag("--trackers", "NAME,NAME")] = ()
    """Trackers that get the figures of every update and evaluation: tensorboard, trackio and wandb (offline). Each
    needs the extra of its name. The file metrics.jsonl in the run's folder is always written. null means no other.
    """
    atropos_url: Annotated[Text | None, Flag("--atropos-url", "URL")] = None
    """Base URL of Atropos' trajectory API (run-api), such as http://localhost:8001. Training takes its batches, of
    update_frequency sequences, beside what requests collect. Then `environment` only names the environment of Atropos,
    which answers its own tasks. null means none; server.atropos_api serves such an API here.
    """
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    gate: GateConfig = GateConfig()
    divergence: DivergenceConfig = DivergenceConfig()
    plateau: PlateauConfig = PlateauConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    judge: JudgeConfig = JudgeConfig()
    teacher: TeacherConfig = TeacherConfig()
    people: PeopleConfig = PeopleConfig()
    tinker: Annotated[TinkerConfig, Flag(only=SERVE)] = TinkerConfig()
    competition: Annotated[CompetitionConfig, Flag(only=SERVE)] = CompetitionConfig()

    @model_validator(mode="after")
    def _loss_reads_what_is_collected(self) -> Self:
        if self.algorithm is Algorithm.DISTILLATION and not self.teacher.is_set:
            raise ValueError(
                "algorithm distillation needs a teacher: set teacher.adapter, teacher.prompt or teacher.url"
            )
        return self

    @property
    def own_environment(self) -> str | None:
        """`environment`, unless it is one of Atropos."""
        return None if self.atropos_url is not None else self.environment

    @model_validator(mode="after")
    def _atropos_url_is_complete(self) -> Self:
        if self.atropos_url is None:
            return self
        parts = urlsplit(self.atropos_url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
            raise ValueError("atropos_url must be the base URL of Atropos' API, such as http://localhost:8001")
        return self

    @model_validator(mode="after")
    def _evaluation_has_tasks(self) -> Self:
        if self.evaluation.every is None and self.gate.eval_floor is not None:
            raise ValueError("gate.eval_floor needs an evaluation; set evaluation.every (--eval-every) too")
        if self.evaluation.every is not None and self.evaluation.tasks is None and self.own_environment is None:
            raise ValueError(
                "evaluation.every: no tasks are held out; set environment or evaluation.tasks (--eval-tasks)"
            )
        return self

    @model_validator(mode="after")
    def _curriculum_has_tasks(self) -> Self:
        if self.curriculum.enabled and self.own_environment is None:
            raise ValueError(
                "curriculum.enabled: there are no tasks to draw; set environment (an environment of Atropos draws its "
                "own tasks)"
            )
        return self

    @model_validator(mode="after")
    def _buffer_holds_an_update(self) -> Self:
        size, wanted = self.trajectory_buffer_size, self.update_frequency
        if size < wanted:
            raise ValueError(
                f"trajectory_buffer_size {size} is below update_frequency {wanted}, so no update would ever begin; "
                "raise the one or lower the other"
            )
        return self

    def resolved(self, float32: bool, micro_batch_tokens: int = 256) -> ResolvedTraining:
        """These settings with values in place of null and auto.

        Args:
            float32: whether the base model computes in float32. In lower precisions decode and training round
                differently, so `old_logprobs` auto means the trainer's logprobs.
            micro_batch_tokens: in place of null.
        """
        loss = self.loss.resolved(self.algorithm, float32, self.max_completion_tokens)
        tokens = self.micro_batch_tokens or micro_batch_tokens
        return ResolvedTraining.model_construct(**{**fields_of(self), "loss": loss, "micro_batch_tokens": tokens})


class ResolvedTraining(RLTrainingConfig):
    """The section `rl_training` in which every setting of the trainer has a value: what the trainer and the training
    loop read."""

    loss: ResolvedLoss
    micro_batch_tokens: int
