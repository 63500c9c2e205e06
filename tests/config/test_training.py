"""The keys of training: their bounds, the rules between them, and when a server trains at all."""

import math

import pytest

from mlx_parallm.config import (
    Mode,
    OldLogprobs,
    OptimizerConfig,
    RewardScale,
    RLTrainingConfig,
    ServerConfig,
    Setting,
    TrackerName,
    render,
    resolve,
)
from mlx_parallm.errors import ConfigError
from mlx_parallm.rl.rollouts.server import environment_of


def flags(**values):
    """Flags by their keys, `__` for the dot."""
    paths = {name.replace("__", "."): value for name, value in values.items()}
    return {path: Setting(value, f"--{path}") for path, value in paths.items()}


def problems(given, environ=None, file=None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(given, environ or {}, file)
    return str(caught.value).splitlines()


# ---- whether the server trains -----------------------------------------------------------------

OFF, ON = (Mode.INFERENCE_ONLY, False), (Mode.INFERENCE_AND_TRAINING, True)


def trains(given=None, environ=None, file=None):
    config = resolve(given or {}, environ or {}, file).config
    return config.server.mode, config.rl_training.enabled


@pytest.mark.parametrize(
    ("written", "mode"),
    [
        ("inference", Mode.INFERENCE_ONLY),
        ("inference_only", Mode.INFERENCE_ONLY),
        ("rl", Mode.INFERENCE_AND_TRAINING),
        ("training_priority", Mode.TRAINING_PRIORITY),
        ("training_only", Mode.TRAINING_ONLY),
    ],
)
def test_modes_have_short_forms_and_decide_about_training(written, mode):
    assert ServerConfig.model_validate({"mode": written}).mode is mode
    assert trains(flags(server__mode=written)) == (mode, mode is not Mode.INFERENCE_ONLY)


def test_the_switch_decides_about_the_mode():
    assert trains() == OFF
    assert trains(flags(rl_training__enabled=True)) == ON
    assert trains({}, {"MLX_PARALLM_RL_TRAINING__ENABLED": "true"}) == ON
    assert trains(flags(rl_training__enabled=True, server__mode="training_only")) == (Mode.TRAINING_ONLY, True)


@pytest.mark.parametrize(
    ("given", "text", "expected"),
    [
        ({"rl_training__enabled": True}, "server: {mode: inference_only}\nrl_training: {enabled: false}", ON),
        ({"rl_training__enabled": False}, "server: {mode: rl}\nrl_training: {enabled: true}", OFF),
        ({"server__mode": "inference"}, "server: {mode: rl}\nrl_training: {enabled: true}", OFF),
        ({"server__mode": "rl"}, "rl_training: {enabled: false}", ON),
        ({}, "server: {mode: inference_only}\nrl_training: {enabled: true}", ON),
        ({}, "server: {mode: rl}\nrl_training: {enabled: false}", ON),
    ],
)
def test_a_flag_beats_the_file_and_in_a_file_that_lists_every_key_training_wins(yaml_file, given, text, expected):
    assert trains(flags(**given), {}, yaml_file(text)) == expected


def test_the_environment_beats_the_file(yaml_file):
    file = yaml_file("rl_training: {enabled: true}")
    assert trains({}, {"MLX_PARALLM_SERVER__MODE": "inference"}, file) == OFF


def test_contradiction_in_one_breath_is_refused():
    (line,) = problems(flags(server__mode="inference", rl_training__enabled=True))
    assert line.startswith("server.mode: inference_only contradicts rl_training.enabled true; keep one of them")
    environ = {"MLX_PARALLM_SERVER__MODE": "rl", "MLX_PARALLM_RL_TRAINING__ENABLED": "false"}
    (line,) = problems({}, environ)
    assert line.endswith("(from MLX_PARALLM_SERVER__MODE and MLX_PARALLM_RL_TRAINING__ENABLED)")


def test_what_turned_the_other_on_is_shown_and_reads_back(yaml_file):
    resolved = resolve(flags(rl_training__enabled=True))
    printed = render(resolved)
    assert "  mode: inference_and_training  # from --rl_training.enabled" in printed.splitlines()
    assert resolve({}, {}, yaml_file(printed)).config == resolved.config


# ---- rules between keys ------------------------------------------------------------------------


def test_rank_of_training_raises_that_of_the_bank(yaml_file):
    wide = flags(model__lora_rank=32)
    assert resolve(wide).config.adapters.max_lora_rank == 16
    on = wide | flags(rl_training__enabled=True)
    resolved = resolve(on)
    assert resolved.config.adapters.max_lora_rank == 32
    assert resolved.sources["adapters.max_lora_rank"] == "--model.lora_rank"
    assert resolve(on, {}, yaml_file("adapters: {max_lora_rank: 16}")).config.adapters.max_lora_rank == 32
    assert resolve(on | flags(adapters__max_lora_rank=64)).config.adapters.max_lora_rank == 64


def test_rank_of_training_must_fit_a_bank_that_is_set_as_strongly():
    (line,) = problems(flags(rl_training__enabled=True, model__lora_rank=32, adapters__max_lora_rank=16))
    assert line == (
        "model.lora_rank: 32 is above adapters.max_lora_rank 16; raise --max-lora-rank or lower --lora-rank "
        "(from --model.lora_rank and --adapters.max_lora_rank)"
    )
    (line,) = problems(flags(rl_training__enabled=True, model__lora_rank=513))
    assert line.startswith("model.lora_rank: 513 is above adapters.max_lora_rank 512")
    weaker = {"MLX_PARALLM_ADAPTERS__MAX_LORA_RANK": "4"}
    assert problems(flags(rl_training__enabled=True, adapters__max_lora_rank=8), {"MLX_PARALLM_MODEL__LORA_RANK": "9"})
    assert resolve(flags(rl_training__enabled=True, model__lora_rank=9), weaker).config.adapters.max_lora_rank == 9


def test_bank_must_hold_the_live_version_and_the_next():
    (line,) = problems(flags(rl_training__enabled=True, adapters__max_loras=1))
    assert line.startswith("adapters.max_loras: training needs at least 2")
    assert resolve(flags(adapters__max_loras=1)).config.adapters.max_loras == 1
    assert resolve(flags(rl_training__enabled=True, adapters__max_loras=2)).config.adapters.max_loras == 2


def test_buffer_must_hold_an_update():
    (line,) = problems(flags(rl_training__trajectory_buffer_size=99))
    assert line.startswith("rl_training: trajectory_buffer_size 99 is below update_frequency 100")
    assert resolve(flags(rl_training__trajectory_buffer_size=100)).config.rl_training.update_frequency == 100


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            {"evaluation__tasks": "held_out.jsonl"},
            "evaluation: tasks are named, but not how often to evaluate",
        ),
        (
            {"evaluation__every": "5"},
            ": evaluation.every: no tasks are held out; set environment or evaluation.tasks",
        ),
        ({"gate__eval_floor": "0.5"}, ": gate.eval_floor needs an evaluation; set evaluation.every"),
        ({"evaluation__samples": "4"}, "evaluation: the samples of a task are equal at temperature 0"),
        ({"evaluation__every": "0"}, "evaluation.every: "),
        ({"evaluation__size": "1"}, "evaluation.size: "),
        ({"rollout_temperature": "0"}, "rollout_temperature: "),
        ({"trackers": "tensorboard,mlflow"}, "trackers: must be 'tensorboard', 'trackio' or 'wandb'"),
    ],
)
def test_settings_of_evaluation_that_cannot_be_used_say_what_to_change(values, problem):
    (line,) = problems(flags(**{f"rl_training__{name}": value for name, value in values.items()}))
    assert problem in line


