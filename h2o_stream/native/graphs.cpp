// What compiled graphs call: AOT Inductor hands tensors over by handle. Names and types are of torch's shim.h.

#include <cstdint>
#include <initializer_list>

extern "C" {

void h2o_stream_multiply_packed(const float* x, const void* codes, const uint16_t* grid, float* y, int64_t count,
                                int64_t rows, int64_t columns, int64_t packing, int64_t threads);
void h2o_stream_multiply_few(const void* x, const void* matrix, void* y, int64_t count, int64_t rows, int64_t columns,
                             int64_t in_bfloat16, int64_t threads);
void h2o_stream_weigh_one(const void* query, const void* keys, const void* values, const void* turns,
                          const int64_t* behind, const bool* hidden, void* output, float* probs, int64_t groups,
                          int64_t heads, int64_t places, int64_t size, int64_t value_size, int64_t turned,
                          double scaling, double softcap, int64_t in_bfloat16, int64_t threads);

struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
int32_t aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** data);
int32_t aoti_torch_get_size(AtenTensorHandle tensor, int64_t dimension, int64_t* size);
int32_t aoti_torch_get_numel(AtenTensorHandle tensor, int64_t* numel);
int32_t aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* dtype);
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_empty_strided(int64_t dimensions, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                 int32_t device, int32_t index, AtenTensorHandle* created);
}

namespace {

// A contiguous tensor on the CPU. `failed` remembers whether anything went wrong.
class Tensor {
 public:
  Tensor(AtenTensorHandle handle, int32_t& failed) : handle_(handle), failed_(failed) {}

  Tensor(AtenTensorHandle* created, std::initializer_list<int64_t> sizes, int32_t dtype, int32_t& failed)
      : failed_(failed) {
    int64_t strides[8], stride = 1, dimension = int64_t(sizes.size());
    for (auto size = sizes.end(); size != sizes.begin(); stride *= *--size) strides[--dimension] = stride;
    failed |= aoti_torch_empty_strided(int64_t(sizes.size()), sizes.begin(), strides, dtype, 0, 0, created);
    handle_ = failed ? nullptr : *created;
  }

  template <class Number>
  Number* data() const {
    void* data = nullptr;
    if (!failed_) failed_ |= aoti_torch_get_data_ptr(handle_, &data);
    return static_cast<Number*>(data);
  }

  int64_t size(int64_t dimension) const {
    int64_t size = 0;
    if (!failed_) failed_ |= aoti_torch_get_size(handle_, dimension, &size);
    return size;
  }

  int64_t count() const {
    int64_t count = 0;
    if (!failed_) failed_ |= aoti_torch_get_numel(handle_, &count);
    return count;
  }

  int32_t dtype() const {
    int32_t dtype = 0;
    if (!failed_) failed_ |= aoti_torch_get_dtype(handle_, &dtype);
    return dtype;
  }

  bool in_bfloat16() const { return dtype() == aoti_torch_dtype_bfloat16(); }

 private:
  AtenTensorHandle handle_ = nullptr;
  int32_t& failed_;
};

}  // namespace

extern "C" {

int32_t aoti_torch_cpu_multiply_packed(AtenTensorHandle x, AtenTensorHandle codes, AtenTensorHandle grid,
                                       int64_t threads, AtenTensorHandle* y) {
  int32_t failed = 0;
  const Tensor vectors(x, failed), bytes(codes, failed), scales(grid, failed);
  const int64_t count = vectors.size(0), rows = scales.size(0), packing = scales.size(1);
  const Tensor products(y, {count, rows}, aoti_torch_dtype_float32(), failed);
  const auto* from = vectors.data<const float>();
  auto* to = products.data<float>();
  if (!failed) {
    h2o_stream_multiply_packed(from, bytes.data<const void>(), scales.data<const uint16_t>(), to, count, rows,
                               bytes.size(1) * packing, packing, threads);
  }
  return failed;
}

int32_t aoti_torch_cpu_multiply_few(AtenTensorHandle x, AtenTensorHandle matrix, int64_t threads,
                                    AtenTensorHandle* y) {
  int32_t failed = 0;
  const Tensor vectors(x, failed), weights(matrix, failed);
  const int64_t count = vectors.size(0), rows = weights.size(0), columns = weights.size(1);
  const Tensor products(y, {count, rows}, vectors.dtype(), failed);
  const auto *from = vectors.data<const void>(), *by = weights.data<const void>();
  auto* to = products.data<void>();
  if (!failed) h2o_stream_multiply_few(from, by, to, count, rows, columns, vectors.in_bfloat16(), threads);
  return failed;
}

int32_t aoti_torch_cpu_weigh_one(AtenTensorHandle query, AtenTensorHandle keys, AtenTensorHandle values,
                                 AtenTensorHandle* turns, AtenTensorHandle* behind, AtenTensorHandle* hidden,
                                 double scaling, double softcap, int64_t threads, AtenTensorHandle* output,
                                 AtenTensorHandle* probs) {
  int32_t failed = 0;
  const Tensor asked(query, failed), from(keys, failed), mixed(values, failed);
  const int64_t rows = from.size(0), kv_heads = from.size(1), places = from.size(2), heads = asked.size(1) / kv_heads;
  const Tensor answer(output, {rows, 1, heads * kv_heads, mixed.size(3)}, asked.dtype(), failed);
  const Tensor weights(probs, {rows, kv_heads, heads, 1, places}, aoti_torch_dtype_float32(), failed);
  const Tensor table(turns ? *turns : nullptr, failed);
  const auto* circle = turns ? table.data<const void>() : nullptr;
  const auto* distances = behind ? Tensor(*behind, failed).data<const int64_t>() : nullptr;
  const auto* covered = hidden ? Tensor(*hidden, failed).data<const bool>() : nullptr;
  const int64_t turned = turns ? table.size(1) : 0;
  const auto *own = asked.data<const void>(), *held = from.data<const void>(), *worth = mixed.data<const void>();
  auto* to = answer.data<void>();
  auto* shares = weights.data<float>();
  if (!failed) {
    h2o_stream_weigh_one(own, held, worth, circle, distances, covered, to, shares, rows * kv_heads, heads, places,
                         from.size(3), mixed.size(3), turned, scaling, softcap, asked.in_bfloat16(), threads);
  }
  return failed;
}

}  // extern "C"
