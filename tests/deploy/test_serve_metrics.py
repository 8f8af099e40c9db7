"""The text format of Prometheus, read back by its grammar."""

from __future__ import annotations

import math
import re
from pathlib import Path

import httpx
from hypothesis import given
from hypothesis import strategies as st
from served import image_bytes, serving

from cclnet.deploy.serve.metrics import Counter, Histogram

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? (\S+)")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(text: str) -> tuple[dict[str, str], Samples]:
    """Types and samples of an exposition; any line outside the format fails."""
    assert text.endswith("\n")
    types: dict[str, str] = {}
    samples: Samples = {}
    for line in text.splitlines():
        if comment := re.fullmatch(rf"# (HELP|TYPE) ({NAME}) (.+)", line):
            if comment[1] == "TYPE":
                assert comment[2] not in types and comment[3] in ("counter", "gauge", "histogram")
                types[comment[2]] = comment[3]
            continue
        found = SAMPLE.fullmatch(line)
        assert found, line
        labels = frozenset((k, unescape(v)) for k, v in re.findall(LABEL, found[2] or ""))
        family = re.sub(r"_(bucket|sum|count)$", "", found[1]) if found[1] not in types else found[1]
        assert family in types, f"{line}: its type comes first"
        assert (found[1], labels) not in samples
        samples[found[1], labels] = float(found[found.lastindex or 0])
    return types, samples


def unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: {"n": "\n"}.get(found[1], found[1]), text)


def histogram_holds(samples: Samples, name: str) -> None:
    buckets = sorted(
        (float(dict(labels)["le"]), value) for (n, labels), value in samples.items() if n == f"{name}_bucket"
    )
    counts = [value for _, value in buckets]
    assert counts == sorted(counts) and buckets[-1] == (math.inf, samples[f"{name}_count", frozenset()])


@given(st.dictionaries(st.text(), st.integers(1, 9)))
def test_any_label_comes_back(counts: dict[str, int]) -> None:
    counter = Counter("things_total", "Things.")
    for name, count in counts.items():
        counter.add({"name": name}, count)
    # A line ends at a line feed alone; what else Unicode calls an end of line stays inside a label.
    lines = "".join(f"{line}\n" for line in counter.lines()).split("\n")
    found = {
        unescape(m[1]): float(m[2])
        for line in lines
        if (m := re.fullmatch(r'things_total\{name="(.*)"\} (\S+)', line, re.S))
    }
    assert found == {name: float(count) for name, count in counts.items()}


@given(st.lists(st.floats(0, 100)))
def test_a_histogram_counts_what_is_at_most_each_bound(values: list[float]) -> None:
    histogram = Histogram("size", "Sizes.", (1.0, 5.0, 20.0))
    for value in values:
        histogram.observe(value)
    _, samples = parse("".join(f"{line}\n" for line in histogram.lines()))
    for bound in (1.0, 5.0, 20.0, math.inf):
        le = "+Inf" if math.isinf(bound) else f"{bound:g}"
        assert samples["size_bucket", frozenset({("le", le)})] == sum(value <= bound for value in values)
    assert samples["size_sum", frozenset()] == sum(values)
    histogram_holds(samples, "size")


def test_a_counter_that_has_not_counted_says_zero() -> None:
    assert parse("\n".join(Counter("things_total", "Things.").lines()) + "\n")[1] == {("things_total", frozenset()): 0}


def test_a_server_counts_what_it_does(tmp_path: Path) -> None:
    with serving(tmp_path) as address, httpx.Client(base_url=address) as client:
        for colour in ((200, 0, 0), (200, 9, 0), (0, 0, 200)):
            assert client.post("/predict", files={"image": image_bytes(colour)}).status_code == 200
        assert client.post("/predict", files={"image": b"not an image"}).status_code == 422
        for path in ("/a", "/b", "/c"):
            client.get(path)
        client.request("BREW", "/model")
        answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    types, samples = parse(answer.text)
    requests = {labels: v for (name, labels), v in samples.items() if name == "cclnet_requests_total"}

    def count(route: str, method: str, status: str) -> float:
        return requests[frozenset({("route", route), ("method", method), ("status", status)})]

    assert count("/predict", "POST", "200") == 3 and count("/predict", "POST", "422") == 1
    assert count("other", "GET", "404") == 3  # one label for all that is not there, however much of it is asked for
    assert count("/model", "other", "405") == 1
    assert samples["cclnet_predictions_total", frozenset({("class", "red")})] == 2
    assert samples["cclnet_predict_seconds_count", frozenset()] == 4
    assert samples["cclnet_batch_images_sum", frozenset()] == 3
    assert samples["process_resident_memory_bytes", frozenset()] > 1e6
    for name, kind in types.items():
        if kind == "histogram":
            histogram_holds(samples, name)
