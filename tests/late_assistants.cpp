// Closes a step while a thread that assisted it still reads weights: returns 0 if that waits for the thread.
//
// Run by test_assistants.py with the path of a library. Weights cannot be read at first: their reader ends up in
// `handle`, which keeps an assistant there until the step is being closed, and some time after.

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <vector>

#include "../h2o_stream/native/src/abi.h"

namespace {

constexpr int64_t kHidden = 64, kRows = 20000, kBytes = kRows * kHidden * int64_t(sizeof(float));
constexpr useconds_t kMillisecond = 1000;

float* weights = nullptr;
thread_local bool calls = false;
std::atomic<bool> is_late{false}, closes{false};

void allow(bool reading) { mprotect(weights, kBytes, reading ? PROT_READ : PROT_NONE); }

void handle(int) {
  if (calls) {
    usleep(20 * kMillisecond);  // others begin meanwhile
    return allow(true);
  }
  is_late = true;
  while (!closes) usleep(kMillisecond);
  usleep(200 * kMillisecond);
  is_late = false;
  allow(true);
}

}  // namespace

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (!library) return std::puts(dlerror()), 2;
  const auto open = reinterpret_cast<void* (*)(const Model*)>(dlsym(library, "h2o_step_open"));
  const auto close = reinterpret_cast<void (*)(void*)>(dlsym(library, "h2o_step_close"));
  const auto share = reinterpret_cast<void (*)(void*, int64_t)>(dlsym(library, "h2o_step_share"));
  const auto step = reinterpret_cast<int64_t (*)(void*, const Stream*, int64_t, float*, float*, int64_t)>(
      dlsym(library, "h2o_step"));

  weights = static_cast<float*>(mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  const std::vector<float> embedding(kRows * kHidden, 1);
  const Layer layer{};  // does nothing
  Model model{};
  model.layers = &layer, model.layer_count = 1, model.hidden_size = kHidden, model.vocab_size = kRows;
  model.embedding = {embedding.data(), nullptr, kRows, kHidden, kFloat32, 1}, model.embedding_scale = 1;
  model.output = {weights, nullptr, kRows, kHidden, kFloat32, 1}, model.logit_scale = 1;
  std::vector<float> logits(kRows);
  int64_t seen = 0;
  Slots slots{};
  slots.seen = &seen;
  const Stream stream{0, &slots, nullptr};

  calls = true;
  std::signal(SIGSEGV, handle);
  void* opened = open(&model);
  if (!opened) return std::puts("the model is refused"), 2;
  share(opened, kAssisted);
  for (int64_t steps = 0; !is_late; ++steps) {  // until an assistant has begun
    if (steps == 100) return std::puts("nobody assists"), 3;
    allow(false);
    if (step(opened, &stream, 1, logits.data(), nullptr, 2)) return 4;
  }
  closes = true;
  close(opened);
  if (is_late) std::puts("a thread reads weights after the step is closed");
  return is_late;
}
