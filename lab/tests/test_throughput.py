"""``h2o-compare throughput``."""

from pathlib import Path

import pytest

from h2o_lab.throughput.page import times_full
from tests.commands import invoke, records


@pytest.mark.exhaustive
@pytest.mark.usefixtures("no_charts")
def test_throughput(tiny_folder: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    base = ["throughput", "-m", tiny_folder, "--text", text, "--shapes", "60+5,20+40", "--rounds=1", "--jsonl", "-"]
    done = invoke("h2o-compare", *base, "--cache-budget", "160KiB", "--ratio", "0.4", "--out", out)
    assert done.exit_code == 0, done.stderr
    _, *results = records(done.stdout)
    assert [(r["prompt"], r["new"], r["policy"], r["window"], r["largest"]) for r in results] == [
        (prompt, new, policy, window if policy != "full" else None, largest)
        for prompt, new, window in ((60, 5, 26), (20, 40, 24))
        for policy, largest in (("full", True), ("recent", True), ("h2o", True), ("recent", False), ("h2o", False))
    ]
    full, recent, h2o, *equal = results[5:]
    assert recent["batch"] > full["batch"] < h2o["batch"]
    assert {r["batch"] for r in equal} == {full["batch"]}
    for result in results:
        assert result["cache_bytes"] == result["batch"] * result["row_bytes"] <= 160 * 1024
        assert result["tok_s"] == pytest.approx(result["batch"] * result["new"] / result["seconds"], rel=0.05)
    assert "| 60+5 | full |" in (out / "throughput.md").read_text()
    again = invoke("h2o-compare", *base, "--cache-budget", "160KiB", "--ratio", "0.4", "--out", out, "-q")
    assert records(again.stdout)[1:] == results, "timings are reused"
    rows = records(invoke("h2o-compare", *base, "--cache-budget", "auto", "--policies", "recent", "-q").stdout)[1:]
    full = [r["batch"] for r in rows if r["policy"] == "full"]
    assert full == [5, 5], "five rows of the longest shape"
    small = invoke("h2o-compare", *base, "--cache-budget", "4KiB")
    assert small.exit_code == 2
    assert "--cache-budget" in small.stderr


def test_batches_in_multiples_of_a_full_cache() -> None:
    found = [
        {"policy": policy, "prompt": 512, "new": 32, "tok_s": speed, "largest": largest}
        for policy, speed, largest in (("full", 10.0, True), ("h2o", 24.0, True), ("h2o", 8.0, False))
    ]
    assert times_full(found) == ("At 512+32, h2o generates 2.4 times the tokens/s of a full cache in the same memory.")
