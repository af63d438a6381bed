// Prefill of a layer: distributes the work on heads over threads.

#include "prefill.h"

#include <atomic>
#include <vector>

#include "check.h"
#include "policies.h"
#include "threads.h"

namespace prefill {
namespace {

// With at least this many heads per thread, every thread takes whole heads.
constexpr int64_t kHeadsPerThread = 4;

// Workspaces with more keys and values than this are freed after the call.
constexpr int64_t kMaxCachedElements = 4 << 20;

// One KV head of one stream.
struct Task {
  const Slots* slots;
  int64_t stream, head;  // `head` is the index within the group
  int64_t count;         // new tokens
  const int64_t* limits;
};

// Buffers that are reused between calls.
struct Workspace {
  std::vector<Head> heads;
  std::vector<Scratch> scratch;  // per thread
};

// Calls `work` with every number below `total` that no other thread has claimed.
template <class Item>
void claim_all(std::atomic<int64_t>& next, int64_t total, Item work) {
  for (int64_t number; (number = next.fetch_add(1, std::memory_order_relaxed)) < total;) work(number);
}

// Threads process whole heads.
void run_heads(const AttentionLayer& layer, const NewTokens& tokens, const std::vector<Task>& tasks, int64_t threads,
               Workspace& space) {
  std::atomic<int64_t> next{0};
  parallel(threads, [&](const Worker& worker) {
    Head& head = space.heads[worker.index];
    Scratch& scratch = space.scratch[worker.index];
    claim_all(next, int64_t(tasks.size()), [&](int64_t index) {
      const Task& task = tasks[index];
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
  for (const Task& task : tasks) chunks = std::max(chunks, tokens.chunks(task.count));
  parallel(threads, [&](const Worker& worker) {
    Scratch& scratch = space.scratch[worker.index];
    for (int64_t i = worker.index; i < heads; i += worker.count) {
      const Task& task = tasks[i];
      space.heads[i].load_slots(layer, *task.slots, tokens, task.stream, task.head, task.count, task.limits);
    }
    worker.barrier();
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const auto active = [&](int64_t i) { return chunk * tokens.chunk < tasks[i].count; };
      // The work units of all active heads, in order. A counter is reset one phase ahead of its use, when no thread can
      // still be in the phase that used it last.
      const auto phase = [&](int64_t phase_index, auto units, auto work) {
        if (worker.index == 0) next[(phase_index + 1) % 3].store(0, std::memory_order_relaxed);
        int64_t total = 0;
        for (int64_t i = 0; i < heads; ++i) total += active(i) ? units(space.heads[i]) : 0;
        claim_all(next[phase_index], total, [&](int64_t unit) {
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
      phase(
          0, [](Head& head) { return head.key_blocks(); }, [&](Head& head, int64_t i) { head.prepare(i, scratch); });
      phase(
          1, [](Head& head) { return head.splits(); }, [&](Head& head, int64_t i) { head.attend(i, scratch); });
      phase(
          2, [](Head&) { return 1; }, [](Head& head, int64_t) { head.evict(); });
    }
  });
}

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

bool fits(const AttentionLayer& layer, const LayerSlots& slots, const NewTokens& tokens) {
  for (int64_t stream = 0; stream < tokens.streams; ++stream) {
    const int64_t count = tokens.counts[stream];
    if (count < 0 || count > tokens.tokens) return false;
    for (int64_t group = 0; count && group < slots.groups; ++group) {
      const int64_t* limits = slots.limits_of(stream, group);
      if (!fits(layer, slots.streams[stream][group], limits, tokens.chunks(count))) return false;
    }
  }
  return true;
}

void attend(const AttentionLayer& layer, const LayerSlots& slots, const NewTokens& tokens, int64_t threads) {
  std::vector<Task> tasks;
  int64_t max_slots = 0;
  for (int64_t stream = 0; stream < tokens.streams; ++stream) {
    for (int64_t group = 0; tokens.counts[stream] && group < slots.groups; ++group) {
      const Slots& of_group = slots.streams[stream][group];
      max_slots = std::max(max_slots, of_group.slot_count);
      for (int64_t head = 0; head < of_group.head_count; ++head) {
        tasks.push_back({&of_group, stream, head, tokens.counts[stream], slots.limits_of(stream, group)});
      }
    }
  }
  run(layer, tokens, tasks, max_slots, std::max<int64_t>(threads, 1));
  if (tokens.starts) return;
  const int64_t bytes = layer.query_heads * layer.value_size * (tokens.in_bfloat16 ? 2 : 4);
  for (int64_t stream = 0; stream < tokens.streams; ++stream) {
    std::memset(static_cast<char*>(tokens.output) + (stream * tokens.tokens + tokens.counts[stream]) * bytes, 0,
                (tokens.tokens - tokens.counts[stream]) * bytes);
  }
}

}  // namespace prefill

// Feeds up to `new_tokens` tokens of each of B streams to one layer; see `prefill::attend`.
//
// slots [B][groups]: the slots of this layer, by stream.
// counts [B]: new tokens of each stream. The other outputs are zero.
// limits [B][groups][chunks]: maximum number of cached tokens after each chunk.
// chunk: tokens between evictions; 0 for all tokens.
// query [B][Hq][Q][D], key, value [B][Hkv][Q][D], with `strides` [3][3] in elements per stream, head and token;
// output [B][Q][Hq][value_size]; all float32 or bfloat16.
//
// Returns 0, 2 if there are too few slots, or what `code_of` does, with nothing changed.
extern "C" int64_t h2o_prefill(const AttentionLayer* layer, const Slots* slots, int64_t groups, int64_t streams,
                               const int64_t* counts, const int64_t* limits, int64_t chunk, const void* query,
                               const void* key, const void* value, const int64_t* strides, int64_t new_tokens,
                               int64_t in_bfloat16, void* output, int64_t threads) {
  if (new_tokens <= 0) return 0;
  if (chunk <= 0 || chunk > new_tokens) chunk = new_tokens;
  const prefill::NewTokens tokens{query,  key,     value,      strides, output,
                                  counts, streams, new_tokens, chunk,   in_bfloat16 != 0};
  const int64_t chunks = tokens.chunks(new_tokens);
  return code_of([&] {
    for (int64_t i = 0; i < streams; ++i) check_slots(*layer, slots + i * groups, groups);
    std::vector<const Slots*> by_stream;
    std::vector<int64_t> seen;
    for (int64_t i = 0; i < streams * groups; ++i) {
      if (i % groups == 0) by_stream.push_back(slots + i);
      seen.push_back(*slots[i].seen + counts[i / groups]);
    }
    const prefill::LayerSlots of_layer{by_stream.data(), groups, limits, groups * chunks, chunks};
    if (!prefill::fits(*layer, of_layer, tokens)) return 2;
    prefill::attend(*layer, of_layer, tokens, threads);
    for (int64_t i = 0; i < streams * groups; ++i) *slots[i].seen = seen[i];
    return 0;
  });
}
