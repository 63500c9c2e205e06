"""The table of a training run, and its curves."""

import io
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_parallm.app.training_run import SampleText
from mlx_parallm.cli.train_view import (
    RichTrainView,
    columns_of,
    draw_curves,
    figure,
    heading,
    line,
    reason_line,
    spark,
    summary,
)
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.rl.status import Divergence, EvaluationResult, UpdateReport
from mlx_parallm.rl.tracking import Made

FULL = {
    "reward_mean": 0.3125,
    "reward_std": 0.4012,
    "loss": 0.01234,
    "kl": 0.00021,
    "entropy": 1.2345,
    "clip_fraction": 0.0159,
    "completion_tokens": 41.6,
    "tokens_per_second": 310.4,
    "seconds": 12.34,
    "grad_norm": 0.7,
}
DONE = UpdateReport(AdapterRef("default", 4), 4, "published", metrics=FULL)
EVALUATED = UpdateReport(
    AdapterRef("default", 5), 5, "published", metrics={**FULL, "eval_mean": 0.55, "eval_low": 0.47, "eval_high": 0.63}
)
EVALUATES = columns_of(evaluates=True)
FIRST = EvaluationResult(AdapterRef("base", 0), 0, 0.25, 0.125, 0.5, 16, 1, 5.0)
BEST, WORST = (
    SampleText("What is 2 + 2?", "4", 1.0),
    SampleText("What is 3 + 9?\nSay", "\x1b[31mIt is\n" + "a " * 99, 0.0),
)
SKIPPED = UpdateReport(None, 4, "skipped", "no group had a signal")
HELD = UpdateReport(AdapterRef("default", 5), 5, "held", "kl_step 5 is above 3", {"reward_mean": 0.5})


def made(*reports: UpdateReport, first: bool = False, before: int = 0) -> list[Made]:
    """The lines of a run's metrics. `first`: that of the evaluation FIRST, too."""
    start = (
        [Made(before, 0.0, UpdateReport(FIRST.adapter, 0, "published", metrics=FIRST.metrics), False)] if first else []
    )
    return start + [Made(step, 1.0, report) for step, report in enumerate(reports, before + 1)]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream: io.StringIO, *reports: UpdateReport, samples: bool = False, evaluates: bool = False) -> str:
    with RichTrainView(3, stream, columns_of(evaluates=evaluates)) as view:
        view.started({"model": "SmolLM2-135M-Instruct", "environment": "[red]x"}, 0, Path("runs"))
        if evaluates:
            view.evaluated(FIRST)
        for report in reports:
            view.rollout(32, 32)
            if samples:
                view.sampled(BEST, WORST)
            view.updated(report)
    return stream.getvalue()


# ---- the table ---------------------------------------------------------------------------------


def test_line_has_every_figure_under_its_heading():
    titles, cells = heading(EVALUATES), line(4, 50, EVALUATED, 190.0, columns=EVALUATES)
    assert titles.split() == [
        *("step", "reward", "evaluation", "loss", "grad", "KL", "entropy", "clip", "length", "tok/s", "seconds"),
        *("left", "result"),
    ]
    assert re.split(r"\s{2,}", cells.strip()) == [
        *(
            "4/50",
            "0.312 ± 0.401",
            "0.550 [0.47, 0.63]",
            "+0.0123",
            "0.700",
            "0.0002",
            "1.234",
            "0.016",
            "42",
            "310",
            "12.3",
        ),
        *("3m10s", "default@5"),
    ]
    ends = [[found.end() for found in re.finditer(r"\S+( \S+)*", text)] for text in (titles, cells)]
    assert ends[0][:-1] == ends[1][:-1]
    assert "evaluation" not in heading()
    assert "0.550" not in line(4, 50, EVALUATED)


def test_line_of_an_update_that_did_not_go_live_says_why():
    assert re.split(r"\s{2,}", line(5, 50, SKIPPED).strip()) == ["5/50", *["-"] * 10, "skipped"]
    assert reason_line(SKIPPED).strip() == "skipped: no group had a signal"
    assert line(5, 50, replace(SKIPPED, reason="no_signal")).endswith("skipped: no_signal")
    assert reason_line(replace(SKIPPED, reason="no_signal")) == ""
    assert line(6, 50, HELD).endswith("held")
    saved = UpdateReport(DONE.adapter, 4, "published", metrics={"loss": math.nan}, checkpoint="checkpoint-4")
    assert line(4, 50, saved).endswith("default@4, checkpoint-4")
    assert "nan" in line(4, 50, saved)


def test_a_divergence_has_a_line_of_its_own():
    told = Divergence("length", 300.0, 3.0, "tell", "completion_tokens 300 is above 3 times what it was, 20", 5.0)
    out = io.StringIO()
    RichTrainView(50, out).updated(replace(DONE, divergences=(told,)))
    first, second = out.getvalue().splitlines()[:2]
    assert first == "DIVERGES completion_tokens 300 is above 3 times what it was, 20 (tell)"
    assert second.strip().startswith("1/50")


