"""The system prompt that all tasks get which have none of their own."""

from __future__ import annotations

from pathlib import Path

from mlx_parallm.errors import ConfigError
from mlx_parallm.rl.environments.protocol import Message, Task


def read_system_prompt(text: str | None) -> str | None:
    """The value of `rl_training.system_prompt`, with the text of the file in place of `@FILE`.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if text is None or not text.startswith("@"):
        return text
    try:
        prompt = Path(text[1:]).expanduser().read_text("utf-8").strip()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"rl_training.system_prompt: {text[1:]} cannot be read: {error}") from error
    if not prompt:
        raise ConfigError(f"rl_training.system_prompt: {text[1:]} is empty")
    return prompt


def with_system_prompt(task: Task, system_prompt: str | None) -> tuple[Message, ...]:
    """The messages of the task, after the system prompt if they have no system message of their own."""
    if system_prompt is None or any(message["role"] == "system" for message in task.messages):
        return task.messages
    return ({"role": "system", "content": system_prompt}, *task.messages)
