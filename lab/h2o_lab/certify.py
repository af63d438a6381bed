"""Compares what is computed of a model's files without torch with transformers' model of the same files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import typer

from h2o_stream.base.progress import ignore
from h2o_stream.base.startup import importing
from h2o_stream.config import ModelConfig
from h2o_stream.errors import H2OStreamError
from h2o_stream.session.jsonl import JsonlWriter


@dataclass(frozen=True)
class CertifyOptions:
    """Compare how h2o-chat reads a model, without torch, with transformers: tokens, logits, and packed weights on disk.

    Needs the memory of both. The exit code is 1 if there is a difference.
    """

    name: Annotated[
        str, typer.Argument(help="The model, in place of --model.", metavar="MODEL", show_default=False)
    ] = ""
    model: ModelConfig = field(default_factory=ModelConfig)

    def run(self, terminal: Any, records: JsonlWriter) -> None:
        """Say whether there is a difference; see `catalog.COMMANDS`."""
        with importing():
            differences = certify(self, lambda line: terminal.note(f"{line} ...", style="dim"))
        name = self.name or self.model.model
        records.write({"type": "certificate", "model": name, "differences": differences})
        if differences:
            raise H2OStreamError(f"{name}: {'; '.join(differences)}")
        terminal.note(f"{name}: tokens and logits are those of transformers")


def certify(options: CertifyOptions, say: Callable[[str], None]) -> list[str]:
    """The differences between both readings of a model, a line each; nothing if there are none.

    `say` gets a line before what takes long.

    Raises:
        H2OStreamError: it cannot be loaded without torch, or through transformers.
    """
    from h2o_stream.attachment.verification import Verification
    from h2o_stream.loading.loading import open_source
    from h2o_stream.loading.transformers_model import load
    from h2o_stream.models.find import find, local_path
    from h2o_stream.native.description import DescriptionError

    config = replace(options.model, model=options.name or options.model.model, device="cpu")
    try:
        path = local_path(find(config.model, config.offline), config.offline)
        source = open_source(config, path, say)
        say("comparing packed weights on disk with the files")
        problems = [line] if (line := _damage(source)) else []
        description, tokenizer = source.describe(ignore), source.tokenizer()[0]
    except DescriptionError as error:
        raise H2OStreamError(f"{config.model} is read through transformers anyway: {error}") from error
    say("reading it through transformers")
    through = replace(config, dtype=source.dtype, quantize=source.quantize, offline=True)
    loaded = load(through, source=str(source.path), from_packed=False)
    problems += _tokenizer_differences(tokenizer, loaded.tokenizer)
    say("comparing logits")
    model = source.model(description)
    precise = replace(model, description=replace(description, dtype="float32"))
    makes = (lambda config, each=each: each.serve(config).forward for each in (model, precise))
    line = Verification(loaded.model, "gap", "auto", ()).why_not_served(*makes)
    return [*problems, line] if line else problems


def _damage(source: Any) -> str:
    """A line if packed weights on disk are not those of the files; they are removed then."""
    from h2o_stream.models.packed_cache import folder_lock

    folder = source.folder
    if folder is None or not folder.exists() or not (name := source.packed_difference()):
        return ""
    with folder_lock(folder):
        shutil.rmtree(folder, ignore_errors=True)
    return f"{name} of the packed weights on disk was damaged; they are removed, and packed anew by the next start"


def _tokenizer_differences(ours: Any, theirs: Any) -> list[str]:
    """How two tokenizers may give different tokens. Which are called special changes none."""
    rules = []
    for tokenizer in (ours, theirs):
        rule = json.loads(tokenizer.backend_tokenizer.to_str())
        for token in rule["added_tokens"]:
            token.pop("special")
        rules.append(rule)
    names = [name for name in rules[0].keys() | rules[1].keys() if rules[0].get(name) != rules[1].get(name)]
    return [f"the tokenizers differ: {', '.join(sorted(names))}"] if names else []
