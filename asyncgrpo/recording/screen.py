"""A run on the terminal: one line per event, the figures that every view of a run shows, the summary, and the live screen.

Everything is drawn from events alone. `watch` follows a `metrics.jsonl` and shows it: as a live panel on a terminal, or as one
line per step if the output is a file or a pipe.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncgrpo.config.explain import counted
from asyncgrpo.logs import visible
from asyncgrpo.recording.events import Event, Follower
from asyncgrpo.recording.progress import (
    Progress,
    Totals,
    counts_in_words,
    lags_of,
    mean_lag,
    seconds_by_activity,
    shares,
    short_version,
    sync_line,
    warning_of,
)

Estimated = Sequence[float | None]
"""A number of a suite: its value, and both ends of its 95 % interval."""

# -- a line for an event -----------------------------------------------------------------------------------------------


def line_of(event: Event, progress: Progress) -> str | None:
    """Return the line of an event; None: it has none. `progress` includes the event."""
    match event["event"]:
        case "start":
            return f"start {event.get('run', '')} at step {event.get('step')}"
        case "step":
            return _step_line(event, progress)
        case "eval":
            line = f"eval {event['step']:>3}  reward {number(event.get('reward_mean'))}"
            line += f"  completions {event.get('completions')}"
            line += "".join(f"  {name} {text}" for name, text in suites_of(event).items())
            return line + (f"  failures: {counts_in_words(failures)}" if (failures := event.get("failures")) else "")
        case "checkpoint":
            return f"checkpoint at step {event.get('step')}  {event.get('path')}  {event.get('seconds') or 0:.1f} s"
        case "recovered":
            return f"recovered from: {event['fault']} {event['actor']}  {event['seconds']:.1f} s"
        case "curriculum":
            return curriculum_line(event)
        case "advice":
            return f"advice  {event['sentence']}"
        case "end":
            return f"end   {event.get('status')} at step {event.get('step')}"
    return None if (warning := warning_of(event)) is None else f"warning: {warning}"


def _step_line(step: Event, progress: Progress) -> str:
    lags = lags_of(step)
    generated, trained = progress.tokens_per_second()
    waited = shares(seconds_by_activity(step)).get("wait_data", 0.0)
    width = len(str(progress.total_steps or 0))
    of = f"/{progress.total_steps}" if progress.total_steps else ""
    kl = "" if step.get("kl_reference") is None else f"  kl {number(step['kl_reference'])}"
    line = (
        f"step {step['step']:>{max(3, width)}}{of}  reward {number(step.get('reward_mean'))}"
        f"  lag {mean_lag(lags):.1f} (max {max(lags, default=0)})  loss {number(step.get('loss'), 4)}"
        f"{kl}  tok/s {thousands(generated)} gen {thousands(trained)} train  wait {waited:3.0%}"
    )
    if progress.syncs:
        sync = progress.syncs[-1]
        line += f"  sync {short_version(str(sync['version']))} {sync.get('ms') or 0:.0f} ms {sync.get('checksum')}"
    if failures := step.get("failures"):
        line += f"  failures {sum(failures.values())}"
    return line


def suites_of(evaluation: Event) -> dict[str, str]:
    """Return the numbers of each suite, as "0.412 pass@1 0.380 pass@8 0.710 maj@8 0.520".

    Empty for one suite with one completion per prompt: the mean reward of the evaluation suffices.
    """
    suites = {name: headline(suite["numbers"]) for name, suite in (evaluation.get("suites") or {}).items()}
    if len(suites) == 1 and len(next(iter(suites.values()))) <= 2:
        return {}
    return {
        name: " ".join(f"{key} {number(value[0])}".removeprefix("reward ") for key, value in numbers.items())
        for name, numbers in suites.items()
    }


def headline(numbers: Mapping[str, Estimated]) -> dict[str, Estimated]:
    """Return the reward, pass@1, pass@k with the largest k, and maj@n."""
    passed, majority = ([name for name in numbers if name.startswith(kind)] for kind in ("pass@", "maj@"))
    names = ["reward", *passed[:1], *passed[-1:], *majority[-1:]]
    return {name: numbers[name] for name in dict.fromkeys(names) if name in numbers}


def curriculum_line(event: Event) -> str | None:
    """Return the places of the prompts of a round, by kind; None before any result."""
    prompts, places = event["prompts"], event["places"]
    known = [kind for kind in ("solved", "mixed", "hopeless", "unknown") if prompts.get(kind)]
    if known in ([], ["unknown"]):
        return None
    named = f"round {event['round']} of {event['source']}" if event["source"] else f"epoch {event['round']}"
    kinds = [f"{prompts[kind]:,} {kind} with {places[kind]:,}" for kind in known]
    return f"{named}: {sum(places.values()):,} places; prompts: {', '.join(kinds)}"


def position(step: int, total: int | None) -> str:
    """Return the steps done, as "17/60", or "17" if the total is unknown."""
    return f"{step}/{total}" if total else f"{step}"


def number(value: float | None, digits: int = 3) -> str:
    """Format `value` with `digits` decimals, or four significant digits if it is large; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.4g}"


