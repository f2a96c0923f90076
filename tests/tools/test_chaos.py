"""Which faults chaos injects: drawn ones without an end, or exactly those that were asked for."""

from types import SimpleNamespace

from asyncgrpo.tools.chaos import Plan

ORDER = ("kill generator", "reset network", "partition network", "kill generator")


def injected(plan: Plan, looks: int) -> list[str]:
    """The faults of a run that is looked at once a second, has no processes, and makes steps."""
    now, told = [0.0], []
    watch = SimpleNamespace(pids=lambda *roles: [1] if roles == ("buffer", "learner") else [], names=lambda role: [])
    events = SimpleNamespace(write=lambda event, **fields: told.append((event, fields)))
    chaos = plan.begin(watch, SimpleNamespace(is_whole=True), events)
    chaos._clock = lambda: now[0]
    core = SimpleNamespace(setup=SimpleNamespace(lineage=1), first_step=0, steps_done=1)
    for _ in range(looks):
        now[0] += 1.0
        chaos.reconcile(core, may_strike=True)
        core.steps_done += 1
    return [f"{fields['fault']} {fields['actor']}" for event, fields in told if event == "fault"]


def test_faults_are_those_of_the_plan_in_its_order_and_no_others():
    assert injected(Plan(per_hour=3600.0, seed=1, faults=ORDER), 60) == list(ORDER)


def test_faults_are_drawn_without_an_end():
    assert len(injected(Plan(per_hour=3600.0, seed=1), 200)) > 50
