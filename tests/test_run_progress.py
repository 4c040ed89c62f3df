# SPDX-License-Identifier: Apache-2.0
"""The live view: what a person sees on a terminal, and what a pipe gets instead."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from palestra.run.plot import plot, resample, sparkline
from palestra.run.progress import Progress, clock, number


def screen(progress: Progress) -> list[str]:
    """The live view of this moment as lines."""
    console = Console(file=io.StringIO(), width=90, force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(progress.render())
    return captured.get().splitlines()


def watched(**metrics: float) -> Progress:
    progress = Progress(Console(file=io.StringIO(), width=90, force_terminal=True), quiet=True)
    progress.phase("RL", total=4)
    for step in (1, 2):
        progress.update(step, {name.replace("__", "/"): value * step for name, value in metrics.items()})
    return progress


def test_the_view_shows_phase_step_reward_its_parts_kl_length_and_speed() -> None:
    progress = watched(
        train__reward=0.25,
        reward__format=0.4,
        train__kl=0.005,
        rollout__sampled_tokens_mean=20,
        speed__sampled_tokens_per_s=1100,
    )
    lines = screen(progress)
    assert lines[0].startswith("RL  step 2/4  0:00 elapsed, 0:00 left")
    text = "\n".join(lines)
    for name, value in [
        ("reward ", "0.500"),
        ("reward format", "0.800"),
        ("kl", "0.010"),
        ("sampled tokens mean", "40"),
    ]:
        assert any(name in line and value in line for line in lines), (name, text)
    assert any("sampled tokens/s" in line and "2,200" in line for line in lines), text


def test_before_the_first_phase_the_view_says_that_it_is_starting() -> None:
    assert screen(Progress(Console(file=io.StringIO()), quiet=True))[0] == "starting  0:00"


def test_the_curve_grows_to_the_right_as_steps_go_by() -> None:
    lines = screen(watched(train__reward=0.5))
    (top,) = (line for line in lines if line.startswith("  1.00"))
    assert len(top.rstrip()) == pytest.approx(8 + 82 * 2 / 4, abs=1)
    assert any(line.startswith("  0.00 ┤") for line in lines)


def test_the_curve_of_a_phase_stays_while_the_next_has_none_of_its_own() -> None:
    progress = watched(train__reward=0.5)
    progress.phase("evaluation after", total=1)
    progress.update(1, {"eval/accuracy": 0.9})
    lines = screen(progress)
    assert "reward by step of RL" in lines and any(line.startswith("  1.00 ┤") for line in lines)
    progress.phase("more", total=2)
    progress.update(1, {"train/reward": 0.1})
    progress.update(2, {"train/reward": 0.2})
    assert "reward by step of more" in screen(progress)


def test_a_warning_stands_out_and_an_old_phase_leaves_its_last_numbers() -> None:
    progress = watched(sft__loss=0.5)
    progress.phase("RL 2", total=3)
    progress.note("accuracy 0.58")
    progress.note("KL 0.6 is above 0.5", warning=True)
    lines = screen(progress)
    assert lines[0].startswith("RL 2/4") and "sft loss 1" in lines[0]
    assert lines[-2:] == ["- accuracy 0.58", "! KL 0.6 is above 0.5"]


def test_markup_in_a_note_is_text() -> None:
    progress = watched(train__reward=0.5)
    progress.note("[red]x[/red] [/oops]")
    assert screen(progress)[-1] == "- [red]x[/red] [/oops]"


def test_none_and_nan_are_not_shown() -> None:
    progress = watched(train__reward=0.25)
    progress.update(3, {"train/reward": None, "train/kl": float("nan")})
    lines = screen(progress)
    assert any("reward" in line and "0.500" in line for line in lines)
    assert not any(line.startswith("kl") for line in lines)


def test_a_pipe_gets_plain_lines_without_control_characters() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, width=40), interval_s=1000) as progress:
        progress.phase("RL", total=3)
        for step in (1, 2, 3):
            progress.update(step, {"train/reward": step / 4})
        progress.note("accuracy 0.9")
    lines = out.getvalue().splitlines()
    assert not any(ord(c) < 32 for line in lines for c in line)
    # The first and the last step are told; the one between falls into the pause.
    assert [line.split()[:2] for line in lines] == [["RL:", "3"], ["RL", "1/3"], ["RL", "3/3"], ["accuracy", "0.9"]]


def test_quiet_says_nothing() -> None:
    for terminal in (False, True):
        out = io.StringIO()
        with Progress(Console(file=out, force_terminal=terminal), quiet=True) as progress:
            progress.phase("RL", total=1)
            progress.update(1, {"train/reward": 1.0})
            progress.note("x")
        assert out.getvalue() == ""


def test_a_terminal_is_redrawn_while_the_caller_works_and_left_in_order() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=True, width=80)) as progress:
        progress.phase("RL", total=2)
        progress.update(1, {"train/reward": 0.5})
        time.sleep(0.6)
        assert "step 1/2" in out.getvalue()
    assert out.getvalue().endswith("\x1b[?25h") or "\x1b[?25h" in out.getvalue()  # the cursor is back


def test_updates_are_cheap_and_long_runs_stay_bounded() -> None:
    progress = Progress(Console(file=io.StringIO(), force_terminal=True), quiet=True)
    progress.phase("RL", total=5000)
    for step in range(1, 5001):
        progress.update(step, {"train/reward": step / 5000})
    began = time.perf_counter()
    screen(progress)
    assert time.perf_counter() - began < 0.25
    assert max(len(points) for points in progress._history.values()) <= 512


def test_a_resumed_phase_counts_its_time_left_from_where_it_began() -> None:
    progress = Progress(Console(file=io.StringIO()), quiet=True)
    progress.phase("RL", total=100, done=90)
    progress._began -= 10
    progress.update(95, {})
    assert "0:10 elapsed, 0:10 left" in screen(progress)[0]


def test_a_plot_averages_what_shares_a_column_and_marks_its_range() -> None:
    lines = plot([(1, 0.0), (2, 1.0), (3, 5.0), (4, 5.0)], width=10, height=1)
    assert lines[0].split("┤")[1] == "▁█"  # columns of mean 0.5 and 5.0 on an axis from 0 to 5
    assert lines[1].split() == ["14"]


def test_without_block_characters_a_plot_is_ascii() -> None:
    lines = plot([(1, 0.0), (2, 1.0)], width=20, height=3, ascii_only=True)
    assert all(ord(c) < 128 for line in lines for c in line)
    assert sparkline([0, 1], 4, ascii_only=True) == ".@"


def test_a_sparkline_of_a_constant_with_rounding_noise_is_flat() -> None:
    assert sparkline([0.1 + 0.2, 0.3, 0.3], 3) == "▁▁▁"


def test_pieces_of_a_series_are_nearly_equal_and_none_is_lost() -> None:
    assert resample([1, 2, 3, 4, 5], 2) == [1.5, 4.0]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (1.0, "1"), (-0.25, "-0.250"), (0.0004, "4e-04"), (1234567.0, "1,234,567"), (999.5, "999.500")],
)
def test_numbers_are_short(value: float, shown: str) -> None:
    assert number(value) == shown


def test_clocks_roll_over() -> None:
    assert [clock(s) for s in (0, 59.6, 3600)] == ["0:00", "1:00", "1:00:00"]
