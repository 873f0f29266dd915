"""The page in a real browser: its display of each state, its buttons, and its robustness.

Needs Chromium and its driver (Debian: chromium, chromium-driver). With `SAMESTEP_SCREENSHOTS=DIR`,
each state is also saved as a picture for review.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.coordinator.operator.test_control import LONG, SPEC, Operator, operating
from tests.coordinator.operator.test_run_history import Journal, commit, view
from tests.event_loop import on_uvloop

webdriver = pytest.importorskip("selenium.webdriver")
axe = pytest.importorskip("axe_core_python.selenium")
DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium")
pytestmark = [
    pytest.mark.skipif(not (DRIVER and BROWSER), reason="no browser here: install chromium-driver"),
]

OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
PATIENCE_S = 60.0
HOSTILE = "<img src=x onerror=alert(1)>\u202e" + "w" * 200
PICTURES = os.environ.get("SAMESTEP_SCREENSHOTS")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    for option in OPTIONS:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(DRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


class Page:
    """The page in the browser; the service runs in this loop, so the browser gets a thread."""

    def __init__(self, driver: Any, operator: Operator) -> None:
        self.driver = driver
        self.operator = operator

    async def run(self, script: str, *arguments: object) -> Any:
        return await asyncio.to_thread(self.driver.execute_script, script, *arguments)

    async def open(self, *, token: str | None = None) -> None:
        await asyncio.to_thread(self.driver.get, "about:blank")
        secret = self.operator.control.guard.token if token is None else token
        fragment = f"#token={secret}" if secret else ""
        await asyncio.to_thread(self.driver.get, f"http://{self.operator.address}/{fragment}")

    async def until(self, script: str) -> Any:
        """Wait until an expression holds in the page, which is driven by events.

        Polled with a timer, not with animation frames: a page behind another tab has none.
        """
        poll_script = (
            "const done = arguments[0]; const look = () => { const found = (() => { try { return "
            f"{script}; }} catch {{ return null; }} }})(); if (found) return done(found); "
            "setTimeout(look, 15); }; look();"
        )
        self.driver.set_script_timeout(PATIENCE_S)
        return await asyncio.to_thread(self.driver.execute_async_script, poll_script)

    async def wait_for_text(self, element: str, text: str) -> None:
        content = f"document.getElementById({element!r}).textContent"
        await self.until(f"{content}.includes({json.dumps(text)})")

    async def click(self, selector: str) -> None:
        await self.run(f"document.querySelector({json.dumps(selector)}).click()")

    async def act(self, name: str) -> None:
        """Press a button of the section "Act", and confirm."""
        await self.until(f"!document.querySelector('[data-act={name}]').disabled")
        await self.click(f"[data-act={name}]")
        await self.until("document.getElementById('confirm').open")
        await self.click("#yes")

    async def save_pictures(self, name: str) -> None:
        """Save pictures for review: light and dark, at the widths of a desktop and a phone."""
        if not PICTURES:
            return
        for theme, width in itertools.product(("light", "dark"), (1280, 390)):
            feature = [{"name": "prefers-color-scheme", "value": theme}]
            await self.command("Emulation.setEmulatedMedia", features=feature)
            await self.set_width(width)
            await self.until(
                "Object.entries(page.charts).every(([id, each]) =>"
                " each.shape.includes(css('--ink')) &&"
                " each.shape.endsWith(`,${document.getElementById(id).clientWidth}]`))"
            )
            screenshot = await self.command("Page.captureScreenshot", captureBeyondViewport=True)
            path = Path(PICTURES) / f"{name}-{theme}-{width}.png"
            path.write_bytes(base64.b64decode(screenshot["data"]))
        await self.command("Emulation.setEmulatedMedia", features=[])
        await self.command("Emulation.clearDeviceMetricsOverride")

    async def command(self, name: str, **parameters: object) -> Any:
        """Send a command of the browser's DevTools protocol."""
        return await asyncio.to_thread(self.driver.execute_cdp_cmd, name, parameters)

    async def set_width(self, width: int) -> None:
        """Set the width of the window; a narrow one emulates a phone."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        await self.command("Emulation.setDeviceMetricsOverride", **metrics)

    async def thread_s(self) -> float:
        """Return the processor time of the page's thread so far, in seconds."""
        metrics = (await self.command("Performance.getMetrics"))["metrics"]
        return float({metric["name"]: metric["value"] for metric in metrics}["ThreadTime"])

    async def accessibility_violations(self) -> list[str]:
        """Return axe-core findings that are serious or worse."""
        report = await asyncio.to_thread(axe.Axe().run, self.driver)
        violations = [v for v in report["violations"] if v["impact"] in {"serious", "critical"}]
        return [f"{v['id']}: {v['nodes'][0]['html']}" for v in violations]

    def log_errors(self) -> list[str]:
        """Return errors in the browser's log since the last call, except for refused requests."""
        entries = self.driver.get_log("browser")
        texts = [entry["message"] for entry in entries]
        return [text for text in texts if not re.search(r"status of 40[019] ", text)]


