"""The result file keeps what is measured, and the README names exactly the registry's figures."""

import asyncio
import io
import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rollyard_bench import results
from rollyard_bench.main import main, run_group
from rollyard_bench.pipeline import Slots, Workload, pipeline_bound
from rollyard_bench.registry import FIGURES, GROUPS, failed, judge, missing, selected
from rollyard_bench.results import Baseline, Entry, Measurement, Settings

BENCH = Path(__file__).parents[2] / "bench"

FIELDS = ("name", "value", "unit", "baseline", "ratio", "goal", "met", "how", "seconds")
GOOD = Entry(
    name="echo_p50",
    value=0.4,
    unit="ms",
    baseline=Baseline("raw pty", 0.1),
    ratio=4.0,
    goal="≤ 0.6 ms",
    met=True,
    how="p50 of 900",
)


def test_written_entries_have_exactly_the_documented_fields(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "results.json"
    results.write([GOOD, failed(FIGURES[1], "it broke"), missing(FIGURES[2], "no tmux")], out)
    first, second, third = json.loads(out.read_text())
    assert tuple(first) == tuple(second) == tuple(third) == FIELDS
    assert first["baseline"] == {"name": "raw pty", "value": 0.1}
    assert (second["value"], second["met"], second["how"]) == (None, False, "failed: it broke")
    assert (third["value"], third["met"], third["how"]) == (None, None, "not measured: no tmux")
    assert results.read(out) == [GOOD, failed(FIGURES[1], "it broke"), missing(FIGURES[2], "no tmux")]
    assert [path.name for path in out.parent.iterdir()] == ["results.json"]


def test_a_part_measured_anew_leaves_the_other_groups_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measured(settings: Settings) -> list[Measurement]:
        return [Measurement("ipython_p50", 2.0, Baseline("gateway", 40.0), "anew")]

    out = tmp_path / "results.json"
    old = replace(GOOD, name="ipython_p50", how="old")
    results.write([GOOD, old, replace(GOOD, name="of_no_figure_any_more")], out)
    monkeypatch.setattr("rollyard_bench.main._load", lambda group: measured)
    monkeypatch.setattr("rollyard_bench.main.signal.signal", lambda *arguments: None)
    assert main(["--only", "ipython", "--out", str(out)]) == 0
    assert [(entry.name, entry.how) for entry in results.read(out)] == [
        ("echo_p50", GOOD.how),
        ("ipython_p50", "anew"),
    ]
    out.write_text("[{}]")
    assert main(["--only", "ipython", "--out", str(out)]) == 2
    assert out.read_text() == "[{}]"


@pytest.fixture
def handlers() -> Iterator[None]:
    """Put the handlers of signals back."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_it_measured_and_the_former_rest(
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    handlers: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cleaned: list[str] = []

    async def memory(settings: Settings) -> list[Measurement]:
        return [Measurement("queued_10000_resident", 100.0, None, "anew")]

    async def page(settings: Settings) -> list[Measurement]:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(30)
        finally:
            cleaned.append("page")
        return []

    out = tmp_path / "results.json"
    former = replace(GOOD, name="reconcile_lag_p99", how="old")
    results.write([former, replace(GOOD, name="queued_10000_resident", how="old")], out)
    monkeypatch.setattr("rollyard_bench.main._load", lambda group: {"memory": memory, "page": page}[group])
    with pytest.raises(SystemExit) as stopped:
        main(["--only", "memory", "page", "--out", str(out)])
    assert stopped.value.code == 128 + number
    assert cleaned == ["page"]
    assert [(entry.name, entry.how) for entry in results.read(out)] == [
        ("queued_10000_resident", "anew"),
        ("reconcile_lag_p99", "old"),
    ]
    said = capsys.readouterr().out
    assert "1 figures: 1 goals met, 0 missed, 0 not measured" in said
    assert f"interrupted: {out} keeps the former figures of page" in " ".join(said.split())


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_every_figure_judges_both_ways(figure) -> None:
    """Half and double the limit lie on either side; without a baseline no ratio is met."""
    verdicts = []
    for measured in (figure.goal.limit / 2, figure.goal.limit * 2):
        by_value = figure.goal.on == "value" or figure.ratio == "times the baseline"
        value = measured if by_value else 1 / measured
        entry = judge(figure, Measurement(figure.name, value, Baseline("b", 1.0), "how"))
        verdicts.append(entry.met)
        if figure.goal.on == "ratio":
            assert judge(figure, Measurement(figure.name, value, None, "how")).met is False
    assert verdicts == ([True, False] if figure.goal.op == "<=" else [False, True])


def test_readme_names_exactly_the_figures_of_the_registry() -> None:
    rows = re.findall(r"^\| `([a-z0-9_]+)` \|", (BENCH / "README.md").read_text(), flags=re.MULTILINE)
    assert rows == [figure.name for figure in FIGURES]


def test_selection_takes_groups_and_figures_and_refuses_others() -> None:
    assert selected([]) == list(GROUPS)
    assert selected(["seq_20000", "memory", "echo"]) == ["echo", "memory"]
    with pytest.raises(ValueError, match=r"unknown: nonsense; there are the groups echo"):
        selected(["echo", "nonsense"])


def test_a_group_that_breaks_is_reported_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(settings: Settings) -> list[Measurement]:
        raise ExceptionGroup("several", [FileNotFoundError("no such tool: tmux")])

    monkeypatch.setattr("rollyard_bench.main._load", lambda group: broken)
    entries = run_group("echo", Settings(quick=True))
    assert [entry.name for entry in entries] == [figure.name for figure in FIGURES if figure.group == "echo"]
    for entry in entries:
        assert entry.value is None
        assert not entry.met
        assert "no such tool: tmux" in entry.how


def test_bounds_of_a_workload_that_can_be_counted_by_hand() -> None:
    work = Workload(rollouts=16, init=1.0, model_call=0.5, turns=4, eval=1.0, eval_slow=5.0, slow_every=8)
    slots = Slots(init=8, run=4, eval=8)
    assert work.eval_total == 2 * 5.0 + 14 * 1.0
    # The bound of Run has fill 1, 16 * 2 / 4 = 8, drain 1; Init has 2 + 2 + 1, and Eval 1 + 2 + 24 / 8.
    assert pipeline_bound(work, slots) == pytest.approx(10.0)
    # With enough Run slots, evaluation is the narrowest.
    assert pipeline_bound(work, Slots(init=16, run=16, eval=2)) == pytest.approx(1 + 2 + 12)


def test_what_was_not_measured_is_counted_and_shown_with_its_reason() -> None:
    entries = [GOOD, missing(FIGURES[1], "no [/tmux] here"), failed(FIGURES[2], "[/it] broke")]
    assert results.summary(entries) == "3 figures: 1 goals met, 1 missed, 1 not measured"
    console = Console(width=200, record=True, file=io.StringIO())
    results.show(entries, console)
    said = console.export_text()
    (row,) = [line for line in said.splitlines() if FIGURES[1].name in line]
    assert re.search(r"not measured .* no \[/tmux\] here", row)
    assert f"missed {FIGURES[2].name}: failed: [/it] broke" in said
