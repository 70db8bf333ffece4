// Two operators for ONNX Runtime on a CPU: attention of one new position per row.
//
// They are faster than ONNX Runtime's GroupQueryAttention, which costs more than the products themselves where heads
// are narrow and sequences short. A graph that uses them also has a definition of each in standard operators, which
// ONNX Runtime takes where this library is not loaded (export/graphs/functions.py).
//
//   CacheAttention   appends a position to each row's cache, and attends to the cache
//   MemoryAttention  attends to a memory; the rows of a request read that of one of them
//
// A row's numbers do not depend on the rows beside it. No other code knows ONNX Runtime's C interface; it is declared
// here as far as it is used, because ONNX Runtime's packages for Python do not have its headers.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>

namespace {

constexpr size_t MAX_WIDTH = 32; // of a head, in vectors of eight: d_head is at most 256

// One operator's run. Letters: B rows, H heads, G heads of keys and values, C capacity, K d_head.
struct Task {
  const float *queries; // (B, …): a row has `query_stride` numbers, of which the queries (H, K) are the first
  size_t query_stride;
  const float *keys, *values; // (B, G, C, K)
  const int32_t *last_positions; // (B,)
  const int64_t *owners; // (B,): the row whose keys and values each row reads; null for its own
  float *outputs; // (B, H, K)
  size_t num_rows, num_heads, num_groups, capacity, d_head;
  float scale, cap;

  // Where the keys of a row and head begin.
  size_t place(size_t row, size_t head) const {
    const size_t owner = owners ? static_cast<size_t>(owners[row]) : row;
    return (owner * num_groups + head * num_groups / num_heads) * capacity * d_head;
  }
};

namespace portable {
#include "attend.inc"
}

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
#include "attend.inc"
}
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

void attend_rows(const Task &task, size_t begin, size_t end) {
  const std::unique_ptr<float[]> scores(new float[task.capacity + 8]);
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx2) return avx2::attend_rows(task, begin, end, scores.get());
#endif
  portable::attend_rows(task, begin, end, scores.get());
}

// ---- ONNX Runtime's C interface (onnxruntime_c_api.h), whose functions keep their places in its table ----

using Status = void; // opaque; null means success
constexpr uint32_t API_VERSION = 17; // the first with `parallel_for`
constexpr int FLOAT = 1, INT32 = 6, INT64 = 7, INVALID_ARGUMENT = 2;

struct ApiBase {
  void *const *(*get)(uint32_t version);
  const char *(*version)();
};

struct Operator { // OrtCustomOp
  uint32_t version;
  void *(*create)(const Operator *, void *const *, const void *);
  const char *(*name)(const Operator *);
  const char *(*provider)(const Operator *);
  int (*input_type)(const Operator *, size_t);
  size_t (*num_inputs)(const Operator *);
  int (*output_type)(const Operator *, size_t);
  size_t (*num_outputs)(const Operator *);
  void (*compute)(void *, void *);
  void (*destroy)(void *);
  int (*input_kind)(const Operator *, size_t);
  int (*output_kind)(const Operator *, size_t);
  int (*input_memory)(const Operator *, size_t);
  int (*variadic[4])(const Operator *);
  Status *(*create_with_status)(const Operator *, void *const *, const void *, void **);
  Status *(*compute_with_status)(void *, void *);
  Status *(*infer_shapes)(const Operator *, void *);
  int (*first_version)(const Operator *);
  int (*last_version)(const Operator *);
  void *in_place[4];
};

void *const *api = nullptr;

template <int PLACE, class Result = Status *, class... Arguments> Result call(Arguments... arguments) {
  return reinterpret_cast<Result (*)(Arguments...)>(api[PLACE])(arguments...);
}

Status *failure(const char *message) { return call<0>(INVALID_ARGUMENT, message); }
Status *attribute(const void *info, const char *name, float *value) { return call<85>(info, name, value); }
Status *attribute(const void *info, const char *name, int64_t *value) { return call<86>(info, name, value); }
void parallel_for(void *context, void (*work)(void *, size_t), size_t total, void *data) {
  call<274>(context, work, total, static_cast<size_t>(0), data);
}

template <class T> struct Tensor {
  T *data = nullptr;
  size_t num_axes = 0;
  int64_t shape[4] = {};

  bool has_shape(int64_t a) const { return num_axes == 1 && shape[0] == a; }
  bool has_shape(int64_t a, int64_t b) const { return num_axes == 2 && shape[0] == a && shape[1] == b; }
};

