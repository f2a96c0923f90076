"""Groups, configurations and a plain transformers forward for the learner's tests."""

import zlib
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM

from asyncgrpo.config.schema import Config
from asyncgrpo.learner import head
from asyncgrpo.learner.learner import Learner
from asyncgrpo.learner.report import StepReport
from asyncgrpo.types import Completion, Group, PolicyVersion, Prompt, Rollout, Score, TeacherLogprobs, VersionSpan
from tests.models import make_tiny_deepseek_v3, make_tiny_llama, make_tiny_qwen3, make_tiny_qwen3_moe

VERSION = PolicyVersion(7, 3)
OLDER = PolicyVersion(7, 2)
FAMILIES = {
    "qwen3": make_tiny_qwen3,
    "tied": lambda path, **shape: make_tiny_qwen3(path, tie=True, **shape),
    "llama": make_tiny_llama,
    "qwen3_moe": make_tiny_qwen3_moe,
    "deepseek_v3": make_tiny_deepseek_v3,
}
"""How a model of each kind is made in a folder."""


def config(path, **sections) -> Config:
    """A float32 configuration on the CPU; `sections` override fields, as `learner={"lr": 0.1}`."""
    base = {
        "model": {"path": str(path), "dtype": "float32"},
        "data": {"train": "unused.jsonl"},
        "learner": {"device": "cpu", "lr": 1e-3, "tokens_per_microbatch": 4096},
        "sampling": {"max_tokens": 16},
    }
    return msgspec.convert({name: base.get(name, {}) | sections.get(name, {}) for name in base | sections}, Config)


def make_group(number: int, rewards, completions, *, prompt=(5, 6, 7), logprobs=None, version=VERSION) -> Group:
    """A group with the given completions (lists of token ids); a reward of None is a failure."""
    rollouts = []
    for index, (reward, tokens) in enumerate(zip(rewards, completions, strict=True)):
        chosen = logprobs[index] if logprobs is not None else np.full(len(tokens), -5.0)
        completion = Completion(
            index=index,
            token_ids=np.asarray(tokens, np.int32),
            logprobs=np.asarray(chosen, np.float32),
            spans=(VersionSpan(version, 0, len(tokens)),) if len(tokens) else (),
            finish_reason="stop",
        )
        score = Score(value=reward) if reward is not None else Score(failure="timeout")
        rollouts.append(Rollout(completion, score))
    return Group(
        group_id=f"g{number}",
        lease_id=f"l{number}",
        attempt=0,
        prompt_index=number,
        purpose="train",
        prompt=Prompt(prompt_id=f"train/{number}", token_ids=tuple(prompt)),
        rollouts=tuple(rollouts),
    )


def changed(group: Group, index: int, **completion) -> Group:
    """`group` with another completion in one of its rollouts."""
    rollouts = list(group.rollouts)
    rollouts[index] = replace(rollouts[index], completion=replace(rollouts[index].completion, **completion))
    return replace(group, rollouts=tuple(rollouts))


def random_groups(
    count: int, size: int, *, seed: int = 0, vocab: int = 260, prompt=(1, 12), answer=(1, 10)
) -> list[Group]:
    """Groups of unequal lengths, with rewards 0 or 1, behaviour log-probs around those of a random model."""
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(count):
        completions = [rng.integers(0, vocab, rng.integers(*answer, endpoint=True)) for _ in range(size)]
        groups.append(
            make_group(
                number,
                rng.integers(0, 2, size).astype(float).tolist(),
                completions,
                prompt=rng.integers(0, vocab, rng.integers(*prompt, endpoint=True)).tolist(),
                logprobs=[rng.normal(-5.5, 0.5, len(a)) for a in completions],
                version=[VERSION, OLDER][number % 2],
            )
        )
    return groups


def with_teacher(groups: list[Group], *, top_k: int, vocab: int = 260, seed: int = 0) -> list[Group]:
    """The same groups with log-probs of a served teacher, which knows nothing."""
    rng = np.random.default_rng(seed)
    taught = []
    for group in groups:
        for index, rollout in enumerate(group.rollouts):
            length = len(rollout.completion.token_ids)
            ids = np.array([rng.choice(vocab, top_k, replace=False) for _ in range(length)], np.int32)
            ids = ids.reshape(-1, top_k)
            values = np.log(rng.dirichlet(np.ones(top_k + 1), length)[:, :top_k]).astype(np.float32)
            sampled = rng.normal(-5.5, 0.5, length).astype(np.float32)
            group = changed(group, index, teacher=TeacherLogprobs(sampled, ids, values))
        taught.append(group)
    return taught


