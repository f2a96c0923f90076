"""Checks that journal, checkpoints and `metrics.jsonl` of a run agree.

It does not trust the code that wrote the files. What was trained is what the manifests on the path to the newest
checkpoint say, and every promise of `docs/reliability.md` that files can show is checked against them. A difference is one
sentence that names the group, the prompt or the step.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from asyncgrpo.buffer.admission import POLICIES
from asyncgrpo.buffer.recovery import bound_of, surviving_path
from asyncgrpo.data.prompts import PromptState
from asyncgrpo.journal.format import BatchIssued, BoundChanged, Delivered, Dropped, RunStarted
from asyncgrpo.journal.history import History, read_run
from asyncgrpo.learner.checkpoints import Checkpoints, read_state
from asyncgrpo.recording.events import read_events
from asyncgrpo.types import PolicyVersion

TRAINED, WAITING, LOST = "trained", "in flight", "without a fate"


@dataclass
class Audit:
    """The result of an audit."""

    step: int
    """Step of the newest checkpoint; 0 without one."""
    starts: int
    prompts_done: int
    groups: Counter[str] = field(default_factory=Counter)
    """Delivered groups by fate."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Their sampled tokens, by fate."""
    lags: Counter[int] = field(default_factory=Counter)
    """Groups trained on the path, by lag in optimizer steps."""
    differences: list[str] = field(default_factory=list)


def audit(run: Path) -> Audit:
    """Check the folder of a run, which may be over, killed or still going.

    Raises:
        JournalError: there is no journal, or it holds no complete record of a start.
    """
    history = read_run(run)
    newest = Checkpoints(run, keep=1).latest()
    state = read_state(newest) if newest is not None else None
    checkpoint = PolicyVersion(state.lineage, state.step) if state is not None else None
    prompts = msgspec.convert(state.prompts, PromptState) if state is not None else None
    return _Auditor(run, history, checkpoint, prompts).audit()


