"""Every event of `metrics.jsonl` and every field, a line each: the one place that says so.

`EventLog.write` refuses what is not declared here, and `python -m tests.test_docs` makes docs/metrics-file.md of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class Field(NamedTuple):
    """One field of an event."""

    type: Any
    """Of the value as JSON; a float is null where it is not finite."""
    meaning: str
    is_needed: bool
    """Readers cannot do without it; others may be absent."""


@dataclass(frozen=True)
class Kind:
    """One kind of event."""

    meaning: str
    fields: Mapping[str, Field]

    @property
    def needed(self) -> frozenset[str]:
        """Names of the fields that readers cannot do without."""
        return frozenset(name for name, field in self.fields.items() if field.is_needed)


def _must(type_: Any, meaning: str) -> Field:
    return Field(type_, meaning, is_needed=True)


def _may(type_: Any, meaning: str) -> Field:
    return Field(type_, meaning, is_needed=False)


_Counts = dict[str, int]
_Numbers = dict[str, float]

# fmt: off
_START = {
    "run": _must(str, "name of the run's folder"),
    "lineage": _must(int, "which start of the run this is, from 1"),
    "version": _must(str, "`lineage.version` of the weights it begins with"),
    "step": _must(int, "optimizer steps done before it"),
    "sizes": _must(str, "the run in words: a few lines"),
    "steps": _may(int | None, "last step of the run; null: without an end"),
    "prompts": _may(int | None, "prompts of the whole run; null: without an end"),
    "data_schema": _may(str, "for which project the training file was written"),
    "dropped_too_long": _may(int, "prompts left out because they are longer than `data.max_prompt_tokens`"),
    "recovered": _may(_Counts, "groups of earlier starts, by what becomes of them"),
    "overrides": _may(tuple[str, ...], "of a replay: what it changes, as `key=value`"),
    "generated": _may(int, "of a resume: tokens that the starts before had said to have generated"),
    "undone_steps": _may(int, "of a resume: steps done after the checkpoint, which are trained again"),
}

_STEP = {
    "step": _must(int, "optimizer steps so far, this one included"),
    "version": _must(str, "`lineage.version` of the weights it made"),
    "reward_mean": _must(float | None, "over the answers of the step that have a score"),
    "reward_std": _may(float | None, "over the same answers"),
    "reward_max": _may(float | None, "over the same answers"),
    "reward_parts": _may(_Numbers, "mean of each named part of the rewards"),
    "loss": _must(float | None, "mean of the step's updates"),
    "grad_norm": _may(float | None, "before clipping; of several updates the largest"),
    "skipped": _may(str | None, "why an update was not made; null: all were"),
    "lr": _may(float, "learning rate"),
    "entropy": _may(float | None, "mean over the trained tokens, nats"),
    "clip_ratio": _may(float | None, "share of the trained tokens that the surrogate clipped"),
    "importance_mean": _may(float | None, "mean ratio proximal / behaviour policy"),
    "importance_capped": _may(float | None, "share of the trained tokens above the ratio's upper bound"),
    "kl_reference": _may(float | None, "mean KL to the reference model, nats; null without one"),
    "value_loss": _may(float | None, "mean loss of the critic; null without one"),
    "diagnostics": _may(dict[str, float | None], "ratios, updates, rejections and lags ([names](algorithms.md))"),
    "logprob_gap_mean": _may(float | None, "mean abs(learner - engine) log-prob, nats, of answers wholly by the current version"),
    "logprob_gap_max": _may(float | None, "the largest of them"),
    "lags": _must(_Counts, "trained groups by lag in optimizer steps"),
    "answers": _may(int, "answers in the trained groups"),
    "zero_signal_groups": _may(int, "trained groups whose advantages are all 0, as where all answers have one reward"),
    "signal_share": _may(float, "share of the trained groups with an advantage other than 0; the learning rate depends on it"),
    "answer_length_mean": _may(float, "tokens"),
    "truncated_share": _may(float, "share of the answers that ended by length"),
    "failures": _may(_Counts, "answers of the step without a score, by what went wrong"),
    "malformed_logprobs": _may(int, "answers left out for a behaviour log-prob that cannot be one"),
    "tokens_trained": _must(int, "of this step"),
    "tokens": _may(_Counts, "sampled tokens of the run so far by fate: `generated`, and what that is made of"),
    "tokens_generated": _may(int, "of the run so far, as the buffer counted"),
    "tokens_dropped": _may(int, "of the run so far, in groups given up for their age"),
    "tokens_filtered": _may(int, "of the run so far, in groups without signal that were replaced"),
    "prompts_done": _may(int, "of the run so far: trained, filtered or dropped for good"),
    "dropped": _may(_Counts, "groups since the step before, by why they were dropped"),
    "filtered": _may(_Counts, "groups that `algorithm.filter_zero_signal` replaced since the step before: "
        "all_equal_high (reward above 0), all_equal_low, unscored; no other field knows of them"),
    "discarded": _may(_Counts, "answers left out of groups since the step before: "
        "retried (sampled again), failed, spare (in reserve), censored (cut at the deadline of their group)"),
    "bias": _may(_Numbers, "distance of trained from generated groups by length, reward, source and age"),
    "seconds": _must(_Numbers, "wall time of the step: wait_data, forward_backward, optimizer (or train for both), "
        "publish, checkpoint, eval, other"),
}

KINDS: dict[str, Kind] = {
    "changed": Kind("A setting is not what it was in the start before. Comes before `start`.", {
        "key": _must(str, "of the setting"),
        "before": _must(Any, "its value then"),
        "now": _must(Any, "its value now"),
        "effect": _must(Literal["applied", "ignored"], "whether it counts, or the checkpoint decides"),
    }),
    "start": Kind("A start of the run trains from here. A resume writes another.", _START),
    "step": Kind("An optimizer step was made.", _STEP),
    "sync": Kind("A weight version was published.", {
        "version": _must(str, "`lineage.version`"),
        "engines": _must(int, "generators that proved to hold it"),
        "ms": _must(float, "from the offer until every generator had answered"),
        "checksum": _must(str, "`ok`, or what was wrong"),
        "bytes": _may(int, "sent to each generator"),
        "digest": _may(str, "of the bytes that were sent"),
        "attempts": _may(int, "times it was offered"),
        "left_out": _may(tuple[str, ...], "generators that it did not reach"),
    }),
    "eval": Kind("An evaluation of `data.eval` ended.", {
        "step": _must(int, "after which it was asked for"),
        "version": _must(str | None, "the newest that answered; null: none did"),
        "versions_answered": _may(tuple[str, ...], "the oldest and the newest that answered"),
        "reward_mean": _must(float | None, "over the answers that have a score; null without any"),
        "answers": _must(int, "that were sampled"),
        "failures": _may(_Counts, "answers without a score, by what went wrong"),
        "answer_length_mean": _may(float | None, "tokens"),
        "ms": _may(float, "from the request to the last answer"),
    }),
    "checkpoint": Kind("A checkpoint is on the disk.", {
        "step": _must(int, "of its weights"),
        "path": _must(str, "its folder"),
        "seconds": _must(float, "to write it"),
    }),
    "restart": Kind("A process ended, or was ended, and is started again.", {
        "actor": _must(str, "its name, such as `generator-0`"),
        "reason": _must(str, "why it ended"),
        "count": _may(int, "restarts of it so far"),
    }),
    "fault": Kind("`--chaos` did something to the run.", {
        "fault": _must(str, "kill, freeze, pause, partition, reset or full"),
        "actor": _must(str, "whom to"),
    }),
    "recovered": Kind("After a fault every process is up again and a step was trained.", {
        "fault": _must(str, "as in `fault`"),
        "actor": _must(str, "as in `fault`"),
        "seconds": _must(float, "since the fault"),
    }),
    "drain": Kind("No new group is leased any more.", {
        "reason": _must(str, "why"),
    }),
    "warning": Kind("A person should look at the curves.", {
        "about": _must(str, "`signal`, `evaluation` or `filter`"),
        "text": _must(str, "the warning, in a sentence"),
    }),
    "stall": Kind("The learner waits for something unusually long.", {
        "what": _must(str, "it waits for"),
        "seconds": _must(float, "so far"),
    }),
    "reward_failed": Kind("Calls of the reward fail in one way: the first, about the tenth, the hundredth, ...", {
        "actor": _must(str, "the generator that saw the last of them"),
        "failure": _must(str, "its kind; of an exception with its type and place"),
        "detail": _must(str, "what the last of them said"),
        "count": _must(int, "of this kind so far"),
    }),
    "rewards_paused": Kind("No reward works at a generator, so it takes no lease. Again after each probe that fails.", {
        "actor": _must(str, "the generator"),
        "reason": _must(str, "the last failure"),
        "probe_in_s": _must(float, "until the next probe"),
    }),
    "rewards_resumed": Kind("A probe of the reward worked, or the generator is gone.", {
        "actor": _must(str, "the generator"),
        "seconds": _must(float, "for which it was paused"),
    }),
    "lease_failed": Kind("Leases come to nothing in one way: the first, the tenth, the hundredth, ...", {
        "actor": _must(str, "the generator of the last of them"),
        "reason": _must(str, "of the lease's end"),
        "detail": _must(str, "what the generator said"),
        "count": _must(int, "of this reason so far"),
    }),
    "end": Kind("This start of the run is over. One that was killed has none.", {
        "status": _must(Literal["done", "drained", "failed"], "how it ended"),
        "step": _must(int, "optimizer steps so far"),
        "reason": _may(str, "of a failure, in a sentence"),
        "tokens": _may(_Counts, "as in `step`, at the end"),
        "dropped": _may(_Counts, "as in `step`, since the last one"),
        "filtered": _may(_Counts, "as in `step`, since the last one"),
        "discarded": _may(_Counts, "as in `step`, since the last one"),
    }),
}
# fmt: on
