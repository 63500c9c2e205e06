"""The curves of `studies/beside_trl.py`."""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

COLORS = {"ours": "tab:blue", "TRL": "tab:orange"}


def plot(record: dict[str, Any], file: Path) -> None:
    """Draws each task: the reward (or loss) against the answers learnt from and, where it was measured, against time.
    A line is the mean of the seeds; its band goes from the least to the most."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(cell["task"] for cell in record["cells"]))
    if not tasks:
        return
    figure = Figure(figsize=(3.2 * len(tasks), 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(tasks), squeeze=False)
    for column, task in enumerate(tasks):
        for side, color in COLORS.items():
            runs = list(_curves(record, task, side))
            if not runs:
                continue
            length = min(map(len, runs))
            values = [[run[at] for run in runs] for at in range(length)]
            answers = [_answers(record, task) * (at + 1) for at in range(length)]
            times = [each["seconds"] for each in record["times"] if (each["task"], each["side"]) == (task, side)]
            axes = [(panels[0][column], answers)]
            if times:
                axes.append((panels[1][column], [median(times) * (at + 1) for at in range(length)]))
            for panel, across in axes:
                panel.plot(across, [fmean(of) for of in values], color=color, label=f"{side}, {len(runs)} seeds")
                least, most = [min(of) for of in values], [max(of) for of in values]
                panel.fill_between(across, least, most, color=color, alpha=0.2)
        panels[0][column].set_title(task)
        panels[0][column].set_xlabel("answers")
        panels[1][column].set_xlabel("seconds")
        for panel in panels[:, column]:
            panel.set_ylabel("loss" if task in ("dpo", "kto") else "reward")
        panels[0][column].legend(fontsize=7)
    figure.savefig(file, dpi=110)


def _curves(record: dict[str, Any], task: str, side: str) -> Iterator[list[float]]:
    for cell in record["cells"]:
        if (cell["task"], cell["side"]) == (task, side):
            yield [update["loss" if cell["accuracy"] is not None else "reward"] for update in cell["updates"]]


def _answers(record: dict[str, Any], task: str) -> int:
    """How many answers one update learns from."""
    setting = record["setting"]
    if task == "dpo":
        return 2 * int(setting["pairs"])
    return int(setting["answers"] if task == "kto" else setting["prompts"] * setting["group"])
