"""The files that are mutated: one of each family that is described without torch."""

from pathlib import Path

from gguf import GGMLQuantizationType
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests import test_checkpoints, test_gguf_families, test_gguf_hybrids, test_runtime
from tests.gguf_files import write_model
from tests.hostile_models import Folder, Gguf


def gguf_names() -> list[str]:
    """Names of families with files of GGUF."""
    return [*test_gguf_families.CASES, *test_gguf_hybrids.CASES, *test_runtime.MODELS]


def gguf_seed(name: str, path: Path) -> Gguf:
    """The file of a family, written to this path."""
    tables = None
    if name in test_gguf_families.CASES:
        case = test_gguf_families.CASES[name]
        architecture, make, keys, tables = case.architecture, case.make, case.keys, case.tables
    elif name in test_gguf_hybrids.CASES:
        architecture, make, keys = test_gguf_hybrids.CASES[name]
    else:
        architecture, make, keys = test_runtime.MODELS[name]
    write_model(path, make(), architecture, GGMLQuantizationType.Q8_0, tables, **keys)
    return Gguf.read(path)


def checkpoint_seed(name: str, path: Path) -> Folder:
    """The checkpoint of a family, written to this folder."""
    words = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", "the"])}
    backend = Tokenizer(models.WordLevel(words, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    test_checkpoints.MODELS[name]().save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>").save_pretrained(path)
    return Folder.read(path)
