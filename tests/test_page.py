"""The report's page: what it shows, that nothing escapes into markup, and that it works."""

import html
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from records import a_record

from attentune import AttentionKey, AttentionProblem, Database, cli
from attentune.page import Entry, page
from attentune.page.charts import Bar, bars, roofline
from attentune.page.markup import Markup, tag
from attentune.page.trace import trace_lines
from attentune.record import Loser
from attentune.search.roofline import Peaks, Work
from attentune.target import native

EVIL = "</script><script>alert('x')</script>\"&<b>"
BATCHES = (("flash_split_kv",), ("fallback", "flash_unit"), ("flash_cmma_2_planes",))
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
VOID = {"meta", "input"}


class Page(HTMLParser):
    """Parses a page strictly, and keeps its elements with their text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name, attributes):
        element = {"tag": name, "text": "", **dict(attributes)}
        self.elements.append(element)
        if name not in VOID:
            self.open.append(element)

    def handle_endtag(self, name):
        assert self.open.pop()["tag"] == name

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, name, **attributes):
        return [
            one
            for one in self.elements
            if one["tag"] == name and all(one.get(k) == v for k, v in attributes.items())
        ]


def an_entry(number=0, **changes):
    losers = (
        Loser("fallback", {}, "slower", "it is 1.20 times", 2e-3, (9e-3, 1.9e-3, 2.1e-3)),
        Loser("flash_split_kv", {}, "wrong", "off by 3"),
    )
    fields = {"batches": BATCHES, "peaks": Peaks(1e11, 2e10, 1e-6), "source": "for i in T.grid(1):"}
    record = a_record(number, losers=losers, **changes.pop("record", {}))
    return Entry(record, **{**fields, **changes})


def test_what_a_record_holds_is_shown():
    record = an_entry().record
    shown = Page(page("records.sqlite", [an_entry()]))
    (section,) = shown.all("details", id="key-0")
    for text in (str(record.key), "block_q 64", "0.27.0.post1", "off by 3", "it is 1.20 times",
                 "for i in T.grid(1):", "1.5 ms", "served"):  # fmt: skip
        assert text in section["text"]
    items = [one["text"] for one in shown.all("li")]
    assert items == [
        "flash_split_kv: every candidate failed",
        "fallback, flash_unit: the winner is from here",
        "flash_cmma_2_planes: not tried, as an earlier one held a valid candidate",
    ]
    # A bar and a whisker each, and a mark of each variant below the roof.
    assert len(shown.all("rect")) == len(shown.all("path", **{"class": "whisker"})) == 2
    assert len(shown.all("circle")) == 2


def test_candidates_are_ranked_with_their_reasons():
    text = page("x", [an_entry()])
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", text[text.index('class="candidates"') :])
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows][1:]
    assert [(row[0], row[1], row[5]) for row in cells] == [
        ("1", "flash_unit", "won"), ("2", "fallback", "slower"), ("-", "flash_split_kv", "wrong"),
    ]  # fmt: skip


def test_text_stays_text():
    record = {"machine": EVIL, "variant": EVIL, "versions": {EVIL: EVIL}, "trace": EVIL,
              "parameters": {EVIL: 1}}  # fmt: skip
    entry = an_entry(record=record, stale=EVIL, source=EVIL)
    text = page(EVIL, [entry], EVIL, [a_record(1, variant=EVIL)])
    shown = Page(text)
    assert len(shown.all("script")) == 1
    assert shown.all("b") == []
    assert shown.all("h1")[0]["text"] == EVIL
    assert html.escape(EVIL) in text


def test_the_page_asks_for_nothing():
    text = page("x", [an_entry()], "y")
    assert "default-src 'none'" in html.unescape(text)
    for address in re.findall(r'(?:src|href)="([^"]*)"', text):
        assert address.startswith("#")
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text


def test_a_comparison_shows_both_sides():
    entry = an_entry(other=a_record(seconds_all=(3e-3,), variant="fallback"))
    text = page("a", [entry, an_entry(1)], "b.sqlite", [a_record(2)])
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", text.partition("</tbody>")[0])
    shown = [re.sub("<[^>]*>", "|", row) for row in rows]
    assert "|fallback|" in shown[1]
    assert "|2.00|" in shown[1]
    assert "only in the other" in shown[3]
    assert "b.sqlite has no record of it" in text


def test_a_batch_that_no_plan_has_is_said_so():
    assert "which today&#x27;s default plan does not have" in page("x", [an_entry(batches=())])


def test_markup():
    assert tag("p", "a<b", None, tag("i", "c"), class_="x&y", hidden=True, id=None) == (
        '<p class="x&amp;y" hidden>a&lt;b<i>c</i></p>'
    )
    assert isinstance(tag("p"), Markup)


def test_bars_are_as_long_as_their_times():
    shown = Page(bars([Bar("a", 1.0, (0.5, 2.0), True), Bar("b", 0.5)]))
    widths = [float(one["width"]) for one in shown.all("rect")]
    assert widths == [179.0, 89.5]
    assert shown.all("path")[0]["d"].startswith("M89.5 20.0H358.0")


def test_a_point_on_the_roof_lies_on_it():
    # At its peak rate, right of the ridge.
    shown = Page(roofline(Work(10**9, 10**7), Peaks(1e11, 1e10, 0.0), [("flash_unit", 1e-2)]))
    points = shown.all("polyline")[0]["points"].split()
    heights = [float(point.split(",")[1]) for point in points]
    assert heights[1] == heights[2] == pytest.approx(float(shown.all("circle")[0]["cy"]), abs=0.1)
    assert heights[0] > heights[1]


def test_a_trace_reads_as_lines():
    trace = [
        [["SampleCategorical", [], [[4, 8], [0.5, 0.5]], ["v0"]], ["Split", ["l1", "v0"], [], []]],
        [[0, 1]],
    ]
    assert trace_lines(trace) == [
        "v0 = SampleCategorical([4, 8], [0.5, 0.5])  # chose 1",
        "Split(l1, v0)",
    ]
    assert trace_lines([["other"]]) == ['[["other"]]']


def databases(tmp_path, *seconds):
    """Make databases of two keys, each with one record's time, and return their paths."""
    paths = []
    for index, time in enumerate(seconds):
        paths.append(tmp_path / f"{index}.sqlite")
        with Database(paths[-1]) as database:
            for text in ("1,1,1,64,64,32,32:float32", "1,1,1,64,64,32,32:float32:causal"):
                key = AttentionKey.from_problem(AttentionProblem.parse(text))
                database.put(a_record(key=key, target=str(native()), seconds_all=(time,)))
    return paths


