"""Speed and memory over the tokens of a run, collected and drawn."""

from hypothesis import given
from hypothesis import strategies as st

from h2o_stream.session.report import MAX_ENTRIES, Timeline
from h2o_stream.session.turn import Timings
from h2o_stream.ui.timeline import bars, draw_timeline, draw_timelines


def course(tokens: int, growing: bool) -> Timeline:
    """A run of some tokens, 10 ms each: of a full cache that grows and slows, or of a constant one."""
    timeline = Timeline()
    for seen in range(1, tokens + 1):
        decode_s, cache_bytes = (0.01 * (1 + seen / tokens), 100 * seen) if growing else (0.01, 5000)
        timeline.add(seen, Timings(new_tokens=1, decode_s=decode_s, cache_bytes=cache_bytes))
    return timeline


class TestTimeline:
    @given(st.integers(1, 30_000), st.integers(1, 200))
    def test_nothing_is_lost_and_it_stays_small(self, tokens: int, step: int) -> None:
        timeline = Timeline()
        for seen in range(step, tokens + 1, step):
            timeline.add(seen, Timings(new_tokens=step, decode_s=0.5, cache_bytes=seen))
        columns = [column for column in timeline.columns(timeline.seen or 1, 1) if column]
        assert sum(column.new_tokens for column in columns) == tokens // step * step
        assert len(timeline._entries) <= MAX_ENTRIES

    def test_columns_have_no_holes(self) -> None:
        assert all(course(100, False).columns(100, 80)), "also where a column is finer than an entry"


class TestLines:
    def test_heights(self) -> None:
        assert bars([0, 1, 4, 8], 1, 8) == [" ▁▄█"]
        assert bars([0, 1, 8], 2, 8) == ["  █", " ▂█"]
        assert bars([0.001], 2, 8) == [" ", "▁"], "what is above 0 shows"

    def test_a_full_cache_grows_and_a_window_does_not(self) -> None:
        full, h2o = draw_timelines([course(2000, True), course(2000, False)], 91, 3, None)
        memory = {"full": full[3:6], "h2o": h2o[3:6]}
        assert memory["full"][0].plain.rstrip().endswith("█")
        assert memory["h2o"][0].plain.split("│")[1].strip() == "", "both are drawn to one scale"
        assert "195.3 KiB" in memory["full"][0].plain
        assert memory["h2o"][2].plain.split("│")[1] == "▁" * 80

    def test_the_context_is_a_mark_once_it_is_near(self) -> None:
        near, far = (draw_timeline(course(seen, True), 90, 2, 1000) for seen in (500, 100))
        assert near[-1].plain.split("context 1,000┘")[1].strip("─") == ""
        assert all("┊" in line.plain for line in near[:-1])
        assert far[-1].plain.endswith("100 tokens seen · context 1,000 later")

    def test_the_axis_is_not_cut(self) -> None:
        """Regression: "4 tokens seen" stood under a run of 1,024."""
        (drawn,) = (draw_timeline(course(1024, True), width, 1, 8192) for width in (40,))
        assert drawn[-1].plain.endswith("─1,024 tokens seen")

    def test_each_run_has_its_own_number_of_tokens(self) -> None:
        """Regression: a full cache that was far behind had "seen" as many as the other."""
        axes = [drawn[-1].plain for drawn in draw_timelines([course(900, True), course(1200, False)], 90, 1, 1000)]
        assert ["900 tokens seen" in axes[0], "1,200 tokens seen" in axes[1]] == [True, True]

    def test_a_text_that_is_read_has_memory_from_its_beginning(self) -> None:
        reading = Timeline()
        for seen in (400, 800):
            reading.add(seen, Timings(cache_bytes=1000 * seen))
        speed, memory, _ = draw_timeline(reading, 51, 1, None)
        assert speed.plain.startswith("  - tok/s │")
        assert memory.plain.split("│")[1] == "▄" * 22 + "▅" * 5 + "▆" * 5 + "▇" * 5 + "█" * 3

    @given(st.integers(0, 3000), st.integers(20, 200), st.integers(1, 5), st.none() | st.integers(1, 5000))
    def test_it_fits(self, tokens: int, width: int, rows: int, context: int | None) -> None:
        lines = draw_timeline(course(tokens, True), width, rows, context)
        assert len(lines) == 2 * rows + 1
        assert all(len(line.plain) <= width for line in lines)