def test_evaluation_needs_only_how_often_if_there_is_an_environment():
    values = {"rl_training__environment": "tasks.jsonl", "rl_training__evaluation__every": "5"}
    evaluation = resolve(flags(**values, rl_training__gate__eval_floor="-0.5")).config.rl_training.evaluation
    assert (evaluation.every, evaluation.tasks, evaluation.temperature) == (5, None, 0.0)
    trackers = resolve(flags(rl_training__trackers="wandb, trackio")).config.rl_training.trackers
    assert trackers == (TrackerName.WANDB, TrackerName.TRACKIO)


ATROPOS = {"rl_training__atropos_url": "http://127.0.0.1:8001"}


def test_groups_of_atropos_are_taken_for_training_and_from_one_api():
    (line,) = problems(flags(**ATROPOS))
    assert line == (
        "rl_training.atropos_url: takes groups for training, which is off; add --enable-rl-training "
        "(from --rl_training.atropos_url)"
    )
    (line,) = problems(flags(**ATROPOS, server__atropos_api="true", rl_training__enabled="true"))
    assert "keep one of the two" in line
    (line,) = problems(flags(rl_training__atropos_url="localhost:8001", rl_training__enabled="true"))
    assert "such as http://localhost:8001" in line


def test_the_queue_of_atropos_holds_what_environments_send_ahead():
    settings = {"server__atropos_api": "true", "rl_training__enabled": "true"}
    (line,) = problems(flags(**settings, rl_training__update_frequency="300"))
    assert "raise --trajectory-buffer-size to at least 1200" in line
    resolve(flags(**settings, rl_training__update_frequency="250"))