def thousands(value: float) -> str:
    """Format `value` with three significant digits: "0.25", "870", "1.7k", "29.4k", "3.1M"."""
    for unit in ("", "k", "M"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}G"


# -- the figures of a run ----------------------------------------------------------------------------------------------

Rows = Iterator[tuple[str, str]]
"""Figures, each with its name."""


def figures(progress: Progress) -> Rows:
    """Yield the figures of a run, over its last ten steps, for the screen, `status` and `top`."""
    last, evaluation = progress.last, progress.newest.get("eval")
    held_out = f", eval {number(evaluation['reward_mean'])} @ {evaluation['step']}" if evaluation else ""
    parts = ", ".join(f"{name} {number(mean)}" for name, mean in (last.get("reward_parts") or {}).items())
    yield "reward", number(last.get("reward_mean")) + held_out + (f" ({parts})" if parts else "")
    if evaluation and (suites := suites_of(evaluation)):
        yield "suites", "; ".join(f"{name} {text}" for name, text in suites.items())
    if len(sources := last.get("sources") or {}) > 1:
        yield "sources", ", ".join(f"{name} {number(of.get('reward_mean'))}" for name, of in sources.items())
    if "curriculum" in progress.newest and (line := curriculum_line(progress.newest["curriculum"])) is not None:
        yield "prompts", line
    yield from flow(progress.recent)
    generated, trained = progress.tokens_per_second()
    elapsed = progress.elapsed_s
    rate = f"{thousands(3600 * (len(progress.steps) - 1) / elapsed)} steps/h, " if elapsed else ""
    rate += f"{thousands(generated)} tok/s generated, {thousands(trained)} trained"
    sums = f"{thousands(last.get('tokens_generated') or 0)} and {thousands(progress.tokens_trained)} tokens"
    yield "speed", f"{rate}; so far {sums}"
    gap = next((sync["gap_max"] for sync in reversed(progress.syncs) if sync.get("gap_max") is not None), None)
    gap = last.get("logprob_gap_max") if gap is None else gap
    yield (
        "policy",
        f"loss {number(last.get('loss'), 4)}"
        + ("" if last.get("kl_reference") is None else f", kl {number(last['kl_reference'])}")
        + f", length {number(last.get('completion_length_mean'), 1)}"
        + ("" if gap is None else f", log-prob gap {gap:.1e}"),
    )
    if progress.syncs:
        yield "weights", sync_line(progress.syncs[-1])


def flow(totals: Totals) -> Rows:
    """Yield the figures of groups, learner and generators over some steps."""
    if lags := totals.lags:
        of = "" if totals.max_lag is None else f" of {totals.max_lag}"
        p50, p90 = _lag_quantile(lags, 0.5), _lag_quantile(lags, 0.9)
        yield "lag", f"mean {mean_lag(lags):.2f}, p50 {p50}, p90 {p90}, max {max(lags)}{of} steps"
    under_way, wanted, ready = (totals.mean(name) for name in ("under_way", "wanted", "ready_seconds"))
    if under_way is not None:
        of = f"{wanted:.1f} wanted" if wanted is not None else f"{totals.mean('slots'):.1f} slots"
        waits = f"; a group waits ready {ready:.2f} s" if ready is not None else ""
        yield "under way", f"mean {under_way:.1f} groups of {of}{waits}"
    for name, spent in (("generators", totals.generators), ("learner", totals.learner)):
        if of_time := {_ACTIVITIES.get(what, what): share for what, share in shares(spent).items() if share > 0.005}:
            yield name, ", ".join(f"{what} {share:.0%}" for what, share in of_time.items())


def _lag_quantile(lags: Mapping[int, int], share: float) -> int:
    """Return the smallest lag that at least `share` of the groups do not exceed, given their counts."""
    left = share * sum(lags.values())
    return next((lag for lag, groups in sorted(lags.items()) if (left := left - groups) <= 0), max(lags))


_ACTIVITIES = {
    **{"generate": "sampling", "reward": "only scoring", "weights": "changing weights"},
    **{"wait_data": "waiting for data", "train": "training", "publish": "publishing", "checkpoint": "checkpoints"},
}


# -- the summary -------------------------------------------------------------------------------------------------------


def summary(progress: Progress) -> str:
    rows = list(_rows(progress))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}".rstrip() for name, text in rows)


