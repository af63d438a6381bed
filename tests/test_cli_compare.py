"""Comparisons as run from the command line."""

from pathlib import Path

import pytest

from tests.commands import invoke, records
from tests.fixtures import written
from tests.tolerance import LIKELIHOOD


class TestCompare:
    def test_nll(self, tiny_folder: Path, text: Path, tmp_path: Path) -> None:
        base = ["nll", "-m", tiny_folder, "--dtype", "float32", "--text", text, "--tokens", "200", "--jsonl", "-"]
        done = invoke("h2o-compare", *base, "--policies", "full,h2o,recent", "--windows", "16,240", "--chunk", "8")
        assert done.exit_code == 0
        run, *results = records(done.stdout)
        assert run["type"] == "run"
        assert [(r["policy"], r["window"]) for r in results] == [
            ("full", None), ("h2o", 16), ("h2o", 240), ("recent", 16), ("recent", 240),
        ]  # fmt: skip
        assert {r["tokens"] for r in results} == {200}
        full = results[0]["nll"]
        for result in results:
            assert result["nll"] == pytest.approx(full, rel=LIKELIHOOD) or result["window"] == 16
            assert result["nll_last_half"] > 0
        assert results[1]["nll"] != pytest.approx(full, rel=3 * LIKELIHOOD)
        assert "nats per token" in done.stderr

    def test_nll_in_a_folder_resumes(self, tiny_folder: Path, text: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        base = ["nll", "-m", tiny_folder, "--text", text, "--tokens", "200", "--jsonl", "-", "--out", out]
        base += ["--windows", "16", "--chunk", "8", "--seeds", "0,5"]
        first = records(invoke("h2o-compare", *base, "--policies", "full,sink").stdout)[1:]
        done = invoke("h2o-compare", *base, "--policies", "random,full,sink,h2o")
        assert done.exit_code == 0, done.stderr
        results = records(done.stdout)[1:]
        assert [(r["policy"], r["seed"]) for r in results] == [
            ("full", 0), ("random", 0), ("random", 5), ("sink", 0), ("h2o", 0),
        ]  # fmt: skip
        assert [results[0], results[3]] == first, "taken from the folder, its speed too"
        assert results[1]["nll"] != results[2]["nll"]
        assert results[0]["to_full"] is None
        for result in results[1:]:
            difference = result["to_full"]
            assert difference["mean"] == pytest.approx(result["nll"] - results[0]["nll"])
            assert difference["low"] < difference["mean"] < difference["high"]
        assert len(list((out / "parts").iterdir())) == 5
        assert "text, 200 tokens" in (out / "nll.md").read_text()
        assert "| random #5 | 16 | " in (out / "nll.md").read_text()
        assert "…" not in done.stderr, "no figure is cut"
        assert (out / "nll-text.png").read_bytes().startswith(b"\x89PNG")

    def test_a_damaged_part_is_measured_again(self, tiny_folder: Path, text: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        base = [
            "nll", "-m", tiny_folder, "--text", text, "--policies", "sink", "--windows", "16", "--tokens", "60",
            "--out", out, "-q",
        ]  # fmt: skip
        assert invoke("h2o-compare", *base).exit_code == 0
        (part,) = (out / "parts").iterdir()
        part.write_bytes(b"nonsense")
        done = invoke("h2o-compare", *base, "--jsonl", "-")
        assert done.exit_code == 0
        assert records(done.stdout)[1]["nll"] > 0

    def test_full_stays_inside_the_context(self, tiny_folder: Path, text: Path, tmp_path: Path) -> None:
        base = ["nll", "-m", tiny_folder, "--text", text, "--tokens", "450", "--jsonl", "-", "-q"]
        results = records(invoke("h2o-compare", *base, "--policies", "full,h2o", "--windows", "32").stdout)[1:]
        assert [result["tokens"] for result in results] == [400, 450]

    @pytest.mark.exhaustive
    def test_kv_bits(self, tiny_folder: Path, text: Path, tmp_path: Path) -> None:
        base = ["nll", "-m", tiny_folder, "--text", text, "--tokens", "200", "--jsonl", "-", "-q", "--policies", "h2o"]
        results = [records(invoke("h2o-compare", *base, "--kv-bits", bits).stdout)[1]["nll"] for bits in "842"]
        exact = records(invoke("h2o-compare", *base).stdout)[1]["nll"]
        assert len({exact, *results}) == 4
        assert results[0] == pytest.approx(exact, abs=0.05)

    @pytest.mark.exhaustive
    @pytest.mark.usefixtures("no_charts")
    def test_recall(self, tiny_folder: Path, text: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        base = ["recall", "-m", tiny_folder, "--text", text, "--facts", "2", "--distances", "8,60", "--jsonl", "-"]
        base += ["--chat", "150", "--policies", "full,sink", "--windows", "64", "--out", out]
        done = invoke("h2o-compare", *base)
        assert done.exit_code == 0, done.stderr
        run, *results = records(done.stdout)
        assert (run["facts"], run["recall"], run["chat"]) == (2, ["off"], 150)
        headline = [r for r in results if r["type"] == "recall" and r["kind"] == "same"]
        assert [(r["policy"], r["window"], r["distance"]) for r in headline] == [
            ("full", None, 8), ("full", None, 60), ("sink", 64, 8), ("sink", 64, 60),
        ]  # fmt: skip
        kinds = [r["kind"] for r in results if r["type"] == "recall" and r["policy"] == "sink"]
        assert kinds == ["same", "same", "other", "other", "contradicted", "contradicted", "never", "never"]
        for result in results:
            assert result["recall"] == "off"
            assert result["recalling"] == 0
            assert 0 <= result["wrong"] <= 1 - result["accuracy"]
            assert (result["margin"] is None) == (result["kind"] == "never")
            assert result["questions"] == {"never": 1}.get(result["kind"], 2) or result["policy"] == "full"
        chat = [r for r in results if r["type"] == "recall-chat"]
        assert [(r["policy"], r["kind"]) for r in chat] == [("sink", "same"), ("sink", "other"), ("sink", "never")]
        assert all(r["turns"] >= 1 and r["turns_recalling"] == 0 for r in chat)
        assert len(list((out / "parts").iterdir())) == 3
        assert "| full | - | off |" in (out / "recall.md").read_text()
        assert len(records((out / "replies" / "sink-64.jsonl").read_text())) == 14
        again = invoke("h2o-compare", *base, "-q")
        assert records(again.stdout)[1:] == results

    def test_recall_of_what(self, tiny_folder: Path, tmp_path: Path) -> None:
        text = tmp_path / "text.txt"
        text.write_text(" \n ")
        base = ["recall", "-m", tiny_folder, "--text", text]
        assert "there are no words in it" in invoke("h2o-compare", *base).stderr
        assert "--distances is empty" in invoke("h2o-compare", *base, "--distances=").stderr
        assert "lower --facts" in invoke("h2o-compare", *base, "--facts", "31").stderr
        assert "--recall takes some of auto, wide, off" in invoke("h2o-compare", *base, "--recall", "auto,on").stderr

    @pytest.mark.usefixtures("no_charts")
    def test_summarize(self, tiny_folder: Path, text: Path, tmp_path: Path) -> None:
        file, out = tmp_path / "requests.jsonl", tmp_path / "out"
        form = {"max_tokens": 6, "temperature": 0.5, "top_p": 1, "n": 1, "summary_gt": "some words"}
        stops = [[], [], [], ["###"], []]
        written(file, [{**form, "article": "word " * (20 + 9 * n), "stop": stops[n]} for n in range(5)])
        base = ["summarize", "-m", tiny_folder, "--requests", file, "--policies", "full,h2o", "--windows", "16,32"]
        base += ["--jsonl", "-", "--dtype", "float32"]
        done = invoke("h2o-compare", *base, "--limit", "4", "--out", out)
        assert done.exit_code == 0, done.stderr
        run, *results = records(done.stdout)
        assert (run["requests"], run["prefill"], run["sample"]) == (4, "full", False)
        assert [(r["policy"], r["window"], r["n"]) for r in results] == [
            ("full", None, 4), ("h2o", 16, 4), ("h2o", 32, 4),
        ]  # fmt: skip
        assert [r["evicting"] for r in results] == [0, 4, 3]
        assert all(0 <= r["rouge2"] <= r["rouge1"] <= 1 and 4 <= r["new_tokens"] <= 24 for r in results)
        names = sorted(path.name for path in (out / "predictions").iterdir())
        assert names == ["full.jsonl", "h2o-16.jsonl", "h2o-32.jsonl"]
        assert "| h2o | 16 |" in (out / "summarize.md").read_text()
        assert (out / "summarize.png").exists()

        whole = (out / "predictions" / "h2o-16.jsonl").read_text()
        (out / "predictions" / "h2o-16.jsonl").unlink()
        sorted((out / "parts").iterdir())[0].write_bytes(b"torn")
        again = invoke("h2o-compare", *base, "--limit", "4", "--out", out, "-q")
        assert again.exit_code == 0, again.stderr
        made = {line["index"]: line["text"] for line in records((out / "predictions" / "h2o-16.jsonl").read_text())}
        assert made == {line["index"]: line["text"] for line in records(whole)}
        for old, new in zip(results, records(again.stdout)[1:], strict=True):
            assert {**old, "tok_s": 0} == {**new, "tok_s": 0}

        other = invoke("h2o-compare", *base, "--out", out, "--sample", "-q")
        assert other.exit_code == 1
        assert "another run" in other.stderr

    def test_summarize_says_where_nothing_is_evicted(self, tiny_folder: Path, tmp_path: Path) -> None:
        file = written(tmp_path / "requests.jsonl", [{"article": "word " * 20, "summary_gt": "word", "max_tokens": 4}])
        base = ["summarize", "-m", tiny_folder, "--requests", file, "--policies", "h2o", "--windows", "16,200,300"]
        done = invoke("h2o-compare", *base)
        assert done.exit_code == 0, done.stderr
        assert "At 200 and 300 nothing was evicted: no request exceeds that." in " ".join(done.stderr.split())

    def test_summarize_by_ratios_and_by_bytes(self, tiny_folder: Path, tmp_path: Path) -> None:
        """Regression: both ended in "leave out --window", which nobody had given."""
        lines = [{"article": "word " * count, "summary_gt": "word", "max_tokens": 4} for count in (100, 300)]
        file = written(tmp_path / "requests.jsonl", lines)
        base = ["summarize", "-m", tiny_folder, "--requests", file, "--policies", "full,h2o", "--jsonl", "-"]
        done = invoke("h2o-compare", *base, "--heavy_ratio", "0.1", "--recent_ratio", "0.1", "--sinks", "4")
        assert done.exit_code == 0, done.stderr
        run, full, h2o = records(done.stdout)
        assert run["window"] == [None, None]
        assert full["windows"] is None
        low, high = h2o["windows"]
        assert low - 4 == pytest.approx(run["prompt_tokens"] / 4 * 2 * 0.2, abs=2)
        assert high - 4 == pytest.approx(run["prompt_tokens"] * 3 / 4 * 2 * 0.2, abs=2)
        assert f"{low} to {high}" in done.stderr
        sized = invoke("h2o-compare", *base, "--cache-size", "8KiB")
        assert sized.exit_code == 0, sized.stderr
        (window,) = {*records(sized.stdout)[2]["windows"]}
        assert records(sized.stdout)[2]["window"] == window != 256
        both = invoke("h2o-compare", *base, "--recent-ratio", "0.1", "--windows", "32")
        assert (both.exit_code, both.stderr.count("\n")) == (2, 1)
        assert "leave out --windows" in both.stderr

    def test_requests_beyond_the_context(self, tiny_folder: Path, tmp_path: Path) -> None:
        """Regression: one request that full cannot read ended the whole run."""
        lines = [{"article": "word " * count, "summary_gt": "word", "max_tokens": 4} for count in (50, 900, 60)]
        file = written(tmp_path / "requests.jsonl", lines)
        base = ["summarize", "-m", tiny_folder, "--requests", file, "--windows", "32", "--jsonl", "-"]
        done = invoke("h2o-compare", *base, "--policies", "full,recent,h2o")
        assert done.exit_code == 0, done.stderr
        found = {r["policy"]: (r["n"], r["left_out"]) for r in records(done.stdout)[1:]}
        assert found == {"full": (2, 1), "recent": (3, 0), "h2o": (3, 0)}
        assert "full leaves out 1 of 3 requests: up to 90" in done.stderr
        written(file, lines[1:2])
        alone = invoke("h2o-compare", *base, "--policies", "full,h2o")
        assert [r["policy"] for r in records(alone.stdout)[1:]] == ["h2o"], alone.stderr
        none = invoke("h2o-compare", *base, "--policies", "full", "-q")
        assert (none.exit_code, none.stderr.count("\n")) == (2, 1)
        assert "use --positions gap or rolling" in none.stderr

    def test_chunks_make_a_difference(self, tiny_folder: Path, tmp_path: Path) -> None:
        prompts = ["one two three " * 12, "The quick brown fox. " * 9, "a b c d e " * 20]
        file = written(tmp_path / "requests.jsonl", [{"prompt": prompt, "max_tokens": 8} for prompt in prompts])

        def texts(name: str, *more: object) -> list[str]:
            base = ["summarize", "-m", tiny_folder, "--requests", file, "--policies", "h2o", "--windows", "24"]
            done = invoke("h2o-compare", *base, "--out", tmp_path / name, "--dtype", "float32", "-q", *more)
            assert done.exit_code == 0, done.stderr
            made = records((tmp_path / name / "predictions" / "h2o-24.jsonl").read_text())
            assert all(line["rouge"] is None for line in made), "there is no reference"
            return [line["text"] for line in made]

        whole = texts("whole")
        assert texts("eager", "--engine", "eager") == whole
        assert texts("chunked", "--prefill", "chunked", "--chunk", "4") != whole

    @pytest.mark.parametrize(("content", "words"), [(b"", "0 tokens"), (b"a\xff", "not UTF-8 at byte 1")])
    def test_bad_texts(self, tiny_folder: Path, tmp_path: Path, content: bytes, words: str) -> None:
        text = tmp_path / "text.txt"
        text.write_bytes(content)
        done = invoke("h2o-compare", "nll", "-m", tiny_folder, "--text", text, "-q")
        assert done.exit_code == 1
        assert words in done.stderr
