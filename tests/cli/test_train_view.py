"""The table of a training run, and its curves."""

import io
import math
import re

import pytest

from mlx_parallm.cli.train_view import RichTrainView, _figure, draw_curves, heading, line, summary
from mlx_parallm.core import AdapterRef, UpdateReport

FULL = {
    "reward_mean": 0.3125,
    "reward_std": 0.4012,
    "loss": 0.01234,
    "kl": 0.00021,
    "entropy": 1.2345,
    "clip_fraction": 0.0159,
    "tokens_per_second": 310.4,
    "seconds": 12.34,
    "grad_norm": 0.7,
}
DONE = UpdateReport(AdapterRef("default", 4), 4, "published", metrics=FULL)
SKIPPED = UpdateReport(None, 4, "skipped", "no group had a signal")
HELD = UpdateReport(AdapterRef("default", 5), 5, "held", "kl_step 0.9 is over kl_bound 0.1", {"reward_mean": 0.5})


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream: io.StringIO, *reports: UpdateReport) -> str:
    with RichTrainView(3, stream) as view:
        view.started({"model": "SmolLM2-135M-Instruct", "environment": "[red]x"}, 0)
        for report in reports:
            view.rollout(32, 32)
            view.updated(report)
    return stream.getvalue()


# ---- the table ---------------------------------------------------------------------------------


def test_line_has_every_figure_under_its_heading():
    titles, cells = heading(), line(4, 50, DONE)
    assert titles.split() == ["step", "reward", "loss", "KL", "entropy", "clip", "tok/s", "seconds", "result"]
    assert re.split(r"\s{2,}", cells.strip()) == [
        *("4/50", "0.312 ± 0.401", "+0.0123", "0.0002", "1.234", "0.016", "310", "12.3", "default@4")
    ]
    ends = [[found.end() for found in re.finditer(r"\S+( ± \S+)?", text)] for text in (titles, cells)]
    assert ends[0][:-1] == ends[1][:-1]


def test_line_of_an_update_that_did_not_go_live_says_why():
    assert re.split(r"\s{2,}", line(5, 50, SKIPPED).strip()) == ["5/50", *["-"] * 7, "skipped: no group had a signal"]
    assert line(6, 50, HELD).endswith("held: kl_step 0.9 is over kl_bound 0.1")
    saved = UpdateReport(DONE.adapter, 4, "published", metrics={"loss": math.nan}, checkpoint="checkpoint-4")
    assert line(4, 50, saved).endswith("default@4, checkpoint-4")
    assert "nan" in line(4, 50, saved)


def test_summary_counts_and_names_the_last_live_version():
    assert summary([DONE, SKIPPED, HELD]) == (
        "1 published, 1 skipped, 1 held; mean reward 0.312 in the first, 0.500 in the last; default@4 is live"
    )
    assert summary([SKIPPED]) == "1 skipped"
    assert summary([]) == "no update was made"


# ---- on the screen -----------------------------------------------------------------------------


def test_plain_lines_where_there_is_no_terminal():
    expected = ["model        SmolLM2-135M-Instruct", "environment  [red]x", "", heading()]
    text = shown(io.StringIO(), DONE, SKIPPED)
    assert text.splitlines() == [*expected, line(1, 3, DONE), line(2, 3, SKIPPED)]


def test_progress_bars_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = shown(Terminal(), DONE, HELD)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert plain.count(line(1, 3, DONE)) == plain.count(line(2, 3, HELD)) == 1
    assert re.search(r"updates .*2/3", plain)
    assert re.search(r"rollout .*32/32", plain)


def test_bars_are_taken_down_when_the_run_fails(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    with pytest.raises(KeyboardInterrupt), RichTrainView(3, terminal):
        raise KeyboardInterrupt
    assert terminal.getvalue().endswith("\x1b[?25h"), "the cursor is shown again"


# ---- the curves --------------------------------------------------------------------------------


def test_curves_have_a_point_a_step_and_gaps_where_nothing_is_known():
    axes = {panel.get_title().split(" ")[0]: panel for panel in _figure([DONE, SKIPPED, HELD], "t").axes}
    assert set(axes) == {"reward", "loss", "KL", "entropy", "clipped", "tokens"}
    (rewards,), (losses,) = (axes[name].get_lines() for name in ("reward", "loss"))
    assert list(rewards.get_xdata()) == [1, 2, 3]
    assert [value for value in rewards.get_ydata() if math.isfinite(value)] == [0.3125, 0.5]
    assert [value for value in losses.get_ydata() if math.isfinite(value)] == [0.01234]


def test_band_of_the_reward_is_one_standard_deviation_wide():
    (band,) = _figure([DONE, DONE], "t").axes[0].collections
    box = band.get_datalim(band.axes.transData)
    assert (box.y0, box.y1) == pytest.approx((0.3125 - 0.4012, 0.3125 + 0.4012))


@pytest.mark.parametrize("reports", [[SKIPPED], [DONE], [DONE] * 100])
def test_png_is_written_whole_over_an_older_one(tmp_path, reports):
    path = tmp_path / "curves.png"
    path.write_bytes(b"old")
    draw_curves(reports, path, "reasoning_gym:leg_counting")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert path.read_bytes().endswith(b"IEND\xaeB`\x82")
    assert list(tmp_path.iterdir()) == [path]
