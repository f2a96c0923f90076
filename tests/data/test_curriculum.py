"""A curriculum: who comes how often, and that a prompt index means one prompt whatever happens to the process."""

import json
import os
import random
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncgrpo.data.order import (
    ALL_RIGHT,
    KINDS,
    MOST,
    SOLVED_EVERY,
    UNKNOWN,
    Curriculum,
    kinds_of,
    order_of,
    places,
    places_of,
)
from asyncgrpo.data.order import share_of as share
from asyncgrpo.data.prompts import PromptSource, PromptState
from asyncgrpo.errors import CheckpointError
from asyncgrpo.types import Prompt

SOLVED, MIXED, HOPELESS = (1.0, 1.0), (0.0, 1.0), (0.5, 0.5)
"""Rewards of a group."""


def some_prompts(count: int) -> tuple[Prompt, ...]:
    return tuple(Prompt(prompt_id=f"train/{i}", token_ids=(i, i + 1)) for i in range(count))


def make(folder: Path | None, count=8, *, is_on=True, epochs=None, seed=0, shuffle=True, **more) -> PromptSource:
    curriculum = None if folder is None else Curriculum(folder, is_on=is_on, names=("one", "two", "three"))
    return PromptSource(some_prompts(count), seed=seed, shuffle=shuffle, epochs=epochs, curriculum=curriculum, **more)


def run_epoch(source: PromptSource, rewards) -> list[str]:
    """Issue and finish a whole epoch. `rewards` gives those of a prompt id. Returns the ids in order."""
    ids = []
    for _ in range(len(source.prompts)):
        index, prompt = source.next()
        ids.append(prompt.prompt_id)
        source.done(index, rewards(prompt.prompt_id))
    return ids


# -- who comes how often -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((1.0, 2.0), 254),
        ((0.9, 0.9), 0),
        ((0.0, 1.0), 127),
        ((0.0,) * 999 + (1.0,), 1),
        ((1.0,) * 999 + (0.0,), 253),
        ((0.0, 0.9), 1),  # none is right, and there is something to learn from
    ],
)
def test_only_all_and_none_are_the_ends_of_a_share(rewards, expected):
    assert share(rewards, 1.0) == expected


SEEDS = st.integers(0, 3)
SHARES = st.lists(st.sampled_from([0, 1, 60, 127, 200, 253, ALL_RIGHT, UNKNOWN]), min_size=1, max_size=60)


def drawn(size: int, number: int) -> np.ndarray:
    return np.array(random.Random(number).sample(range(size), size))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(SHARES, min_size=4, max_size=7), st.integers(1, 9))
def test_whatever_the_shares_become_a_round_is_full_and_no_prompt_is_left_out_of_two_rounds(history, first):
    size = min(map(len, history))
    first_order, seen = drawn(size, 0), []
    for number, shares in enumerate((np.array(one[:size], np.uint8) for one in history), first):
        counts = places_of(shares, number, drawn(size, number), first_order)
        kinds = kinds_of(shares)
        order = order_of(counts, drawn(size, number))
        assert len(order) == size and counts.max() <= MOST
        assert np.array_equal(np.bincount(order, minlength=size), counts)
        assert (counts[kinds <= KINDS.index("hopeless")] == 1).all()
        assert (counts[kinds == KINDS.index("mixed")] >= 1).all()
        assert (counts[kinds == KINDS.index("solved")] <= 1).all()
        seen.append(counts > 0)
    for begin in range(len(seen) - SOLVED_EVERY + 1):
        assert np.any(seen[begin : begin + SOLVED_EVERY], axis=0).all()


@pytest.mark.parametrize("kind", [0, ALL_RIGHT, 127, UNKNOWN])
def test_where_all_prompts_are_of_one_kind_the_order_is_that_without_a_curriculum(kind):
    counts = places_of(np.full(30, kind, np.uint8), 5, drawn(30, 5), drawn(30, 0))
    assert order_of(counts, drawn(30, 5)).tolist() == drawn(30, 5).tolist()


# -- epochs of a run ---------------------------------------------------------------------------------------------------


