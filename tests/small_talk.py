"""A model and a tokenizer small enough for thousands of conversations."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from h2o_stream import CacheConfig, Engine, SamplingConfig
from tests.fixtures import make_llama

WORDS = tuple(f"w{number}" for number in range(24))
_SPECIAL = ("<unk>", "<s>", "</s>", "<system>", "<user>", "<bot>")
_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}<system> {{ m.content }} </s>{% endif %}"
    "{% if m.role == 'user' %}<user> {{ m.content }} </s>{% endif %}"
    "{% if m.role == 'assistant' %}<bot> {{ m.content }} </s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<bot> {% endif %}"
)


def small_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer."""
    inner = Tokenizer(models.WordLevel({word: id for id, word in enumerate((*_SPECIAL, *WORDS))}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=["<system>", "<user>", "<bot>"],
    )  # fmt: skip
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def small_model() -> PreTrainedModel:
    """A model with the vocabulary of the tokenizer."""
    return make_llama(heads=1, layers=2, size=4, vocab=len(_SPECIAL) + len(WORDS))


def small_engine(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, policy: str = "h2o") -> Engine:
    """One that draws replies of a few tokens, and reads a few at a time."""
    sampling = SamplingConfig(temperature=1.0, seed=4, max_tokens=4)
    engine = Engine(model, tokenizer, CacheConfig(policy, 32, chunk=4), sampling)
    engine.prefill_step = 4
    return engine
