"""Progress away from a terminal is a few plain lines, not silence and not a flood."""

from __future__ import annotations

import io

from rich.console import Console

from rlhf_cluster.progress import ProgressView


def test_away_from_a_terminal_every_tenth_is_a_line() -> None:
    out = io.StringIO()
    with ProgressView(Console(file=out, force_terminal=False)) as view:
        for done in range(1, 41):
            view.update("prompts answered", done, 40)
        view.update("features", 1, 1)
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["prompts answered: 4 of 40", "prompts answered: 8 of 40"]
    assert lines[-1] == "features: 1 of 1"
    assert len(lines) == 11


def test_on_a_terminal_the_stage_is_a_bar() -> None:
    out = io.StringIO()
    with ProgressView(Console(file=out, force_terminal=True, width=80)) as view:
        view.update("prompts [answered]", 20, 40)
        view._bar.refresh()
    assert "50%" in out.getvalue()
    assert "20 of 40" not in out.getvalue(), "a bar needs no lines beside it"