@pytest.fixture
def open_pages(browser: Any, tmp_path: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def open_page(expect_workers: int = 1) -> AsyncIterator[Page]:
        browser.set_window_size(1280, 1700)
        async with operating(tmp_path, expect_workers) as operator:
            page = Page(browser, operator)
            await page.open()
            try:
                yield page
                assert page.log_errors() == []
            finally:
                # Ignore requests to an ended service, and tabs that a failed test left open.
                first, *others = browser.window_handles
                for other in others:
                    await asyncio.to_thread(browser.switch_to.window, other)
                    await asyncio.to_thread(browser.close)
                await asyncio.to_thread(browser.switch_to.window, first)
                await asyncio.to_thread(browser.get, "about:blank")
                page.log_errors()

    return open_page


@on_uvloop
async def test_page_without_a_token_only_requests_one(open_pages):
    async with open_pages() as page:
        await page.run("sessionStorage.clear()")
        await page.open(token="")
        await page.until("!document.getElementById('ask').hidden")
        assert "no run" not in await page.run("return document.body.innerText")
        assert await page.run("return document.getElementById('shown').hidden")
        await page.run("document.getElementById('token').value = 'wrong'")
        await page.click("#ask button")
        await page.until("!document.getElementById('refused').hidden")
        token = page.operator.control.guard.token
        await page.run("document.getElementById('token').value = arguments[0]", token)
        await page.click("#ask button")
        await page.wait_for_text("phase", "idle")
        assert token not in await page.run("return location.href")
        mixed = {
            "exact": False,
            "workers": [
                {"name": name, "signature": choice * 12, "signature_text": f"cpu of {choice}"}
                for name, choice in (("mars", "a"), ("venus", "b"), ("earth", "a"))
            ],
        }
        shown_text = await page.run(
            "return describeMixedProfiles(arguments[0], {workers: []})", mixed
        )
        assert shown_text == "venus (cpu of b), from mars, earth (cpu of a)"


@pytest.mark.slow
@on_uvloop
async def test_page_shows_each_phase_of_a_run(open_pages):
    async with open_pages(2) as page:
        operator = page.operator
        operator.live.start_worker("mars")
        _, submission = await operator.post("/submit", {"run": LONG})
        await page.wait_for_text("lines", "1 more worker")
        await page.save_pictures("waiting")
        operator.live.start_worker("venus")
        await page.wait_for_text("phase", "training")
        await page.until("page.charts['chart-loss'].data[0].length > 3")
        await page.save_pictures("training")
        assert await page.accessibility_violations() == []

        operator.live.clients[0].drain()
        await page.until("document.querySelector('#workers .gone')?.textContent.includes('gone')")
        await page.wait_for_text("events", "mars")
        await page.save_pictures("worker-lost")

        await page.act("halt")
        await page.wait_for_text("phase", "halted")
        await page.wait_for_text("reason", "operator")
        await page.wait_for_text("acted", "done")
        await page.save_pictures("halted")
        assert await page.accessibility_violations() == []
        await page.act("continue")
        await page.wait_for_text("phase", "training")
        await page.act("halt")
        await page.wait_for_text("phase", "halted")
        await page.act("skip")
        await page.wait_for_text("events", "skipped")
        await page.act("checkpoint")
        await page.wait_for_text("events", "checkpoint")

        steps = await page.run("return page.charts['chart-loss'].data[0][0]")
        await asyncio.to_thread(page.driver.refresh)
        await page.until("page.charts['chart-loss'].data[0].length > 3")
        assert await page.run("return page.charts['chart-loss'].data[0][0]") == steps
        await page.wait_for_text("events", "skipped")
        await page.act("drain")
        run_end = await operator.live.wait_for("run_ended", run_id=submission["run_id"])
        assert run_end["outcome"] == "drained"
        await page.wait_for_text("phase", "drained")


@pytest.mark.slow
@on_uvloop
async def test_run_is_submitted_and_compared_on_the_page(open_pages):
    async with open_pages() as page:
        page.operator.live.start_worker("mars")
        text = json.dumps(SPEC)  # YAML, too
        await page.run(
            "const spec = document.getElementById('spec'); spec.closest('details').open = true;"
            "spec.value = arguments[0]; spec.dispatchEvent(new Event('input'))", "stebs: 3",
        )  # fmt: skip
        await page.wait_for_text("verdict", "stebs")
        assert await page.run("return document.getElementById('submit').disabled")
        await page.run(
            "const spec = document.getElementById('spec'); spec.value = arguments[0];"
            "spec.dispatchEvent(new Event('input'))", text,
        )  # fmt: skip
        await page.wait_for_text("verdict", "can be submitted")
        for _ in range(2):
            await page.click("#submit")
            await page.until("document.getElementById('confirm').open")
            await page.click("#yes")
            await page.until("!document.getElementById('confirm').open")
            await page.wait_for_text("acted", "Submit: done")
            await page.wait_for_text("phase", "finished")
        await page.save_pictures("finished")
        await page.until("document.querySelectorAll('#beside option').length === 2")
        await page.run(
            "const beside = document.getElementById('beside'); beside.selectedIndex = 1;"
            "beside.dispatchEvent(new Event('change'))"
        )
        await page.until("page.charts['chart-loss'].data.length === 6")
        await page.click("#report")
        await page.wait_for_text("acted", "in a new tab")
        first, second = page.driver.window_handles
        await asyncio.to_thread(page.driver.switch_to.window, second)
        await page.until("document.title.startsWith('Run scripted-')")
        is_styled = (
            "getComputedStyle(document.querySelector('table')).borderCollapse === 'collapse'"
        )
        assert await page.run(f"return {is_styled}")
        await asyncio.to_thread(page.driver.close)
        await asyncio.to_thread(page.driver.switch_to.window, first)


@pytest.mark.slow
@on_uvloop
async def test_abandoned_run_is_resumed_on_the_page(open_pages):
    async with open_pages() as page:
        page.operator.live.start_worker("mars")
        await page.operator.post("/submit", {"run": LONG})
        await page.wait_for_text("phase", "training")
        await page.act("give-up")
        await page.wait_for_text("phase", "failed")
        await page.until("document.querySelector('#runs button[aria-label^=Resume]')")
        await page.click("#runs button[aria-label^=Resume]")
        await page.until("document.getElementById('confirm').open")
        await page.click("#yes")
        await page.wait_for_text("phase", "training")


@pytest.mark.slow
@on_uvloop
async def test_revoked_worker_disappears(open_pages):
    async with open_pages() as page:
        page.operator.live.start_worker("mars")
        await page.until("document.querySelector('#workers button')")
        await page.click("#workers button")
        await page.until("document.getElementById('confirm').open")
        await page.click("#yes")
        await page.operator.live.wait_for("worker_disconnected", worker="mars")
        await page.click("#join")
        await page.wait_for_text("joined", "worker --coordinator")


@pytest.mark.parametrize("width", [390, pytest.param(1280, marks=pytest.mark.slow)])
@on_uvloop
async def test_hostile_name_is_harmless_and_nothing_overflows(open_pages, width):
    async with open_pages() as page:
        await page.set_width(width)
        page.operator.live.start_worker("mars")
        _, submission = await page.operator.post("/submit", {"run": SPEC})
        await page.operator.live.result(submission["run_id"])
        journal = Journal(page.operator.live.service.finished.directory / "journal.jsonl")
        journal.write(view(4, "lost", HOSTILE, worker=HOSTILE, reason=HOSTILE))
        await page.open()
        await page.wait_for_text("events", "onerror")
        assert await page.run("return document.querySelectorAll('#shown img').length") == 0
        # A phone's innerWidth grows with overflowing content.
        assert await page.run("return document.documentElement.scrollWidth") <= width
        assert await page.accessibility_violations() == []
        await page.command("Emulation.clearDeviceMetricsOverride")


@pytest.mark.slow
@on_uvloop
async def test_ten_thousand_steps_are_drawn_in_under_a_second(open_pages):
    async with open_pages() as page:
        page.operator.live.start_worker("mars")
        _, submission = await page.operator.post("/submit", {"run": SPEC})
        await page.operator.live.result(submission["run_id"])
        journal = Journal(page.operator.live.service.finished.directory / "journal.jsonl")
        journal.write(*(commit(step, 1 / (step + 1)) for step in range(4, 10_000)))
        await page.open()
        await page.until("page.charts['chart-loss'].data[0].at(-1) === 10000")
        steps = await page.run("return page.charts['chart-loss'].data[0].length")
        assert 500 < steps <= 2_000
        # The journal has no rates, as in older releases: still only new data is transferred.
        news = await page.run(
            "const known = page.histories[page.present];"
            "known.rate = {...known.rate, step: [], full: 0};"
            "const before = performance.getEntriesByType('resource').length; await refresh();"
            "return performance.getEntriesByType('resource').slice(before).map(each => each.name)"
        )
        history_urls = [name for name in news if "/history" in name]
        assert history_urls
        assert not any("after=0" in name for name in history_urls)
        await page.run(
            "const shows = document.getElementById('window'); shows.value = '1000';"
            "shows.dispatchEvent(new Event('change'))"
        )
        scales = "Object.values(page.charts).map(each => [each.scales.x.min, each.scales.x.max])"
        ranges = await page.run(f"return {scales}")
        assert ranges == [[9_000, 10_000]] * len(ranges)
        await page.run("page.last = 0; zoom([200, 300])")
        script = "return document.getElementById('window').selectedOptions[0].textContent"
        assert await page.run(script) == "steps 200 to 300"
        # Processor time of the page's thread, which does not depend on the load of the machine.
        await page.command("Performance.enable", timeDomain="threadTicks")
        before = await page.thread_s()
        await page.run("for (const each of Object.values(page.charts)) each.destroy();"
            "page.charts = {}; draw(page.histories[page.present], null)")  # fmt: skip
        assert await page.thread_s() - before < 1.0