def _rows(progress: Progress) -> Rows:
    of = f" of {progress.total_steps}" if progress.total_steps else ""
    status = progress.end.get("status", "ended") if progress.end else "not ended"
    seconds = f"{progress.training_seconds:.1f} s of training"
    yield "run", f"{progress.run or '-'}: {status} at step {progress.step}{of}, {seconds}"
    if progress.steps:
        yield from _of_steps(progress)
    if dropped := progress.dropped:
        yield "dropped", f"{counted(sum(dropped.values()), 'group')}: {counts_in_words(dropped)}"
    if filtered := progress.filtered:
        yield "filtered", f"{counted(sum(filtered.values()), 'group')} without signal: {counts_in_words(filtered)}"
    if (checkpoint := progress.newest.get("checkpoint")) is not None:
        yield "checkpoint", f"{checkpoint['path']} (step {checkpoint['step']})"


def _of_steps(progress: Progress) -> Rows:
    first, last = progress.first_rewards, progress.last_rewards
    if first:
        means = f"{number(fmean(first))} -> {number(fmean(last))}"
        yield "reward", f"{means} (means of {len(first)} first and last steps)"
    if progress.first_kl is not None:
        values = f"{number(progress.first_kl)} -> {number(progress.last.get('kl_reference'))}"
        yield "kl", f"{values} nats per token (first and last step)"
    if progress.first_eval is not None:
        both = progress.first_eval, progress.newest["eval"]
        scores = [number(event["reward_mean"]) for event in both if event.get("reward_mean") is not None]
        yield "eval", " -> ".join(dict.fromkeys(scores)) or "no score"
        before, now = map(suites_of, both)
        yield from ((f"  {name}", " -> ".join(filter(None, (before.get(name), text)))) for name, text in now.items())
    yield "tokens", _tokens(progress)
    yield from flow(progress.totals)
    if progress.advice:
        yield "advice", f"{progress.advice['sentence']} ({progress.advice['evidence']})"
    yield "weight syncs", f"{progress.counts['sync']}, each proved by checksum"
    if (gap := progress.largest_logprob_gap) is not None:
        yield "log-prob gap", f"max {gap:.2g} nats between learner and engine"
    if progress.largest_gap is not None:
        yield "sync gap", f"max {progress.largest_gap:.2g} nats, at {progress.num_gaps} publications"
    if restarts := progress.counts["restart"]:
        yield "restarts", str(restarts)
    if progress.undone_steps:
        yield (
            "undone",
            f"{counted(progress.undone_steps, 'step')} after the last checkpoint before a crash, trained again",
        )
    if faults := progress.counts["fault"]:
        recoveries = progress.counts["recovered"]
        slowest = f", the slowest in {progress.slowest_recovery_s:.1f} s" if recoveries else ""
        yield "faults", f"{faults} injected, {recoveries} survived{slowest}"


def _tokens(progress: Progress) -> str:
    """Return all tokens by fate, as "1,000 generated = 900 trained + 70 dropped (stale 50) + 30 waiting"."""
    tokens = progress.tokens
    if not tokens:
        return "-"
    named = {"filtered": "filtered", "waiting": "waiting", "undone": "undone by restarts"}
    dropped = {fate: count for fate, count in tokens.items() if count and fate not in ("generated", "trained", *named)}
    parts = [f"{tokens['trained']:,} trained", f"{sum(dropped.values()):,} dropped"]
    parts[-1] += f" ({counts_in_words(dropped)})" if dropped else ""
    parts += [f"{tokens[fate]:,} {words}" for fate, words in named.items() if tokens.get(fate)]
    return f"{tokens['generated']:,} generated = {' + '.join(parts)}"


# -- the panel of a run ------------------------------------------------------------------------------------------------

_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 40
_COLOURS = {"training": "green", "done": "green", "drained": "green", "starting": "cyan"}
_COLOURS |= {"paused": "yellow", "draining": "yellow", "failed": "red", "no reply": "red"}

Note = tuple[str, str, str]
"""Name, text and style of a line below the figures."""


def curve_of(values: Sequence[float]) -> str:
    """Draw values as a line of bars between the smallest and the largest; several values in one place are averaged."""
    count, low, high = min(_CURVE_WIDTH, len(values)), min(values), max(values)
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [fmean(values[a:b]) for a, b in pairwise(edges)]
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return f"{number(low)} {''.join(_BARS[round((mean - low) * scale)] for mean in means)} {number(high)}"