def test_the_command_writes_it(tmp_path, capsys):
    ours, other = databases(tmp_path, 1e-3, 2e-3)
    out = tmp_path / "report.html"
    assert cli.main(["report", str(ours), "--against", str(other), "-o", str(out)]) == 0
    assert "2 records" in capsys.readouterr().out
    text = out.read_text()
    assert Page(text).all("h1")[0]["text"] == "0.sqlite"
    assert text.count("2.00 times this") == 2
    assert "stale: the sources of flash_unit have changed" in text


def test_a_database_that_is_missing_is_named(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path / "none.sqlite")]) == 1
    assert "There is no database" in capsys.readouterr().err


# What a person would do, with what they would see after each step.
STEPS = """
<script>
  const seen = {errors: []};
  addEventListener("error", (event) => seen.errors.push(event.message));
  addEventListener("securitypolicyviolation", (event) => seen.errors.push(event.violatedDirective));
</script>
"""
USE = """
<script>
  const shown = () => [...document.querySelectorAll("#front tbody tr")].filter((r) => !r.hidden)
    .map((r) => r.dataset.key);
  const press = (key, on) => on.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true,
    cancelable: true}));
  const median = document.querySelectorAll("#front th button")[3];
  median.focus(); median.click(); seen.up = shown(); seen.aria = median.parentNode.ariaSort;
  median.click(); seen.down = shown();
  press("/", document.body); seen.focus = document.activeElement.id;
  const search = document.activeElement;
  const type = (text) => { search.value = text; search.dispatchEvent(new Event("input")); };
  type("FLASH_UNIT fallbackless"); seen.none = shown();
  type("twice"); seen.some = shown(); seen.count = document.getElementById("count").textContent;
  press("Escape", search); seen.all = shown().length;
  location.hash = "#key-1";
  setTimeout(() => {
    seen.opened = document.getElementById("key-1").open;
    seen.closed = !document.getElementById("key-0").open;
    seen.overflow = document.documentElement.scrollWidth - innerWidth;
    seen.width = innerWidth;
    document.title = JSON.stringify(seen);
  }, 100);
</script>
"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium on PATH to run the page's script")
def test_it_sorts_filters_and_unfolds_in_a_browser(tmp_path):
    entries = [
        an_entry(0, record={"seconds_all": (2e-3,)}),
        an_entry(1, record={"seconds_all": (10e-3,), "variant": "twice"}),
        an_entry(2, record={"seconds_all": (1e-3,)}),
    ]
    text = page("x", entries, "y")
    file = tmp_path / "page.html"
    file.write_text(text.replace("<body>", f"<body>{STEPS}").replace("</body>", f"{USE}</body>"))
    command = [BROWSER, "--headless", "--disable-gpu", "--window-size=375,800",
               f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000",
               "--dump-dom", file.as_uri()]  # fmt: skip
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.insert(1, "--no-sandbox")  # which it refuses to have as root
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    seen = json.loads(html.unescape(re.search("<title>(.*?)</title>", run.stdout)[1]))
    assert seen["errors"] == []
    assert seen["up"] == ["key-2", "key-0", "key-1"]
    assert seen["down"] == ["key-1", "key-0", "key-2"]
    assert seen["aria"] == "ascending"
    assert seen["focus"] == "search"
    assert seen["none"] == []
    assert seen["some"] == ["key-1"]
    assert seen["count"] == "1 of 3 shown"
    assert seen["all"] == 3
    assert seen["opened"]
    assert seen["closed"]
    # Nothing sticks out of a telephone's window.
    assert seen["width"] <= 500
    assert seen["overflow"] <= 0
