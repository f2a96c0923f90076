"""The last words of a run: what it did, how fast, and what it left on disk."""

import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from asyncgrpo.recording.events import Event
from asyncgrpo.recording.lines import number
from asyncgrpo.recording.progress import Progress, counts_in_words, mean_lag

_ENDS = 5
"""Steps averaged for the first and the last reward."""


def summary(events: Iterable[Event], run_dir: Path | None = None) -> str:
    """A few aligned lines about the whole run.

    Args:
        events: all of them, as `read_events` gives them.
        run_dir: names the files it holds, if given.
    """
    progress = Progress.of(events)
    rows = [("run", f"{progress.run or '-'}: {_status(progress)}")]
    if progress.steps:
        rows += [*_learning(progress), *_flow(progress)]
    if dropped := progress.untrained("dropped"):
        rows.append(("dropped", f"{dropped.total():,} groups: {counts_in_words(dropped)}"))
    if filtered := progress.untrained("filtered"):
        rows.append(("filtered", f"{filtered.total():,} groups without signal: {counts_in_words(filtered)}"))
    if progress.checkpoints:
        rows.append(("checkpoint", f"{progress.checkpoints[-1]['path']} (step {progress.checkpoints[-1]['step']})"))
    if run_dir is not None:
        rows += [("files" if first else "", text) for first, text in _files(Path(run_dir))]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}".rstrip() for name, text in rows)


def _status(progress: Progress) -> str:
    of = f" of {progress.total_steps}" if progress.total_steps else ""
    status = progress.end.get("status", "ended") if progress.end else "not ended"
    return f"{status} at step {progress.step}{of}, {progress.training_seconds:.1f} s of training"


def _learning(progress: Progress) -> list[tuple[str, str]]:
    rewards = progress.rewards()
    first, last = rewards[:_ENDS], rewards[-_ENDS:]
    rows = []
    if rewards:
        rows.append(
            ("reward", f"{number(_mean(first))} -> {number(_mean(last))} (means of {len(first)} first and last steps)")
        )
    if progress.evals:
        scores = [number(event["reward_mean"]) for event in progress.evals if event.get("reward_mean") is not None]
        rows.append(("eval", " -> ".join(dict.fromkeys((scores[0], scores[-1]))) if scores else "no score"))
    return rows


def _flow(progress: Progress) -> list[tuple[str, str]]:
    lags = progress.lags()
    good = progress.num_syncs - progress.num_bad_syncs
    rows = [
        ("tokens", _tokens(progress)),
        ("lag", f"mean {mean_lag(lags):.2f}, max {max(lags, default=0)} steps"),
        ("weight syncs", f"{good} of {progress.num_syncs} proved by checksum"),
    ]
    gaps = [step["logprob_gap_max"] for step in progress.steps if step.get("logprob_gap_max") is not None]
    if gaps:
        rows.append(("log-prob gap", f"max {max(gaps):.2g} nats between learner and engine"))
    rows.append(("waiting", f"{progress.time_shares().get('wait_data', 0.0):.0%} of the learner's time"))
    if progress.num_restarts:
        rows.append(("restarts", str(progress.num_restarts)))
    if progress.undone_steps:
        rows.append(
            ("undone", f"{progress.undone_steps} steps after the last checkpoint before a crash, trained again")
        )
    if progress.faults:
        rows += _survived(progress)
    return rows


def _tokens(progress: Progress) -> str:
    """`1,000 generated = 900 trained + 70 dropped (stale 50, unusable 20) + 30 waiting`."""
    tokens = progress.tokens
    if not tokens:  # an older release wrote no ledger
        return f"{progress.last.get('tokens_generated') or 0:,} generated, {progress.tokens_trained():,} trained"
    named = {"masked": "masked", "filtered": "filtered", "waiting": "waiting", "undone": "undone by restarts"}
    dropped = {fate: count for fate, count in tokens.items() if count and fate not in ("generated", "trained", *named)}
    parts = [f"{tokens['trained']:,} trained", f"{sum(dropped.values()):,} dropped"]
    parts[-1] += f" ({counts_in_words(dropped)})" if dropped else ""
    parts += [f"{tokens[fate]:,} {words}" for fate, words in named.items() if tokens.get(fate)]
    return f"{tokens['generated']:,} generated = {' + '.join(parts)}"


def _survived(progress: Progress) -> list[tuple[str, str]]:
    """What `--chaos` did, and how long it took until every process was up and a step was trained after it."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for event in progress.recoveries:
        role = event["actor"].partition("-")[0]
        by_kind[f"{event['fault']} {role}"].append(event["seconds"])
    rows = [("faults", f"{len(progress.faults)} done, {len(progress.recoveries)} survived; seconds to recovery:")]
    every = [seconds for kind in by_kind.values() for seconds in kind]
    for kind, seconds in [*sorted(by_kind.items()), ("all", every)]:
        if seconds:
            rows.append(
                (
                    "",
                    f"{kind:<18}{len(seconds):>4}   p50 {quantile(seconds, 0.5):5.1f}   p99 {quantile(seconds, 0.99):5.1f}",
                )
            )
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
    """The smallest value that at least this share of all does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