def plain_logprobs(path, prompt, completion, *, temperature: float = 1.0) -> np.ndarray:
    """Log-probs from an unpacked, unsharded forward pass of transformers.

    Of the ids of a completion, or of the sampled tokens of a `Completion`, each after all that came before it.
    """
    model = path if isinstance(path, torch.nn.Module) else load(path)
    said = {one.at: one.token_ids.tolist() for one in getattr(completion, "observations", ())}
    tokens, places = list(prompt), []
    for index, token in enumerate(np.asarray(getattr(completion, "token_ids", completion)).tolist()):
        tokens += said.get(index, [])
        places.append(len(tokens))
        tokens.append(token)
    with torch.no_grad():
        logprobs = (model(torch.tensor([tokens])).logits[0].float() / temperature).log_softmax(-1)
    return np.array([logprobs[place - 1, tokens[place]].item() for place in places], np.float32)


def load(path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def with_true_logprobs(path, groups: list[Group], *, temperature: float = 1.0) -> list[Group]:
    """The same groups as the model of `path` would have sampled them."""
    model, made = load(path), []
    for group in groups:
        for index, tokens in enumerate(rollout.completion.token_ids for rollout in group.rollouts):
            exact = plain_logprobs(model, group.prompt.token_ids, tokens, temperature=temperature)
            group = changed(group, index, logprobs=exact, spans=(VersionSpan(VERSION, 0, len(tokens)),))
        made.append(group)
    return made


def weights(learner) -> dict[str, torch.Tensor]:
    return {info.name: tensor.clone() for info, tensor in learner.weights()}


def learner(path, **sections) -> Learner:
    """One rank, on the CPU."""
    return Learner(config(path, **sections), rank=0, world=1, device="cpu")


class Seen(NamedTuple):
    """An update as it is about to be made, by the parameter's name; whole tensors."""

    gradient: dict[str, torch.Tensor]
    """Before it is clipped."""
    weights: dict[str, torch.Tensor]
    """Before it."""


def watch_updates(learner: Learner) -> list[Seen]:
    """From now on, every update; in a list that grows."""
    seen: list[Seen] = []
    update = learner._update

    def keep(*arguments):
        named = {n.removeprefix("language_model."): p for n, p in learner.model.named_parameters()}
        gradient = {n: p.grad.full_tensor().clone() for n, p in named.items() if p.grad is not None}
        seen.append(Seen(gradient, {n: p.detach().full_tensor().clone() for n, p in named.items()}))
        return update(*arguments)

    learner._update = keep
    return seen


def step_and_gradient(learner: Learner, groups, version=VERSION) -> tuple[StepReport, dict[str, torch.Tensor]]:
    """A step's report, and the gradient of its (first) update. The learner steps as well."""
    update = learner._update
    seen = watch_updates(learner)
    report = learner.step(groups, version)
    learner._update = update
    return report, seen[0].gradient


@torch.no_grad()
def disturb(learner: Learner, scale: float = 0.03) -> None:
    """Move every trained weight by seeded noise, the same on any number of ranks: it is no longer the initial model."""
    for name, parameter in learner.model.named_parameters():
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = scale * torch.randn(parameter.shape, generator=generator)
            parameter.add_(distribute_tensor(noise, parameter.device_mesh, parameter.placements, src_data_rank=None))


def assert_same_gradient(found: dict, expected: dict, tolerance: float) -> None:
    """Relative to the norm of each tensor, or where that is next to nothing, of the whole gradient."""
    assert found.keys() == expected.keys()
    whole = torch.stack([gradient.double().norm() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        error = (found[name].double() - gradient.double()).norm()
        assert error <= tolerance * max(gradient.double().norm(), 1e-3 * whole), name


def assert_equal_but_for_rounding(found: dict, expected: dict) -> None:
    """Float32 sums in another order: no number is off by a millionth of the gradient's norm, no tensor by more of its
    own than that a few times over."""
    whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-6 * whole, name
    assert_same_gradient(found, expected, 1e-5)


def cut_head(monkeypatch, block: int, tile: int | None = None) -> None:
    """Let the head work on blocks of so many logits, and on tiles of two blocks or of `tile` logits."""
    monkeypatch.setitem(head.BLOCK_LOGITS, "cpu", block)
    monkeypatch.setitem(head.TILE_LOGITS, "cpu", 2 * block if tile is None else tile)
    monkeypatch.setattr(head, "FEWEST_ROWS", 1)
    monkeypatch.setattr(head, "SUMMED_ROWS", 1)