def panel(
    progress: Progress,
    title: str,
    state: str,
    rows: Iterable[tuple[str, str]],
    notes: Iterable[Note],
    *,
    wraps: bool = True,
    done: float | None = None,
) -> Panel:
    """Return a run as a panel: its figures with the curve of the reward, and notes below them.

    Args:
        wraps: False: longer lines are cut, so that the panel keeps its height.
        done: share of the run that is done, for a progress bar.
    """
    overflow = {"overflow": "fold"} if wraps else {"overflow": "ellipsis", "no_wrap": True}
    tables = []
    upper = [(name, text, "") for name, text in rows]
    if progress.rewards:
        upper.insert(0, ("curve", curve_of(list(progress.rewards)), "green"))
    for lines in (upper, notes):
        tables.append(table := Table.grid(padding=(0, 2)))
        table.add_column(style="dim", no_wrap=True, min_width=10)
        table.add_column(**overflow)  # type: ignore[arg-type]
        before = ""
        for name, text, style in lines:
            table.add_row("" if name == before else name, Text(visible(text), style=style))
            before = name
    colour = next((colour for word, colour in _COLOURS.items() if state.startswith(word)), "white")
    heading = Text.assemble((f"{title}  ", "bold cyan"), (state, f"bold {colour}"))
    bar = () if done is None else (Padding(ProgressBar(total=1.0, completed=done)),)  # which ends its line
    return Panel(Group(*bar, *tables), title=heading, title_align="left", border_style="dim", padding=(0, 1))


# -- the screen --------------------------------------------------------------------------------------------------------

_NUM_WARNINGS = 3
"""Warnings that fit the 24 lines of a small terminal."""


def render(progress: Progress, now: float | None = None) -> RenderableType:
    """Return the screen of a run. The clock shows `now` (Unix seconds), or the time of the last event if it is None."""
    now = progress.updated if now is None else now
    until = (progress.updated if progress.end else now) or 0.0
    elapsed = timedelta(seconds=int(max(0.0, until - (progress.started or 0.0))))
    state = "paused" if progress.is_paused else "training" if progress.steps else "starting"
    state = progress.end.get("status", "ended") if progress.end else state
    done = "" if progress.share_done is None else f"  {progress.share_done:.0%}"
    return panel(
        progress,
        f"{progress.run or 'run'}  step {position(progress.step, progress.total_steps)}",
        f"{state}{done}  {elapsed}",
        figures(progress),
        _notes(progress, now),
        wraps=False,
        done=progress.share_done,
    )


def _notes(progress: Progress, now: float | None) -> Iterator[Note]:
    if paused := progress.paused.values():
        at, actors = now or 0.0, ", ".join(sorted(progress.paused))
        since_s = at - min(event["since"] for event in paused)
        probe_in_s = max(0.0, min(event["time"] + event["probe_in_s"] for event in paused) - at)
        reason = next(iter(paused))["reason"]
        text = f"paused at {actors} for {since_s:.0f} s, probing again in {probe_in_s:.0f} s: {reason}"
        yield "rewards", text, "bold yellow"
    elif progress.advice and not progress.is_paused:
        yield "advice", progress.advice["sentence"], ""
    yield from (("warnings", warning, "yellow") for warning in progress.warnings[-_NUM_WARNINGS:])


def watch(
    path: Path,
    *,
    console: Console | None = None,
    stop: threading.Event | None = None,
    since: float = 0.0,
    poll_s: float = 0.25,
) -> Progress:
    """Show the run that writes `path` until its `end` event or until `stop` is set.

    Args:
        since: Unix time of this start of the run. Earlier events print no line and show no warning, and an earlier `end`
            does not end the watch. Events that come while it watches are new, whatever their time: a clock may be set back.
    Returns:
        The progress of the run at the end.
    """
    console = console or Console()
    stop = stop or threading.Event()
    follower, progress = Follower(path), Progress()
    live = Live(render(Progress(), time.time()), console=console, auto_refresh=False) if console.is_terminal else None
    newest = skip_until = since
    drawn, repeats = 0.0, True
    try:
        if live:
            live.start()
            console.show_cursor(True)  # a killed run could not show it again
        while True:
            stopping, came = stop.is_set(), False
            for event in follower.poll():
                came = True
                progress.update(event)
                if event["event"] == "rewound":
                    skip_until, repeats = newest, True  # the follower repeats some; print only what is new
                at = event.get("time", 0.0)
                newest = max(newest, at)
                if repeats and at < since:
                    progress.warnings.clear()
                if live is None and (at > skip_until or not repeats) and (line := line_of(event, progress)) is not None:
                    console.print(visible(line), markup=False, highlight=False, soft_wrap=True)
            repeats = False
            if live and (came or time.time() >= drawn + 1):
                live.update(render(progress, drawn := time.time()), refresh=True)
            if stopping or (progress.end and progress.end["time"] >= since):
                return progress
            stop.wait(poll_s)
    finally:
        if live:
            live.stop()
