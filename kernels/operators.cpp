// Operators for ONNX Runtime on a CPU, for what costs more than the products in small models.
//
// A graph that uses them also has a definition of each in ONNX Runtime's own operators, which ONNX Runtime takes where
// this library is not loaded (export/graphs/functions.py).
//
//   CacheAttention   appends one position to each row's cache, and attends to the cache
//   MemoryAttention  attends from one position per row to a memory; the rows of a request read that of one of them
//   SourceAttention  attends from every token of a source to all of its tokens
//   AddNormQuantize  adds a residual, normalizes, and quantizes for the next product
//   Candidates       finds the most probable tokens of each row
//
// A row's numbers do not depend on the rows beside it. No other code knows ONNX Runtime's C interface; it is declared
// here as far as it is used, because ONNX Runtime's packages for Python do not have its headers.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <memory>
#include <vector>

namespace {

constexpr size_t MAX_WIDTH = 128; // of a head, in vectors of eight: d_head is at most 1024
constexpr size_t NUM_PARTS = 16;  // of the rows of a run that several threads share

// A run of an attention, whose rows each have one query a head. Letters: H heads, G heads of keys and values, K d_head.
// A stride is the distance of two rows, heads or positions, in numbers.
struct Task {
  const float *queries; // a row begins with its queries (H, K)
  const float *keys, *values;
  const int32_t *last_positions; // of the keys that each row attends to
  const int64_t *owners; // the row at whose keys each row's begin; null for its own
  float *outputs; // rows of (H, K)
  size_t num_rows, num_heads, num_groups, d_head;
  size_t query_stride, row_stride, head_stride, position_stride;
  size_t longest; // the most positions
  float scale, cap;
  float *scores; // room for those of a row, for each part

  size_t room() const { return longest + 8; } // whole vectors are written
  size_t length(size_t row) const { return static_cast<size_t>(last_positions[row]) + 1; }

  // Where the keys of a row and head begin.
  size_t place(size_t row, size_t head) const {
    const size_t owner = owners ? static_cast<size_t>(owners[row]) : row;
    return owner * row_stride + head * num_groups / num_heads * head_stride;
  }
};

// A run of AddNormQuantize over rows of D numbers.
struct Norm {
  const float *x, *residual, *weight, *bias; // (N, D) twice, (D,) twice
  float *total, *normalized; // (N, D): the sum, and its norm; at most one is null
  uint8_t *hidden; // (N, D): the norm in 256 levels
  size_t d_model;
  float epsilon, scale, zero_point;
};

// A run of Candidates: K of V tokens a row.
struct Ranking {
  const float *logits;                 // (m, V)
  float *log_probabilities;            // (m, K)
  int64_t *token_ids;                  // (m, K)
  size_t vocab_size, num_candidates;
};

namespace portable {
#include "compute.inc"
}

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
#include "compute.inc"
}
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#if defined(__x86_64__)
const bool HAS_AVX2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#define FASTEST(function) (HAS_AVX2 ? avx2::function : portable::function)
#else
#define FASTEST(function) portable::function
#endif

void compute_rows(const Task &task, size_t part, size_t begin, size_t end) {
  FASTEST(attend_rows)(task, begin, end, task.scores + part * task.room());
}

void compute_rows(const Norm &norm, size_t, size_t begin, size_t end) { FASTEST(normalize_rows)(norm, begin, end); }

void compute_rows(const Ranking &ranking, size_t, size_t begin, size_t end) {
  FASTEST(rank_rows)(ranking, begin, end);
}

// ---- ONNX Runtime's C interface (onnxruntime_c_api.h), whose functions keep their places in its table ----

using Status = void; // opaque; null means success
constexpr uint32_t API_VERSION = 24; // the first with all functions that are used
constexpr int FLOAT = 1, UINT8 = 2, INT32 = 6, INT64 = 7, INVALID_ARGUMENT = 2;

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
  const T *data = nullptr;
  const int64_t *shape = nullptr;
  size_t num_axes = 0;

  bool has_shape(int64_t a) const { return num_axes == 1 && shape[0] == a; }
  bool has_shape(int64_t a, int64_t b) const { return num_axes == 2 && shape[0] == a && shape[1] == b; }
};

template <class T> Tensor<T> input(void *context, size_t index) {
  Tensor<T> tensor;
  const void *value = nullptr;
  int type = 0;
  void *data = nullptr;
  call<90>(context, index, &value);
  call<414>(value, &type, &tensor.shape, &tensor.num_axes);
  call<51>(const_cast<void *>(value), &data);
  tensor.data = static_cast<const T *>(data);
  return tensor;
}