class _Auditor:
    """Reads all records once, then makes one check after the other."""

    def __init__(
        self, run: Path, history: History, checkpoint: PolicyVersion | None, prompts: PromptState | None
    ) -> None:
        self._run = run
        self._history = history
        self._path = surviving_path(history.starts, checkpoint)
        self._prompts = prompts
        self._step = checkpoint.number if checkpoint is not None else 0
        self._delivered: dict[str, Delivered] = {}
        self._manifests: list[BatchIssued] = []
        """Manifests on the path, by step."""
        self._later: list[BatchIssued] = []
        """Manifests whose steps no checkpoint holds."""
        self._dropped: dict[str, Dropped] = {}
        self.result = Audit(
            step=self._step,
            starts=len(history.starts),
            prompts_done=prompts.frontier + len(prompts.done_beyond) if prompts is not None else 0,
        )

    def audit(self) -> Audit:
        self.result.differences += [f"damaged journal: {sentence}" for sentence in self._history.damage]
        self._read()
        self._every_step_has_one_manifest()
        self._nothing_is_trained_twice()
        self._nothing_is_too_old()
        self._every_bound_was_in_force()
        self._no_prompt_is_skipped()
        self._every_group_has_one_fate()
        self._events_agree()
        return self.result

    def _differ(self, sentence: str) -> None:
        self.result.differences.append(sentence)

    def _read(self) -> None:
        for found in self._history.found:
            record = found.record
            match record:
                case Delivered():
                    if record.lease_id in self._delivered:
                        self._differ(f"group {record.lease_id} was delivered twice")
                    self._delivered[record.lease_id] = record
                case BatchIssued():
                    for lease_id in record.lease_ids:
                        if lease_id not in self._delivered:
                            self._differ(f"step {record.step} was given group {lease_id}, which was never delivered")
                    (self._manifests if self._is_on_path(record) else self._later).append(record)
                case Dropped():
                    self._dropped[record.lease_id] = record

    def _is_on_path(self, manifest: BatchIssued) -> bool:
        return manifest.step <= self._path.get(manifest.version.lineage, -1)

    def _every_step_has_one_manifest(self) -> None:
        count = Counter(manifest.step for manifest in self._manifests)
        for step in range(1, self._step + 1):
            if count[step] != 1:
                self._differ(
                    f"step {step}, which the newest checkpoint holds, has {count[step]} manifests instead of 1"
                )

    def _nothing_is_trained_twice(self) -> None:
        by_group: dict[str, int] = {}
        by_prompt_index: dict[int, str] = {}
        for manifest in self._manifests:
            for lease_id in manifest.lease_ids:
                if lease_id in by_group:
                    self._differ(f"group {lease_id} was trained in step {by_group[lease_id]} and in {manifest.step}")
                by_group[lease_id] = manifest.step
                record = self._delivered.get(lease_id)
                if record is None:
                    continue  # reported already
                if (other := by_prompt_index.setdefault(record.prompt_index, lease_id)) != lease_id:
                    self._differ(
                        f"prompt {record.prompt_index} was trained twice, by the groups {other} and {lease_id}"
                    )
        self._trained_groups, self._trained_prompts = set(by_group), set(by_prompt_index)

    def _nothing_is_too_old(self) -> None:
        for manifest in [*self._manifests, *self._later]:
            start = self._history.starts.get(manifest.version.lineage)
            for record in filter(None, map(self._delivered.get, manifest.lease_ids)):
                lag = manifest.version.number - record.versions[0].number
                newest = record.versions[-1].number
                bounded = _bounded_lag(record, manifest, start) if start is not None else None
                if start is not None and bounded is not None and bounded > (most := bound_of(record, start)):
                    self._differ(f"group {record.lease_id}: lag {bounded} in step {manifest.step}, max_lag {most}")
                if newest > manifest.version.number:
                    self._differ(f"group {record.lease_id} is of weights {newest}, newer than step {manifest.step}")
                if self._is_on_path(manifest):
                    self.result.lags[lag] += 1

    def _every_bound_was_in_force(self) -> None:
        """A group's bound, which its record names, was in force before its oldest token was sampled."""
        # By lineage: from which version on, and the bound.
        changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for found in self._history.found:
            if isinstance(change := found.record, BoundChanged):
                changes[change.version.lineage].append((change.version.number, change.max_lag))
        for record in self._delivered.values():
            start, oldest = self._history.starts.get(_lineage(record.lease_id)), record.versions[0]
            if start is None or record.max_lag in (None, start.max_lag):
                continue
            known = {max_lag for since, max_lag in changes[start.lineage] if since <= oldest.number}
            if record.max_lag not in known:
                self._differ(
                    f"group {record.lease_id}: max_lag {record.max_lag} was not in force before version {oldest}"
                )

    def _no_prompt_is_skipped(self) -> None:
        if self._prompts is None:
            return
        final = {r.prompt_index for r in self._dropped.values() if r.is_final and _lineage(r.lease_id) in self._path}
        done = {*range(self._prompts.frontier), *self._prompts.done_beyond}
        for prompt_index in sorted(done - self._trained_prompts - final):
            self._differ(f"prompt {prompt_index} is done in the newest checkpoint, but was neither trained nor dropped")
        for prompt_index in sorted(self._trained_prompts - done):
            self._differ(
                f"prompt {prompt_index} was trained, but is not done in the newest checkpoint: it would come again"
            )

    def _every_group_has_one_fate(self) -> None:
        last = max(self._history.starts)
        later = [manifest for manifest in self._later if manifest.version.lineage == last]
        issued = {lease_id for manifest in later for lease_id in manifest.lease_ids}
        for lease_id, record in self._delivered.items():
            dropped = self._dropped.get(lease_id)
            if lease_id in self._trained_groups:
                fate = TRAINED
                if dropped is not None:
                    self._differ(f"group {lease_id} was trained, and dropped as {dropped.reason}")
            elif dropped is not None:
                fate = dropped.reason
            elif record.prompt_index not in self._trained_prompts or lease_id in issued:
                fate = WAITING
            else:
                fate = LOST
                self._differ(f"group {lease_id} was neither trained nor dropped, and its prompt is done")
            self.result.groups[fate] += 1
            self.result.tokens[fate] += record.tokens

    def _events_agree(self) -> None:
        events = self._run / "metrics.jsonl"
        if not events.exists():
            self._differ(f"{events} is missing")
            return
        manifests = {manifest.step: manifest for manifest in self._manifests}
        read = list(read_events(events))
        steps = [event for event in read if event["event"] == "step"]
        for sync in (event for event in read if event["event"] == "sync" and event.get("differing")):
            self._differ(
                f"weights {sync['version']}: {', '.join(sync['differing'])} computed with others (sync gap "
                f"{sync['gap_mean']} nats, limit {sync['gap_limit']})"
            )
        counted = Counter(event["step"] for event in steps)
        for step in sorted(manifests):
            if counted[step] != 1:
                self._differ(f"step {step} is {counted[step]} times in metrics.jsonl")
        for event in steps:
            found = manifests.get(event["step"])
            if found is None:
                continue
            records = [r for r in map(self._delivered.get, found.lease_ids) if r is not None]
            lags = Counter(str(found.version.number - record.versions[0].number) for record in records)
            if dict(lags) != event["lags"]:
                self._differ(
                    f"step {event['step']}: lags {event['lags']} in metrics.jsonl, {dict(lags)} in the journal"
                )


def _bounded_lag(record: Delivered, manifest: BatchIssued, start: RunStarted) -> int | None:
    """The lag that the run's policy bounds for this group; None where it bounds none."""
    match POLICIES[start.policy].counts_from:
        case "oldest":
            return manifest.version.number - record.versions[0].number
        case "newest":
            return manifest.version.number - record.versions[-1].number
    return None


def _lineage(lease_id: str) -> int:
    return int(lease_id.partition(".")[0])
