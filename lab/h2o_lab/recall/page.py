"""The page of ``h2o-compare recall``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from h2o_lab.phrases import counted, share, with_recall
from h2o_stream.ui.pages import Chart, Curve, Page, Record, TableData, curve_name, label, or_dash, stem

_HEADINGS = {
    "same": "asked in the same words",
    "other": "asked in other words",
    "contradicted": "updated, then asked for",
    "never": "never said (right: no fact is told instead)",
}


def page(run: Record, records: Sequence[Record]) -> Page:
    """Accuracy by policy and distance, a table for each kind of question, and one for the chat."""
    streams = [record for record in records if record["type"] == "recall"]
    chats = [record for record in records if record["type"] == "recall-chat"]
    tables = [_table(heading, kind, streams) for kind, heading in _HEADINGS.items()] if streams else []
    facts = counted(run["facts"], "fact")
    title = f"{run['model']}, {facts} planted in a chat about {stem(run['text'])} and asked for later"
    return Page(
        title,
        "right replies, and the mean margin of the right value in nats; (n): fewer questions, because "
        "a full cache is only asked inside the model's context",
        [*tables, *([_chat_table(chats)] if chats else [])],
        _charts(streams, title),
        _verdict(streams),
    )


def _verdict(records: Sequence[Record]) -> str:
    """The right replies at the largest distance that all were asked at."""
    runs = runs_of([record for record in records if record["kind"] == "same"])
    common = set.intersection(*({record["distance"] for record in group} for group in runs)) if runs else set()
    if not common:
        return ""
    distance = max(common)
    rates = {
        with_recall(curve_name(group[0]), group[0]): record["accuracy"]
        for group in runs
        for record in group
        if record["distance"] == distance
    }
    return share(rates, f"{distance:,} tokens after the fact", "gives", "right replies")


def runs_of(records: Sequence[Record]) -> list[list[Record]]:
    """The records of each policy, window and mode of recall, in order."""
    runs: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        runs.setdefault((label(record), record["window"], record["recall"]), []).append(record)
    return list(runs.values())


def _table(heading: str, kind: str, records: Sequence[Record]) -> TableData:
    records = [record for record in records if record["kind"] == kind]
    distances = sorted({record["distance"] for record in records})
    max_questions = max((record["questions"] for record in records), default=0)
    rows = []
    for group in runs_of(records):
        cells = {record["distance"]: _cell(record, max_questions) for record in group}
        rows.append([*names_of(group[0]), *(cells.get(distance, "-") for distance in distances)])
    header = ["policy", "window", "recall", *(f"{distance:,} tokens later" for distance in distances)]
    return TableData(f"{heading}; questions: {max_questions}", header, rows)


def _chat_table(records: Sequence[Record]) -> TableData:
    rows = []
    for group in runs_of(records):
        cells = {record["kind"]: _cell(record) for record in group}
        turns = (f"{group[0][name]:.1%}" for name in ("turns_recalling", "first_turns_recalling"))
        rows.append([*names_of(group[0]), *cells.values(), *turns])
    kinds = [record["kind"] for record in runs_of(records)[0]]
    header = ["policy", "window", "recall", *kinds, "other turns that recall", "first turns"]
    length = counted(records[0]["turns"], "turn")
    return TableData(f"at the end of a chat with {length} about other things", header, rows)


def names_of(record: Record) -> list[str]:
    """Policy, window and mode of recall."""
    return [label(record), or_dash(record["window"]), record["recall"]]


def _cell(record: Mapping[str, object], max_questions: int = 0) -> str:
    margin = "" if record["margin"] is None else f" {record['margin']:+.2f}"
    fewer = f" ({record['questions']})" if max_questions and record["questions"] != max_questions else ""
    return f"{record['accuracy']:.0%}{margin}{fewer}"


def _charts(records: Sequence[Record], title: str) -> list[Chart]:
    curves = [
        Curve(
            with_recall(curve_name(group[0]), group[0]),
            [record["distance"] for record in group],
            [record["accuracy"] for record in group],
            f"{label(group[0])} {group[0]['recall']}",
        )
        for group in runs_of([record for record in records if record["kind"] == "same"])
    ]
    axes = ("tokens since the fact", "right replies")
    return [Chart("recall", f"Right replies, by distance\n{title}", axes, curves, (-0.02, 1.02), "x")] if curves else []