// Null for an output that nothing reads.
template <class T = float> T *output(void *context, size_t index, const int64_t *shape, size_t num_axes) {
  void *value = nullptr, *data = nullptr;
  call<91>(context, index, shape, num_axes, &value);
  if (value) call<51>(value, &data);
  return static_cast<T *>(data);
}

struct Attention {
  int64_t num_heads = 0;
  float scale = 0, cap = 0;

  Status *read(const void *info) {
    if (Status *status = attribute(info, "num_heads", &num_heads)) return status;
    if (Status *status = attribute(info, "scale", &scale)) return status;
    return attribute(info, "softcap", &cap);
  }
};

struct AddNorm {
  float epsilon = 0;

  Status *read(const void *info) { return attribute(info, "epsilon", &epsilon); }
};

template <class Kernel> Status *create(const Operator *, void *const *, const void *info, void **kernel) {
  auto made = std::make_unique<Kernel>();
  Status *status = made->read(info);
  if (!status) *kernel = made.release();
  return status;
}

template <class Kernel> void destroy(void *kernel) { delete static_cast<Kernel *>(kernel); }

const char *const WRONG_WIDTH = "d_head is a multiple of 8 up to 1024";

bool is_width(int64_t K) { return K > 0 && K % 8 == 0 && K <= static_cast<int64_t>(8 * MAX_WIDTH); }

// Fills in what the attentions to a cache and to a memory have in common; returns what is wrong with the inputs, or null.
const char *fill(Task &task, const Attention &kernel, const Tensor<float> &queries,
                 const Tensor<float> &keys, const Tensor<float> &values,
                 const Tensor<int32_t> &last_positions) {
  if (queries.num_axes != 2 || keys.num_axes != 4 || values.num_axes != 4)
    return "queries have 2 axes, keys and values 4";
  if (memcmp(keys.shape, values.shape, 4 * sizeof(int64_t))) return "keys and values differ in shape";
  const int64_t B = queries.shape[0], G = keys.shape[1], C = keys.shape[2], K = keys.shape[3];
  if (keys.shape[0] != B || !last_positions.has_shape(B)) return "the inputs differ in the number of rows";
  if (!is_width(K)) return WRONG_WIDTH;
  if (G == 0 || kernel.num_heads % G) return "the heads are a multiple of the heads of keys";
  for (int64_t row = 0; row < B; row++)
    if (last_positions.data[row] < 0 || last_positions.data[row] >= C)
      return "a last position is outside of the keys";
  task.queries = queries.data;
  task.keys = keys.data, task.values = values.data;
  task.last_positions = last_positions.data;
  task.num_rows = B, task.num_heads = kernel.num_heads, task.num_groups = G, task.d_head = K;
  task.query_stride = queries.shape[1], task.row_stride = G * C * K, task.head_stride = C * K, task.position_stride = K;
  task.longest = C;
  task.scale = kernel.scale, task.cap = kernel.cap;
  return nullptr;
}

// Computes all rows, by several threads if they are worth it: a thread does some ten products in a nanosecond.
template <class Work> void compute(void *context, const Work &work, size_t num_rows, size_t num_products) {
  constexpr size_t WORTH_THREADS = 1 << 20;
  if (num_products < WORTH_THREADS) return compute_rows(work, 0, 0, num_rows);
  struct Parts {
    const Work &work;
    size_t num_rows;
  } parts{work, num_rows};
  const auto part = [](void *data, size_t index) {
    const Parts &parts = *static_cast<const Parts *>(data);
    const size_t begin = index * parts.num_rows / NUM_PARTS, end = (index + 1) * parts.num_rows / NUM_PARTS;
    compute_rows(parts.work, index, begin, end);
  };
  parallel_for(context, part, NUM_PARTS, &parts);
}

void attend(void *context, Task &task) {
  const std::unique_ptr<float[]> scores(new float[NUM_PARTS * task.room()]);
  task.scores = scores.get();
  size_t num_positions = 0;
  for (size_t row = 0; row < task.num_rows; row++) num_positions += task.length(row);
  compute(context, task, task.num_rows, num_positions * task.num_heads * task.d_head);
}

