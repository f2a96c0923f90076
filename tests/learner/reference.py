"""One update again: one completion at a time through plain transformers in float64, then the oracles of tests/algorithms.

Nothing here is packed, split, fused or shared, and nothing is from `asyncgrpo.learner` or `asyncgrpo.algorithms`.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from asyncgrpo.config.schema import AlgorithmConfig, CorrectionConfig
from asyncgrpo.types import Completion, Group
from tests.algorithms import oracle_advantages, oracle_losses
from tests.learner.helpers import load

VALUE_HEAD = "value_head."
PARAMETERS = {
    "importance": ("level", "action", "low_ratio", "high_ratio"),
    "veto": ("low_ratio", "high_ratio"),
    "opsm": ("max_nats",),
    "divergence": ("estimator", "level", "max_nats"),
    "m2po": ("max_mean_square",),
}
"""Of each correction, by its kind."""


class Policy:
    """A model in float64 with given weights, and a value head if they have one."""

    def __init__(self, path, weights: dict[str, Tensor]) -> None:
        self.model = load(path).double()
        if hasattr(self.model.config, "num_experts_per_tok"):
            self.model.set_experts_implementation("eager")  # the others have no float64
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])
        self.value_head = {
            name: tensor.double().requires_grad_() for name, tensor in weights.items() if name.startswith(VALUE_HEAD)
        }
        self._answers: dict[tuple, Completed] = {}

    def completion(self, prompt: tuple[int, ...], completion: Completion, temperature: float) -> "Completed":
        """What it says of one completion, with gradient; computed once."""
        tokens = completion.token_ids.tolist()
        key = (prompt, *tokens)
        if key not in self._answers:
            ids = torch.tensor([[*prompt, *completion.all_token_ids.tolist()]])
            where = torch.from_numpy(completion.sampled_at) + len(prompt) - 1
            hidden = self.model.get_decoder()(ids).last_hidden_state[0, where]
            log_p = (self.model.get_output_embeddings()(hidden) / temperature).log_softmax(-1)
            values = torch.zeros(len(tokens), dtype=torch.float64)
            if self.value_head:
                values = (hidden @ self.value_head["value_head.weight"].t()).squeeze(-1)
                values = values + self.value_head["value_head.bias"]
            logprobs = log_p.gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1)
            self._answers[key] = Completed(log_p, logprobs, values)
        return self._answers[key]

    def gradient(self, loss: Tensor) -> dict[str, Tensor]:
        named = dict(self.model.named_parameters()) | self.value_head
        gradients = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
        return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), gradients, strict=True)}


class Completed(NamedTuple):
    log_p: Tensor
    """[L, V]"""
    logprobs: Tensor
    """[L] of its tokens."""
    values: Tensor
    """[L]"""


class Result(NamedTuple):
    loss: float
    value_loss: float
    gradient: dict[str, Tensor]


@dataclass
class Setup:
    """Whose loss it is, and under which weights."""

    settings: AlgorithmConfig
    now: Policy
    start: Policy
    """At the start of the step; `now`, if the step makes one update."""
    initial: Policy | None = None
    version: int = 0
    temperature: float = 1.0
    max_length: int = 16

    def update(self, groups: list[Group]) -> Result:
        """Loss and gradient of an update with all of `groups`."""
        return _Update(self, groups).result()


class _Update:
    """Lists over tokens, as the oracles want them, and the tensors whose gradient is taken."""

    def __init__(self, setup: Setup, groups: list[Group]) -> None:
        self.setup, self.settings = setup, setup.settings
        found = [(g, r.completion, r.score.value) for g in groups for r in g.rollouts if r.score.value is not None]
        self.groups = [g.prompt_index for g, _, _ in found]
        self.rewards = [reward for *_, reward in found]
        self.trained = [not (self.settings.truncated == "mask" and c.finish_reason == "length") for _, c, _ in found]

        def under(policy: Policy) -> list[Completed]:
            return [policy.completion(g.prompt.token_ids, c, setup.temperature) for g, c, _ in found]

        self.now, self.start = under(setup.now), under(setup.start)
        self.initial = under(setup.initial) if setup.initial is not None else None
        self.lengths = [len(a.logprobs) for a in self.now]
        starts = [sum(self.lengths[:i]) for i in range(len(found))]
        self.sequences = [list(range(s, s + n)) for s, n in zip(starts, self.lengths, strict=True)]
        self.mask = [t for t, n in zip(self.trained, self.lengths, strict=True) for _ in range(n)]
        self.behaviour = [float(x) for _, c, _ in found for x in c.logprobs]
        self.versions = [s.version.number for _, c, _ in found for s in c.spans for _ in range(s.start, s.end)]
        self.policy = _flat(self.now)
        self.proximal = _flat(self.start)
        self.reference = _flat(self.initial) if self.initial is not None else None
        self.weights = oracle_losses.token_weights(
            self.settings.aggregation,
            self.mask,
            self.sequences,
            self.groups,
            num_sequences=sum(self.trained),
            max_length=setup.max_length,
        )

    def result(self) -> Result:
        logp = torch.cat([a.logprobs for a in self.now])
        weights = torch.tensor(self.weights, dtype=torch.float64)
        self.outcome = self._rewards()
        self.critic = self._critic() if self.settings.advantage == "gae" else None
        if self.settings.loss == "pairwise":
            root, value = self._pairs()
        else:
            coefficients, values = self._surrogate()
            root, value = (
                (weights * torch.tensor(coefficients) * logp).sum(),
                math.fsum(w * v for w, v in zip(self.weights, values, strict=True)),
            )
        for added, its_value in self._penalties(logp, weights):
            root, value = root + added, value + its_value
        value_loss = 0.0
        if self.critic is not None:
            error = self._value_loss(weights)
            root, value_loss = root + self.settings.critic.value_coef * error, error.item()
        return Result(value, value_loss, self.setup.now.gradient(root))

    def _rewards(self) -> list[float]:
        charges = ([self._charge(t) for t in tokens if self.mask[t]] for tokens in self.sequences)
        return [reward - math.fsum(charge) for reward, charge in zip(self.rewards, charges, strict=True)]

    def _charge(self, t: int) -> float:
        """What the KL takes from the reward of a token."""
        if not (self.settings.kl_coef and self.settings.kl_in == "reward"):
            return 0.0
        return self.settings.kl_coef * oracle_losses.kl(self.settings.kl_kind, self.proximal[t], self.reference[t])[0]

    def _critic(self) -> tuple[list[float], list[float], list[float]]:
        """Whitened advantages, returns and old values, of tokens."""
        values = torch.cat([a.values for a in self.start]).tolist()
        raw = [0.0] * len(values)
        for reward, tokens in zip(self.rewards, self.sequences, strict=True):
            rewards = [-self._charge(t) for t in tokens]
            if tokens:
                rewards[-1] += reward
            one = ([values[t] for t in tokens], [self.mask[t] for t in tokens])
            found = oracle_advantages.gae(rewards, *one, self.settings.critic.gamma, self.settings.critic.lam)
            for t, advantage in zip(tokens, found, strict=True):
                raw[t] = advantage
        returns = [a + v for a, v in zip(raw, values, strict=True)]
        return oracle_advantages.whiten(raw, self.mask), returns, values

    def _advantages(self) -> list[float]:
        if self.critic is not None:
            return self.critic[0]
        nobody = [math.nan] * len(self.outcome)
        found = oracle_advantages.estimate(self.settings.advantage, self.outcome, self.groups, self.lengths, nobody)
        return [a for a, n in zip(found, self.lengths, strict=True) for _ in range(n)]

    def _share_with_hope(self) -> float:
        """Of the groups, those with an advantage, and those whose rewards are one number in the upper half of all."""
        if self.critic is not None:
            return 1.0
        group_of = [group for group, n in zip(self.groups, self.lengths, strict=True) for _ in range(n)]
        taught = {g for g, a, m in zip(group_of, self._advantages(), self.mask, strict=True) if m and a}
        rewards = {
            group: [r for r, g in zip(self.outcome, self.groups, strict=True) if g == group] for group in self.groups
        }
        best, worst = max(self.outcome), min(self.outcome)
        middle = (best + worst) / 2 if best > worst else 0.0
        return sum(g in taught or min(r) == max(r) > middle for g, r in rewards.items()) / len(rewards)

    def _anchor(self) -> list[float]:
        if self.settings.anchor == "proximal":
            return self.proximal
        if self.settings.anchor == "behaviour":
            return self.behaviour
        anchors = []
        for policy, behaviour, version in zip(self.policy, self.behaviour, self.versions, strict=True):
            lag = self.setup.version - version
            share = (lag - 1) / lag if lag > 1 else 0.0
            anchors.append(behaviour + share * (policy - behaviour))
        return anchors

    def _surrogate(self) -> tuple[list[float], list[float]]:
        """Derivative of the unweighted loss by each log-prob, and the loss."""
        anchor, advantages = self._anchor(), self._advantages()
        points = oracle_losses.surrogate(
            self.settings.loss, self.policy, anchor, advantages, self.mask, self.sequences, **self.settings.loss_args
        )
        gradients, values = [], []
        for (weight, keep), (coefficient, value, _) in zip(self._verdicts(), points, strict=True):
            gradients.append(-weight * keep * coefficient)
            values.append(-weight * keep * value)
        return gradients, values

    def _verdicts(self) -> list:
        """Weight of each token by the corrections, and whether it is kept."""
        numerator, advantages = (
            self.policy if self.settings.anchor == "behaviour" else self._anchor(),
            self._advantages(),
        )
        log_rho = [n - b for n, b in zip(numerator, self.behaviour, strict=True)]
        return oracle_losses.combine(
            [[(1.0, m) for m in self.mask], *(self._correct(c, log_rho, advantages) for c in self.settings.corrections)]
        )

    def _correct(self, one: CorrectionConfig, log_rho: list[float], advantages: list[float]) -> list:
        if one.kind == "m2po":
            log_rho = [p - b for p, b in zip(self.proximal, self.behaviour, strict=True)]
        parameters = {name: getattr(one, name) for name in PARAMETERS[one.kind]}
        return oracle_losses.correct(one.kind, log_rho, advantages, self.mask, self.sequences, **parameters)

    def _penalties(self, logp: Tensor, weights: Tensor):
        """(root, value) of what is added to the surrogate."""
        settings = self.settings
        if settings.kl_coef and settings.kl_in == "loss":
            if settings.kl_kind == "full":
                kl = [
                    (a.log_p.exp() * (a.log_p - b.log_p.detach())).sum(-1)
                    for a, b in zip(self.now, self.initial, strict=True)
                ]
                root = settings.kl_coef * (weights * torch.cat(kl)).sum()
                yield root, root.item()
            else:
                drift = [p - b for p, b in zip(self.policy, self.behaviour, strict=True)]
                points = [
                    oracle_losses.kl(settings.kl_kind, *x) for x in zip(self.policy, self.reference, drift, strict=True)
                ]
                yield self._penalty(settings.kl_coef, points, logp, weights)
        if settings.behaviour_kl_coef:
            points = [oracle_losses.kl("k2", *x) for x in zip(self.policy, self.behaviour, strict=True)]
            yield self._penalty(settings.behaviour_kl_coef, points, logp, weights)
        if settings.entropy_coef:
            entropy = torch.cat([-(a.log_p.exp() * a.log_p).sum(-1) for a in self.now])
            root = -settings.entropy_coef * self._share_with_hope() * (weights * entropy).sum()
            yield root, root.item()

    def _penalty(self, coef: float, points: list, logp: Tensor, weights: Tensor) -> tuple[Tensor, float]:
        gradients = torch.tensor([gradient for _, gradient in points], dtype=torch.float64)
        value = math.fsum(w * v for w, (v, _) in zip(self.weights, points, strict=True))
        return coef * (weights * gradients * logp).sum(), coef * value

    def _pairs(self) -> tuple[Tensor, float]:
        """-mean log sigmoid(beta z), by autograd. Corrections weigh its gradient."""
        arguments = dict(self.settings.loss_args)
        usable = [i for i in range(len(self.rewards)) if self.trained[i] and self.lengths[i]]
        chosen = oracle_advantages.pairs([self.rewards[i] for i in usable], [self.groups[i] for i in usable])
        chosen = {(usable[w], usable[x]) for w, x in chosen}
        if arguments.get("pairs", "best_worst") == "best_worst":
            chosen = {self._extremes(chosen, group) for group in {self.groups[w] for w, _ in chosen}}

        def relative(i: int) -> Tensor:
            total = self.now[i].logprobs.sum()
            if arguments.get("reference"):
                total = total - self.initial[i].logprobs.detach().sum()
            return total / (self.lengths[i] if arguments.get("length_normalised") else 1)

        z = torch.stack([relative(w) - relative(x) for w, x in sorted(chosen)])
        root = -torch.nn.functional.logsigmoid(arguments["beta"] * z).mean()
        logprobs = [a.logprobs for a in self.now]
        found = torch.autograd.grad(root, logprobs, retain_graph=True, materialize_grads=True)
        weights = torch.tensor([weight * keep for weight, keep in self._verdicts()], dtype=torch.float64)
        return (weights * torch.cat(found) * torch.cat(logprobs)).sum(), root.item()

    def _extremes(self, chosen: set[tuple[int, int]], group: int) -> tuple[int, int]:
        """Best and worst of a group, each the first of its kind."""
        members = sorted({i for pair in chosen for i in pair if self.groups[i] == group})
        rewards = [self.rewards[i] for i in members]
        return members[rewards.index(max(rewards))], members[rewards.index(min(rewards))]

    def _value_loss(self, weights: Tensor) -> Tensor:
        """Σ w 0.5 max((v - R)², (v_clip - R)²), by autograd."""
        _, returns, old = (torch.tensor(x, dtype=torch.float64) for x in self.critic)
        values, clip = torch.cat([a.values for a in self.now]), self.settings.critic.value_clip
        loss = (values - returns).square()
        if clip is not None:
            loss = torch.maximum(loss, (old + (values - old).clamp(-clip, clip) - returns).square())
        return (weights * 0.5 * loss).sum()


def _flat(completions: list[Completed]) -> list[float]:
    return torch.cat([a.logprobs for a in completions]).tolist()
