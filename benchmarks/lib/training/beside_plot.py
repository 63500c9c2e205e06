"""The curves of `studies/beside_trl.py`."""

from pathlib import Path
from statistics import fmean
from typing import Any

COLORS = {"ours": "tab:blue", "TRL": "tab:orange"}


def plot(record: dict[str, Any], file: Path) -> None:
    """Draws each task: the reward (or loss) against the answers learnt from, and against processor time. A line is the
    mean of the seeds; its band goes from the least to the most."""
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
            cells = [cell for cell in record["cells"] if (cell["task"], cell["side"]) == (task, side)]
            if not cells:
                continue
            runs, times = [_curve(cell) for cell in cells], [_times(cell) for cell in cells]
            values, spent = list(zip(*runs, strict=False)), list(zip(*times, strict=False))
            least, most = [min(of) for of in values], [max(of) for of in values]
            answers = [_answers(record, task) * (at + 1) for at in range(len(values))]
            for row, across in enumerate((answers, [fmean(of) for of in spent])):
                panel = panels[row][column]
                panel.plot(across, [fmean(of) for of in values], color=color, label=f"{side}, seeds: {len(runs)}")
                panel.fill_between(across, least, most, color=color, alpha=0.2)
        panels[0][column].set_title(task)
        panels[0][column].set_xlabel("answers")
        panels[1][column].set_xlabel("processor seconds")
        for panel in panels[:, column]:
            panel.set_ylabel("loss" if task in ("dpo", "kto") else "reward")
        panels[0][column].legend(fontsize=7)
    figure.savefig(file, dpi=110)


def _curve(cell: dict[str, Any]) -> list[float]:
    return [update["loss" if cell["accuracy"] is not None else "reward"] for update in cell["updates"]]


def _times(cell: dict[str, Any]) -> list[float]:
    return [update["processor"] for update in cell["updates"]]


def _answers(record: dict[str, Any], task: str) -> int:
    """How many answers one update learns from."""
    setting = record["setting"]
    if task == "dpo":
        return 2 * int(setting["pairs"])
    return int(setting["answers"] if task == "kto" else setting["prompts"] * setting["group"])