// Inputs: queries, keys and values (B, (H + 2G)K); the cache's keys and values (B, G, C, K); the new position of each
// row (B,); and C, which only the standard definition reads. Outputs: (B, HK), and the cache, which may be bound to the inputs' memory.
Status *cache_attention(void *self, void *context) {
  const Attention &kernel = *static_cast<const Attention *>(self);
  const auto packed = input<float>(context, 0), keys = input<float>(context, 1), values = input<float>(context, 2);
  const auto last_positions = input<int32_t>(context, 3);
  Task task{};
  if (const char *problem = fill(task, kernel, packed, keys, values, last_positions)) return failure(problem);
  const size_t H = task.num_heads, G = task.num_groups, C = task.longest, K = task.d_head;
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
  const Attention &kernel = *static_cast<const Attention *>(self);
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

// Inputs: queries, keys and values (N, 3HK) of the tokens of several sources, one after the other; each source's number
// of tokens (B,); and two that only the standard definition reads. Output: (N, HK), each token's attention to its source.
Status *source_attention(void *self, void *context) {
  const Attention &kernel = *static_cast<const Attention *>(self);
  const auto packed = input<float>(context, 0);
  const auto lengths = input<int64_t>(context, 1);
  if (packed.num_axes != 2 || lengths.num_axes != 1) return failure("the tokens have 2 axes, the lengths 1");
  const int64_t N = packed.shape[0], H = kernel.num_heads, K = packed.shape[1] / (3 * H);
  if (packed.shape[1] != 3 * H * K || !is_width(K)) return failure(WRONG_WIDTH);
  std::vector<int64_t> firsts;
  std::vector<int32_t> last_positions;
  int64_t longest = 0;
  for (int64_t source = 0; source < lengths.shape[0]; source++) {
    const int64_t first = static_cast<int64_t>(firsts.size()), length = lengths.data[source];
    if (length < 0 || length > N - first) return failure("the sources have more tokens than there are");
    firsts.insert(firsts.end(), length, first);
    last_positions.insert(last_positions.end(), length, static_cast<int32_t>(length - 1));
    longest = std::max(longest, length);
  }
  if (static_cast<int64_t>(firsts.size()) != N) return failure("the sources have fewer tokens than there are");
  Task task{};
  task.queries = packed.data, task.keys = packed.data + H * K, task.values = packed.data + 2 * H * K;
  task.last_positions = last_positions.data(), task.owners = firsts.data();
  task.num_rows = N, task.num_heads = task.num_groups = H, task.d_head = K;
  task.query_stride = task.row_stride = task.position_stride = 3 * H * K, task.head_stride = K;
  task.longest = longest;
  task.scale = kernel.scale;
  const int64_t shape[] = {N, H * K};
  task.outputs = output(context, 0, shape, 2);
  attend(context, task);
  return nullptr;
}

// Inputs: x and the residual (N, D); the norm's weight and bias (D,); the scale and zero point of the levels.
// Outputs: their sum, its norm, and the norm's levels, (N, D) each.
Status *add_norm_quantize(void *self, void *context) {
  const auto x = input<float>(context, 0), residual = input<float>(context, 1);
  const auto weight = input<float>(context, 2), bias = input<float>(context, 3), scale = input<float>(context, 4);
  const auto zero_point = input<uint8_t>(context, 5);
  if (x.num_axes != 2) return failure("x has 2 axes");
  const int64_t N = x.shape[0], D = x.shape[1];
  if (!residual.has_shape(N, D)) return failure("x and the residual differ in shape");
  if (!weight.has_shape(D) || !bias.has_shape(D) || D % 8) return failure("the norm has another width");
  Norm norm{};
  norm.x = x.data, norm.residual = residual.data, norm.weight = weight.data, norm.bias = bias.data;
  norm.total = output(context, 0, x.shape, 2);
  norm.normalized = output(context, 1, x.shape, 2);
  norm.hidden = output<uint8_t>(context, 2, x.shape, 2);
  norm.d_model = static_cast<size_t>(D);
  norm.epsilon = static_cast<const AddNorm *>(self)->epsilon;
  norm.scale = *scale.data, norm.zero_point = *zero_point.data;
  compute(context, norm, static_cast<size_t>(N), static_cast<size_t>(8 * N * D));
  return nullptr;
}

struct Nothing {
  Status *read(const void *) { return nullptr; }
};

// Inputs: logits (m, V), and the number K of candidates (1,). Outputs: their ids and log-probabilities, (m, K) each, the
// most probable first.
Status *candidates(void *, void *context) {
  const auto logits = input<float>(context, 0);
  const auto number = input<int64_t>(context, 1);
  if (logits.num_axes != 2 || !number.has_shape(1)) return failure("the logits have 2 axes, the number 1");
  const int64_t rows = logits.shape[0], V = logits.shape[1], K = *number.data;
  if (K < 1 || K > V) return failure("the number of candidates is from 1 to the size of the vocabulary");
  const int64_t shape[] = {rows, K};
  Ranking ranking{};
  ranking.logits = logits.data;
  ranking.token_ids = output<int64_t>(context, 0, shape, 2);
  ranking.log_probabilities = output(context, 1, shape, 2);
  ranking.vocab_size = static_cast<size_t>(V), ranking.num_candidates = static_cast<size_t>(K);
  compute(context, ranking, static_cast<size_t>(rows), static_cast<size_t>(8 * rows * V));
  return nullptr;
}

int none(const Operator *) { return 0; }
int required(const Operator *, size_t) { return 0; }
int optional(const Operator *, size_t) { return 1; }

// Runs an operator; no exception may leave the library.
template <Status *(*run)(void *, void *)> Status *guarded(void *self, void *context) {
  try {
    return run(self, context);
  } catch (const std::exception &error) { // memory
    return failure(error.what());
  }
}

template <class Kernel, Status *(*run)(void *, void *)> Operator operator_of() {
  Operator made{};
  made.version = API_VERSION;
  made.provider = [](const Operator *) -> const char * { return nullptr; }; // the CPU's
  made.input_kind = made.output_kind = made.input_memory = required;
  for (auto &arity : made.variadic) arity = none;
  made.create_with_status = create<Kernel>;
  made.compute_with_status = guarded<run>;
  made.destroy = destroy<Kernel>;
  made.first_version = [](const Operator *) { return 1; };
  made.last_version = [](const Operator *) { return INT32_MAX; };
  return made;
}

struct Operators {
  Operator cache = operator_of<Attention, cache_attention>(), memory = operator_of<Attention, memory_attention>(),
           source = operator_of<Attention, source_attention>(), norm = operator_of<AddNorm, add_norm_quantize>(),
           ranking = operator_of<Nothing, candidates>();

  Operators() {
    cache.name = [](const Operator *) { return "CacheAttention"; };
    cache.num_inputs = [](const Operator *) -> size_t { return 5; };
    cache.input_type = [](const Operator *, size_t i) { return i < 3 ? FLOAT : INT32; };
    cache.num_outputs = [](const Operator *) -> size_t { return 3; };
    cache.output_type = [](const Operator *, size_t) { return FLOAT; };
    memory.name = [](const Operator *) { return "MemoryAttention"; };
    memory.num_inputs = [](const Operator *) -> size_t { return 6; };
    memory.input_type = [](const Operator *, size_t i) { return i < 3 ? FLOAT : i == 4 ? INT64 : INT32; };
    memory.num_outputs = [](const Operator *) -> size_t { return 1; };
    memory.output_type = [](const Operator *, size_t) { return FLOAT; };
    source.name = [](const Operator *) { return "SourceAttention"; };
    source.num_inputs = [](const Operator *) -> size_t { return 4; };
    source.input_type = [](const Operator *, size_t i) { return i == 0 ? FLOAT : INT64; };
    source.num_outputs = [](const Operator *) -> size_t { return 1; };
    source.output_type = [](const Operator *, size_t) { return FLOAT; };
    norm.name = [](const Operator *) { return "AddNormQuantize"; };
    norm.num_inputs = [](const Operator *) -> size_t { return 6; };
    norm.input_type = [](const Operator *, size_t i) { return i < 5 ? FLOAT : UINT8; };
    norm.num_outputs = [](const Operator *) -> size_t { return 3; };
    norm.output_type = [](const Operator *, size_t i) { return i < 2 ? FLOAT : UINT8; };
    norm.output_kind = optional;
    ranking.name = [](const Operator *) { return "Candidates"; };
    ranking.num_inputs = [](const Operator *) -> size_t { return 2; };
    ranking.input_type = [](const Operator *, size_t i) { return i == 0 ? FLOAT : INT64; };
    ranking.num_outputs = [](const Operator *) -> size_t { return 2; };
    ranking.output_type = [](const Operator *, size_t i) { return i == 0 ? INT64 : FLOAT; };
  }
};

struct Domain {
  void *domain = nullptr;
  Status *problem = nullptr;

  explicit Domain(const Operators &operators) {
    problem = call<26>("seq2seq_serve", &domain);
    for (const Operator *each : {&operators.cache, &operators.memory, &operators.source, &operators.norm,
                                  &operators.ranking})
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