def test_the_first_epoch_is_that_without_a_curriculum_and_the_next_is_by_what_was_right(tmp_path):
    plain, source = make(None, 40), make(tmp_path, 40)
    easy = {f"train/{i}" for i in range(20)}
    rewards = lambda prompt_id: SOLVED if prompt_id in easy else MIXED  # noqa: E731
    assert run_epoch(source, rewards) == run_epoch(plain, rewards)
    following = [Counter(run_epoch(source, rewards)) for _ in range(4)]
    for counts in following:
        assert all(counts[f"train/{i}"] >= 1 for i in range(20, 40))
        assert sum(counts[prompt_id] for prompt_id in easy) <= 15
    assert all(sum(counts[prompt_id] for counts in following) == 2 for prompt_id in easy)
    about = source.rounds_begun()
    assert [event["round"] for event in about] == [1, 2, 3, 4, 5]
    assert about[1]["prompts"] == {"unknown": 0, "hopeless": 0, "mixed": 20, "solved": 20}
    assert sum(about[1]["places"].values()) == 40
    assert source.rounds_begun() == []


def test_the_order_of_a_seed_and_its_shares_never_changes(tmp_path):
    source = make(tmp_path, 10)
    rewards = lambda prompt_id: (SOLVED, MIXED, HOPELESS, MIXED)[int(prompt_id[6:]) % 4]  # noqa: E731
    run_epoch(source, rewards)
    assert [int(prompt_id[6:]) for prompt_id in run_epoch(source, rewards)] == GOLDEN_ORDER


