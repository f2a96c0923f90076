"""Turns a lease into a group: samples its completions and scores each as soon as it is complete.

A reward that takes groups is called once: when the group is sampled, or at its deadline for the completions that are.

A group has all of its completions, those that failed included, each with its failure by name. Only the deadline of the
group can leave a completion out: the late ones are cut and counted, because most of them are long. A failure of the
engine is an exception.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from asyncgrpo import metrics
from asyncgrpo.engines.base import Engine
from asyncgrpo.errors import RequestError
from asyncgrpo.host import CoreClock
from asyncgrpo.rewards.base import IN_ENVIRONMENT, Reward, Sampled
from asyncgrpo.rewards.breaker import RewardsPaused
from asyncgrpo.rewards.teacher import TaughtScore
from asyncgrpo.types import Completion, Discarded, GeneratorSeconds, Group, Lease, Observation, Rollout, Score

if TYPE_CHECKING:
    from asyncgrpo.generators.turns import Turns

# -- completions of one or several turns -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Played(Completion):
    """A completion in an environment or by an agent."""

    score: Score | None = field(kw_only=True)
    """Score by the environment or agent, or its failure; None: a reward scores it."""
    opening: tuple[int, ...] = ()
    """Prompt that an agent sent; empty: the prompt of the lease."""


def with_common_prompt(group: Group) -> Group:
    """Return the group with the longest common prefix of its completions' prompts as its prompt.

    Without agents, or if they sent the row's messages, this is the prompt of the lease. The rest of each prompt becomes an
    observation at the start of its completion.
    """
    openings = [found for one in group.rollouts if (found := getattr(one.completion, "opening", ()))]
    whole = group.prompt.token_ids
    if all(opening == whole for opening in openings):
        return group
    alike = takewhile(lambda tokens: len(set(tokens)) == 1, zip(whole, *openings, strict=False))
    common = whole[: min(sum(1 for _ in alike), *(len(opening) - 1 for opening in openings))]

    def moved(completion: Completion) -> Completion:
        rest = getattr(completion, "opening", ())[len(common) :]
        first = (Observation(0, np.array(rest, np.int32)),) if rest else ()
        return replace(completion, observations=first + completion.observations)

    return replace(
        group,
        prompt=msgspec.structs.replace(group.prompt, token_ids=common),
        rollouts=tuple(replace(one, completion=moved(one.completion)) for one in group.rollouts),
    )


# -- a generator's time ------------------------------------------------------------------------------------------------

Activity = Literal["weights", "generate", "reward"]
FIRST_COUNTS: tuple[Activity, ...] = ("weights", "generate", "reward")
"""In order of precedence: of concurrent activities, the first one gets the time."""


class Activities:
    """Adds up a generator's time by activity, and the time of every completion that is sampled or scored.

    So a slow reward shows as time with nothing to do but score, rather than as a busy engine. The rate of completion
    seconds is the number of completions that are sampled or scored at once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, cores: CoreClock | None = None) -> None:
        """
        Args:
            cores: of this machine; None: cores are not counted.
        """
        self._clock, self._cores = clock, cores
        self._at_s = clock()
        self._running: Counter[str] = Counter()
        self._seconds = dict.fromkeys((*FIRST_COUNTS, "idle"), 0.0)
        self._of_completions = {"generate": 0.0, "reward": 0.0}
        self._shown: dict[tuple[Any, str], float] = defaultdict(float)

    def begin(self, activity: Activity, count: int = 1) -> None:
        """Note the start of sampling or scoring `count` completions, or of a swap."""
        self._add_up()
        self._running[activity] += count

    def end(self, activity: Activity, count: int = 1) -> None:
        """Note the end of `count` of those."""
        self._add_up()
        self._running[activity] -= count

    @contextmanager
    def during(self, activity: Activity, count: int = 1) -> Iterator[None]:
        """Count `count` of `activity` while the block runs."""
        self.begin(activity, count)
        try:
            yield
        finally:
            self.end(activity, count)

    @contextmanager
    def instead(self, activity: Activity, *, of: Activity) -> Iterator[None]:
        """Count a completion as `activity` instead of as `of` while the block runs."""
        self.end(of)
        try:
            with self.during(activity):
                yield
        finally:
            self.begin(of)

    def seconds(self) -> GeneratorSeconds:
        """Return the seconds by activity so far, and update this process's metrics to them."""
        self._add_up()
        self._show(metrics.generator_seconds_total, self._seconds)
        self._show(metrics.completion_seconds_total, self._of_completions)
        of_completions = self._of_completions
        return GeneratorSeconds(
            **self._seconds,
            sampling=of_completions["generate"],
            scoring=of_completions["reward"],
            **(self._cores.count()._asdict() if self._cores is not None else {}),
        )

    def _show(self, metric: Any, totals: Mapping[str, float]) -> None:
        for activity, total in totals.items():
            metric.labels(activity=activity).inc(total - self._shown[metric, activity])
            self._shown[metric, activity] = total

    def _add_up(self) -> None:
        now_s = self._clock()
        elapsed_s, self._at_s = now_s - self._at_s, now_s
        self._seconds[next((one for one in FIRST_COUNTS if self._running[one]), "idle")] += elapsed_s
        for activity in self._of_completions:
            self._of_completions[activity] += self._running[activity] * elapsed_s

    def is_active(self, activity: Activity) -> bool:
        """Return True if any of it is in progress."""
        return self._running[activity] > 0


