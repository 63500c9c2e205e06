"""The configuration as a Python program writes it."""

from pathlib import Path

import pytest

from mlx_parallm.config import LoRAConfig, Mode, RLConfig, configure, resolve, training
from mlx_parallm.config.sections import ModelConfig
from mlx_parallm.errors import ConfigError


def problems(*args, **keys) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        configure(*args, **keys)
    return str(caught.value).splitlines()


def test_nothing_given_is_the_default_with_training_on():
    config = configure()
    assert (config.server.mode, config.rl_training.enabled) == (Mode.INFERENCE_AND_TRAINING, True)
    assert config.model == ModelConfig()
    assert config.rl_training == training.RLTrainingConfig(enabled=True)
    assert config.adapters == resolve({}).config.adapters


def test_objects_set_the_keys_that_they_name():
    rl = RLConfig("dapo", learning_rate=1e-4, batch_size=32, clip_high=0.3, scale_rewards="batch", kl_coef=0.1, seed=3)
    config = configure(Path("models/m"), LoRAConfig(rank=8, alpha=16, target_modules=("q_proj",)), rl)
    model, ours = config.model, config.rl_training
    assert model.base_model_path == "models/m"
    assert (model.lora_rank, model.lora_alpha, model.lora_target_modules) == (8, 16.0, ("q_proj",))
    assert (ours.algorithm, ours.update_frequency, ours.seed) == ("dapo", 32, 3)
    assert (ours.optimizer.learning_rate, ours.loss.kl_coef) == (1e-4, 0.1)
    assert (ours.loss.clip_low, ours.loss.clip_high, ours.loss.scale_rewards) == (None, 0.3, "batch")


def test_bank_has_room_for_the_rank_unless_told_otherwise():
    assert configure(lora_config=LoRAConfig(rank=64)).adapters.max_lora_rank == 64
    assert configure(lora_config=LoRAConfig(rank=4)).adapters.max_lora_rank == 16
    assert configure(lora_config=LoRAConfig(rank=4), adapters__max_lora_rank=8).adapters.max_lora_rank == 8
    (line,) = problems(lora_config=LoRAConfig(rank=64), adapters__max_lora_rank=8)
    assert line.startswith("model.lora_rank: 64 is above adapters.max_lora_rank 8")


def test_any_key_may_be_given_and_wins():
    config = configure(
        rl_config=RLConfig(batch_size=32),
        server__port=9001,
        rl_training__update_frequency=64,
        rl_training__divergence__kl_step__limit=0.1,
        checkpointing__checkpoint_dir=Path("kept"),
        server__mode=Mode.TRAINING_ONLY,
    )
    assert (config.server.port, config.server.mode) == (9001, Mode.TRAINING_ONLY)
    assert (config.rl_training.update_frequency, config.rl_training.divergence.kl_step.limit) == (64, 0.1)
    assert config.checkpointing.checkpoint_dir == Path("kept")


def test_environment_is_not_read(monkeypatch):
    monkeypatch.setenv("MLX_PARALLM_SERVER__PORT", "1")
    assert configure().server.port == 8000


def test_problems_name_what_was_written():
    lines = problems(rl_config=RLConfig("rloo", learning_rate=-1.0), lora_config=LoRAConfig(rank=0), server__port="x")
    assert [line.rpartition("(from ")[2] for line in lines] == [
        "server__port)",
        "lora_config.rank)",
        "rl_config.algorithm)",
        "rl_config.learning_rate)",
    ]
    assert problems(server__prot=1) == ["server__prot: unknown keyword; did you mean server__port?"]
    assert problems(prot=1) == ["prot: unknown keyword; did you mean server__port?"]
    assert problems(qqq=1) == ["qqq: unknown keyword"]


def test_a_server_that_trains_cannot_be_told_not_to():
    (line,) = problems(server__mode="inference")
    assert line.startswith("server.mode: inference_only contradicts rl_training.enabled true")