GOLDEN_ORDER = [3, 7, 4, 2, 9, 3, 8, 1, 6, 5]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0.25, 1.0, 3.0])), min_size=1, max_size=3), SEEDS)
def test_each_source_keeps_its_share_and_every_prompt_a_place_in_two_of_its_rounds(sources, seed):
    sizes, weights = zip(*sources, strict=True)
    total, shares = sum(sizes), places(sum(sizes), weights)
    rng = random.Random(seed)
    with TemporaryDirectory() as folder:
        source = make(Path(folder), total, seed=seed, weights=weights, sizes=sizes)
        first = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        rounds = 4 * max(-(-size // share) for size, share in zip(sizes, shares, strict=True))
        ids = []
        for _ in range(min(rounds, 25)):
            epoch = run_epoch(source, lambda _: rng.choice((SOLVED, MIXED, HOPELESS)))
            ids += [int(prompt_id[6:]) for prompt_id in epoch]
            for i, share_ in enumerate(shares):
                assert sum(first[i] <= int(prompt_id[6:]) < first[i + 1] for prompt_id in epoch) == share_
        for i, size in enumerate(sizes):
            of_source = [row for row in ids if first[i] <= row < first[i + 1]]
            for begin in range(0, len(of_source) - 2 * size + 1, size):
                assert len(set(of_source[begin : begin + 2 * size])) == size


# -- a prompt index is one prompt --------------------------------------------------------------------------------------


class AnyRun(RuleBasedStateMachine):
    """A run that takes, finishes, fails and restarts at random, from any of its checkpoints. Rewards are drawn.

    With a curriculum or without, shuffled or not, of one source or two.
    """

    @initialize(
        count=st.integers(1, 7),
        epochs=st.integers(1, 4),
        weights=st.sampled_from([(), (1.0, 1.0), (3.0, 1.0)]),
        has_curriculum=st.booleans(),
        order=st.fixed_dictionaries({"seed": st.integers(0, 3), "shuffle": st.booleans()}),
    )
    def begin(self, count, epochs, weights, has_curriculum, order):
        self.folder = TemporaryDirectory()
        mixture = {"weights": weights, "sizes": (1, count)} if weights else {}
        self.count = count + bool(weights)
        self.has_each_once = not weights and not has_curriculum
        folder = Path(self.folder.name) if has_curriculum else None
        self.make = lambda: make(folder, self.count, epochs=epochs, **order, **mixture)
        self.source = self.make()
        self.total = self.count * epochs
        self.meant: dict[int, str] = {}  # the prompt of each index that was ever issued
        self.done: list[int] = []
        self.outstanding: set[int] = set()
        self.waiting: set[int] = set()
        self.saved: list[tuple[str, list[int]]] = []
        self.checkpoint()

    @rule()
    def next(self):
        known = {*self.done, *self.outstanding}
        expected = min(self.waiting, default=next((i for i in range(self.total) if i not in known), None))
        issued = self.source.next()
        assert (issued[0] if issued else None) == expected
        if issued is not None:
            assert self.meant.setdefault(expected, issued[1].prompt_id) == issued[1].prompt_id
            self.waiting.discard(expected)
            self.outstanding.add(expected)

    @rule(rewards=st.lists(st.sampled_from([SOLVED, SOLVED, MIXED, HOPELESS]), min_size=1, max_size=8))
    def work(self, rewards):
        """Issue and finish some."""
        for one in rewards:
            before = set(self.outstanding)
            self.next()
            for prompt_index in self.outstanding - before:
                self.source.done(prompt_index, one)
                self.done.append(prompt_index)
            self.outstanding = before

    @precondition(lambda self: self.outstanding)
    @rule(data=st.data(), rewards=st.sampled_from([SOLVED, SOLVED, MIXED, HOPELESS, ()]))
    def finish(self, data, rewards):
        prompt_index = data.draw(st.sampled_from(sorted(self.outstanding)))
        self.source.done(prompt_index, rewards)
        self.outstanding.remove(prompt_index)
        self.done.append(prompt_index)

    @precondition(lambda self: self.outstanding)
    @rule(data=st.data())
    def fail(self, data):
        prompt_index = data.draw(st.sampled_from(sorted(self.outstanding)))
        self.source.give_back(prompt_index)
        self.outstanding.remove(prompt_index)
        self.waiting.add(prompt_index)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def finish_late(self, data):
        prompt_index = data.draw(st.sampled_from(sorted(self.waiting)))
        self.source.done(prompt_index)
        self.waiting.remove(prompt_index)
        self.done.append(prompt_index)

    @rule()
    def checkpoint(self):
        written = json.dumps(msgspec.to_builtins(self.source.state()))
        self.saved.append((written, list(self.done)))

    @rule(data=st.data())
    def restart(self, data):
        """Restart from any checkpoint; a group or two may be left in the journal."""
        left = sorted(self.outstanding)
        at = data.draw(st.integers(0, len(self.saved) - 1))
        del self.saved[at + 1 :]
        written, done = self.saved[at]
        self.source, self.done = self.make(), list(done)
        self.source.restore(msgspec.convert(json.loads(written), PromptState))
        self.outstanding, self.waiting = set(), set()
        for prompt_index in left[: data.draw(st.integers(0, 2))]:
            if self.source.is_wanted(prompt_index):
                self.source.claim(prompt_index)
                self.outstanding.add(prompt_index)
                assert self.source.prompt(prompt_index).prompt_id == self.meant[prompt_index]

    @invariant()
    def counts_agree(self):
        if hasattr(self, "source"):
            assert self.source.num_done == len(self.done) == len(set(self.done))
            assert self.source.is_exhausted == (len(self.done) == self.total)
            state, frontier = self.source.state(), next(i for i in range(self.total + 1) if i not in self.done)
            assert (state.frontier, list(state.done_beyond)) == (frontier, sorted(i for i in self.done if i > frontier))

    def teardown(self):
        if not hasattr(self, "source"):
            return
        for prompt_index in sorted(self.outstanding):
            self.source.give_back(prompt_index)
        while (issued := self.source.next()) is not None:
            assert self.meant.setdefault(issued[0], issued[1].prompt_id) == issued[1].prompt_id
            self.source.done(issued[0])
            self.done.append(issued[0])
        assert sorted(self.done) == list(range(self.total)), "a prompt index was lost or came twice"
        if self.has_each_once:
            ids = [self.meant.get(i) or self.source.prompt(i).prompt_id for i in range(self.total)]
            assert all(len(set(ids[i : i + self.count])) == self.count for i in range(0, self.total, self.count))
        self.folder.cleanup()


AnyRun.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True)
TestAnyRun = AnyRun.TestCase


def half_an_epoch(source: PromptSource) -> list[str]:
    ids = []
    for _ in range(len(source.prompts) // 2):
        index, prompt = source.next()
        source.done(index, MIXED if index % 5 == 0 else SOLVED)
        ids.append(prompt.prompt_id)
    return ids


def test_an_epoch_that_began_without_a_curriculum_ends_without_one_and_the_next_has_it(tmp_path):
    plain = make(tmp_path, 20, is_on=False)
    whole = run_epoch(make(None, 20), lambda _: SOLVED)
    assert half_an_epoch(plain) == whole[:10]
    assert not list(tmp_path.iterdir()) and plain.state().shares == b""
    source = make(tmp_path, 20)
    source.restore(plain.state())
    assert half_an_epoch(source) == whole[10:]
    assert max(Counter(run_epoch(source, lambda _: MIXED)).values()) > 1


def test_an_epoch_that_began_with_a_curriculum_ends_with_it_and_the_next_has_none(tmp_path):
    source = make(tmp_path, 20)
    run_epoch(source, lambda prompt_id: SOLVED if int(prompt_id[6:]) < 15 else MIXED)
    half = half_an_epoch(source)
    off = make(tmp_path, 20, is_on=False)
    off.restore(source.state())
    rest = half_an_epoch(off)
    assert max(Counter(half + rest).values()) > 1
    assert set(Counter(run_epoch(off, lambda _: SOLVED)).values()) == {1}
    assert off.rounds_begun()[-1]["round"] == 2
    again = make(tmp_path, 20)
    again.restore(off.state())
    assert set(Counter(run_epoch(again, lambda _: SOLVED)).values()) == {1}, "nothing is known of any prompt"


class Ended(BaseException):
    """The process was killed."""


@pytest.mark.parametrize("at", ["replace", "fsync"])
def test_a_process_that_ends_while_it_writes_an_order_has_issued_none_of_it(tmp_path, monkeypatch, at):
    source = make(tmp_path, 12)
    run_epoch(source, lambda prompt_id: SOLVED if prompt_id < "train/5" else MIXED)
    state = source.state()
    real = getattr(os, at)

    def ends(*arguments):
        if at == "replace":
            real(*arguments)  # it is written, and nobody has heard of it
        raise Ended

    monkeypatch.setattr(os, at, ends)
    with pytest.raises(Ended):
        source.next()
    monkeypatch.undo()
    again = make(tmp_path, 12)
    again.restore(msgspec.structs.replace(state, shares=make(tmp_path / "other", 12).state().shares))
    ids = run_epoch(again, lambda _: MIXED)
    assert (max(Counter(ids).values()) > 1) == (at == "replace"), "what is written decides, whatever the shares are now"


def test_while_the_order_cannot_be_written_nothing_is_issued_and_then_what_was_decided(tmp_path):
    source = make(tmp_path / "run" / "curriculum", 6)
    (tmp_path / "run").write_text("a file in the place of the folder")
    for _ in range(3):
        assert source.next() is None and "Not a directory" in source.is_blocked
    assert source.next_prompt_index == 0 and not source.is_exhausted
    (tmp_path / "run").unlink()
    assert source.next()[0] == 0 and source.is_blocked is None
    assert len(list((tmp_path / "run" / "curriculum").iterdir())) == 1


def test_an_order_that_is_damaged_or_missing_is_not_guessed(tmp_path):
    source = make(tmp_path, 6)
    half_an_epoch(source)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"source_0_round_000001 is damaged"):
        make(tmp_path, 6).restore(source.state())
    path.unlink()
    with pytest.raises(CheckpointError, match=r"source_0_round_000001 is missing"):
        make(tmp_path, 6).restore(source.state())


def test_the_shares_of_a_checkpoint_come_back(tmp_path):
    source = make(tmp_path, 30)
    run_epoch(source, lambda prompt_id: SOLVED if int(prompt_id[6:]) % 2 else MIXED)
    again = make(tmp_path / "elsewhere", 30)
    again.restore(source.state())
    assert run_epoch(again, lambda _: SOLVED) == run_epoch(source, lambda _: SOLVED)
    assert source.state().without_shares.shares == b""
