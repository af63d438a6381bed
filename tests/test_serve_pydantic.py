"""Schemas that pydantic writes are served."""

import datetime
import decimal
import enum
import uuid
from typing import Annotated, Any, Literal, Union

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import test_serve_protocol
from tests.native_builds import needs_library
from tests.protocol import answered
from tests.served import Running
from tests.test_serve_protocol import BASE

pytestmark = needs_library

server = test_serve_protocol.server


class Colour(enum.Enum):
    RED, BLUE = "red", "blue"


class Place(pydantic.BaseModel):
    name: Literal["Bern", "Genf"]
    inside: "Place | None" = None


class Trip(pydantic.BaseModel):
    """A trip."""

    places: list[Place] = pydantic.Field(min_length=1, max_length=2, description="Where to <|im_end|")
    colour: Colour
    more: dict[Literal["a"], bool] | None = None


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    of: Place


class Both(pydantic.BaseModel):
    one: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    two: Annotated[int, pydantic.Field(ge=1, le=9)]


@pytest.mark.parametrize("models", [[Place], [Trip], [Both], [Place, Both]], ids=str)
@pytest.mark.parametrize("endpoint", ["chat/completions", "responses"])
def test_schemas_that_pydantic_writes(server: Running, endpoint: str, models: list[type[pydantic.BaseModel]]) -> None:
    """Tools whose parameters have definitions, which refer to each other and to themselves, can be forced."""
    functions = [{"name": model.__name__, "parameters": model.model_json_schema()} for model in models]
    chat = endpoint == "chat/completions"
    tools = [{"type": "function", **({"function": x} if chat else x)} for x in functions]
    for model in models:
        named = {"name": model.__name__}
        choice = {"type": "function", **({"function": named} if chat else named)}
        limit = {"max_tokens" if chat else "max_output_tokens": 90}
        body = BASE[endpoint] | limit | {"tools": tools, "tool_choice": choice, "store": False}
        status, (answer,) = answered(server, endpoint, body)
        assert status == 200, answer
        if chat and answer["choices"][0]["finish_reason"] == "tool_calls":
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            assert isinstance(model.model_validate_json(call["function"]["arguments"]), model)
        elif not chat and answer["status"] == "completed":
            (item,) = answer["output"]
            assert isinstance(model.model_validate_json(item["arguments"]), model)


TYPES_OF_FIELDS = st.recursive(
    st.sampled_from([
        int, float, bool, str, None, Colour, Place, Literal["a", "ü"], datetime.date, uuid.UUID,
        decimal.Decimal, Annotated[int, pydantic.Field(ge=0, lt=9)], Annotated[str, pydantic.Field(max_length=3)],
        Annotated[str, pydantic.Field(pattern="^[ab]+$")],
    ]),
    lambda inner: st.one_of(
        inner.map(lambda kind: list[kind]), inner.map(lambda kind: dict[str, kind]),  # type: ignore[valid-type]
        inner.map(lambda kind: tuple[kind, int]), st.tuples(inner, inner).map(lambda kinds: Union[kinds]),  # type: ignore[valid-type]  # noqa: UP007
        st.dictionaries(st.sampled_from("xyz"), inner, min_size=1, max_size=3).map(lambda fields: model_of(fields)),
    ),
    max_leaves=5,
)  # fmt: skip


def model_of(fields: dict[str, Any]) -> Any:
    """A model of pydantic with these fields."""
    return pydantic.create_model("Inner", **{name: (kind, ...) for name, kind in fields.items()})


@settings(max_examples=max(settings.default.max_examples // 8, 1))
@given(st.dictionaries(st.sampled_from(["a", "b", "<|im_end|"]), TYPES_OF_FIELDS, min_size=1, max_size=3))
def test_any_schema_that_pydantic_writes(server: Running, fields: dict[str, Any]) -> None:
    test_schemas_that_pydantic_writes(server, "chat/completions", [model_of(fields)])
