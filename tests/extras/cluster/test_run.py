"""The steps of a cluster's trainer while they wait for what clients send, with stand-ins for training."""

import asyncio
from types import SimpleNamespace

from training_runs import View, config

from mlx_parallm.app.training_run import TrainOptions
from mlx_parallm.extras.cluster.running.run import ClusterRun


class Loop:
    """Answers come and are dropped, 3 at a time, until 6 of use come."""

    with_signal = without_signal = 0

    @property
    def has_enough(self) -> bool:
        if self.without_signal < 18:
            self.without_signal += 3
        else:
            self.with_signal = 6
        return self.with_signal == 6


async def test_a_step_says_once_that_the_answers_are_rewarded_alike(tmp_path, caplog):
    loop = Loop()
    steps = ClusterRun(
        config=config(tmp_path, "grpo", rl_training__update_frequency=6),
        options=TrainOptions("default", 1, 2, 3),
        view=View(),
        served=SimpleNamespace(engine=SimpleNamespace(stats=lambda: SimpleNamespace(alive=True))),
        service=SimpleNamespace(loop=lambda: loop),
        tracking=None,
    )
    steps.reading = asyncio.create_task(asyncio.sleep(100))
    await steps._fill(is_last=True)
    steps.reading.cancel()
    assert caplog.text.count("6 answers were dropped, because all answers of their group have the same reward") == 1
    assert "waits for 6 answers in groups whose rewards differ" in caplog.text
