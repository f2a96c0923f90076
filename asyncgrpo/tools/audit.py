"""Checks that journal, checkpoints and `metrics.jsonl` of a run agree.

The audit is independent of the code that wrote the files. The manifests on the path to the newest checkpoint define the
trained groups. Every promise of `docs/reliability.md` that files can prove is checked against them. A difference is one
sentence that names the group, the prompt or the step.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncgrpo.buffer.recovery import bound_of
from asyncgrpo.data.prompts import PromptState
from asyncgrpo.journal import history
from asyncgrpo.learner.checkpoints import Checkpoints, read_state
from asyncgrpo.recording.events import read_events
from asyncgrpo.types import PolicyVersion

TRAINED, WAITING, LOST = "trained", "in flight", "without a fate"


@dataclass(frozen=True)
class Audit:
    """The result of an audit."""

    step: int
    """Step of the newest checkpoint; 0 without one."""
    starts: int
    prompts_done: int
    groups: Counter[str]
    """Delivered groups by fate."""
    tokens: Counter[str]
    """Sampled tokens of delivered groups by fate."""
    lags: Counter[int]
    """Groups trained on the path, by lag in optimizer steps."""
    differences: list[str]


def audit(run: Path) -> Audit:
    """Check the folder of a finished, killed or active run.

    Raises:
        JournalError: the journal is missing or has no complete record of a start.
    """
    return _Auditor(run).audit()


class _Group(msgspec.Struct, gc=False):
    """Compact record of a delivered group: a run of months has millions."""

    lease_id: str
    prompt_index: int
    tokens: int
    oldest: PolicyVersion
    newest: PolicyVersion
    max_lag: int


class _Manifest(msgspec.Struct):
    """Compact record of a `BatchIssued`."""

    step: int
    version: PolicyVersion
    groups: tuple[_Group, ...]
    unknown: tuple[str, ...]
    """Lease ids of groups that were never delivered."""

    @property
    def lags(self) -> Counter[int]:
        return Counter(self.version.number - group.oldest.number for group in self.groups)


class _Auditor:
    """Reads all records once, then runs the checks. Each yields its differences."""

    def __init__(self, run: Path) -> None:
        self._run, self._starts = run, history.starts_of(run)
        newest = Checkpoints(run, keep=1).latest()
        state = read_state(newest) if newest is not None else None
        self._path = history.surviving_path(self._starts, PolicyVersion(state.lineage, state.step) if state else None)
        prompts = msgspec.convert(state.prompts, PromptState) if state is not None else None
        self._frontier, self._beyond = (prompts.frontier, set(prompts.done_beyond)) if prompts else (0, set[int]())
        self._step = state.step if state is not None else 0
        self._delivered: dict[str, _Group] = {}
        self._versions: dict[PolicyVersion, PolicyVersion] = {}
        """Interned versions, shared by groups."""
        self._bounds: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """(first version, bound) by lineage."""
        self._manifests: list[_Manifest] = []
        """Manifests on the path, by step."""
        self._later: list[_Manifest] = []
        """Manifests of steps after the newest checkpoint, or off the path."""
        self._dropped: dict[str, str] = {}
        """Drop reasons by lease id."""
        self._final: set[int] = set()
        """Prompt indices that a start on the path dropped permanently."""
        self._trained_groups: dict[str, int] = {}
        """Steps by lease id."""
        self._trained_prompts: dict[int, str] = {}
        """Lease ids by prompt index."""
        self._groups, self._tokens = Counter[str](), Counter[str]()

    def audit(self) -> Audit:
        checks = (
            *(self._read, self._every_step_has_one_manifest, self._nothing_is_trained_twice, self._nothing_is_too_old),
            *(self._every_bound_was_in_force, self._no_prompt_is_skipped, self._every_group_has_one_fate),
            self._events_agree,
        )
        differences = [difference for check in checks for difference in check()]
        prompts_done = self._frontier + len(self._beyond)
        lags = sum((manifest.lags for manifest in self._manifests), Counter[int]())
        return Audit(self._step, len(self._starts), prompts_done, self._groups, self._tokens, lags, differences)

    def _read(self) -> Iterator[str]:
        for segment in history.read_segments(self._run / "journal"):
            yield from (f"damaged journal: {sentence}" for sentence in segment.damage_messages)
            for found in segment.found:
                yield from self._take(found.record)

    def _take(self, record: history.JournalRecord) -> Iterator[str]:
        match record:
            case history.Delivered(lease_id=lease_id, versions=versions):
                if lease_id in self._delivered:
                    yield f"group {lease_id} was delivered twice"
                oldest, newest = (self._versions.setdefault(one, one) for one in (versions[0], versions[-1]))
                group = _Group(lease_id, record.prompt_index, record.tokens, oldest, newest, record.max_lag)
                self._delivered[lease_id] = group
            case history.BatchIssued(step=step, version=version):
                unknown = tuple(lease_id for lease_id in record.lease_ids if lease_id not in self._delivered)
                yield from (f"step {step} was given group {one}, which was never delivered" for one in unknown)
                groups = tuple(filter(None, map(self._delivered.get, record.lease_ids)))
                is_standing = history.is_on(self._path, PolicyVersion(version.lineage, step))
                (self._manifests if is_standing else self._later).append(_Manifest(step, version, groups, unknown))
            case history.Dropped(lease_id=lease_id):
                self._dropped[lease_id] = sys.intern(record.reason)
                if record.is_final and _lineage(lease_id) in self._path:
                    self._final.add(record.prompt_index)
            case history.BoundChanged(version=version):
                self._bounds[version.lineage].append((version.number, record.max_lag))

    def _every_step_has_one_manifest(self) -> Iterator[str]:
        count = Counter(manifest.step for manifest in self._manifests)
        for step in range(1, self._step + 1):
            if count[step] != 1:
                yield f"step {step}, which the newest checkpoint holds, has {count[step]} manifests instead of 1"

    def _nothing_is_trained_twice(self) -> Iterator[str]:
        steps = self._trained_groups
        for manifest in self._manifests:
            for lease_id in (*(group.lease_id for group in manifest.groups), *manifest.unknown):
                if lease_id in steps:
                    yield f"group {lease_id} was trained in step {steps[lease_id]} and in {manifest.step}"
                steps[lease_id] = manifest.step
            for group in manifest.groups:
                other = self._trained_prompts.setdefault(group.prompt_index, group.lease_id)
                if other != group.lease_id:
                    yield f"prompt {group.prompt_index} was trained twice, by the groups {other} and {group.lease_id}"

    def _nothing_is_too_old(self) -> Iterator[str]:
        for manifest in [*self._manifests, *self._later]:
            start = self._starts.get(manifest.version.lineage)
            for group in manifest.groups:
                if start is not None and start.policy != "train":  # which has no bound
                    lag = manifest.version.number - group.oldest.number
                    most = bound_of(group.lease_id, group.max_lag, start)
                    if lag > most:
                        yield f"group {group.lease_id}: lag {lag} in step {manifest.step}, max_lag {most}"
                if (newest := group.newest.number) > manifest.version.number:
                    yield f"group {group.lease_id} is of weights {newest}, newer than step {manifest.step}"

    def _every_bound_was_in_force(self) -> Iterator[str]:
        """Check that the bound in a group's record was in force before its oldest token was sampled."""
        for group in self._delivered.values():
            start, bound = self._starts.get(_lineage(group.lease_id)), group.max_lag
            if start is None or bound == start.max_lag:
                continue
            if bound not in {max_lag for since, max_lag in self._bounds[start.lineage] if since <= group.oldest.number}:
                yield f"group {group.lease_id}: max_lag {bound} was not in force before version {group.oldest}"

    def _no_prompt_is_skipped(self) -> Iterator[str]:
        trained = self._trained_prompts
        for index in (*range(self._frontier), *sorted(self._beyond)):
            if index not in trained and index not in self._final:
                yield f"prompt {index} is done in the newest checkpoint, but was neither trained nor dropped"
        for index in sorted(i for i in trained if i >= self._frontier and i not in self._beyond):
            yield f"prompt {index} was trained, but is not done in the newest checkpoint: it would be issued again"

    def _every_group_has_one_fate(self) -> Iterator[str]:
        last = max(self._starts)
        later = [manifest for manifest in self._later if manifest.version.lineage == last]
        issued = {group.lease_id for manifest in later for group in manifest.groups}
        for lease_id, record in self._delivered.items():
            dropped = self._dropped.get(lease_id)
            if lease_id in self._trained_groups:
                fate = TRAINED
                if dropped is not None:
                    yield f"group {lease_id} was trained, and dropped as {dropped}"
            elif dropped is not None:
                fate = dropped
            elif record.prompt_index not in self._trained_prompts or lease_id in issued:
                fate = WAITING
            else:
                fate = LOST
                yield f"group {lease_id} was neither trained nor dropped, and its prompt is done"
            self._groups[fate] += 1
            self._tokens[fate] += record.tokens

    def _events_agree(self) -> Iterator[str]:
        events = self._run / "metrics.jsonl"
        if not events.exists():
            yield f"{events} is missing"
            return
        lags = {manifest.step: {str(lag): n for lag, n in manifest.lags.items()} for manifest in self._manifests}
        counted: Counter[int] = Counter()
        for event in read_events(events):
            if event["event"] == "sync" and event.get("differing"):
                mean = "infinite" if event["gap_mean"] is None else f"{event['gap_mean']} nats"
                gap = f"sync gap {mean}, limit {event['gap_limit']}"
                yield f"weights {event['version']}: {', '.join(event['differing'])} used different ones ({gap})"
            if event["event"] == "step":
                step = event["step"]
                counted[step] += 1
                if step in lags and lags[step] != event["lags"]:
                    yield f"step {step}: lags {event['lags']} in metrics.jsonl, {lags[step]} in the journal"
        for step in sorted(lags):
            if counted[step] != 1:
                yield f"step {step} is {counted[step]} times in metrics.jsonl"


def _lineage(lease_id: str) -> int:
    return int(lease_id.partition(".")[0])
