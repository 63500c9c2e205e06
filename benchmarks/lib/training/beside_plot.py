"""The curves of `studies/beside_trl.py`."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.lib.training.beside_cells import Cell


def plot(record: dict[str, Any], file: Path) -> None:
    """Draws each task: the reward (or loss) against the answers learnt from, and against processor time. A line is the
    mean of the seeds; its band goes from the least to the most."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = [Cell(**each) for each in record["cells"]]
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    if not tasks:
        return
    figure = Figure(figsize=(3.2 * len(tasks), 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(tasks), squeeze=False)
    for column, task in enumerate(tasks):
        mine = [cell for cell in cells if cell.task == task]
        for name in dict.fromkeys(cell.name for cell in mine):
            _draw(panels[:, column], record, name.removeprefix(f"{task}, "), [c for c in mine if c.name == name])
        panels[0][column].set_title(task)
        panels[0][column].set_xlabel("answers")
        panels[1][column].set_xlabel("processor seconds")
        for panel in panels[:, column]:
            panel.set_ylabel("loss" if task in ("dpo", "kto") else "reward")
        panels[0][column].legend(fontsize=7)
    figure.savefig(file, dpi=110)


def _draw(panels: Any, record: dict[str, Any], name: str, cells: Sequence[Cell]) -> None:
    """One line in both panels of a task."""
    values, spent = (
        list(zip(*([update[key] for update in cell.updates] for cell in cells), strict=False))
        for key in ("reward" if cells[0].accuracy is None else "loss", "processor")
    )
    answers = [_answers(record, cells[0].task) * (at + 1) for at in range(len(values))]
    for panel, across in zip(panels, (answers, [fmean(of) for of in spent]), strict=True):
        (line,) = panel.plot(across, [fmean(of) for of in values], label=f"{name} (seeds: {len(cells)})")
        panel.fill_between(
            across, [min(of) for of in values], [max(of) for of in values], color=line.get_color(), alpha=0.2
        )


def _answers(record: dict[str, Any], task: str) -> int:
    """How many answers one update learns from."""
    setting = record["setting"]
    if task == "dpo":
        return 2 * int(setting["pairs"])
    return int(setting["answers"] if task == "kto" else setting["prompts"] * setting["group"])
