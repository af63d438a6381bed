"""Values of options that are converted without typer: to what typer makes of them, or not at all."""

from typing import Annotated, Any, Literal, Optional

import pytest
import typer
import typer.testing
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, TokenType
from typer.core import TyperCommand

from h2o_stream.cli.conversion import convert_plainly
from h2o_stream.native import gguf_types


def command(kind: Any, default: Any, plainly: bool, **settings: Any) -> tuple[typer.Typer, list[Any]]:
    """A command with one option, and what it was called with."""
    app, seen = typer.Typer(), list[Any]()
    annotated = Annotated[kind, typer.Option("--value", **settings)]

    class Command(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            for parameter in self.get_params(ctx) if plainly else ():
                convert_plainly(parameter, annotated if parameter.name == "value" else None)
            return super().parse_args(ctx, args)

    def run(value: Any = default) -> None:
        seen.append(value)

    run.__annotations__["value"] = annotated
    app.command(cls=Command)(run)
    return app, seen


@pytest.mark.parametrize(
    ("kind", "default", "settings"),
    [
        (int, 256, {}),
        (int | None, None, {}),
        (Optional[int], None, {}),  # noqa: UP045
        (int | None, None, {"min": 1}),
        (float | None, None, {}),
        (str | None, None, {}),
        (str, "auto", {}),
        (Literal["auto", "off"], "auto", {"case_sensitive": False}),
        (Literal["a", "b"] | None, None, {}),
        (list[str] | None, None, {}),
    ],
)
def test_as_typer_converts(kind: Any, default: Any, settings: dict[str, Any]) -> None:
    texts = ["2", "-2", "0", "+3", "007", "2.0", ".5", "1e3", "nan", "2_0", "²", "auto", "AUTO", "", " 2", "a\nb"]
    for arguments in ([], *(["--value", text] for text in texts)):
        outcomes = []
        for plainly in (False, True):
            app, seen = command(kind, default, plainly, **settings)
            outcomes.append((typer.testing.CliRunner().invoke(app, arguments).exit_code, seen or None))
        by_typer, converted = outcomes
        assert converted[0] == by_typer[0], arguments
        assert repr(converted[1]) == repr(by_typer[1]), arguments


def test_types_of_gguf_files() -> None:
    assert {(kind.name, kind.value): size for kind, size in gguf_types.BLOCKS.items()} == {
        (kind.name, kind.value): size for kind, size in GGML_QUANT_SIZES.items()
    }
    assert {*gguf_types.TensorType.__members__} == {*GGMLQuantizationType.__members__}
    assert {kind.name: kind.value for kind in gguf_types.ValueType} == {kind.name: kind.value for kind in GGUFValueType}
    assert (gguf_types.CONTROL, gguf_types.USER_DEFINED) == (TokenType.CONTROL, TokenType.USER_DEFINED)
