// The attention of one token of each stream to the places of its cache.
//
// A key is rotated where it is multiplied and read once for all query heads of its group. Few streams have fewer groups
// than there are threads, so that the places of a group are shared out too: every thread has the softmax of its own
// places, and what they found is put together at the end.

#include "lanes.h"

#include <limits>
#include <vector>

namespace {

using lanes::BFloat16;
using lanes::kLanes;
using lanes::Lanes;

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Heads whose sums fit into registers at once.
constexpr int64_t kHeads = 8;

// How many places ahead keys are fetched from memory.
constexpr int64_t kAhead = 16;

int64_t padded(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

template <class Number>
void fetch(const Number* numbers, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / int64_t(sizeof(Number))) __builtin_prefetch(numbers + i);
}

// Numbers in float32, with zeros up to the next multiple of kLanes.
template <class Number>
void widen(const Number* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) lanes::store(lanes::load(from + i), to + i);
  for (; i < count; ++i) to[i] = lanes::number(from[i]);
  for (; i < padded(count); ++i) to[i] = 0;
}

// What is asked, for all streams; see `weigh_one` in ops.py.
template <class Number>
struct Question {
  const Number *query, *keys, *values, *turns;
  const int64_t* behind;
  const bool* hidden;
  Number* output;
  float* probs;
  int64_t groups, heads, places, size, value_size, turned;
  float scaling, softcap;
};

// The pieces of a key: two halves that are rotated, and what stays as it is.
struct Pieces {
  int64_t half, rest;

  int64_t padded_half() const { return padded(half); }
  int64_t padded_all() const { return 2 * padded(half) + padded(rest); }

  template <class Number>
  void widen_all(const Number* from, float* to) const {
    widen(from, to, half);
    widen(from + half, to + padded_half(), half);
    widen(from + 2 * half, to + 2 * padded_half(), rest);
  }
};

// One thread's part of a group: some of its places.
template <class Number>
class Share {
 public:
  explicit Share(const Question<Number>& question)
      : asked_(question),
        pieces_{question.turned / 2, question.size - question.turned},
        query_(question.heads * pieces_.padded_all()),
        key_(pieces_.padded_all()),
        turn_(2 * pieces_.padded_half()) {}

  // Leaves the exponentials in `probs`. `top`, `sum` and `mixed` [heads][value size] are what the softmax has to know.
  void attend(int64_t group, int64_t first, int64_t last, float* top, float* sum, float* mixed) {
    const int64_t all = pieces_.padded_all();
    float* probs = asked_.probs + group * asked_.heads * asked_.places;
    for (int64_t head = 0; head < asked_.heads; ++head) {
      pieces_.widen_all(asked_.query + (group * asked_.heads + head) * asked_.size, query_.data() + head * all);
    }
    if (pieces_.rest == 0 && pieces_.half % kLanes == 0) {
      multiply_all<8>(group * asked_.places, first, last, probs);
    } else {
      multiply_all<0>(group * asked_.places, first, last, probs);
    }
    for (int64_t head = 0; head < asked_.heads; ++head) {
      soften(probs + head * asked_.places + first, last - first, top[head], sum[head]);
    }
    mix(group, first, last, probs, mixed);
  }

 private:
  // Keys by the queries of all heads; `blocks` is how many a half of a key fills, or 0 for any size.
  template <int64_t blocks>
  void multiply_all(int64_t start, int64_t first, int64_t last, float* logits) {
    if constexpr (blocks > 0) {
      if (pieces_.half != blocks * kLanes) return multiply_all<blocks - 1>(start, first, last, logits);
    }
    for (int64_t place = first; place < last; ++place) {
      fetch(asked_.keys + (start + std::min(place + kAhead, last - 1)) * asked_.size, asked_.size);
      fetch(asked_.values + (start + place) * asked_.value_size, asked_.value_size);
      if (asked_.hidden && asked_.hidden[start + place]) {
        for (int64_t head = 0; head < asked_.heads; ++head) logits[head * asked_.places + place] = kNothing;
      } else if constexpr (blocks > 0) {
        multiply_blocks<blocks>(start + place, logits + place);
      } else {
        multiply(start + place, logits + place);
      }
    }
  }

