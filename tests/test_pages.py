"""Pages of comparisons: verdicts, charts and tables."""

import re
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from h2o_stream.compare.catalog import COMPARISONS
from h2o_stream.ui.format import shade
from h2o_stream.ui.pages import Chart, Curve, TableData, page_of, readable
from h2o_stream.ui.pages.nll import loss
from h2o_stream.ui.pages.speed import decoding
from h2o_stream.ui.plots import ChartStyle
from h2o_stream.ui.tables import data_table


def test_every_kind_has_a_page_or_needs_none() -> None:
    for kind in COMPARISONS:
        with pytest.raises((KeyError, IndexError)):
            page_of(kind, {}, [])


def test_no_chart_has_more_curves_than_colours() -> None:
    curves = [Curve(f"p{number}", [1], [1]) for number in range(20)]
    parts = readable(Chart("nll", "", ("x", "y"), curves))
    assert [part.name for part in parts] == ["nll", "nll-part2", "nll-part3"]
    assert all(part.curves[0].name == "p0" and len(part.curves) <= len(ChartStyle().colors) for part in parts)
    assert {curve.name for part in parts for curve in part.curves} == {curve.name for curve in curves}


def test_cells_are_colored_and_still_say_their_value() -> None:
    data = TableData("", ["depth", "100 tokens"], [["0%", "25%"], ["50%", "100%"]], [[None, 0.25], [None, 1.0]])
    console = Console(file=StringIO(), force_terminal=True, color_system="truecolor", width=40)
    console.print(data_table(data, 60))
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"\x1b\[30;48;2;(\d+);(\d+);\d+m +100%", drawn)
    assert shade(1.0)[1] > shade(1.0)[0]
    assert shade(0.0)[0] > shade(0.0)[1]
    plain = Console(file=StringIO(), width=40)
    plain.print(data_table(data, 60))
    assert "100%" in plain.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [100, 80])
def test_numbers_of_a_table_are_never_cut(width: int) -> None:
    """Regression: at 80 columns the intervals of nll ended in an ellipsis."""
    header = ("policy", "window", "MiB", "nll", "last half", "to full", "95%", "gap", "tok/s")
    figures = ["256", "6.00", "12.0622", "12.3043", "+0.0868", "-0.037 to +0.226", "-0.48", "1945"]
    data = TableData("a text", header, [["h2o-paper", *figures], ["expected-attention", *figures]])
    drawn = StringIO()
    Console(width=width, file=drawn, highlight=False).print(data_table(data, width))
    lines = drawn.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    whole = [line for line in lines if " ".join(line.split()).endswith(" ".join(figures))]
    assert len(whole) == 2
    assert whole[0].startswith("h2o-paper ")
    assert all(word in drawn.getvalue() for name in header for word in name.split())
    assert ("last half" in drawn.getvalue()) == (width == 100), "columns are apart where there is room"


class TestVerdicts:
    def test_loss_at_equal_bytes(self) -> None:
        added = {"full": None, "h2o": 0.01234, "sink": 0.0611, "random": 0.09, "recent": 0.5, "tova": 0.04}
        rates = [
            {"policy": policy, "window": 500, "cache_size": 6 << 20, "to_full": mean and {"mean": mean}}
            for policy, mean in added.items()
        ]
        assert loss(rates) == (
            "At 6 MiB, h2o loses 0.012 nats per token against the full cache, sink loses 0.061 and recent loses 0.5."
        )
        assert loss(rates[:1]) == "", "nothing was compared"

    def test_decoding_is_compared_at_a_history_that_all_reached(self) -> None:
        def at(engine: str, policy: str, history: int, speed: float) -> dict[str, Any]:
            name = f"{engine} {policy}".strip()
            rest = {"dtype": "bfloat16", "quantize": "auto" if policy else "none"}
            return {"engine": engine, "name": name, "policy": policy, "history": history, "decode_tok_s": speed, **rest}

        rates = [at("h2o-stream", "h2o", 256, 90), at("h2o-stream", "h2o", 2048, 84), at("h2o-stream", "h2o", 8192, 80)]
        rates += [at("llama.cpp", "", 256, 70), at("llama.cpp", "", 2048, 35)]
        assert decoding(rates) == (
            "After 2,048 tokens, h2o-stream h2o decodes 84 tokens/s, 2.4 times llama.cpp's (bfloat16)."
        )
        assert decoding(rates[:1] + rates[4:]) == "", "no history in common"
