"""Every setting and every default. Imports no torch and no command-line library.

``None`` in a config stands for the default of the policy or the model; `CacheConfig.plan` resolves it.
"""

from h2o_stream.config.cache import (
    AUTO_MEMORY_SHARE,
    AUTO_QUERIES,
    AUTO_STEP_SHARE,
    AUTO_WINDOWS,
    DEFAULT_CHUNK,
    DEFAULT_SPAN,
    DEFAULT_WINDOW,
    EXACT_SINKS,
    KV_BITS,
    MIN_EVICTABLE,
    PREFILL_STEP,
    PREFILL_STEP_MAX,
    PREFILL_WORK,
    RESIDUAL,
    SIZED_KV_BITS,
    CacheConfig,
    CacheDevice,
    CachePlan,
    prefill_step,
)
from h2o_stream.config.conversation import (
    AUTOMATIC_BYTES,
    CHAT_RECALL,
    EFFORT_VARIABLE,
    THINKING_VARIABLES,
    THINKING_WORDS,
    AtContext,
    ChatConfig,
    EngineChoice,
    RecallConfig,
    RecallMode,
    Settings,
    ThinkMode,
)
from h2o_stream.config.model import DEFAULT_MODEL, DTYPES, HUB_ANSWER_S, QUANTIZATIONS, ModelConfig
from h2o_stream.config.policies import (
    DEFAULT_POLICY,
    LONG_TERM_DECAY,
    LONG_TERM_DISTANCE,
    POLICIES,
    Budgets,
    PolicyDefaults,
    Positions,
)
from h2o_stream.config.sampling import (
    BENCH,
    BENCH_TEMPERATURES,
    DEFAULT_DRY_MULTIPLIER,
    DEFAULT_TEMPERATURE,
    DEFAULT_TOP_K,
    DEFAULT_TOP_P,
    FOCUSED_TEMPERATURE,
    MODEL_SAMPLING,
    SamplingConfig,
    model_sampling,
)
from h2o_stream.config.serve import ServeConfig
from h2o_stream.config.speculation import (
    FORCED,
    MATCHED_TOKENS,
    MAX_COST_FACTOR,
    MIN_GAIN,
    PASS_COSTS,
    RIGHT_GUESSES,
    SEARCHED_TOKENS,
    SPECULATED_BYTES,
    SPECULATED_LOGITS,
    SPECULATED_SHARE,
    STRUCTURE,
    SpeculateMode,
)
