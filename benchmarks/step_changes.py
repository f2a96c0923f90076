"""What admission does when the world changes in mid-run: `buffer.admission` eager and fresh side by side.

python -m benchmarks.step_changes --jobs 2
python -m benchmarks.step_changes --changes longer slower --lags 8 --sigmas 0.5 --seeds 0 --steps

The product on the virtual clock (`benchmarks.scheduler`), on the case `LongTail` of `benchmarks.policies`. At step 30 of 70:

    none      nothing: what chance alone does to these figures
    lost      one of four generators is gone; the buffer is told as the driver tells it
    back      a generator that was lost at step 10 is replaced
    longer    answers that begin from now on are twice as long
    faster    the learner takes half of its time
    slower    the learner takes twice its time
    pause     one step takes five times as long, as with an evaluation or a checkpoint
    restart   the whole run starts again with no group; 40 steps from there

Of the steps from the change on, medians over the seeds:

    excess_idle     the learner's idle time beyond that of eager in the 20 steps after the change, in steps
    idle            the learner's idle time in these 20 steps, in steps
    longest_wait    the longest of these waits, in steps
    groups_settled  steps until the groups under way stay within 20 % of their mean over the last 20 steps of the run
    lag_settled     the same of the lag, as a mean over five steps (two before and two after)
    under_way, lag  means over the last 20 steps
    swing           groups under way in the last 20 steps: the most over the fewest
    lag_max         the largest lag of a group

`told` is no admission of the product but what `fresh` would be if it were told: it keeps as many groups under way as
`fresh` did on average before the change, and from the change on as many as `fresh` settles at. It shows which part of
the idle time is not for lack of reacting: what begins after the change comes only when it has been generated.
"""

import argparse
import asyncio
import itertools
import logging
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import numpy as np

from asyncgrpo.buffer.admission import Eager
from asyncgrpo.buffer.buffer import State
from asyncgrpo.generators.service import GeneratorService
from asyncgrpo.types import Group, PolicyVersion
from asyncgrpo.wire.codec import encode
from asyncgrpo.wire.rollouts import Shutdown
from asyncgrpo.wire.supervision import GeneratorLost
from benchmarks.measuring import line, rounded, show
from benchmarks.policies import LongTail
from benchmarks.scheduler import Product

STEPS, CHANGE_AT, LAST = 70, 30, 20
BAND = 0.2


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", nargs="+", choices=list(CHANGES), default=list(CHANGES))
    parser.add_argument("--lags", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--sigmas", nargs="+", type=float, default=[0.5, 1.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--policy", default="wait")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--steps", action="store_true", help="show every step of every run too")
    arguments = parser.parse_args(argv)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for change, sigma, max_lag in itertools.product(arguments.changes, arguments.sigmas, arguments.lags):
            case = LongTail(max_lag, STEPS, 0, policy=arguments.policy, sigma=sigma)
            runs = list(pool.map(partial(side_by_side, change), [replace(case, seed=s) for s in arguments.seeds]))
            report(change, case, arguments.seeds, runs, with_steps=arguments.steps)


def report(
    change: str, case: LongTail, seeds: Sequence[int], runs: Sequence[Mapping[str, "Seen"]], *, with_steps: bool
) -> None:
    """One line: the excess idle time of fresh, and the medians of all figures of each admission."""
    found = {name: [run[name].figures(run["eager"]) for run in runs] for name in runs[0]}
    medians = {
        name: {what: rounded(statistics.median(f[what] for f in figures), 3) for what in figures[0]}
        for name, figures in found.items()
    }
    fields: dict[str, object] = {"change": change, "policy": case.policy, "sigma": case.sigma, "max_lag": case.max_lag}
    if with_steps:
        fields["steps"] = [{name: seen.columns() for name, seen in run.items()} for run in runs]
    excess = [one["excess_idle"] for one in found["fresh"]]
    show(line("excess idle of fresh after a change", excess, "steps", digits=3, seed=seeds[0], **fields, **medians))


def side_by_side(change: str, case: LongTail) -> dict[str, "Seen"]:
    """What was seen under each admission, by its name."""
    logging.getLogger("asyncgrpo").setLevel(logging.ERROR)
    seen = {name: run(change, replace(case, admission=name)) for name in ("eager", "fresh")}
    fresh = seen["fresh"]
    before = fresh.steps[fresh.at - 10 : fresh.at] if fresh.at > 0 else fresh.steps[-LAST:]
    told = Told(_mean(s.under_way for s in before), _mean(s.under_way for s in fresh.steps[-LAST:]))
    return {**seen, "told": run(change, replace(case, admission="fresh"), told)}


def _mean(counts: Iterable[int]) -> int:
    return round(statistics.fmean(counts))


# -- what is seen ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One step, as it starts."""

    waited_s: float
    """For its batch."""
    under_way: int
    """Groups leased or ready, when it has its batch."""
    lags: tuple[int, ...]


