"""Markdown of replies, of which nothing is left out: tags, addresses of links, and long words of tables are shown."""

from __future__ import annotations

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown, TableElement

from h2o_stream.ui.terminal import folded

_PARSER = (
    MarkdownIt("commonmark", {"html": False})
    .enable(["strikethrough", "table"])
    .disable(["autolink", "image", "reference"])
)


class ReplyMarkdown(Markdown):
    """rich's Markdown, with lines that end where the model ended them, as poems and addresses do."""

    def __init__(self, text: str, code_theme: str) -> None:
        super().__init__("", code_theme, hyperlinks=False)
        self.parsed = _PARSER.parse(text)
        for token in self.parsed:
            for child in token.children or ():
                child.type = "hardbreak" if child.type == "softbreak" else child.type


class _FoldedTable(TableElement):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from map(folded, super().__rich_console__(console, options))  # type: ignore[arg-type]


ReplyMarkdown.elements = {**Markdown.elements, "table_open": _FoldedTable}