template <class T> Tensor<const T> input(void *context, size_t index) {
  Tensor<const T> tensor;
  const void *value = nullptr;
  void *info = nullptr, *data = nullptr;
  call<90>(context, index, &value);
  call<65>(value, &info);
  call<61>(static_cast<const void *>(info), &tensor.num_axes);
  if (tensor.num_axes <= 4) call<62>(static_cast<const void *>(info), tensor.shape, tensor.num_axes);
  call<99, void>(info);
  call<51>(const_cast<void *>(value), &data);
  tensor.data = static_cast<const T *>(data);
  return tensor;
}

float *output(void *context, size_t index, const int64_t *shape, size_t num_axes) {
  void *value = nullptr, *data = nullptr;
  call<91>(context, index, shape, num_axes, &value);
  call<51>(value, &data);
  return static_cast<float *>(data);
}

struct Kernel {
  int64_t num_heads = 0;
  float scale = 0, cap = 0;
};

Status *create(const Operator *, void *const *, const void *info, void **kernel) {
  auto made = std::make_unique<Kernel>();
  if (Status *status = attribute(info, "num_heads", &made->num_heads)) return status;
  if (Status *status = attribute(info, "scale", &made->scale)) return status;
  if (Status *status = attribute(info, "softcap", &made->cap)) return status;
  *kernel = made.release();
  return nullptr;
}

void destroy(void *kernel) { delete static_cast<Kernel *>(kernel); }

// Fills in what both operators have in common; returns what is wrong with the inputs, or null.
const char *fill(Task &task, const Kernel &kernel, const Tensor<const float> &queries,
                 const Tensor<const float> &keys, const Tensor<const float> &values,
                 const Tensor<const int32_t> &last_positions) {
  if (queries.num_axes != 2 || keys.num_axes != 4 || values.num_axes != 4)
    return "queries have 2 axes, keys and values 4";
  if (memcmp(keys.shape, values.shape, sizeof keys.shape)) return "keys and values differ in shape";
  const int64_t B = queries.shape[0], G = keys.shape[1], C = keys.shape[2], K = keys.shape[3];
  if (keys.shape[0] != B || !last_positions.has_shape(B)) return "the inputs differ in the number of rows";
  if (K % 8 || K == 0 || K > static_cast<int64_t>(8 * MAX_WIDTH)) return "d_head is a multiple of 8 up to 256";
  if (G == 0 || kernel.num_heads % G) return "the heads are a multiple of the heads of keys";
  for (int64_t row = 0; row < B; row++)
    if (last_positions.data[row] < 0 || last_positions.data[row] >= C)
      return "a last position is outside of the keys";
  task.queries = queries.data;
  task.query_stride = static_cast<size_t>(queries.shape[1]);
  task.keys = keys.data, task.values = values.data;
  task.last_positions = last_positions.data;
  task.num_rows = B, task.num_heads = kernel.num_heads, task.num_groups = G, task.capacity = C, task.d_head = K;
  task.scale = kernel.scale, task.cap = kernel.cap;
  return nullptr;
}

constexpr size_t NUM_PARTS = 16, WORTH_THREADS = 1 << 20; // products, of which a core does some 10 in a nanosecond

void attend(void *context, const Task &task) {
  size_t positions = 0;
  for (size_t row = 0; row < task.num_rows; row++) positions += task.last_positions[row] + 1;
  if (positions * task.num_heads * task.d_head < WORTH_THREADS) return attend_rows(task, 0, task.num_rows);
  const auto part = [](void *data, size_t index) {
    const Task &task = *static_cast<const Task *>(data);
    attend_rows(task, index * task.num_rows / NUM_PARTS, (index + 1) * task.num_rows / NUM_PARTS);
  };
  parallel_for(context, part, NUM_PARTS, const_cast<Task *>(&task));
}

