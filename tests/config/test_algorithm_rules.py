"""What the rules of the algorithm refuse, and the sentence with which they do."""

import inspect
import shlex

import msgspec
import pytest

from asyncgrpo.algorithms.pairwise import PairKind, pairwise
from asyncgrpo.algorithms.surrogates import SURROGATES, WITH_RATIO
from asyncgrpo.config.load import load_config
from asyncgrpo.config.rules import _has_ratio, loss_arguments
from asyncgrpo.config.schema import AlgorithmConfig
from tests.config.test_schema_and_loading import NEEDED, message_of
from tests.config.test_verl import cases


def accepts(*overrides: str) -> None:
    load_config(None, [*NEEDED, *overrides])


@pytest.mark.parametrize("loss", AlgorithmConfig.__annotations__["loss"].__args__)
def test_the_source_of_a_loss_is_read_as_python_imports_it(loss):
    parameters = inspect.signature(SURROGATES.get(loss, pairwise)).parameters.values()
    imported = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "reference_logprobs"}
    read = loss_arguments(loss)
    defaults = {name: msgspec.NODEFAULT if p.default is p.empty else p.default for name, p in imported.items()}
    assert {name: read[name].default for name in imported} == defaults
    assert read.keys() - imported.keys() == ({"reference", "pairs"} if loss == "pairwise" else set())
    assert loss != "pairwise" or read["pairs"].type == PairKind
    assert _has_ratio(loss) == (loss in WITH_RATIO)
    given = {name: 0.1 if p.default is msgspec.NODEFAULT else p.default for name, p in read.items()}
    load_config(None, NEEDED, base={"algorithm": {"loss": loss, "loss_args": given}})


SHORT = {"LOSS": "algorithm.loss", "ARGS": "algorithm.loss_args", "CORRECTION": "algorithm.corrections"}
SHORT |= {"KL": "algorithm.kl", "SERVED": "teacher.url=http://t:1 algorithm.kl_coef=1 algorithm.kl_kind=k2"}


def words(overrides: str) -> list[str]:
    for short, name in SHORT.items():
        overrides = overrides.replace(short, name)
    return shlex.split(overrides)


