"""A run as text: one line per event for a log, and the summary at the end."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from asyncgrpo.recording.events import Event
from asyncgrpo.recording.progress import Progress, counts_in_words, is_bad_sync, lag_line, mean_lag, short_version

Estimated = Sequence[float | None]
"""A number of a suite: its value, and both ends of its 95 % interval."""

# -- a line for an event -----------------------------------------------------------------------------------------------

_WARNINGS = frozenset(
    {"restart", "drain", "stall", "fault", "warning"}
    | {"reward_failed", "rewards_paused", "rewards_resumed", "lease_failed"}
)


def line_of(event: Event, progress: Progress) -> str | None:
    """Return the line of an event; None: it has none. `progress` includes the event."""
    kind = event["event"]
    if kind == "start":
        return f"start {event.get('run', '')} at step {event.get('step')}"
    if kind == "step":
        return _step_line(event, progress)
    if kind == "eval":
        line = f"eval {event['step']:>3}  reward {number(event.get('reward_mean'))}  completions {event.get('completions')}"
        line += "".join(f"  {name} {text}" for name, text in suites_of(event).items())
        return line + (f"  failures: {counts_in_words(failures)}" if (failures := event.get("failures")) else "")
    if kind == "checkpoint":
        return f"checkpoint at step {event.get('step')}  {event.get('path')}  {event.get('seconds') or 0:.1f} s"
    if kind == "recovered":
        return f"recovered from: {event['fault']} {event['actor']}  {event['seconds']:.1f} s"
    if kind in _WARNINGS or (kind == "sync" and is_bad_sync(event)):
        return f"warning: {progress.warnings[-1]}"
    if kind == "curriculum":
        return curriculum_line(event)
    if kind == "advice":
        return f"advice  {event['sentence']}"
    if kind == "end":
        return f"end   {event.get('status')} at step {event.get('step')}"
    return None


def _step_line(step: Event, progress: Progress) -> str:
    lags = {int(lag): groups for lag, groups in (step.get("lags") or {}).items()}
    generated, trained = progress.tokens_per_second()
    seconds = step.get("seconds") or {}
    waited = seconds.get("wait_data", 0.0) / total if (total := sum(seconds.values())) > 0 else 0.0
    width = len(str(progress.total_steps or 0))
    of = f"/{progress.total_steps}" if progress.total_steps else ""
    line = (
        f"step {step['step']:>{max(3, width)}}{of}  reward {number(step.get('reward_mean'))}"
        f"  lag {mean_lag(lags):.1f} (max {max(lags, default=0)})  loss {number(step.get('loss'), 4)}"
        f"  tok/s {thousands(generated)} gen {thousands(trained)} train  wait {waited:3.0%}"
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
    """Return the reward, pass@1, and pass@k and maj@k with the largest k."""
    passed, majority = ([name for name in numbers if name.startswith(kind)] for kind in ("pass@", "maj@"))
    names = ["reward", *passed[:1], *passed[-1:], *majority[-1:]]
    return {name: numbers[name] for name in dict.fromkeys(names) if name in numbers}


def parts_line(step: Event) -> str | None:
    """Return the means of the rewards' named parts, as "correct 0.510, format 0.920"; None without parts."""
    return ", ".join(f"{name} {number(mean)}" for name, mean in (step.get("reward_parts") or {}).items()) or None


def sources_line(step: Event) -> str | None:
    """Return the mean rewards of several sources, as "aiw 0.510, gsm8k 0.920"; None with fewer than two."""
    sources = step.get("sources") or {}
    named = [f"{source} {number(numbers.get('reward_mean'))}" for source, numbers in sources.items()]
    return ", ".join(named) if len(named) > 1 else None