// Inputs: queries, keys and values (B, (H + 2G)K); the cache's keys and values (B, G, C, K); the new position of each
// row (B,); and C, which only the standard definition reads. Outputs: (B, HK), and the cache, which may be bound to the inputs' memory.
Status *cache_attention(void *self, void *context) {
  const Kernel &kernel = *static_cast<const Kernel *>(self);
  const auto packed = input<float>(context, 0), keys = input<float>(context, 1), values = input<float>(context, 2);
  const auto last_positions = input<int32_t>(context, 3);
  Task task{};
  if (const char *problem = fill(task, kernel, packed, keys, values, last_positions)) return failure(problem);
  const size_t H = task.num_heads, G = task.num_groups, C = task.capacity, K = task.d_head;
  if (task.query_stride != (H + 2 * G) * K) return failure("packed queries, keys and values have another width");
  const int64_t shape[] = {packed.shape[0], static_cast<int64_t>(H * K)};
  task.outputs = output(context, 0, shape, 2);
  const float *given[] = {keys.data, values.data};
  float *cache[2];
  for (size_t i = 0; i < 2; i++) {
    cache[i] = output(context, 1 + i, keys.shape, 4);
    if (cache[i] != given[i]) memcpy(cache[i], given[i], task.num_rows * G * C * K * sizeof(float));
    for (size_t row = 0; row < task.num_rows; row++)
      for (size_t group = 0; group < G; group++) {
        const float *from = packed.data + row * task.query_stride + (H + i * G + group) * K;
        float *to = cache[i] + ((row * G + group) * C + last_positions.data[row]) * K;
        memcpy(to, from, K * sizeof(float));
      }
  }
  task.keys = cache[0], task.values = cache[1];
  attend(context, task);
  return nullptr;
}

// Inputs: queries (B, HK); the memory's keys and values (B, G, C, K); each row's last position (B,), and the row whose
// memory it reads (B,); and C, which only the standard definition reads. Output: (B, HK).
Status *memory_attention(void *self, void *context) {
  const Kernel &kernel = *static_cast<const Kernel *>(self);
  const auto queries = input<float>(context, 0), keys = input<float>(context, 1), values = input<float>(context, 2);
  const auto last_positions = input<int32_t>(context, 3);
  const auto owners = input<int64_t>(context, 4);
  Task task{};
  if (const char *problem = fill(task, kernel, queries, keys, values, last_positions)) return failure(problem);
  if (task.query_stride != task.num_heads * task.d_head) return failure("queries have another width");
  if (!owners.has_shape(queries.shape[0])) return failure("the inputs differ in the number of rows");
  for (size_t row = 0; row < task.num_rows; row++)
    if (owners.data[row] < 0 || owners.data[row] >= queries.shape[0]) return failure("an owner is not a row");
  task.owners = owners.data;
  task.outputs = output(context, 0, queries.shape, 2);
  attend(context, task);
  return nullptr;
}

int required(const Operator *, size_t) { return 0; }

struct Operators {
  Operator cache{}, memory{};

  Operators() {
    for (Operator *each : {&cache, &memory}) {
      each->version = API_VERSION;
      each->provider = [](const Operator *) -> const char * { return nullptr; }; // the CPU's
      each->output_type = [](const Operator *, size_t) { return FLOAT; };
      each->input_kind = each->output_kind = each->input_memory = required;
      for (auto &none : each->variadic) none = [](const Operator *) { return 0; };
      each->create_with_status = create;
      each->destroy = destroy;
      each->first_version = [](const Operator *) { return 1; };
      each->last_version = [](const Operator *) { return INT32_MAX; };
    }
    cache.name = [](const Operator *) { return "CacheAttention"; };
    cache.input_type = [](const Operator *, size_t i) { return i < 3 ? FLOAT : INT32; };
    cache.num_inputs = [](const Operator *) -> size_t { return 5; };
    cache.num_outputs = [](const Operator *) -> size_t { return 3; };
    cache.compute_with_status = cache_attention;
    memory.name = [](const Operator *) { return "MemoryAttention"; };
    memory.input_type = [](const Operator *, size_t i) { return i < 3 ? FLOAT : i == 4 ? INT64 : INT32; };
    memory.num_inputs = [](const Operator *) -> size_t { return 6; };
    memory.num_outputs = [](const Operator *) -> size_t { return 1; };
    memory.compute_with_status = memory_attention;
  }
};

struct Domain {
  void *domain = nullptr;
  Status *problem = nullptr;

  explicit Domain(const Operators &operators) {
    problem = call<26>("seq2seq_serve", &domain);
    for (const Operator *each : {&operators.cache, &operators.memory})
      if (!problem) problem = call<27>(domain, each);
  }
};

} // namespace

// ONNX Runtime calls this for each session that loads the library.
extern "C" Status *RegisterCustomOps(void *session_options, const ApiBase *base) {
  static void *const *const table = base->get(API_VERSION);
  if (!table) return nullptr; // an older ONNX Runtime, which then reports an operator that it does not know
  api = table;
  static const Operators operators;
  static const Domain domain(operators); // lives as long as the library, as sessions use it
  return domain.problem ? domain.problem : call<28>(session_options, domain.domain);
}