@dataclass(eq=False)
class Launched:
    """A completion that was launched."""

    index: int
    """Position in the order of launch, from 0."""
    seed: int = 0
    completion: Completion | None = None
    """None while it is sampled."""
    score: Score | None = None
    """Final score; None while it is sampled or scored."""

    @property
    def num_tokens(self) -> int:
        """Tokens sampled."""
        return 0 if self.completion is None else len(self.completion.token_ids)


Decode = Callable[[Sequence[int]], str]
"""Turns token ids into the text that the reward reads."""

ABORT_WITHIN_S = 5.0
"""Deadline for an engine to hand over the tokens of aborted completions. Later ones are not counted."""
PERMANENT = frozenset({"unknown_source", "not_applicable", "aborted", IN_ENVIRONMENT})
"""Failures that another call of the reward would not change."""


class TooFewCompletions(Exception):
    """The group was cut with fewer completions than its lease requires."""


class GivenUp(Exception):
    """The group was cancelled."""


class GroupInFlight:
    """A lease that is worked on: its requests run and its completions are scored, until the group is complete or cut."""

    def __init__(
        self,
        lease: Lease,
        engine: "Engine | Turns",
        reward: Reward,
        decode: Decode,
        reward_works: Callable[[], Awaitable[bool]] | None = None,
        activities: Activities | None = None,
    ) -> None:
        """
        Args:
            reward_works: waits until the reward is known to work, and returns True if it never failed meanwhile. If too
                few completions have a score for the group to be kept, it is awaited and the failed ones are scored once
                more. None: they are not.
            activities: counts the completions that are sampled and scored.
        """
        self._activities = activities or Activities()
        self._reward_works = reward_works
        self._may_score_again = reward_works is not None
        self._waiting: list[Launched] = []
        """Completions that a group reward will score together."""
        self._calls_to_await = 0
        """Calls of the reward for several completions, which the deadline does not cut."""
        self._lease, self._engine, self._reward, self._decode = lease, engine, reward, decode
        self._launched = [Launched(index) for index in range(lease.num_completions)]
        self._baseline = [Launched(lease.num_completions)] if lease.with_greedy else []
        self._all = [*self._launched, *self._baseline]
        self._min_completions = lease.min_completions or lease.num_completions
        self._cut_after_s = lease.cut_after_s if self._min_completions < lease.num_completions else None
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Requests and calls of the reward."""
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._refusal: RequestError | None = None
        self._is_over = False
        self.is_sampled = asyncio.Event()
        """Set once every completion has been sampled: only scores are missing."""

    def give_up(self) -> None:
        """Cancel the group: `generate` raises GivenUp soon."""
        self._failure = self._failure or GivenUp(f"{self._lease.group_id} was cancelled")
        self._changed.set()

    @property
    def num_tokens(self) -> int:
        """Tokens sampled for the group so far, in completions that the engine returned."""
        return sum(one.num_tokens for one in self._all)

    async def generate(self, generator_id: str) -> Group:
        """Generate the group of the lease.

        Raises:
            EngineError: the engine failed; the lease must be returned.
            RequestError: the engine works but refuses this prompt.
            TooFewCompletions: the group was cut at the lease's deadline with too few completions.
            GivenUp: `give_up` was called.
            RewardsPaused: rewards are paused.
        """
        lease, loop = self._lease, asyncio.get_running_loop()
        self._started_s = self._sampled_s = loop.time()
        if self._failure is not None:  # given up before it began
            raise self._failure
        try:
            self._request(lease.lease_id, self._launched, lease.seed)
            if self._baseline:
                self._request(f"{lease.lease_id}.greedy", self._baseline, lease.seed)
            chosen = await self._decided()
            discarded = await self._end_the_rest(chosen)
        except (TooFewCompletions, GivenUp, RewardsPaused):
            await self._end_the_rest([])
            raise
        finally:
            await self._stop()
        if self._refusal is not None and not any(one.num_tokens for one in [*chosen, *self._baseline]):
            raise self._refusal
        group = Group(
            group_id=lease.group_id,
            lease_id=lease.lease_id,
            attempt=lease.attempt,
            prompt_index=lease.prompt_index,
            purpose=lease.purpose,
            prompt=lease.prompt,
            rollouts=tuple(
                self._rollout(one, index)
                for index, one in [*enumerate(chosen), *((lease.num_completions, one) for one in self._baseline)]
            ),
            generator_id=generator_id,
            timings={"generate": self._sampled_s - self._started_s, "reward": loop.time() - self._sampled_s},
            discarded=discarded,
        )
        return with_common_prompt(group)

    # -- deciding ------------------------------------------------------------------------------------------------------

    async def _decided(self) -> list[Launched]:
        """Return the completions of the group, in order of launch: all of them, or at the deadline those that are done."""
        cut_at_s = None if self._cut_after_s is None else self._started_s + self._cut_after_s
        is_late = False
        while True:
            if self._failure is not None:
                raise self._failure
            is_cut = is_late and not self._calls_to_await
            done = [one for one in self._launched if one.score is not None]
            has_baseline = all(one.score is not None for one in self._baseline)
            if has_baseline and (is_cut or len(done) == len(self._launched)):
                some = [*done, *self._baseline]
                scored = sum(one.score is not None and one.score.failure is None for one in some)
                # Too few to keep the group, and another call might change that.
                if self._may_score_again and scored < min(2, len(some)) and any(map(_may_score_later, some)):
                    self._begin_to_score_again(some)
                    continue
                if not is_cut or len(done) >= self._min_completions:
                    return done
            if is_cut:
                missing = "" if has_baseline else ", and not the greedy one"
                done_of = f"{len(done)} of {len(self._launched)} completions were done"
                raise TooFewCompletions(f"{done_of} after {self._cut_after_s:.0f} s{missing}")
            self._changed.clear()
            try:
                async with asyncio.timeout_at(None if is_late else cut_at_s):
                    await self._changed.wait()
            except TimeoutError:
                is_late, self._sampled_s = True, asyncio.get_running_loop().time()
                self._score_waiting()

    def _begin_to_score_again(self, some: list[Launched]) -> None:
        self._may_score_again = False
        self._calls_to_await += 1
        failed = [one for one in some if _may_score_later(one)]
        scores = [one.score for one in failed]
        for one in failed:
            one.score = None
        self._spawn(self._score_again(failed, scores))

    async def _score_again(self, failed: list[Launched], scores: list[Score | None]) -> None:
        """Score failed completions again once the reward works, and after each outage during that.

        If one fails again without an outage, its prompt is the cause and all scores are final.
        """
        assert self._reward_works is not None
        await self._reward_works()
        at_once, is_final = len(failed) if self._reward.takes_groups else 1, False
        while not is_final:
            is_final = True
            for start in range(0, len(failed), at_once):
                some = slice(start, start + at_once)
                scores[some] = found = await self._rewards_of(failed[some])
                if any(score.failure is not None for score in found):
                    is_final = await self._reward_works()
                    break
        for one, score in zip(failed, scores, strict=True):
            one.score = score
        self._calls_to_await -= 1
        self._changed.set()

    async def _end_the_rest(self, chosen: list[Launched]) -> Discarded:
        """Abort the running requests and count the discarded completions and tokens."""
        self._is_over = True
        others = [one for one in self._launched if one not in chosen]
        running = dict(self._requests)
        if any(one.completion is None for one in [*others, *self._baseline]):
            for request_id in running:
                await self._engine.abort(request_id)
        if running:
            await asyncio.wait(running.values(), timeout=ABORT_WITHIN_S)
        return Discarded(tokens=sum(one.num_tokens for one in others), censored=len(others))

    async def _stop(self) -> None:
        """Cancel all running requests and reward calls."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # -- requests and scores -------------------------------------------------------------------------------------------

    def _request(self, request_id: str, launched: list[Launched], seed: int) -> None:
        task = self._requests[request_id] = self._spawn(self._sample(request_id, launched, seed))
        task.add_done_callback(lambda _: self._requests.pop(request_id))

    async def _sample(self, request_id: str, launched: list[Launched], seed: int) -> None:
        """Run one request and score each completion as soon as it is sampled."""
        sampling = self._lease.sampling
        if launched == self._baseline:
            sampling = msgspec.structs.replace(sampling, temperature=0.0, top_p=1.0, top_k=-1)
        owed = dict(enumerate(launched))
        prompt, count = self._lease.prompt, len(launched)
        self._activities.begin("generate", len(owed))
        try:
            async for completion in self._engine.generate(
                request_id, prompt.token_ids, count, sampling, seed, prompt.images
            ):
                self._activities.end("generate")
                self._sampled(owed.pop(completion.index), completion, seed + completion.index, "the engine ended it")
        except RequestError as error:
            self._refusal = error
            for index, one in owed.items():
                empty = Completion(index, np.empty(0, np.int32), np.empty(0, np.float32), (), "abort")
                self._sampled(one, empty, seed + index, str(error))
        finally:
            self._activities.end("generate", len(owed))

    def _sampled(self, one: Launched, completion: Completion, seed: int, why: str) -> None:
        one.completion, one.seed = completion, seed
        if all(other.completion is not None for other in self._all):
            self.is_sampled.set()
        if self._is_over:
            return
        self._sampled_s = asyncio.get_running_loop().time()
        given = completion.score if isinstance(completion, Played) else None
        if given is not None and (given.failure is not None or not self._reward.teaches):
            one.score = given
        elif completion.finish_reason == "abort":
            one.score = Score(failure="aborted", detail=why[:500])
        elif self._reward.takes_groups:
            self._waiting.append(one)
        else:
            self._spawn(self._score([one]))
        self._changed.set()
        if self.is_sampled.is_set() and not self._calls_to_await:
            self._score_waiting()

    def _score_waiting(self) -> None:
        if self._waiting:
            self._calls_to_await += 1
            some, self._waiting = self._waiting, []
            self._spawn(self._score(some))

    async def _score(self, some: list[Launched]) -> None:
        for one, score in zip(some, await self._rewards_of(some), strict=True):
            one.score = score
        self._calls_to_await -= self._reward.takes_groups
        self._changed.set()

    async def _rewards_of(self, some: list[Launched]) -> list[Score]:
        sampled = [one.completion for one in some if one.completion is not None]
        completions = [Sampled(self._sampled_text(one), one.token_ids.tolist(), one) for one in sampled]
        with self._activities.during("reward", len(some)):
            scores = await self._reward.score(self._lease.prompt, completions)
        for index, (one, score) in enumerate(zip(some, scores, strict=True)):
            if isinstance(score, TaughtScore):
                assert one.completion is not None
                one.completion, scores[index] = replace(one.completion, teacher=score.teacher), score.plain
        return scores

    def _rollout(self, one: Launched, index: int) -> Rollout:
        """Return a scored completion as number `index` of its group."""
        assert one.completion is not None and one.score is not None, one
        text = sampled_text = ""
        if self._lease.purpose == "eval":
            text = self._decode(one.completion.all_token_ids.tolist())
            sampled_text = self._sampled_text(one.completion) if one.completion.observations else ""
        return Rollout(replace(one.completion, index=index), one.score, one.seed, text, sampled_text)

    def _sampled_text(self, completion: Completion) -> str:
        """Return the text of a completion for the reward: a line for each turn, without observations."""
        return "\n".join(self._decode(turn.tolist()) for turn in completion.turns)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = self._failure or failure
            self._changed.set()


def _may_score_later(one: Launched) -> bool:
    """Return True if its reward failed for a reason that may be transient."""
    return one.score is not None and one.score.failure is not None and one.score.failure not in PERMANENT