REFUSED = """
# arguments of a loss
ARGS.clip_hihg=0.3 -> (value 0.3) is not an argument of ppo_clip: did you mean `clip_high`?
LOSS=dppo_tv ARGS.high=0.3 -> not an argument of dppo_tv: did you mean `high_prob`?
LOSS=topr ARGS.clip_low=0.3 -> is not an argument of topr: it takes none
ARGS.clip_low=wide -> algorithm.loss_args.clip_low must be a number, at least 0; it is wide
ARGS.clip_low=null -> algorithm.loss_args.clip_low must be a number, at least 0; it is null
ARGS.clip_low=.nan -> algorithm.loss_args must be finite; it is {'clip_low': nan}
ARGS.dual_ratio=1 -> algorithm.loss_args.dual_ratio must be a number, above 1 (or null); it is 1.0
LOSS=dro -> algorithm.loss=dro needs algorithm.loss_args.beta, which has no default
LOSS=pairwise 'ARGS={beta: 1, pairs: some}' -> loss_args.pairs must be one of all, best_worst
LOSS=pairwise 'ARGS={beta: 1, reference: 1}' -> loss_args.reference must be true or false
LOSS=pairwise 'ARGS={beta: 1, reference_logprobs: true}' -> not an argument of pairwise
# corrections that would do nothing or half
'CORRECTION=[{low_ratio: 0.5, high_ratio: 2}]' -> corrections[0] truncates
'CORRECTION=[{action: mask}]' -> has action: mask and no bound, so there is nothing outside
'CORRECTION=[{action: clip, low_ratio: 2, high_ratio: 1}]' -> low_ratio: 2 above high_ratio: 1
'CORRECTION=[{high_ratio: 2, max_mean_square: 1}]' -> corrections[0].max_mean_square is 1.0
'CORRECTION=[{kind: veto}]' -> is a veto without low_ratio
'CORRECTION=[{kind: veto, low_ratio: 1e-4, level: sequence}]' -> corrections[0].level is sequence
'CORRECTION=[{kind: opsm}]' -> is opsm without max_nats
'CORRECTION=[{kind: opsm, max_nats: 0.5, high_ratio: 2}]' -> corrections[0].high_ratio is 2.0
'CORRECTION=[{kind: divergence}]' -> is divergence without max_nats
'CORRECTION=[{kind: divergence, max_nats: 0.01, level: geometric}]' -> is divergence at level geometric
'CORRECTION=[{kind: divergence, max_nats: 0.01, action: reject}]' -> corrections[0].action is reject
# settings that do not fit each other
KL_kind=k1 KL_coef=1 -> kl_kind=k1 has no gradient in expectation
KL_kind=full KL_coef=1 KL_in=reward -> kl_kind=full
LOSS=pairwise ARGS.beta=1 KL_coef=1 KL_in=reward -> no part in algorithm.loss=pairwise
LOSS=pairwise ARGS.beta=1 algorithm.advantage=remax -> samples a baseline for advantages that algorithm.loss=pairwise
algorithm.overlong_buffer=1025 -> overlong_buffer (1025) is more than sampling.max_tokens (1024)
algorithm.overlong_buffer=9 algorithm.truncated=zero -> rewards a cut completion above one
algorithm.overlong_buffer=9 algorithm.advantage=max_rl -> algorithm.overlong_buffer (9)
KL_coef=1 KL_in=reward algorithm.advantage=max_rl -> algorithm.kl_in (reward)
algorithm.critic.lam=1 -> algorithm.critic.* is set, but algorithm.advantage (grpo)
algorithm.advantage=gae algorithm.filter_zero_signal=true -> are always or never solved
algorithm.advantage=gae 'CORRECTION=[{kind: opsm, max_nats: 1}]' -> gae has one for each token
algorithm.anchor=interpolated 'CORRECTION=[{action: reject, high_ratio: 2}]' -> judges anchor
learner.lr_min_ratio=0.1 -> learner.lr_min_ratio (0.1) has no effect
learner.lr_schedule=cosine run.steps=null -> learner.lr_schedule=cosine
learner.lr_schedule=linear run.steps=5 learner.minibatches=2 learner.warmup_steps=10 -> none of the 10 updates
learner.minibatches=65 -> learner.minibatches (65) is more than buffer.prompts_per_step (64)
# a teacher that cannot teach
algorithm.teacher=t -> algorithm.teacher (t) is set, but algorithm.kl_coef (0.0) is 0
teacher.url=http://t:1 -> teacher.url (http://t:1) is set, but algorithm.kl_coef
SERVED algorithm.filter_zero_signal=true -> whose rewards are all equal, but teacher.url
SERVED algorithm.teacher=t -> are two teachers for the same tokens
SERVED sampling.temperature=0.7 -> does not fit sampling.temperature (0.7); set it to 1, or use algorithm.teacher
SERVED sampling.top_p=0.9 -> does not fit sampling.top_p (0.9); set it to 1
SERVED sampling.top_k=20 -> does not fit sampling.top_k (20); set it to -1
SERVED KL_kind=full -> algorithm.kl_kind=full compares teacher.top_k (0) tokens
SERVED teacher.top_k=8 -> teacher.top_k (8) is for algorithm.kl_kind=full
teacher.top_k=8 -> neither teacher.path (null), a model to serve, nor teacher.url (null)
teacher.path=t -> teacher.path (t) is set, but algorithm.kl_coef
SERVED teacher.url={} -> teacher.url ({}) has no value for a data_source
SERVED 'teacher.url={a: " "}' -> has no value for a data_source
SERVED teacher.gpus_each=2 -> teacher.gpus_each (2) is for a server that the run starts
SERVED 'teacher.url={a: http://t:1}' 'teacher.path={b: t}' -> name different data_sources
"""


@pytest.mark.parametrize(("overrides", "sentence"), cases(REFUSED))
def test_what_does_not_fit_is_refused_in_a_sentence(overrides, sentence):
    said = message_of(*words(overrides))
    assert sentence in said and "\n" not in said


ACCEPTED = """
'CORRECTION=[{kind: divergence, level: sequence, max_nats: 0.01, estimator: k2}]'
KL_kind=k1 KL_coef=0.1 KL_in=reward
algorithm.overlong_buffer=1024 algorithm.truncated=mask
algorithm.advantage=gae algorithm.critic.lam=1 algorithm.critic.value_clip=null
learner.minibatches=64 LOSS=gspo
learner.ess_lr=true algorithm.anchor=interpolated
SERVED
SERVED 'teacher.url={a: http://t:1, b: http://t:2}' teacher.path=t
SERVED KL_kind=full teacher.top_k=8
SERVED teacher.url=null 'teacher.path={a: s, b: t}' teacher.gpus_each=2
"""


@pytest.mark.parametrize("overrides", ACCEPTED.strip().splitlines())
def test_settings_that_fit_are_accepted(overrides):
    accepts(*words(overrides))


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo", "vespo", "topr"])
def test_a_ratio_is_never_counted_twice(loss):
    behaviour = ["algorithm.anchor=behaviour", f"algorithm.loss={loss}"]
    assert "it would count twice" in message_of(*behaviour)
    accepts(*behaviour, "algorithm.corrections=[{action: reject, high_ratio: 2}]")
    accepts("algorithm.anchor=behaviour", "algorithm.loss=reinforce")
    accepts("algorithm.anchor=interpolated", f"algorithm.loss={loss}")
