"""The page of a run in a real browser: what it shows, what its buttons do, and that what a model wrote is only text."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from asyncgrpo.control.client import ChangeSettings, Pause, Scale
from asyncgrpo.errors import CommandRefused
from asyncgrpo.recording.events import EventLog
from asyncgrpo.recording.samples import Sample, schema
from tests.control.browser import CHROMIUM, Page, browser
from tests.control.operators import TOKEN, FakeOperator, make_run, served, step
from tests.recording.test_sample_files import FIELDS

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

SCRIPT = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"


def sample(**fields: Any) -> dict[str, Any]:
    made = FIELDS | {"step": 12, "prompt_id": "train/1", "prompt": "2 + 2 = ?"}
    return asdict(Sample(**{**made, **fields}))


SAMPLES = [
    sample(),
    sample(prompt_id="train/2", completion=SCRIPT, reward=0.0, advantage=-0.5),
    sample(prompt_id="train/3", completion="a needle in hay", reward=None, failure="timeout", observed="[[12, 15]]"),
    *(sample(prompt_id=f"train/{n}") for n in range(10, 30)),
]


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.fixture
def operator(tmp_path: Path) -> FakeOperator:
    run = make_run(tmp_path / "demo")
    (run / "samples").mkdir()
    pq.write_table(pa.Table.from_pylist(SAMPLES, schema=schema()), run / "samples" / "step_000012.parquet")
    return FakeOperator(run)


@pytest.fixture
def url(operator: FakeOperator) -> Iterator[str]:
    with served(operator) as url:
        yield url


@pytest.fixture
def page(tab: Page, url: str) -> Iterator[Page]:
    tab.complaints.clear()
    tab.open(f"{url}/#token={TOKEN}")
    tab.wait("document.querySelectorAll('.sample').length")
    yield tab
    assert tab.complaints == [], "of scripts, or of the content policy"


def test_it_shows_how_the_run_is(page: Page, operator: FakeOperator):
    assert page.text("#run") == "demo" and TOKEN not in page.value("location.href")
    assert page.text("#state") == "training"
    assert "step 12 of 60, reward 0.12, 4.5k steps/h" in page.text("#step")
    assert "2 / 2" in page.text("#flow") and "v12" in page.text("#flow")
    assert page.value("document.querySelectorAll('#curves canvas').length") == 6
    assert "wait for data 13 %" in page.text("#shares")
    assert "generator-1" in page.text("#processes")
    EventLog(operator.run_dir / "metrics.jsonl").write("step", **step(13, reward_mean=0.875))
    page.wait("document.querySelector('#step').innerText.includes('reward 0.875')")


def test_an_evaluation_that_ends_late_replaces_none_of_a_later_step(page: Page):
    take = "[5, 7, 6, 6].forEach((step) => events.take({event: 'eval', step})); return events.evals.length"
    assert page.value(f"import('/events.js').then((m) => {{ const events = new m.Events(); {take} }})") == 3


def test_a_tab_that_is_open_for_weeks_keeps_as_many_evaluations_as_steps(page: Page, operator: FakeOperator):
    log, beyond = EventLog(operator.run_dir / "metrics.jsonl"), 13 + 5_000
    log.write("eval", step=12, version="1.12", reward_mean=0.5, completions=1)
    for number in range(13, beyond):
        log.write("step", **step(number))
    log.write("eval", step=beyond - 1, version="1.9", reward_mean=0.5, completions=1)
    page.value(
        "import('/events.js').then(({Events}) => { events = new Events(); events.next = 0; return events.follow(); })"
    )
    kept = page.value("[events.steps.length, events.evals.map((one) => one.step), events.isWhole]")
    assert kept == [5_000, [beyond - 1], False]


def test_buttons_ask_and_reach_the_driver(page: Page, operator: FakeOperator):
    operator.failure = CommandRefused("the run is ending")
    page.click("#checkpoint")
    page.click("#yes")
    assert page.text("#said") == "the run is ending"
    operator.failure = None
    page.click("#pause")
    assert "Pause the run?" in page.text("#dialog") and operator.commands == []
    page.click("#yes")
    page.wait("document.querySelector('#said').innerText === 'Pause is done'")
    page.wait("document.querySelector('#state').innerText === 'paused'")
    assert page.value("document.querySelector('#pause').disabled && !document.querySelector('#resume').disabled")
    page.type("#settings [name='buffer.max_lag']", "4")
    page.click("#settings button")
    assert "buffer.max_lag: 2 → 4?" in page.text("#dialog")
    page.click("#yes")
    page.wait("document.querySelector('#said').innerText.startsWith('ChangeSettings')")
    assert operator.commands == [Pause(), ChangeSettings(settings={"buffer.max_lag": 4})]


def test_advice_is_followed_with_two_clicks_and_a_problem_leads_to_what_to_do(page: Page, operator: FakeOperator):
    assert "no optimizer step for" in page.text("#notes .problem")
    page.click("#notes .problem button")
    assert "docs/runbooks/NoProgress.md" in page.text("#dialog small")
    assert page.text("#dialog pre").startswith("asyncgrpo status RUN")
    page.value("document.querySelector('#dialog').close()")
    assert "a third generator would make steps 18 % shorter" in page.text("#notes .advice")
    page.click("#notes .advice button")
    page.click("#yes")
    page.text("#said")
    assert operator.commands == [Scale(generators=3)]


def test_samples_are_searched_and_filtered_and_what_a_model_wrote_is_only_text(page: Page):
    assert "1 to 10 of 23 found, 23 in all" in page.text("#found")
    page.type("#search [name=search]", "NEEDLE")
    page.wait("document.querySelector('#found').innerText.includes('1 to 1 of 1 found')")
    assert "failed: timeout" in page.text(".sample")
    page.value("document.querySelector('.sample').open = true")
    assert page.text(".sample mark") == "needle" and page.text(".sample .observed") == "hay"
    page.type("#search [name=search]", "")
    page.type("#search [name=only]", "worse")
    page.wait("document.querySelector('.sample')?.innerText.includes('<script>')")
    page.value("document.querySelector('.sample').open = true")
    assert SCRIPT in page.text(".sample dl")
    assert page.value("document.querySelectorAll('main script, main img').length") == 0
    assert page.value("document.title") != "taken"


def test_the_images_of_a_prompt_are_shown_where_its_card_is_opened(tab: Page, url: str, operator: FakeOperator):
    folder, there, gone = operator.run_dir / "images", "a" * 32, "b" * 32
    folder.mkdir()
    Image.new("RGB", (40, 30), "red").save(folder / there, "BMP")
    rows = [sample(images=json.dumps([f"images/{there}", f"images/{gone}"]))]
    table = pa.Table.from_pylist(rows, schema=schema())
    pq.write_table(table, operator.run_dir / "samples" / "step_000012.parquet")
    tab.open(f"{url}/#token={TOKEN}")
    tab.wait("document.querySelectorAll('.sample').length === 1")
    assert tab.value("document.querySelectorAll('.sample img').length") == 0
    tab.value("document.querySelector('.sample').open = true")
    tab.wait("document.querySelector('.sample img')?.naturalWidth === 40")
    assert "cannot be shown" in tab.text(".sample .bad")


def test_a_wrong_token_and_a_run_that_has_ended_are_said(tab: Page, operator: FakeOperator):
    with served(operator) as url:
        tab.open(f"{url}/#token=wrong")
        assert "the token is not that of this run: `asyncgrpo page RUN`" in tab.text("#banner")
        assert tab.text("#state") == "no access"
        tab.open(f"{url}/#token={TOKEN}")
        tab.wait("document.querySelectorAll('.sample').length")
    tab.wait("document.querySelector('#banner').innerText.includes('does not reply')")
    assert tab.value("document.querySelector('#pause').disabled")


def test_curves_fit_their_cards_where_the_window_tells_of_no_change(page: Page):
    """A scroll bar comes once there is something to scroll, and headless Chromium gets its width late."""
    page.value("document.querySelector('#curves').style.width = '300px'")
    charts = "[...document.querySelectorAll('.card .uplot')]"
    page.wait(f"{charts}.every(c => c.getBoundingClientRect().right <= c.parentElement.getBoundingClientRect().right)")
    assert page.value(f"{charts}.length") == 6


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_nothing_is_cut_at_the_side(page: Page, url: str, width: int, dark: bool):
    page.open(f"{url}/#token={TOKEN}", width=width, dark=dark)
    page.wait("document.querySelectorAll('.sample').length")
    assert page.value("document.documentElement.scrollWidth") <= width
    first = page.value("document.querySelector('#curves').getBoundingClientRect().top")
    assert width < 1000 or first < 600, "curves begin on the first screen"


def test_the_page_comes_with_all_that_it_names():
    folder = Path(__file__).parent.parent.parent / "asyncgrpo/control/page"
    text = "".join(path.read_text() for path in folder.glob("*.*"))
    assert "http://" not in text.replace("http://www.w3.org", "") and "https://" not in text
    assert (folder / "vendor" / "uPlot.LICENSE").read_text().startswith("The MIT License")