def curriculum_line(event: Event) -> str | None:
    """Return the places of the prompts of a round, by kind; None before any result."""
    prompts, places = event["prompts"], event["places"]
    known = [kind for kind in ("solved", "mixed", "hopeless", "unknown") if prompts.get(kind)]
    if known in ([], ["unknown"]):
        return None
    named = f"round {event['round']} of {event['source']}" if event["source"] else f"epoch {event['round']}"
    kinds = [f"{prompts[kind]:,} {kind} with {places[kind]:,}" for kind in known]
    return f"{named}: {sum(places.values()):,} places; prompts: {', '.join(kinds)}"


def position(progress: Progress) -> str:
    """Return the steps done, as "17/60", or "17" if the total is unknown."""
    return f"{progress.step}/{progress.total_steps}" if progress.total_steps else f"{progress.step}"


def number(value: float | None, digits: int = 3) -> str:
    """Format `value` with `digits` decimals, or four significant digits if it is large; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.4g}"


def thousands(value: float) -> str:
    """Format `value` with three significant digits: "870", "1.7k", "29.4k", "3.1M"."""
    for unit in ("", "k", "M"):
        if abs(value) < 999.5:
            return f"{value:.0f}{unit}" if not unit else f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}G"


# -- the summary -------------------------------------------------------------------------------------------------------


def summary(progress: Progress, run_dir: Path | None = None) -> str:
    """Return the summary of a run: aligned lines.

    Args:
        run_dir: run folder; its files are listed, if given.
    """
    rows = [("run", f"{progress.run or '-'}: {_status(progress)}")]
    if progress.steps:
        rows += [*_learning(progress), *_flow(progress)]
    if dropped := progress.untrained("dropped"):
        rows.append(("dropped", f"{dropped.total():,} groups: {counts_in_words(dropped)}"))
    if filtered := progress.untrained("filtered"):
        rows.append(("filtered", f"{filtered.total():,} groups without signal: {counts_in_words(filtered)}"))
    if (checkpoint := progress.last_checkpoint) is not None:
        rows.append(("checkpoint", f"{checkpoint['path']} (step {checkpoint['step']})"))
    if run_dir is not None:
        rows += [("files" if first else "", text) for first, text in _files(Path(run_dir))]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}".rstrip() for name, text in rows)


def _status(progress: Progress) -> str:
    of = f" of {progress.total_steps}" if progress.total_steps else ""
    status = progress.end.get("status", "ended") if progress.end else "not ended"
    return f"{status} at step {progress.step}{of}, {progress.training_seconds:.1f} s of training"


def _learning(progress: Progress) -> list[tuple[str, str]]:
    first, last = progress.first_rewards, progress.last_rewards
    rows = []
    if first:
        means = f"{number(fmean(first))} -> {number(fmean(last))}"
        rows.append(("reward", f"{means} (means of {len(first)} first and last steps)"))
    if progress.first_eval is not None and progress.last_eval is not None:
        both = progress.first_eval, progress.last_eval
        scores = [number(event["reward_mean"]) for event in both if event.get("reward_mean") is not None]
        rows.append(("eval", " -> ".join(dict.fromkeys(scores)) or "no score"))
        before, now = map(suites_of, both)
        rows += [(f"  {name}", " -> ".join(filter(None, (before.get(name), text)))) for name, text in now.items()]
    return rows


def _flow(progress: Progress) -> list[tuple[str, str]]:
    lags = progress.lags()
    good = progress.num_syncs - progress.num_bad_syncs
    rows = [
        ("tokens", _tokens(progress)),
        ("lag", f"mean {mean_lag(lags):.2f}, {lag_line(lags, progress.last.get('max_lag'))} steps"),
        *_admission(progress),
        ("weight syncs", f"{good} of {progress.num_syncs} proved by checksum"),
    ]
    if (gap := progress.largest_logprob_gap) is not None:
        rows.append(("log-prob gap", f"max {gap:.2g} nats between learner and engine"))
    if progress.largest_gap is not None:
        rows.append(("sync gap", f"max {progress.largest_gap:.2g} nats, at {progress.num_gaps} publications"))
    rows.append(("waiting", f"{progress.time_shares().get('wait_data', 0.0):.0%} of the learner's time"))
    if progress.num_restarts:
        rows.append(("restarts", str(progress.num_restarts)))
    if progress.undone_steps:
        rows.append(
            ("undone", f"{progress.undone_steps} steps after the last checkpoint before a crash, trained again")
        )
    if progress.num_faults:
        rows += _survived(progress)
    return rows


def _admission(progress: Progress) -> list[tuple[str, str]]:
    """Rows on groups under way, their wait, the generators' time, and the advice."""
    under_way, wanted, ready = (progress.mean(name) for name in ("under_way", "wanted", "ready_seconds"))
    if under_way is None:
        return []
    of = f"{wanted:.1f} wanted" if wanted is not None else f"{progress.mean('slots'):.1f} slots"
    groups = f"mean {under_way:.1f} groups of {of}"
    rows = [("under way", groups + (f"; a group waits ready {ready:.2f} s" if ready is not None else ""))]
    if text := _generators(progress):
        rows.append(("generators", text))
    if progress.advice:
        rows.append(("advice", f"{progress.advice['sentence']} ({progress.advice['evidence']})"))
    return rows