  // A key that is all rotated, and stays in registers.
  template <int64_t blocks>
  void multiply_blocks(int64_t place, float* logits) const {
    const Number* key = asked_.keys + place * asked_.size;
    const Number* turn = asked_.turns + asked_.behind[place] * asked_.turned;
    constexpr int64_t half = blocks * kLanes;
    Lanes pieces[2 * blocks];
    for (int64_t i = 0; i < blocks; ++i) {
      const Lanes one = lanes::load(key + i * kLanes), other = lanes::load(key + half + i * kLanes);
      const Lanes cosine = lanes::load(turn + i * kLanes), sine = lanes::load(turn + half + i * kLanes);
      pieces[i] = one * cosine + other * sine;
      pieces[blocks + i] = other * cosine - one * sine;
    }
    for (int64_t head = 0; head < asked_.heads; ++head) {
      const float* query = query_.data() + head * 2 * half;
      Lanes sums{};
      for (int64_t i = 0; i < 2 * blocks; ++i) sums += lanes::load(query + i * kLanes) * pieces[i];
      logits[head * asked_.places] = bounded(lanes::total(sums));
    }
  }

  // A key of any size.
  void multiply(int64_t place, float* logits) {
    const int64_t half = pieces_.padded_half(), all = pieces_.padded_all();
    float* key = key_.data();
    pieces_.widen_all(asked_.keys + place * asked_.size, key);
    if (asked_.turns) {
      const Number* turn = asked_.turns + asked_.behind[place] * asked_.turned;
      float *cosines = turn_.data(), *sines = cosines + half;
      widen(turn, cosines, pieces_.half);
      widen(turn + pieces_.half, sines, pieces_.half);
      for (int64_t i = 0; i < half; i += kLanes) {
        const Lanes one = lanes::load(key + i), other = lanes::load(key + half + i);
        const Lanes cosine = lanes::load(cosines + i), sine = lanes::load(sines + i);
        lanes::store(one * cosine + other * sine, key + i);
        lanes::store(other * cosine - one * sine, key + half + i);
      }
    }
    for (int64_t head = 0; head < asked_.heads; ++head) {
      const float* query = query_.data() + head * all;
      Lanes sums{};
      for (int64_t i = 0; i < all; i += kLanes) sums += lanes::load(query + i) * lanes::load(key + i);
      logits[head * asked_.places] = bounded(lanes::total(sums));
    }
  }

  float bounded(float product) const {
    product *= asked_.scaling;
    return asked_.softcap > 0 ? std::tanh(product / asked_.softcap) * asked_.softcap : product;
  }

  static void soften(float* logits, int64_t count, float& top, float& sum) {
    top = count ? *std::max_element(logits, logits + count) : kNothing;
    const float least = top == kNothing ? 0 : top;
    Lanes sums{};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      const Lanes powers = lanes::exponential(lanes::load(logits + i) - least);
      lanes::store(powers, logits + i);
      sums += powers;
    }
    sum = lanes::total(sums);
    for (; i < count; ++i) sum += logits[i] = std::exp(logits[i] - least);
  }

  // The values by the exponentials.
  void mix(int64_t group, int64_t first, int64_t last, const float* probs, float* mixed) const {
    const Number* values = asked_.values + group * asked_.places * asked_.value_size;
    for (int64_t head = 0; head < asked_.heads; head += kHeads) {
      const float* own = probs + head * asked_.places;
      float* to = mixed + head * asked_.value_size;
      some_heads<kHeads>(std::min(kHeads, asked_.heads - head), values, first, last, own, to);
    }
  }

  template <int64_t most>
  void some_heads(int64_t count, const Number* values, int64_t first, int64_t last, const float* probs,
                  float* mixed) const {
    if constexpr (most > 1) {
      if (count < most) return some_heads<most - 1>(count, values, first, last, probs, mixed);
    }
    const int64_t size = asked_.value_size;
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
      Lanes sums[most] = {};
      for (int64_t place = first; place < last; ++place) {
        const Lanes value = lanes::load(values + place * size + i);
        for (int64_t head = 0; head < most; ++head) sums[head] += probs[head * asked_.places + place] * value;
      }
      for (int64_t head = 0; head < most; ++head) lanes::store(sums[head], mixed + head * size + i);
    }
    for (; i < size; ++i) {
      for (int64_t head = 0; head < most; ++head) {
        float sum = 0;
        for (int64_t place = first; place < last; ++place) {
          sum += probs[head * asked_.places + place] * lanes::number(values[place * size + i]);
        }
        mixed[head * size + i] = sum;
      }
    }
  }

  const Question<Number>& asked_;
  const Pieces pieces_;
  std::vector<float> query_, key_, turn_;
};

