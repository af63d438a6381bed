// Prompts through the slots of a layer: how the work on heads is shared among threads.

#include "prefill.h"

#include <atomic>
#include <vector>

#include "policies.h"
#include "threads.h"

namespace prefill {
namespace {

constexpr int64_t kDone = 0, kDoesNotFit = 1, kOutOfMemory = 2;

// Heads for each thread from which on it pays to give it whole ones.
constexpr int64_t kHeadsPerThread = 4;

// Numbers of keys and values for which memory is kept between calls: a prompt that is read whole needs more.
constexpr int64_t kMaxCachedElements = 4 << 20;

// One KV head of one stream.
struct Task {
  const Slots* slots;
  int64_t stream, head;  // the latter among those of the slots
  int64_t count;         // new tokens
  const int64_t* limits;
};

// What a call computes in, kept for the next one.
struct Workspace {
  std::vector<Head> heads;
  std::vector<Scratch> scratch;  // of each thread
};

// Calls `item` with numbers below `total` that no other thread has taken.
template <class Item>
void claim_all(std::atomic<int64_t>& next, int64_t total, Item work) {
  for (int64_t number; (number = next.fetch_add(1, std::memory_order_relaxed)) < total;) work(number);
}

// Every thread takes whole heads.
void run_heads(const AttentionLayer& layer, const NewTokens& tokens, const std::vector<Task>& tasks, int64_t threads,
               Workspace& space) {
  std::atomic<int64_t> next{0};
  parallel(threads, [&](const Worker& worker) {
    Head& head = space.heads[worker.index];
    Scratch& scratch = space.scratch[worker.index];
    claim_all(next, int64_t(tasks.size()), [&](int64_t number) {
      const Task& task = tasks[number];
      head.load_slots(layer, *task.slots, tokens, task.stream, task.head, task.count, task.limits);
      for (int64_t chunk = 0, all = head.chunks(); chunk < all; ++chunk) {
        for (int64_t block = 0; block < head.key_blocks(); ++block) head.prepare(block, scratch);
        for (int64_t split = 0; split < head.splits(); ++split) head.attend(split, scratch);
        head.evict();
      }
    });
  });
}

// All threads work on all heads, phase by phase.
void run_phases(const AttentionLayer& layer, const NewTokens& tokens, const std::vector<Task>& tasks, int64_t threads,
                Workspace& space) {
  const int64_t heads = int64_t(tasks.size());
  std::atomic<int64_t> next[3] = {};
  int64_t chunks = 0;
  for (const Task& task : tasks) chunks = std::max(chunks, (task.count + tokens.chunk - 1) / tokens.chunk);
  parallel(threads, [&](const Worker& worker) {
    Scratch& scratch = space.scratch[worker.index];
    for (int64_t i = worker.index; i < heads; i += worker.count) {
      const Task& task = tasks[i];
      space.heads[i].load_slots(layer, *task.slots, tokens, task.stream, task.head, task.count, task.limits);
    }
    worker.barrier();
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const auto active = [&](int64_t i) { return chunk * tokens.chunk < tasks[i].count; };
      // Units of work of all active heads, one after the other. A counter is set back a phase ahead of its use, when
      // no thread can be in the one that used it last.
      const auto phase = [&](int64_t number, auto units, auto work) {
        if (worker.index == 0) next[(number + 1) % 3].store(0, std::memory_order_relaxed);
        int64_t total = 0;
        for (int64_t i = 0; i < heads; ++i) total += active(i) ? units(space.heads[i]) : 0;
        claim_all(next[number], total, [&](int64_t unit) {
          int64_t i = 0;
          for (;; ++i) {
            const int64_t head_units = active(i) ? units(space.heads[i]) : 0;
            if (unit < head_units) break;
            unit -= head_units;
          }
          work(space.heads[i], unit);
        });
        worker.barrier();
      };
      phase(0, [](Head& head) { return head.key_blocks(); }, [&](Head& head, int64_t i) { head.prepare(i, scratch); });
      phase(1, [](Head& head) { return head.splits(); }, [&](Head& head, int64_t i) { head.attend(i, scratch); });
      phase(2, [](Head&) { return 1; }, [](Head& head, int64_t) { head.evict(); });
    }
  });
}

// Whether all tokens to hold have slots, with one to spare for the next token, and with a ring another.
bool fits(const AttentionLayer& layer, const Slots& slots, const int64_t* limits, int64_t chunks) {
  const bool quantized = layer.kv_bits < 16;
  if (quantized && slots.recent < layer.residual - 1) return false;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (limits[chunk] < 1 || limits[chunk] + 1 + quantized > slots.slot_count) return false;
  }
  return true;
}

