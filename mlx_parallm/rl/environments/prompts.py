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
    prompt = read_text("rl_training.system_prompt", text)
    return prompt.strip() if prompt is not None and prompt is not text else prompt


def read_text(setting: str, text: str | None) -> str | None:
    """The value of a setting, with the text of the file in place of `@FILE`.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if text is None or not text.startswith("@"):
        return text
    try:
        content = Path(text[1:]).expanduser().read_text("utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{setting}: {text[1:]} cannot be read: {error}") from error
    if not content.strip():
        raise ConfigError(f"{setting}: {text[1:]} is empty")
    return content


def with_system_prompt(task: Task, system_prompt: str | None) -> tuple[Message, ...]:
    """The messages of the task, after the system prompt if they have no system message of their own."""
    if system_prompt is None or any(message["role"] == "system" for message in task.messages):
        return task.messages
    return ({"role": "system", "content": system_prompt}, *task.messages)
