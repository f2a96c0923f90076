"""Which faults chaos injects, and the proxy that holds and cuts connections."""

import signal
from types import SimpleNamespace

import pytest

from asyncgrpo.cluster.chaos import CORE, Chaos, Plan, Proxy
from asyncgrpo.liveness import FAILED_STARTS
from asyncgrpo.wire.codec import decode
from asyncgrpo.wire.sockets import Client, Server
from asyncgrpo.wire.supervision import Drain

ORDER = ("kill generator", "reset network", "partition network", "kill generator")


def injected(plan: Plan, looks: int, *, steps_a_look: int = 1, may_lose: bool = True, generator: int = 0) -> list[str]:
    """The faults of a run that is looked at once a second and has no processes. Its first core has made a step.

    Args:
        steps_a_look: of every core after that.
        may_lose: whether the run would go on without a generator.
        generator: process id of its generator; 0: none.
    """
    now, told = [0.0], []
    nobody = 2**22 + 1  # above all process ids of Linux: the limit on file sizes is really set
    pids = {("buffer", "learner"): [nobody], ("generator-0",): [generator] * (generator > 0)}
    names = {"generator": ["generator-0"]}
    watch = SimpleNamespace(pids=lambda *roles: pids.get(roles, []), names=lambda role: names.get(role, []))
    events = SimpleNamespace(write=lambda event, **fields: told.append((event, fields)))
    chaos = Chaos(plan, watch, SimpleNamespace(is_whole=True, may_lose=lambda name: may_lose), events)
    chaos._clock = lambda: now[0]
    core = SimpleNamespace(setup=SimpleNamespace(lineage=1), first_step=0, steps_done=1)
    for _ in range(looks):
        now[0] += 1.0
        chaos.reconcile(core, may_strike=True)
        core.first_step, core.steps_done = core.steps_done, core.steps_done + steps_a_look
    return [f"{fields['fault']} {fields['actor']}" for event, fields in told if event == "fault"]


def test_faults_are_those_of_the_plan_in_its_order_and_no_others():
    found = injected(Plan(per_hour=3600.0, seed=1, faults=ORDER), 60)
    assert [fault.removesuffix("-0") for fault in found] == list(ORDER)


def test_no_core_is_struck_whose_loss_would_end_the_run():
    """Where faults come faster than buffer and learner make a step, as on a busy machine."""

    def of_the_core(steps_a_look: int) -> int:
        faults = injected(Plan(per_hour=3600.0, seed=1), 200, steps_a_look=steps_a_look)
        assert len(faults) > 50, "they are drawn without an end"
        return sum(fault.split()[1] in CORE for fault in faults)

    assert of_the_core(steps_a_look=0) == FAILED_STARTS - 1
    assert of_the_core(steps_a_look=1) > 10


@pytest.mark.parametrize("may_lose", [True, False])
def test_no_generator_is_struck_whose_loss_would_end_the_run(may_lose: bool):
    faults = injected(Plan(per_hour=3600.0, seed=1), 200, may_lose=may_lose)
    assert ("kill generator-0" in faults) == may_lose


def test_what_is_paused_goes_on(monkeypatch: pytest.MonkeyPatch):
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("asyncgrpo.cluster.chaos.os.kill", lambda *what: sent.append(what))
    faults = injected(Plan(per_hour=3600.0, seed=1, faults=("pause generator",)), 30, generator=7)
    assert faults == ["pause generator-0"]
    assert sent == [(7, signal.SIGSTOP), (7, signal.SIGCONT)]


@pytest.fixture
def ends(caplog):
    server = Server("127.0.0.1")
    proxy = Proxy(server.endpoint)
    client = Client(proxy.endpoint, "c")
    yield server, proxy, client
    proxy.close()
    assert caplog.text == "", "connections that are open at the end are no errors"
    client.close()
    server.close()


def heard(server: Server, timeout_s: float) -> str | None:
    received = server.receive(timeout_s)
    return decode(received[1])[0].reason if received is not None else None  # type: ignore[attr-defined]


def test_what_is_held_arrives_once_it_is_released_and_after_a_cut_the_client_connects_again(ends):
    server, proxy, client = ends
    client.send(Drain(reason="1"))
    assert heard(server, 5.0) == "1"
    proxy.hold()
    client.send(Drain(reason="2"))
    assert heard(server, 0.2) is None
    proxy.release()
    assert heard(server, 5.0) == "2"
    proxy.cut()
    for _ in range(100):
        client.send(Drain(reason="again"))
        if heard(server, 0.1) == "again":
            return
    pytest.fail("nothing arrived over a new connection")