// Where the share of a thread begins.
int64_t start(int64_t share, int64_t shares, int64_t places) { return share * places / shares; }

// Puts the shares of a head together: one maximum, one sum, and all are divided by it.
template <class Number>
void put_together(const Question<Number>& asked, int64_t head, int64_t shares, const float* tops, const float* sums,
                  const float* mixed, int64_t stride) {
  float top = kNothing, sum = 0;
  for (int64_t s = 0; s < shares; ++s) top = std::max(top, tops[s * stride]);
  std::vector<float> factors(shares), output(asked.value_size);
  for (int64_t s = 0; s < shares; ++s) {
    factors[s] = tops[s * stride] == kNothing ? 0 : std::exp(tops[s * stride] - top);
    sum += factors[s] * sums[s * stride];
  }
  for (int64_t s = 0; s < shares; ++s) {
    const float factor = factors[s] / sum;
    const float* own = mixed + s * stride * asked.value_size;
    for (int64_t i = 0; i < asked.value_size; ++i) output[i] += factor * own[i];
    float* probs = asked.probs + head * asked.places;
    const int64_t last = start(s + 1, shares, asked.places);
    for (int64_t place = start(s, shares, asked.places); place < last; ++place) probs[place] *= factor;
  }
  for (int64_t i = 0; i < asked.value_size; ++i) lanes::put(output[i], asked.output[head * asked.value_size + i]);
}

template <class Number>
void attend(const Question<Number>& asked, int64_t threads) {
  const int64_t heads = asked.groups * asked.heads;
  const int64_t shares = asked.groups % threads == 0 || asked.groups > 8 * threads ? 1 : threads;
  std::vector<float> tops(shares * heads), sums(shares * heads), mixed(shares * heads * asked.value_size);
#pragma omp parallel num_threads(int(threads))
  {
    Share<Number> share(asked);
#pragma omp for schedule(static)
    for (int64_t number = 0; number < asked.groups * shares; ++number) {
      const int64_t group = number % asked.groups, s = number / asked.groups;
      const int64_t own = s * heads + group * asked.heads;
      share.attend(group, start(s, shares, asked.places), start(s + 1, shares, asked.places), &tops[own], &sums[own],
                   &mixed[own * asked.value_size]);
    }
#pragma omp for schedule(static)
    for (int64_t head = 0; head < heads; ++head) {
      put_together(asked, head, shares, &tops[head], &sums[head], &mixed[head * asked.value_size], heads);
    }
  }
}

}  // namespace

extern "C" {

// See `weigh_one` in ops.py. Sizes: rows times KV heads, query heads of each, places, numbers of a key, of a
// value, and those of a key that are rotated. `turns` and `hidden` may be null.
void h2o_stream_weigh_one(const void* query, const void* keys, const void* values, const void* turns,
                          const int64_t* behind, const bool* hidden, void* output, float* probs, int64_t groups,
                          int64_t heads, int64_t places, int64_t size, int64_t value_size, int64_t turned,
                          double scaling, double softcap, int64_t in_bfloat16, int64_t threads) {
  const auto ask = [&](auto kind) {
    using Number = decltype(kind);
    const auto as = [](const void* numbers) { return static_cast<const Number*>(numbers); };
    attend(Question<Number>{as(query), as(keys), as(values), as(turns), behind, hidden, static_cast<Number*>(output),
                            probs, groups, heads, places, size, value_size, turned, float(scaling), float(softcap)},
           threads);
  };
  if (in_bfloat16) {
    ask(BFloat16{});
  } else {
    ask(float{});
  }
}

}  // extern "C"
