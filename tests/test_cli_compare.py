"""Comparisons as run from the command line."""

from pathlib import Path

import pytest

from tests.commands import invoke, records
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

    @pytest.mark.parametrize(("content", "words"), [(b"", "0 tokens"), (b"a\xff", "not UTF-8 at byte 1")])
    def test_bad_texts(self, tiny_folder: Path, tmp_path: Path, content: bytes, words: str) -> None:
        text = tmp_path / "text.txt"
        text.write_bytes(content)
        done = invoke("h2o-compare", "nll", "-m", tiny_folder, "--text", text, "-q")
        assert done.exit_code == 1
        assert words in done.stderr