void run(const AttentionLayer& layer, const NewTokens& tokens, const std::vector<Task>& tasks, int64_t slots,
         int64_t threads) {
  thread_local Workspace space;
  const int64_t count = int64_t(tasks.size());
  const bool whole_heads = threads == 1 || count >= kHeadsPerThread * threads;
  const int64_t heads = whole_heads ? threads : count, max_keys = slots + tokens.chunk;
  if (int64_t(space.heads.size()) < heads) space.heads.resize(heads);
  if (int64_t(space.scratch.size()) < threads) space.scratch.resize(threads);
  for (int64_t i = 0; i < heads; ++i) space.heads[i].reserve(layer, max_keys, tokens.chunk);
  for (int64_t i = 0; i < threads; ++i) space.scratch[i].reserve(layer, max_keys);
  whole_heads ? run_heads(layer, tokens, tasks, threads, space) : run_phases(layer, tokens, tasks, threads, space);
  if (heads * max_keys * (layer.head_size + layer.value_size) > kMaxCachedElements) space = Workspace();
}

}  // namespace
}  // namespace prefill

// Up to `new_tokens` tokens of each of B streams, packed to the left, in chunks: attend to what is held and to the
// chunk, score, then hold what is worth most.
//
// slots [B][groups]: of each stream the slots of this layer.
// counts [B]: new tokens of each stream. Outputs of the rest are zero.
// windows [B][groups][chunks]: tokens to hold after each chunk, at most.
// chunk: tokens between two evictions; 0 for all at once.
// query [B][Hq][Q][D], key, value [B][Hkv][Q][D], of which `strides` [3][3] are those of stream, head and token, in
// numbers; output [B][Q][Hq][value_size]; all float32 or bfloat16.
//
// Returns 0, or with nothing done 1 if there are not slots enough or 2 if there is not memory enough.
extern "C" int64_t h2o_prefill(const AttentionLayer* layer, const Slots* slots, int64_t groups, int64_t streams,
                               const int64_t* counts, const int64_t* limits, int64_t chunk, const void* query,
                               const void* key, const void* value, const int64_t* strides, int64_t new_tokens,
                               int64_t in_bfloat16, void* output, int64_t threads) {
  using namespace prefill;
  if (chunk <= 0 || chunk > new_tokens) chunk = new_tokens;
  if (new_tokens <= 0) return kDone;
  const int64_t chunks = (new_tokens + chunk - 1) / chunk;
  const NewTokens tokens{query, key, value, strides, output, new_tokens, chunk, in_bfloat16 != 0};
  try {
    std::vector<Task> tasks;
    std::vector<int64_t> seen;
    int64_t max_slots = 0;
    for (int64_t i = 0; i < streams * groups; ++i) {
      const int64_t count = counts[i / groups];
      seen.push_back(*slots[i].seen + count);
      if (!count) continue;
      const int64_t stream_chunks = (count + chunk - 1) / chunk;
      if (count < 0 || count > new_tokens || !fits(*layer, slots[i], limits + i * chunks, stream_chunks)) {
        return kDoesNotFit;
      }
      max_slots = std::max(max_slots, slots[i].slot_count);
      for (int64_t head = 0; head < slots[i].head_count; ++head) {
        tasks.push_back({slots + i, i / groups, head, count, limits + i * chunks});
      }
    }
    run(*layer, tokens, tasks, max_slots, std::max<int64_t>(threads, 1));
    for (int64_t i = 0; i < streams * groups; ++i) *slots[i].seen = seen[i];
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
  const int64_t bytes = layer->query_heads * layer->value_size * (in_bfloat16 ? 2 : 4);
  for (int64_t stream = 0; stream < streams; ++stream) {
    std::memset(static_cast<char*>(output) + (stream * new_tokens + counts[stream]) * bytes, 0,
                (new_tokens - counts[stream]) * bytes);
  }
  return kDone;
}