def test_an_environment_of_atropos_is_not_one_of_ours():
    training = resolve(
        flags(**ATROPOS, rl_training__enabled="true", rl_training__environment="gsm8k")
    ).config.rl_training
    assert (training.environment, training.own_environment) == ("gsm8k", None)
    (line,) = problems(flags(**ATROPOS, rl_training__environment="gsm8k", rl_training__evaluation__every="5"))
    assert "no tasks are held out" in line


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("loss.clip_low", [-0.1, 1.1]),
        ("loss.clip_high", [-0.1]),
        ("loss.dual_clip", [1, -3]),
        ("loss.scale_rewards", ["std"]),
        ("loss.kl_coef", [-1e-9, float("inf")]),
        ("loss.entropy_coef", [-1e-9]),
        ("loss.old_logprobs", ["policy"]),
        ("loss.mismatch_cap", [0.9]),
        ("optimizer.learning_rate", [0, -1e-5, 1.1, "fast"]),
        ("optimizer.schedule", ["step"]),
        ("optimizer.warmup_updates", [-1, 0.5]),
        ("optimizer.decay_updates", [0]),
        ("optimizer.beta1", [-0.1, 1]),
        ("optimizer.beta2", [-0.1, 1]),
        ("optimizer.eps", [0]),
        ("optimizer.weight_decay", [-0.1]),
        ("optimizer.max_grad_norm", [0]),
        ("divergence.kl_step.limit", [0]),
        ("divergence.ratio.limit", [1]),
        ("divergence.entropy.limit", [0, 1]),
        ("divergence.reward.limit", [0]),
        ("divergence.kl.action", ["stop"]),
    ],
)
def test_bad_value_of_an_inner_section_names_its_key(key, values):
    for value in values:
        (line,) = problems({f"rl_training.{key}": Setting(value, "FILE")})
        assert line.startswith(f"rl_training.{key}: must be ")
        assert line.endswith(f"got {value!r} (from FILE)")


def test_texts_are_read_by_type(yaml_file):
    environ = {
        "MLX_PARALLM_RL_TRAINING__ALGORITHM": "DR_GRPO",
        "MLX_PARALLM_RL_TRAINING__LOSS__SCALE_REWARDS": "none",
        "MLX_PARALLM_RL_TRAINING__LOSS__CLIP_HIGH": "0.28",
        "MLX_PARALLM_RL_TRAINING__GRADIENT_CHECKPOINTING": "false",
    }
    # yaml reads 5e-4 as text: it wants a dot there
    config = resolve({}, environ, yaml_file("rl_training: {optimizer: {learning_rate: 5e-4}}")).config.rl_training
    assert (config.algorithm, config.loss.scale_rewards, config.loss.clip_high) == ("dr_grpo", "none", 0.28)
    assert (config.gradient_checkpointing, config.optimizer.learning_rate) == (False, 5e-4)


def test_a_key_of_an_inner_section_is_found_by_its_name(yaml_file):
    file = yaml_file("rl_training: {learning_rate: 1.0e-4}")
    (line,) = problems({}, {}, file)
    assert line.startswith("rl_training.learning_rate: unknown key; did you mean rl_training.optimizer.learning_rate?")


# ---- what the trainer reads ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "float32", "resolved"),
    [
        ("auto", True, OldLogprobs.SAMPLER),
        ("auto", False, OldLogprobs.TRAINER),
        ("trainer", True, OldLogprobs.TRAINER),
        ("sampler", False, OldLogprobs.SAMPLER),
    ],
)
def test_old_logprobs_depend_on_the_models_precision_unless_they_are_set(written, float32, resolved):
    assert RLTrainingConfig(loss={"old_logprobs": written}).resolved(float32).loss.old_logprobs is resolved


def test_what_the_operator_sets_is_kept():
    loss = {"clip_low": 0.0, "clip_high": 5.0, "dual_clip": None, "scale_rewards": "batch", "kl_coef": 0.1}
    config = RLTrainingConfig(algorithm="dr_grpo", loss=loss, optimizer={"beta1": 0.5}, max_completion_tokens=7)
    resolved = config.resolved(float32=True)
    assert (resolved.loss.clip_low, resolved.loss.clip_high, resolved.loss.dual_clip) == (0.0, 5.0, math.inf)
    assert (resolved.loss.scale_rewards, resolved.loss.kl_coef) == (RewardScale.BATCH, 0.1)
    assert resolved.loss.max_completion_tokens == 7
    inner = {"loss", "micro_batch_tokens"}
    assert resolved.model_dump(exclude=inner) == config.model_dump(exclude=inner)


@pytest.mark.parametrize(("given", "samples"), [({}, True), ({"rl_training__server_rollouts": "false"}, False)])
def test_a_server_samples_its_environment_unless_told_not_to(given, samples):
    settings = {"rl_training__enabled": "true", "rl_training__environment": "words", **given}
    assert (environment_of(resolve(flags(**settings)).config) is not None) is samples


def test_a_learning_rate_of_its_own_is_there_from_the_first_step():
    settings = OptimizerConfig(schedule="linear", warmup_updates=9).at(1e-3)
    assert (settings.learning_rate, settings.schedule, settings.warmup_updates) == (1e-3, "constant", 0)


def test_when_a_learning_rate_ends():
    assert OptimizerConfig(schedule="cosine", warmup_updates=9, decay_updates=5).last_step == 14
    assert OptimizerConfig(warmup_updates=9, decay_updates=5).last_step is None
