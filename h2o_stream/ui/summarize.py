"""Shows ``h2o-compare summarize``: progress, predictions as they are made, a table and a plot of ROUGE by window."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from h2o_stream.compare.results import identity, make_folder, writing
from h2o_stream.compare.summarize import ROUGE, Prediction, Rouge, answer, encode
from h2o_stream.config import AnswerConfig, CacheConfig, ModelConfig
from h2o_stream.errors import DataError
from h2o_stream.models.load import load
from h2o_stream.session.lines import read_objects
from h2o_stream.session.records import Records, run_record
from h2o_stream.session.requests import Request
from h2o_stream.ui.plots import Curve, plot, require_matplotlib
from h2o_stream.ui.progress import progress_bars
from h2o_stream.ui.tables import figures_table, markdown_table
from h2o_stream.ui.terminal import Terminal

_HEADER = ("policy", "window", "ROUGE-1", "ROUGE-2", "ROUGE-L", "to full", "tokens", "tok/s")
_LEGEND = "ROUGE F-measures in %; to full: ROUGE-2 as a part of the full cache's"


def compare_summaries(
    model_config: ModelConfig,
    configs: Sequence[CacheConfig],
    requests: Sequence[Request],
    how: AnswerConfig,
    out: Path | None,
    terminal: Terminal,
    records: Records,
) -> None:
    """Every policy and window on the same requests.

    Args:
        model_config: which model.
        configs: the policies and windows, ``full`` first.
        requests: what is answered.
        how: drawn or not, and how many at once.
        out: a folder for the table, the plot and the predictions; None for none of them.
        terminal: where progress and the table go.
        records: gets a record for the run and one per policy and window.

    Raises:
        DataError: the folder cannot be written, or holds predictions of another run.
        ConfigError: a prompt is longer than the model's context.
        H2OStreamError: rouge-score is not installed.
    """
    rouge = Rouge()
    if out is not None:
        require_matplotlib()
        make_folder(out / "predictions")
    loaded = load(model_config, notify=terminal.note)
    prompts = encode(loaded.tokenizer, loaded.model, requests)
    records.write(
        run_record(
            "h2o-compare summarize",
            model=loaded.name,
            policy=[config.policy for config in configs],
            window=[config.window for config in configs],
            requests=len(requests),
            prompt_tokens=fmean(map(len, prompts)),
            **asdict(how),
        )
    )
    rows: list[dict[str, Any]] = []
    with progress_bars(terminal) as progress:
        for config in configs:
            label = config.policy if config.policy == "full" else f"{config.policy} {config.window}"
            kept = _Predictions(out, label, {**asdict(how), **identity(loaded.model, config)}, requests)
            task = progress.add_task(label, total=len(requests), completed=len(kept.made))
            todo = [index for index in range(len(requests)) if index not in kept.made]
            for part in answer(loaded.model, loaded.tokenizer, config, requests, prompts, todo, how, rouge):
                kept.add(part)
                progress.update(task, completed=len(kept.made))
            rows.append(_record(config, list(kept.made.values())))
            records.write(rows[-1])
    title = f"{loaded.name}, {len(requests)} requests, prompts of {fmean(map(len, prompts)):.0f} tokens in the mean"
    cells = [_row(row, rows) for row in rows]
    if out is not None:
        with writing(out):
            (out / "summarize.md").write_text(markdown_table(f"{title}; {_LEGEND}", _HEADER, cells), encoding="utf-8")
            _plot(rows, out / "summarize.png", title)
        terminal.note(f"table, plot and predictions are in {out}")
    if not terminal.quiet:
        terminal.console.print(f"{title} ({_LEGEND})", markup=False, highlight=False)
        terminal.console.print(figures_table("", _HEADER, cells))


class _Predictions:
    """The answers of one policy and window; in a folder they stand one a line, written as they are made.

    The first line says what they are answers of, every other one an answer.

    Raises:
        DataError: the folder holds those of another run, or cannot be written.
    """

    def __init__(self, out: Path | None, label: str, key: dict[str, Any], requests: Sequence[Request]) -> None:
        self.made: dict[int, Prediction] = {}
        self._requests = requests
        self._path = out and out / "predictions" / f"{label.replace(' ', '-')}.jsonl"
        if self._path is None:
            return
        key = json.loads(json.dumps({"type": "predictions", **key}))
        if self._path.exists():
            with writing(self._path):
                whole, _, torn = self._path.read_text(encoding="utf-8").rpartition("\n")
                if torn:
                    self._path.write_text(whole + "\n" if whole else "", encoding="utf-8")
        lines = [line for _, line in read_objects(self._path, "--out")] if self._path.exists() else []
        if lines and lines[0] != key:
            raise DataError(f"--out {self._path} holds predictions of another run; choose another folder")
        for line in lines[1:]:
            self._take(line)
        if not lines:
            self._write([key])

    def _take(self, line: dict[str, Any]) -> None:
        index = line["index"]
        if index < len(self._requests) and line["prompt"] == self._requests[index].prompt:
            rouge = line["rouge"] and tuple(line["rouge"])
            self.made[index] = Prediction(index, line["text"], line["new_tokens"], line["seconds"], rouge)

    def add(self, part: Sequence[Prediction]) -> None:
        """Keep answers."""
        self.made |= {prediction.index: prediction for prediction in part}
        asked = [self._requests[prediction.index] for prediction in part]
        self._write(
            {**asdict(prediction), "reference": request.reference, "prompt": request.prompt}
            for prediction, request in zip(part, asked, strict=True)
        )

    def _write(self, lines: Any) -> None:
        if self._path is not None:
            with writing(self._path), self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _record(config: CacheConfig, predictions: Sequence[Prediction]) -> dict[str, Any]:
    scored = [prediction.rouge for prediction in predictions if prediction.rouge is not None]
    means = [fmean(column) for column in zip(*scored, strict=True)] if scored else [None] * len(ROUGE)
    tokens = sum(prediction.new_tokens for prediction in predictions)
    return {
        "type": "summarize",
        "policy": config.policy,
        "window": None if config.policy == "full" else config.window,
        "n": len(predictions),
        **dict(zip(ROUGE, means, strict=True)),
        "new_tokens": tokens,
        "tok_s": tokens / sum(prediction.seconds for prediction in predictions),
    }


def _row(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    full = next((other["rouge2"] for other in rows if other["policy"] == "full"), None)
    return [
        row["policy"],
        str(row["window"] or "-"),
        *("-" if row[name] is None else f"{100 * row[name]:.2f}" for name in ROUGE),
        f"{row['rouge2'] / full:.3f}" if full and row["rouge2"] is not None else "-",
        f"{row['new_tokens'] / row['n']:.1f}",
        f"{row['tok_s']:.1f}",
    ]


def _plot(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    windows = sorted({row["window"] for row in rows if row["window"]})
    curves = []
    for policy in dict.fromkeys(row["policy"] for row in rows if row["rouge2"] is not None):
        own = {row["window"]: 100 * row["rouge2"] for row in rows if row["policy"] == policy}
        points = {window: own.get(window, own.get(None)) for window in windows}
        curves.append(Curve(policy, list(points), [value for value in points.values() if value is not None]))
    if windows and curves:
        plot(path, f"ROUGE-2 by window\n{title}", ("window, tokens", "ROUGE-2, %"), curves)