def test_summary_counts_and_names_the_newest_version():
    assert summary(made(DONE, SKIPPED, HELD)) == (
        "1 published, 1 skipped, 1 held; mean reward 0.312 in the first, 0.500 in the last; newest version default@4"
    )
    evaluated = "; evaluation 0.250 [0.12, 0.50] then 0.550 [0.47, 0.63]; "
    assert evaluated in summary(made(DONE, EVALUATED, DONE, first=True))
    assert "; evaluation 0.550 [0.47, 0.63]; " in summary(made(EVALUATED))
    last = replace(SKIPPED, metrics={**SKIPPED.metrics, **EVALUATED.metrics})
    assert evaluated in summary(made(DONE, last, first=True)), "an update is skipped, and then an evaluation"
    assert "then" not in summary(made(DONE, replace(HELD, metrics=EVALUATED.metrics), first=True))
    assert summary(made(SKIPPED)) == "1 skipped"
    assert summary([]) == "no update was made"


def test_bars_of_a_spark_line_go_from_the_least_to_the_greatest_value():
    assert spark([0.0, 0.5, 1.0]) == "▁▅█"
    assert spark([-2, -1, math.nan, -3]) == "▅█▁"
    assert spark([7.0, 7.0]) == "▁▁"
    assert spark([0.0] * 50 + [1.0], width=3) == "▁▁█"
    assert spark([]) == ""


# ---- on the screen -----------------------------------------------------------------------------


def test_plain_lines_where_there_is_no_terminal():
    expected = ["model        SmolLM2-135M-Instruct", "environment  [red]x", "", heading()]
    text = shown(io.StringIO(), DONE, SKIPPED, samples=True)
    assert text.splitlines()[:5] == [*expected, line(1, 3, DONE, 24.68)]
    assert text.splitlines()[7:] == [line(2, 3, SKIPPED, 12.34), reason_line(SKIPPED)]
    best, worst = text.splitlines()[5:7]
    assert best == "best        1.00  What is 2 + 2? → 4"
    assert worst.startswith("worst       0.00  What is 3 + 9? Say → [31mIt is a a a")
    assert worst.endswith("a…")


def test_the_evaluation_of_the_start_is_a_line_of_its_own():
    lines = shown(io.StringIO(), EVALUATED, evaluates=True).splitlines()
    assert lines[3] == heading(EVALUATES)
    assert lines[4] == "evaluation of base@0 before the first step: 0.250 [0.12, 0.50], 16 answers, failed tasks: 1"
    assert "0.550 [0.47, 0.63]" in lines[5]


def test_progress_bars_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    text = shown(Terminal(), DONE, HELD, EVALUATED, samples=True, evaluates=True)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert plain.count(line(1, 3, DONE, 24.68, columns=EVALUATES)) == 1
    assert plain.count(line(2, 3, HELD, 12.34, columns=EVALUATES)) == 1
    assert re.search(r"updates .*3/3 .* 0s left", plain)
    assert re.search(r"rollout .*32/32", plain)
    below = plain.splitlines()[-4:]
    assert [row.strip() for row in below[:3]] == [
        "reward      ▁█▁  0.312 to 0.312",
        "evaluation  ▁█  0.550 [0.47, 0.63] after step 3",
        "best        1.00  What is 2 + 2? → 4",
    ]
    assert below[3].startswith("worst       0.00  What is 3 + 9? Say → [31mIt is a a")
    assert max(map(len, below)) <= 100


# ---- the curves --------------------------------------------------------------------------------


def test_curves_have_a_point_a_step_and_gaps_where_nothing_is_known():
    axes = {panel.get_title().split(" ")[0]: panel for panel in figure(made(DONE, SKIPPED, HELD), "t").axes}
    assert set(axes) == {"reward", "loss", "KL", "entropy", "length", "clipped", "tokens"}
    (rewards,), (losses,) = (axes[name].get_lines() for name in ("reward", "loss"))
    assert list(rewards.get_xdata()) == [1, 2, 3]
    assert [value for value in rewards.get_ydata() if math.isfinite(value)] == [0.3125, 0.5]
    assert [value for value in losses.get_ydata() if math.isfinite(value)] == [0.01234]


def test_evaluations_are_drawn_with_their_intervals_from_the_start_of_the_run():
    drawn = figure(made(DONE, EVALUATED, first=True, before=7), "t")
    (panel,) = [panel for panel in drawn.axes if panel.get_title().startswith("evaluation")]
    (bars,) = panel.containers
    (points, _, (spans,)) = bars
    assert (list(points.get_xdata()), list(points.get_ydata())) == ([7, 9], [0.25, 0.55])
    heights = [tuple(segment[:, 1]) for segment in spans.get_segments()]
    assert heights == [pytest.approx((0.125, 0.5)), pytest.approx((0.47, 0.63))]
    assert list(drawn.axes[0].get_lines()[0].get_xdata()) == [8, 9]


@pytest.mark.parametrize("reports", [[SKIPPED], [DONE], [EVALUATED] * 100])
def test_png_is_written_whole_over_an_older_one(tmp_path, reports):
    path = tmp_path / "curves.png"
    path.write_bytes(b"old")
    draw_curves(made(*reports), path, "reasoning_gym:leg_counting")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert path.read_bytes().endswith(b"IEND\xaeB`\x82")
    assert list(tmp_path.iterdir()) == [path]
