# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["atroposlib==0.4.0"]
# ///
"""An environment of Atropos that downloads nothing: questions about numbers, and the more digits in an answer the
better.

    uv run --script environment.py serve --env.tokenizer_name FOLDER --env.rollout_server_url http://127.0.0.1:8000 \\
        --openai.base_url http://127.0.0.1:8000/v1 --openai.model_name FOLDER --openai.server_type vllm

FOLDER has the tokenizer of the served model. `rollout_server_url` is `run-api`, or mlx_parallm_serve with
--atropos-api.
"""

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.envs.server_handling.managed_server import SequenceNode

QUESTIONS = (
    "Tell me a number.",
    "How many legs does a spider have?",
    "How many days are in a week?",
    "What is five plus six?",
    "How many minutes are in an hour?",
    "In which year did the last century begin?",
)


class NumbersConfig(BaseEnvConfig):
    answer_tokens: int = 16
    """Longest answer."""


class Numbers(BaseEnv):
    name = "numbers"
    env_config_cls = NumbersConfig

    @classmethod
    def config_init(cls) -> tuple[NumbersConfig, list[APIServerConfig]]:
        config = NumbersConfig(group_size=8, use_wandb=False, wandb_name=cls.name, total_steps=-1, max_token_length=512)
        return config, [APIServerConfig(server_type="vllm", api_key="none")]

    async def setup(self) -> None:
        self.asked = 0

    async def get_next_item(self) -> str:
        self.asked += 1
        return QUESTIONS[self.asked % len(QUESTIONS)]

    async def collect_trajectories(self, item: str) -> tuple[ScoredDataGroup, list[str]]:
        async with self.server.managed_server(tokenizer=self.tokenizer) as server:
            await server.chat_completion(
                messages=[{"role": "user", "content": item}],
                n=self.config.group_size,
                max_tokens=self.config.answer_tokens,
                temperature=1.0,
            )
            answers = server.get_state()["nodes"]
        group = ScoredDataGroup(
            tokens=[answer.tokens for answer in answers],
            masks=[answer.masked_tokens for answer in answers],
            inference_logprobs=[answer.logprobs for answer in answers],
            scores=[self.score(answer) for answer in answers],
        )
        return group, []

    def score(self, answer: SequenceNode) -> float:
        """The share of digits among the characters of an answer."""
        drawn = [token for token in answer.masked_tokens if token != -100]
        text = self.tokenizer.decode(drawn, skip_special_tokens=True)
        return sum(character.isdigit() for character in text) / max(len(text.strip()), 1)

    async def evaluate(self, *args: object, **kwargs: object) -> None:
        """The server evaluates by itself if it is asked to (--eval-every)."""


if __name__ == "__main__":
    Numbers.cli()