def _generators(progress: Progress) -> str | None:
    shares = progress.generator_shares()
    named = {"generate": "sampling", "reward": "only scoring", "weights": "changing weights", "idle": "idle"}
    text = ", ".join(f"{words} {shares.get(what, 0.0):.0%}" for what, words in named.items())
    return f"{text} of their time" if shares else None


def _tokens(progress: Progress) -> str:
    """Return all tokens by fate, as "1,000 generated = 900 trained + 70 dropped (stale 50) + 30 waiting"."""
    tokens = progress.tokens
    if not tokens:  # a run of an older release
        return f"{progress.last.get('tokens_generated') or 0:,} generated, {progress.tokens_trained:,} trained"
    named = {"masked": "masked", "filtered": "filtered", "waiting": "waiting", "undone": "undone by restarts"}
    dropped = {fate: count for fate, count in tokens.items() if count and fate not in ("generated", "trained", *named)}
    parts = [f"{tokens['trained']:,} trained", f"{sum(dropped.values()):,} dropped"]
    parts[-1] += f" ({counts_in_words(dropped)})" if dropped else ""
    parts += [f"{tokens[fate]:,} {words}" for fate, words in named.items() if tokens.get(fate)]
    return f"{tokens['generated']:,} generated = {' + '.join(parts)}"


def _survived(progress: Progress) -> list[tuple[str, str]]:
    """Rows on the faults of `--chaos`: seconds until every process was up and a step was trained again."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for kind_of_fault, seconds_of_it in progress.recoveries:
        by_kind[kind_of_fault].append(seconds_of_it)
    rows = [("faults", f"{progress.num_faults} injected, {progress.num_recoveries} survived; seconds to recovery:")]
    every = [seconds for kind in by_kind.values() for seconds in kind]
    for kind, seconds in [*sorted(by_kind.items()), ("all", every)]:
        if seconds:
            p50, p99 = quantile(seconds, 0.5), quantile(seconds, 0.99)
            rows.append(("", f"{kind:<18}{len(seconds):>4}   p50 {p50:5.1f}   p99 {p99:5.1f}"))
    return rows


def _files(run_dir: Path) -> list[tuple[bool, str]]:
    found = []
    for path in sorted(run_dir.iterdir()) if run_dir.is_dir() else []:
        if path.is_dir():
            count = sum(1 for inner in path.iterdir() if not inner.name.startswith("."))
            found.append(f"{path}/ ({count} entr{'y' if count == 1 else 'ies'})")
        elif not path.name.startswith("."):
            found.append(str(path))
    return [(i == 0, text) for i, text in enumerate(found)]


def quantile(values: list[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
