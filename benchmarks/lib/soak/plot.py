"""The picture of a soak: what the process held, and how long good requests took."""

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.lib.figures import percentile

if TYPE_CHECKING:
    from benchmarks.soak import Run

PANELS = {
    "RSS, MB": ("resident", 1e6),
    "threads": ("threads", 1),
    "descriptors": ("descriptors", 1),
    "live arrays": ("arrays", 1),
    "journal, MB": ("journal", 1e6),
}


def plot(run: "Run", control: "Run", file: Path) -> None:
    """Draws each value of the run with hostile clients over its minutes, those in pauses as dots, and the latencies."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 3).flatten()
    begin = run.points[0].at
    for panel, (title, (name, unit)) in zip(panels, PANELS.items(), strict=False):
        panel.plot([(p.at - begin) / 60 for p in run.points], [getattr(p, name) / unit for p in run.points], lw=1)
        panel.plot([(p.at - begin) / 60 for p in run.idle], [getattr(p, name) / unit for p in run.idle], "C3.", ms=5)
        panel.set_title(title, fontsize=9)
        panel.set_ylim(bottom=0)
        for down, _ in run.down:
            panel.axvline((down - begin) / 60, color="0.7", lw=0.8, ls=":")
    for each, of, color in ((run, "beside hostile clients", "C0"), (control, "without them", "C2")):
        for percent, style in ((99, "-"), (50, "--")):
            values = [1000 * percentile(minute, percent) for minute in each.latencies()]
            panels[5].plot(values, style, color=color, lw=1, label=f"p{percent} {of}")
    panels[5].set_title("good requests of a minute, ms", fontsize=9)
    panels[5].set_ylim(bottom=0)
    panels[5].legend(fontsize=7)
    for panel in panels:
        panel.set_xlabel("minutes", fontsize=8)
        panel.tick_params(labelsize=8)
    figure.savefig(file, dpi=100)
