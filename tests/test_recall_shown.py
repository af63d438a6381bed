"""What a person sees of recall: lines before a reply, /recall, records, recordings, /why, and long texts."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from h2o_stream.cache.counts import CacheCounts
from h2o_stream.recall.passage import Candidate, Passage, Recalled, Verdict
from h2o_stream.session.metadata import TurnTokens
from h2o_stream.session.recording import Recorder, read_recording
from h2o_stream.session.retention import RetainedText, RetainedTurn
from h2o_stream.session.turn import Timings, Turn
from h2o_stream.ui.documents import split_question
from h2o_stream.ui.heatmap import heatmap
from h2o_stream.ui.recall import candidates_table, recalled_line
from h2o_stream.ui.terminal import SafeConsole

CLARA = Candidate(
    Passage(3, "user", "My sister Clara works as a dentist. We met in May.", 40, 53),
    "My sister Clara works\nas a dentist.",
    score=0.83127,
    terms=("Clara", "dentist"),
    held=0.04,
    tokens=9,
    verdict="recalled",
)


def turn(*recalled: Candidate) -> Turn:
    counts = CacheCounts(seen=9, cached=8, sinks=1, pinned=2, heavy=2, recent=3, window=8, nbytes=100)
    return Turn(4, "Where?", "There.", Timings(), counts, 5, "stop", recalled=recalled)


def drawn(shown: object, width: int = 120) -> str:
    out = io.StringIO()
    SafeConsole(file=out, width=width, markup=False, emoji=False, highlight=False).print(shown)
    return out.getvalue()


class TestLines:
    def test_a_line(self) -> None:
        assert recalled_line(CLARA, 80) == "recalled from turn 3: My sister Clara works as a dentist."
        assert recalled_line(CLARA, 30) == "recalled from turn 3: My sist…"

    @given(st.text(max_size=60), st.integers(1, 60))
    def test_it_fits(self, excerpt: str, width: int) -> None:
        line = recalled_line(replace(CLARA, excerpt=excerpt), width)
        assert cell_len(line) <= width
        assert "\n" not in line


class TestTable:
    def test_every_verdict(self) -> None:
        found = [replace(CLARA, verdict=verdict) for verdict in get_args(Verdict)]
        shown = drawn(candidates_table(found))
        for words in (*get_args(Verdict), "0.83", "4%", "you", "Clara, dentist", "My sister Clara works as a dentist."):
            assert words in shown

    def test_nothing_is_cut_off_in_a_narrow_terminal(self) -> None:
        model = replace(CLARA, passage=replace(CLARA.passage, turn=120_000, role="assistant"), verdict="still held")
        words = " ".join(drawn(candidates_table([model]), width=80).split())
        assert "120000 0.83 4% still held model" in words
        for word in CLARA.excerpt.split():
            assert word in words


class TestRecords:
    def test_a_turn(self) -> None:
        assert turn(CLARA).record()["recalled"] == [
            {"turn": 3, "role": "user", "text": CLARA.excerpt, "score": 0.8313, "tokens": 9}
        ]
        assert turn().record()["recalled"] == []

    def test_recordings(self, tmp_path: Path) -> None:
        events = [Recalled((CLARA, replace(CLARA, terms=()))), turn(CLARA)]
        with Recorder(tmp_path / "run.rec", "title") as recorder:
            for event in events:
                recorder.add_event(event)
        _, recorded = read_recording(tmp_path / "run.rec")
        assert [event for _, event in recorded] == events


class TestWhy:
    @pytest.mark.parametrize("recalled", [False, True])
    def test_what_was_read_again_is_underlined(self, recalled: bool) -> None:
        pieces = [RetainedText(0, "said", 1.0), RetainedText(1, "again", 1.0, recalled)]
        shown = heatmap([RetainedTurn(TurnTokens(1, 0, 2), 1.0, pieces)], "all layers")
        underlined = {shown.plain[span.start : span.end] for span in shown.spans if "underline" in str(span.style)}
        assert underlined == ({"again", "\nunderlined"} if recalled else set())
        assert ("underlined: read again by recall" in shown.plain) == recalled


class TestQuestions:
    @pytest.mark.parametrize(
        ("text", "parts"),
        [
            ("One.\nTwo.", ("", "One.\nTwo.")),
            ("One.\n\nTwo?", ("One.", "Two?")),
            ("One.\n\nTwo.\n \n\t\nThree,\nreally?\n\n", ("One.\n\nTwo.", "Three,\nreally?")),
            ("One.\r\n\r\nTwo?", ("One.", "Two?")),
            ("", ("", "")),
        ],
    )
    def test_the_last_paragraph(self, text: str, parts: tuple[str, str]) -> None:
        assert split_question(text) == parts

    @given(st.text("a \n"))
    def test_nothing_is_lost(self, text: str) -> None:
        body, question = split_question(text)
        assert f"{body}\n{question}".split() == text.split()
        assert question or not text.strip()
