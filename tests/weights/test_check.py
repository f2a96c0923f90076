"""The sync gap: a real learner publishes to real models, and one that computes something else is found at once."""

import math
import threading
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncgrpo.config.schema import WeightsConfig
from asyncgrpo.engines.torch import decoder
from asyncgrpo.learner.learner import Learner
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.digest import tensor_digest
from asyncgrpo.weights.files import disk_tensors
from asyncgrpo.weights.publication import BOUNDS, CheckSequences, Checksum, GapLimit, Publication, SyncCheck, SyncGap
from asyncgrpo.weights.receiver import Receiver
from tests.learner.helpers import config, random_groups
from tests.models import make_tiny_deepseek_v3, make_tiny_qwen3, make_tiny_qwen3_moe
from tests.weights import publishing
from tests.weights.publishing import fill_arena, wait_until

GROUPS = random_groups(4, 4)
Fault = Callable[[str, Tensor, dict[str, Tensor]], Tensor | None]
"""What an engine makes of a tensor that it was given, by name; it sees all of them. None: it ignores it."""


def right(name: str, tensor: Tensor, given: dict[str, Tensor]) -> Tensor | None:
    return tensor


class Member:
    """A model of transformers in a generator's place."""

    def __init__(self, path, dtype: torch.dtype) -> None:
        decoder.register()
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=decoder.NAME).eval()
        self.decoder = decoder.Decoder(self.model, max_context=64, max_completions=1)
        self.fault = right

    def apply(self, tensors: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> Checksum:
        given = dict(tensors)
        wrong = ((name, self.fault(name, tensor, given)) for name, tensor in given.items())
        places = disk_tensors(self.model, remove_duplicate=False)
        for name, tensor in wrong:
            if tensor is not None:
                places[name].detach().copy_(tensor)
        return Checksum(
            "".join(f"{tensor_digest(tensor, name):x}" for name, tensor in disk_tensors(self.model).items())
        )


class Plane(publishing.Plane):
    """A learner that publishes to two members, each version checked."""

    def __init__(self, path, dtype: str, lr: float = 1e-3) -> None:
        self.learner = Learner(
            config(path, model={"path": str(path), "dtype": dtype}, learner={"device": "cpu", "lr": lr}),
            rank=0,
            world=1,
            device="cpu",
        )
        check = SyncCheck(self.learner.check.sequences, GapLimit(dtype))
        super().__init__(WeightsConfig(), maps=True)
        self.publisher.start(self.learner.layout(), check)
        self.path, self.dtype = path, getattr(torch, dtype)
        self.members: list[Member] = []
        for number in range(2):
            self.add(number)
        wait_until(lambda: len(self.publisher._members) == 2, "two generators")
        self.version = PolicyVersion(1, -1)
        """The last one that was offered."""

    def add(self, number: int) -> Receiver:
        member = Member(self.path, self.dtype)
        self.members.append(member)
        return self.join(f"generator-{number}", apply=member.apply, score=member.decoder.score)

    def offer(self) -> None:
        """Begin to publish the learner's weights as the next version."""
        self.version = PolicyVersion(1, self.version.number + 1)
        layout = self.publisher._layout
        fill = lambda arenas, slot: fill_arena(self.learner.weights(), layout, arenas.arena(layout, slot))  # noqa: E731
        wait_until(lambda: self.publisher.offer(self.version, fill), "an arena")
        self.publisher.expect(self.version, self.learner.check.score())

    def held_by(self, name: str) -> PolicyVersion | None:
        return self.publisher._members[name].holds if name in self.publisher._members else None

    def publish(self) -> Publication:
        """Publish, and wait until everyone has the weights and was compared."""
        self.offer()
        found: list[Publication] = []
        wait_until(lambda: found.extend(self.publisher.reports()) or bool(found), "a report")
        assert found[0].version == self.version
        return found[0]

    def step(self) -> Publication:
        self.learner.step(GROUPS, self.version)
        return self.publish()


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return {
        "qwen3": make_tiny_qwen3(tmp_path_factory.mktemp("qwen3")),
        "moe": make_tiny_qwen3_moe(tmp_path_factory.mktemp("moe")),
        "deepseek": make_tiny_deepseek_v3(tmp_path_factory.mktemp("deepseek")),
    }


@pytest.fixture
def plane(paths, request) -> Iterator[Plane]:
    made = Plane(paths[request.param[0]], *request.param[1:])
    yield made
    made.close()


@pytest.mark.parametrize(
    "plane",
    [("qwen3", "float32"), ("qwen3", "bfloat16"), ("moe", "float32"), ("deepseek", "float32")],
    indirect=True,
    ids=str,
)
def test_engines_that_compute_with_what_they_were_sent_are_within_the_limit(plane: Plane):
    for _ in range(4):
        publication = plane.step() if plane.version.number >= 0 else plane.publish()
        assert publication.gaps.keys() == {"generator-0", "generator-1"} and publication.differing == ()
        assert publication.gap is not None and 0 < publication.gap.mean <= publication.gap.max
        assert publication.gap_limit < BOUNDS[plane.learner.config.model.dtype][1]


def ignores(wanted: str) -> Fault:
    return lambda name, tensor, given: None if wanted in name else tensor


def swaps_experts(name: str, tensor: Tensor, given: dict[str, Tensor]) -> Tensor | None:
    there = {".experts.0.": ".experts.1.", ".experts.1.": ".experts.0."}
    return next((given[name.replace(a, b)] for a, b in there.items() if a in name and "layers.1." in name), tensor)


def rounds(name: str, tensor: Tensor, given: dict[str, Tensor]) -> Tensor | None:
    return tensor.to(torch.float8_e4m3fn).to(tensor.dtype)


FAULTS = {
    "one tensor dropped": ("qwen3", "float32", ignores("layers.1.self_attn.k_proj")),
    "a layer not updated": ("qwen3", "float32", ignores("layers.0.")),
    "a layer not updated, bfloat16": ("qwen3", "bfloat16", ignores("layers.0.")),
    "two experts swapped": ("moe", "float32", swaps_experts),
    "another dtype": ("qwen3", "bfloat16", rounds),
}


@pytest.mark.parametrize(
    ("plane", "fault"),
    [pytest.param((model, dtype), fault, id=name) for name, (model, dtype, fault) in FAULTS.items()],
    indirect=["plane"],
)
def test_engines_that_all_compute_something_else_alike_are_found_at_the_first_publication(plane: Plane, fault: Fault):
    """Digests and checksums agree: every engine got the bytes, and made the same of them."""
    assert plane.publish().differing == ()
    for member in plane.members:
        member.fault = fault
    publication = plane.step()
    assert len(set(publication.checksums.values())) == 1 and publication.attempts == 1
    assert publication.differing == ("generator-0", "generator-1")
    assert "generator-0, generator-1: under weights 1.1" in publication.describe_gap()
    for member in plane.members:
        member.fault = right
    assert plane.step().differing == ()


@pytest.mark.parametrize("plane", [("qwen3", "float32")], indirect=True)
def test_an_engine_that_cannot_say_is_not_compared(plane: Plane):
    def fails(sequences, start):
        raise RuntimeError("busy")

    plane.receivers[0]._score, plane.receivers[1]._score = None, fails
    publication = plane.publish()
    assert (publication.gaps, publication.gap, publication.differing) == ({}, None, ())
    plane.receivers[0]._score = plane.members[0].decoder.score
    assert plane.step().gaps.keys() == {"generator-0"}


@pytest.mark.parametrize("plane", [("qwen3", "float32")], indirect=True)
def test_a_newcomer_is_compared_too_and_an_engine_that_is_late(plane: Plane):
    let_go = threading.Event()
    apply = plane.members[0].apply

    def slow(tensors: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> str:
        let_go.wait(30.0)
        return apply(tensors, version)

    plane.receivers[0]._apply = slow
    plane.offer()
    for _ in range(2):
        plane.learner.step(GROUPS, plane.version)
        plane.offer()
        wait_until(lambda: plane.held_by("generator-1") == plane.version, "the quick one")
    newcomer = plane.add(2)
    wait_until(lambda: plane.held_by("generator-2") == plane.version, "the newcomer")
    let_go.set()
    gaps: dict[tuple[int, str], float] = {}

    def all_are_compared() -> bool:
        for publication in plane.publisher.reports():
            gaps.update({(publication.version.number, name): gap.mean for name, gap in publication.gaps.items()})
        return gaps.keys() >= {(0, "generator-0"), (2, "generator-0"), (2, "generator-1"), (2, "generator-2")}

    wait_until(all_are_compared, "gaps")
    assert max(gaps.values()) < BOUNDS["float32"][0] and newcomer.failure is None


# -- its parts ---------------------------------------------------------------------------------------------------------


def test_sequences_are_the_same_for_whoever_draws_them_and_fit_the_context():
    drawn = CheckSequences.draw(260, 1000)
    assert drawn == CheckSequences.draw(260, 1000)
    assert all(0 <= token < 260 for tokens in drawn.tokens for token in tokens)
    assert {len(tokens) for tokens in drawn.tokens} == {32} and drawn.start == 16
    tight = CheckSequences.draw(5, 3)
    assert {len(tokens) for tokens in tight.tokens} == {2} and tight.start == 1


def test_the_gap_is_the_mean_of_all_sequences_but_the_one_that_is_farthest_off():
    learner = [-1.0] * 8
    assert SyncGap.between(learner, [-1.0, -1.0, -1.5, -1.0, -1.0, -9.0, -1.25, -1.0]) == SyncGap(0.125, 8.0)
    assert SyncGap.between(learner, [-1.0, -1.0, -1.0, -1.0, -1.0, -9.0, -1.0, -1.0]) == SyncGap(0.0, 8.0)


def test_what_is_no_number_is_infinitely_far():
    nothing = SyncGap(math.inf, math.inf)
    assert SyncGap.between([-1.0] * 4, [-1.0, math.nan, -1.0, -1.0]) == nothing
    assert SyncGap.between([-1.0] * 4, [-1.0] * 8) == nothing


def test_the_first_gap_is_awaited_as_long_as_kernels_compile_and_later_ones_are_not(monkeypatch: pytest.MonkeyPatch):
    check = SyncCheck(CheckSequences.draw(260, 64), GapLimit("float32"))
    now = iter((60.0, 130.0, 60.0))
    monkeypatch.setattr("asyncgrpo.weights.publication.time.monotonic", lambda: next(now))
    version = PolicyVersion(1, 0)
    assert check.awaits(version, ["a"], since_s=0.0) and not check.awaits(version, ["a"], since_s=0.0)
    check.limit.update(SyncGap(1e-6, 1e-6), [-5.0])
    assert not check.awaits(version, ["a"], since_s=0.0)


def test_the_first_gap_sets_the_limit_within_the_bounds_of_the_dtype():
    for first, expected in ((1e-9, 1e-2), (0.005, 0.02), (5.0, 0.1), (math.inf, 0.1)):
        limit = GapLimit("bfloat16")
        for gap in (first, 7.0):
            limit.update(SyncGap(gap, gap), [-4.0, -6.0])
        assert limit.nats == pytest.approx(expected)


def test_the_limit_grows_with_the_log_probs_that_training_sharpens():
    """On a GPU the gap of a small model in bfloat16 rose to 0.0155 nats as its log-probs went from 7 to 14 nats."""
    limit = GapLimit("bfloat16")
    limit.update(SyncGap(0.0002, 0.001), [-6.8])
    before = limit.nats
    limit.update(SyncGap(0.0155, 0.061), [-13.7])
    assert before < 0.0155 < limit.nats == pytest.approx(2e-3 * 13.7)