@dataclass(frozen=True)
class Seen:
    """The steps of one run, and the place of the one with the change: those after it show what it does."""

    steps: list[Step]
    at: int
    step_s: float
    """Seconds of a step after the change, waiting left out."""

    def figures(self, eager: "Seen") -> dict[str, float]:
        """The figures of the module's text."""
        after = self.steps[self.at + 1 :]
        waits = [step.waited_s / self.step_s for step in after[:20]]
        idle = sum(waits)
        groups = [step.under_way for step in after]
        lags = [statistics.fmean(step.lags) for step in after]
        smooth = [statistics.fmean(lags[max(0, i - 2) : i + 3]) for i in range(len(lags))]
        return {
            "excess_idle": idle - sum(step.waited_s / self.step_s for step in eager.steps[self.at + 1 :][:20]),
            "idle": idle,
            "longest_wait": max(waits),
            "groups_settled": steps_until_settled(groups),
            "lag_settled": steps_until_settled(smooth),
            "under_way": statistics.fmean(groups[-LAST:]),
            "lag": statistics.fmean(lags[-LAST:]),
            "swing": max(groups[-LAST:]) / min(groups[-LAST:]),
            "lag_max": max(lag for step in after for lag in step.lags),
        }

    def columns(self) -> dict[str, list[float]]:
        """Every step."""
        return {
            "waited_s": [rounded(step.waited_s, 3) for step in self.steps],
            "under_way": [step.under_way for step in self.steps],
            "lag": [rounded(statistics.fmean(step.lags), 3) for step in self.steps],
        }


def steps_until_settled(values: Sequence[float]) -> int:
    """Steps after which all values are within `BAND` of the mean of the last `LAST`."""
    mean = statistics.fmean(values[-LAST:])
    outside = [place for place, value in enumerate(values) if abs(value - mean) > BAND * mean]
    return outside[-1] + 1 if outside else 0


# -- the product, and what happens to it -------------------------------------------------------------------------------


class Told(Eager):
    """Keeps as many groups under way as it is told."""

    wanted: int = 0  # type: ignore[override]

    def __init__(self, before: int, after: int) -> None:
        self.wanted, self.after = before, after


@dataclass
class Changing(Product):
    """The product on a case, with something that happens at the start of some steps."""

    happens: Mapping[int, Callable[["Changing"], None]] = field(default_factory=dict)
    """By step, counted from 0."""
    told: Told | None = None
    """Instead of the case's admission."""
    length: float = 1.0
    """By which the tokens of a completion that begins now are multiplied."""
    steps: list[Step] = field(default_factory=list)

    def step(self, groups: list[Group], version: PolicyVersion) -> SimpleNamespace:
        if happens := self.happens.get(len(self.steps)):
            happens(self)
        if self.told is not None and len(self.steps) == CHANGE_AT:
            self.told.wanted = self.told.after
        under_way = self.buffer.count(State.LEASED) + self.buffer.count(State.READY)
        lags = tuple(version.number - group.versions[0].number for group in groups)
        self.steps.append(Step(self._loop.time() - self._is_free_s, under_way, lags))
        return super().step(groups, version)

    def lengths_of(self, prompt_index: int, attempt: int) -> np.ndarray:
        """[completions] tokens of a lease that begins now."""
        return (self.case.lengths_of(prompt_index, attempt) * self.length).astype(int)

    def lose_a_generator(self) -> None:
        """End the last one. The driver sees its process end, and tells the buffer."""
        name = f"generator-{len(self._generators) - 1}"
        service = self._generators.pop()
        service.line.close()
        service.line.arrive([bytes(frame) for frame in encode(Shutdown(), b"")])
        self._to_buffer("driver", GeneratorLost(generator_id=name), b"")

    def replace_it(self) -> None:
        """Another one starts, and receives the weights published last."""

        async def receive_weights() -> None:
            await asyncio.sleep(self.case.transfer_s)
            await newcomer._swap((), self._learner.version)

        newcomer = self._generator(self.case.generators)
        self._generators.append(newcomer)
        self._loop.create_task(receive_weights())

    def _build(self) -> None:
        super()._build()
        if self.told is not None:
            self.buffer._admission = self.told

    def _generator(self, index: int) -> GeneratorService:
        service = super()._generator(index)
        self.engines[-1]._lengths_of = self.lengths_of
        return service


def completions_get_longer(product: Changing) -> None:
    product.length = 2.0


def _train_for(factor: float) -> Callable[[Changing], None]:
    def change(product: Changing) -> None:
        product.case = replace(product.case, train_s=factor * product.case.train_s)

    return change


CHANGES: dict[str, dict[int, Callable[[Changing], None]]] = {
    "none": {},
    "lost": {CHANGE_AT: Changing.lose_a_generator},
    "back": {10: Changing.lose_a_generator, CHANGE_AT: Changing.replace_it},
    "longer": {CHANGE_AT: completions_get_longer},
    "faster": {CHANGE_AT: _train_for(1 / 2)},
    "slower": {CHANGE_AT: _train_for(2)},
    "pause": {CHANGE_AT: _train_for(5), CHANGE_AT + 1: _train_for(1 / 5)},
    "restart": {},
}


def run(change: str, case: LongTail, told: Told | None = None) -> Seen:
    """One run with a change in it."""
    at = CHANGE_AT
    if change == "restart":
        case, at = replace(case, steps=STEPS - CHANGE_AT), -1
    product = Changing(case, happens=CHANGES[change], told=told).run()
    return Seen(product.steps, at, product.case.train_s + product.case.stall_s)


if __name__ == "__main__":
    main()
