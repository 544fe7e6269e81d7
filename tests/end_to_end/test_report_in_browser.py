"""Reports in a real Chromium, which is started once. `make test` installs it where it may."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import recmill

from ..chromium import MISSING, PROGRAM, Browser, browser
from ..conftest import Config
from ..reports import finish, write_run

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=MISSING)

DONE = {"state": "done", "step": 120, "seconds": 75.0}
EVIL = "<script>alert(1)<"  # with its "/script>" below it, as a path


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture
def reports(tmp_path: Path, dlrm: Config) -> dict[str, Path]:
    """Reports of a run with all that there can be, of one with nothing, and of several with a hostile name."""
    full = write_run(tmp_path / "full", dlrm, DONE, store_hit=0.9)
    finish(full)
    bare = write_run(tmp_path / "bare", dlrm, {"state": "failed", "reason": "The loss is no longer a finite number."})
    evil = write_run(tmp_path / EVIL / "script>" / ("long-name-" * 12), dlrm, DONE, auroc=0.6)
    finish(evil)
    several = recmill.report(full, bare, evil, output=tmp_path / "several.html")
    return {"full": recmill.report(full), "bare": recmill.report(bare), "several": several}


def test_reports_work_in_a_browser(chromium: Browser, reports: dict[str, Path], tmp_path: Path) -> None:
    for name, path in reports.items():
        for width in (1280, 400):
            for scheme in ("light", "dark"):
                chromium.open(path, width, scheme)
                where = f"{name}, {width} px, {scheme}"
                assert chromium.complaints == [], where
                assert chromium.requests == [path.as_uri()], where
                assert chromium.value("document.documentElement.scrollWidth") <= width, where
                marks = chromium.value(
                    "[...document.querySelectorAll('figure')].map(f=>f.querySelectorAll('.mark').length)"
                )
                assert len(marks) >= 5 and min(marks) >= 1, where
                wide = chromium.value(
                    "[...document.querySelectorAll('figure,h1,h2,p,pre,.scroll,.numbers div')]"
                    ".filter(e => e.getBoundingClientRect().right > innerWidth + 0.5)"
                    ".map(e => e.outerHTML.slice(0, 99))"
                )
                assert wide == [], where
        assert path.stat().st_size < 1_000_000
    chromium.screenshot(tmp_path / "several.png")
    assert (tmp_path / "several.png").read_bytes().startswith(b"\x89PNG")


def test_a_script_as_the_name_of_a_run_stays_text(chromium: Browser, reports: dict[str, Path]) -> None:
    chromium.open(reports["several"], 1280)
    assert chromium.value("document.scripts.length") == 0
    headings = chromium.value("[...document.querySelectorAll('h2.run')].map(e => e.textContent)")
    assert [EVIL in heading for heading in headings] == [False, False, True]


def test_colours_follow_the_scheme_of_the_system_and_paper_is_white(
    chromium: Browser, reports: dict[str, Path]
) -> None:
    found = []
    for scheme, media in (("light", ""), ("dark", ""), ("dark", "print")):
        chromium.open(reports["full"], 1280, scheme)
        chromium.call(
            "Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}]
        )
        found.append(chromium.value("getComputedStyle(document.body).backgroundColor"))
    chromium.call("Emulation.setEmulatedMedia", media="")
    assert found == ["rgb(255, 255, 255)", "rgb(16, 20, 24)", "rgb(255, 255, 255)"]


def test_the_browser_refuses_requests_of_the_page(chromium: Browser, reports: dict[str, Path], tmp_path: Path) -> None:
    """What we would see if a report asked for anything: the checks above can fail."""
    changed = tmp_path / "changed.html"
    changed.write_text(reports["full"].read_text().replace("</main>", '<img src="other.png"><script>1</script></main>'))
    chromium.open(changed, 1280)
    assert chromium.complaints
