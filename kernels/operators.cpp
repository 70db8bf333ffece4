// Operators for ONNX Runtime on a CPU: x86-64 with AVX2, or 64-bit ARM.
//
// A graph that uses them also has a definition of each in ONNX Runtime's own operators, which ONNX Runtime takes where
// it does not have this library (export/graphs/functions.py).
//
//   CacheAttention   writes positions into caches, and attends from each one to its cache up to itself
//   MemoryAttention  attends from positions to memories
//   Half…            do the same with caches and memories in half precision
//   SourceAttention  attends from every token of a source to all of its tokens
//   AddNorm          adds a residual, and normalizes the sum
//   Linear           multiplies by weights in float32
//   LinearRelu       does the same, and takes negative outputs for 0
//   Embedding        looks up tokens in a table, which may be the weights of a Linear
//   LowRank          adds the low-rank terms of adapters to the outputs of a map
//   Candidates       finds the most probable tokens of each row, and looks up the log-probabilities of others
//   TimeRules        forbids the tokens that may not follow in targets with times
//   QuantizedLinear  quantizes each row, and multiplies by int8 weights
//   QuantizedChoice  does the same for logits; or only finds the most probable tokens, and looks others up, without logits
//   QuantizedEmbedding looks up tokens in a table that is the weights of a QuantizedLinear
//   Int4Linear       quantizes each row, and multiplies by int4 weights in blocks
//   Int4Choice       does the same for logits, as QuantizedChoice
//   Int4Embedding    looks up tokens in a table that is the weights of an Int4Linear
//
// A row's numbers do not depend on the rows beside it.

#if !defined(__x86_64__) && !defined(__aarch64__)
#error "the operators are for x86-64 and aarch64; elsewhere ONNX Runtime runs their definitions"
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <new>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#else
#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace {

#include "computation.h"
#include "interface.h"

// The most threads that share some work.
size_t most_parts() {
  static const size_t count = std::max(std::thread::hardware_concurrency(), 1u);
  return count;
}

// Computes all items of some work, by several threads if that is worth it: a thread does some ten products in a
// nanosecond.
template <class Work> void compute(void *context, const Work &work, size_t num_products) {
  constexpr size_t WORTH_THREADS = 1 << 20;
  struct Parts {
    const Work &work;
    size_t count;
    std::unique_ptr<float[]> scratch;
  } parts{work, num_products < WORTH_THREADS ? 1 : std::min(most_parts(), work.num_items()), nullptr};
  parts.scratch.reset(new float[parts.count * work.scratch()]);
  if (parts.count == 1) return work.run(0, work.num_items(), parts.scratch.get());
  const auto part = [](void *data, size_t index) {
    const Parts &parts = *static_cast<const Parts *>(data);
    const size_t num_items = parts.work.num_items();
    parts.work.run(index * num_items / parts.count, (index + 1) * num_items / parts.count,
                   parts.scratch.get() + index * parts.work.scratch());
  };
  check(call<274>(context, +part, parts.count, static_cast<size_t>(0), static_cast<void *>(&parts)));
}

// ---- The operators ----

template <class Element> constexpr bool IS_HALF = std::is_same<Element, Half>::value;
template <class Element> constexpr int TYPE = IS_HALF<Element> ? FLOAT16 : FLOAT;

struct Attention : Heads {
  using Heads::Heads;

  // The work of rows over keys and values (N, G, C, K).
  template <class Element>
  Rows<Element> rows(const Tensor<float> &queries, const Tensor<Element> &keys, const Tensor<Element> &values,
                     const Tensor<int32_t> &last_positions, const Tensor<int64_t> &owners) const {
    require(queries.num_axes == 2 && keys.num_axes == 4 && values.num_axes == 4,
            "queries must have 2 axes, keys and values 4");
    require(std::equal(keys.shape, keys.shape + 4, values.shape), "keys and values differ in shape");
    const int64_t B = queries.shape[0], N = keys.shape[0], G = keys.shape[1], C = keys.shape[2], K = keys.shape[3];
    require(last_positions.has_shape(B) && owners.has_shape(B), "the inputs differ in the number of rows");
    require_width(K);
    require(G > 0 && num_heads % G == 0, "the heads must be a multiple of the heads of keys");
    for (int64_t row = 0; row < B; row++) {
      require(last_positions.data[row] >= 0 && last_positions.data[row] < C, "a last position is outside of the keys");
      require(owners.data[row] >= 0 && owners.data[row] < N, "an owner is not a row");
    }
    Rows<Element> rows{};
    rows.queries = queries.data, rows.keys = keys.data, rows.values = values.data;
    rows.last_positions = last_positions.data, rows.owners = owners.data;
    rows.query_stride = queries.shape[1];
    rows.num_rows = B, rows.num_heads = num_heads, rows.num_groups = G, rows.num_positions = C, rows.d_head = K;
    rows.scale = scale, rows.cap = cap;
    return rows;
  }

  static void require_width(int64_t K) {
    require(K > 0 && K % 8 == 0 && K <= static_cast<int64_t>(8 * MAX_WIDTH), "d_head must be a multiple of 8 up to 1024");
  }

  template <class Element> static void run(void *context, const Rows<Element> &rows) {
    size_t num_positions = 0;
    for (size_t row = 0; row < rows.num_rows; row++) num_positions += rows.length(row);
    compute(context, rows, num_positions * rows.num_heads * rows.d_head);
  }
};

// Inputs: queries, keys and values (B, (H + 2G)K); the cache's keys and values (N, G, C, K); the new position of each
// row (B,); the row of the cache that it is written to (B,); and C, which only the definition reads. Outputs: (B, HK), and
// the cache, in place if it is bound so. All new positions are written before any is read, so that several of one cache
// see those before them.
template <class Element> struct CacheAttention : Attention {
  static constexpr const char *NAME = IS_HALF<Element> ? "HalfCacheAttention" : "CacheAttention";
  static constexpr int INPUTS[] = {FLOAT, TYPE<Element>, TYPE<Element>, INT32, INT64, INT32};
  static constexpr int OUTPUTS[] = {FLOAT, TYPE<Element>, TYPE<Element>};
  using Attention::Attention;

  void operator()(void *context) const {
    const auto packed = input<float>(context, 0);
    const auto keys = input<Element>(context, 1), values = input<Element>(context, 2);
    Rows<Element> work = rows(packed, keys, values, input<int32_t>(context, 3), input<int64_t>(context, 4));
    const size_t H = work.num_heads, G = work.num_groups, C = work.num_positions, K = work.d_head;
    require(work.query_stride == (H + 2 * G) * K, "queries, keys and values have another width");
    work.outputs = output(context, 0, {packed.shape[0], static_cast<int64_t>(H * K)});
    const Element *given[] = {keys.data, values.data};
    Element *cache[2];
    for (size_t i = 0; i < 2; i++) {
      cache[i] = output<Element>(context, 1 + i, {keys.shape[0], keys.shape[1], keys.shape[2], keys.shape[3]});
      require(cache[i] || work.num_rows == 0, "the cache must be read");
      if (cache[i] != given[i]) memcpy(cache[i], given[i], keys.shape[0] * G * C * K * sizeof(Element));
      for (size_t row = 0; row < work.num_rows; row++)
        for (size_t group = 0; group < G; group++) {
          const float *from = packed.data + row * work.query_stride + (H + i * G + group) * K;
          copy(from, K, cache[i] + ((work.owners[row] * G + group) * C + work.length(row) - 1) * K);
        }
    }
    work.keys = cache[0], work.values = cache[1];
    run(context, work);
  }
};

// Inputs: queries (B, HK); the memory's keys and values (N, G, C, K); each row's last position (B,); the row of the memory
// that it reads (B,); and C, which only the definition reads. Output: (B, HK).
template <class Element> struct MemoryAttention : Attention {
  static constexpr const char *NAME = IS_HALF<Element> ? "HalfMemoryAttention" : "MemoryAttention";
  static constexpr int INPUTS[] = {FLOAT, TYPE<Element>, TYPE<Element>, INT32, INT64, INT32};
  static constexpr int OUTPUTS[] = {FLOAT};
  using Attention::Attention;

  void operator()(void *context) const {
    const auto queries = input<float>(context, 0);
    Rows<Element> work = rows(queries, input<Element>(context, 1), input<Element>(context, 2), input<int32_t>(context, 3),
                              input<int64_t>(context, 4));
    require(work.query_stride == work.num_heads * work.d_head, "the queries have another width");
    work.outputs = output(context, 0, {queries.shape[0], queries.shape[1]});
    run(context, work);
  }
};

// Inputs: queries, keys and values (N, 3HK) of the tokens of several sources, one after the other; each source's number
// of tokens (B,); and two that only the definition reads. Output: (N, HK).
struct SourceAttention : Attention {
  static constexpr const char *NAME = "SourceAttention";
  static constexpr int INPUTS[] = {FLOAT, INT64, INT64, INT64}, OUTPUTS[] = {FLOAT};
  using Attention::Attention;

  void operator()(void *context) const {
    const auto packed = input<float>(context, 0);
    const auto lengths = input<int64_t>(context, 1);
    require(packed.num_axes == 2 && lengths.num_axes == 1, "the tokens must have 2 axes, the lengths 1");
    const int64_t N = packed.shape[0], B = lengths.shape[0], K = packed.shape[1] / (3 * num_heads);
    require(packed.shape[1] == 3 * num_heads * K, "queries, keys and values have another width");
    require_width(K);
    int64_t num_tokens = 0, longest = 0;
    double num_products = 0;
    for (int64_t source = 0; source < B; source++) {
      const int64_t length = lengths.data[source];
      require(length >= 0 && length <= N - num_tokens, "the sources have more tokens than there are");
      num_tokens += length, longest = std::max(longest, length);
      num_products += static_cast<double>(length) * static_cast<double>(length);
    }
    require(num_tokens == N, "the sources have fewer tokens than there are");
    Sources work{};
    work.packed = packed.data, work.lengths = lengths.data;
    work.outputs = output(context, 0, {N, num_heads * K});
    work.num_sources = B, work.num_heads = num_heads, work.longest = longest, work.d_head = K;
    work.scale = scale, work.cap = cap;
    compute(context, work, static_cast<size_t>(num_products * static_cast<double>(num_heads * K)));
  }
};

// Inputs: x and the residual (N, D); the norm's weight and bias (D,). Outputs: their sum, which may be unread, and its
// norm, (N, D) each.
struct AddNorm {
  static constexpr const char *NAME = "AddNorm";
  static constexpr int INPUTS[] = {FLOAT, FLOAT, FLOAT, FLOAT}, OUTPUTS[] = {FLOAT, FLOAT};
  float epsilon = 0;

  explicit AddNorm(const void *info) { check(call<85>(info, "epsilon", &epsilon)); }

  void operator()(void *context) const {
    const auto x = input<float>(context, 0), residual = input<float>(context, 1);
    const auto weight = input<float>(context, 2), bias = input<float>(context, 3);
    require(x.num_axes == 2, "x must have 2 axes");
    const int64_t N = x.shape[0], D = x.shape[1];
    require(residual.has_shape(N, D), "x and the residual differ in shape");
    require(weight.has_shape(D) && bias.has_shape(D) && D % 8 == 0, "the norm has another width");
    Norm work{};
    work.x = x.data, work.residual = residual.data, work.weight = weight.data, work.bias = bias.data;
    work.total = output(context, 0, {N, D});
    work.normalized = output(context, 1, {N, D});
    require(N == 0 || work.normalized, "the norm must be read");
    work.num_rows = N, work.d_model = D;
    work.epsilon = epsilon;
    compute(context, work, 8 * static_cast<size_t>(N * D));
  }
};

// Whether packed weights are in half precision.
static bool holds_halves(const Tensor<float> &packed) { return packed.shape[2] * 2 == PANEL; }

// Inputs: x (N, I); and, constants, the weights (O, I) and the bias (O,). Output: (N, O). The attribute `factor` multiplies
// the sums.
//
// A server gives the weights in panels, as `pack_floats` writes them, so that all sessions, and all processes, share them:
// panels of PANEL floats, or as many halves, which are in PANEL / 2 elements of the tensor. Others are packed by each session.
template <bool HAS_RELU> struct Linear {
  static constexpr const char *NAME = HAS_RELU ? "LinearRelu" : "Linear";
  static constexpr int INPUTS[] = {FLOAT, FLOAT, FLOAT}, OUTPUTS[] = {FLOAT};
  std::unique_ptr<Aligned<float>> own, bias;
  FloatMap map{};

  explicit Linear(const void *info) {
    const auto weight = constant<float>(info, 1), added = constant<float>(info, 2);
    check(call<85>(info, "factor", &map.factor));
    require(weight.num_axes == 2 || weight.num_axes == 3, "the weights must have 2 axes, or 3 if they are packed");
    require(added.num_axes == 1, "the bias must have 1 axis");
    const size_t O = map.num_outputs = added.shape[0];
    const bool is_packed = weight.num_axes == 3;
    const size_t I = map.num_inputs = weight.shape[1];
    require(I > 0, "there must be an input");
    bias = std::make_unique<Aligned<float>>(map.num_groups() * GROUP);
    std::copy(added.data, added.data + O, &(*bias)[0]);
    const bool are_halves = is_packed && holds_halves(weight);
    map.multiply = float_multiplication(are_halves), map.least = HAS_RELU ? 0 : -INFINITY;
    map.bias = bias->data(), map.weights = weight.data;
    if (is_packed) {
      require(weight.shape[0] * PANEL == map.num_groups() * GROUP && (are_halves || weight.shape[2] == PANEL),
              "the weights are packed for another number of outputs");
      return;
    }
    require(static_cast<size_t>(weight.shape[0]) == O, "the outputs differ in number");
    own = std::make_unique<Aligned<float>>(size_in_panels(I, O));
    write_panels(weight.data, I, O, &(*own)[0]);
    map.weights = own->data();
  }

  void operator()(void *context) const {
    const auto x = input<float>(context, 0);
    require(x.num_axes == 2 && x.shape[1] == static_cast<int64_t>(map.num_inputs), "x has another width");
    const int64_t N = x.shape[0];
    float *outputs = output(context, 0, {N, static_cast<int64_t>(map.num_outputs)});
    const FloatProduct work{&map, x.data, outputs, static_cast<size_t>(N)};
    // Fewer than 8 rows take as long as 8, to read the weights.
    compute(context, work, std::max<size_t>(N, 8) * map.num_inputs * map.num_outputs / 4);
  }
};

// The ids of tokens (…), which are the first input of an embedding.
struct Tokens {
  Tensor<int64_t> ids;
  size_t count = 1;

  Tokens(void *context, int64_t vocab_size) : ids(input<int64_t>(context, 0)) {
    for (size_t axis = 0; axis < ids.num_axes; axis++) count *= ids.shape[axis];
    for (size_t i = 0; i < count; i++)
      require(ids.data[i] >= 0 && ids.data[i] < vocab_size, "a token is outside of the table");
  }

  // The first output: a row of this width for each token.
  float *rows(void *context, size_t width) const {
    std::vector<int64_t> shape(ids.shape, ids.shape + ids.num_axes);
    shape.push_back(width);
    return output(context, 0, shape.data(), shape.size());
  }
};

// Inputs: token ids (…); and, a constant, the table (V, D), or packed as the weights of a Linear. Output: (…, D). Ids from V on
// are refused, but those of a packed table's padding, whose numbers are zeros.
struct Embedding {
  static constexpr const char *NAME = "Embedding";
  static constexpr int INPUTS[] = {INT64, FLOAT}, OUTPUTS[] = {FLOAT};
  Tensor<float> table;

  explicit Embedding(const void *info) : table(constant<float>(info, 1)) {
    require(table.num_axes == 2 || (table.num_axes == 3 && (table.shape[2] == PANEL || holds_halves(table))),
            "the table must have 2 axes, or 3 if it is packed");
  }

  void operator()(void *context) const {
    const bool is_packed = table.num_axes == 3;
    const Tokens tokens(context, table.shape[0] * (is_packed ? PANEL : 1));
    const size_t D = table.shape[1];
    const Lookup work{table.data,   is_packed, is_packed && holds_halves(table), tokens.ids.data, tokens.rows(context, D),
                      tokens.count, D};
    compute(context, work, tokens.count * D);
  }
};

enum Purpose { LEVELS, SCALES, SHIFTS, SUMMARY, ROWS, BLOCKS, NORMALIZERS, ORDER };

// Memory of the calling thread, until the next call for the same purpose. It is kept: new memory of this size would come from
// the system each time.
template <class T, Purpose> T *scratch(size_t size) {
  thread_local std::vector<T> kept;
  if (kept.size() < size) kept.resize(size);
  return kept.data();
}

// Inputs: x (N, I); the outputs y (N, O) of a map of it; the weights of adapters, and the ranks of their parts, as PartsOfMap
// describes them; each row's adapter (N,), or -1; and the parts. Output: y with the terms of each row's adapter added (N, O); a
// row without one has the bits of y. A part whose rank is 0 is passed over.
struct LowRank : PartsOfMap {
  static constexpr const char *NAME = "LowRank";
  static constexpr int INPUTS[] = {FLOAT, FLOAT, FLOAT16, INT32, INT64, INT64}, OUTPUTS[] = {FLOAT};
  decltype(Terms::add) add = addition_of_terms();
  using PartsOfMap::PartsOfMap;

  void operator()(void *context) const {
    const auto x = input<float>(context, 0), y = input<float>(context, 1);
    const auto adapters = input<Half>(context, 2);
    const auto ranks = input<int32_t>(context, 3);
    const auto ids = input<int64_t>(context, 4);
    const int64_t R = largest_rank(x, y, adapters, ranks, ids), N = x.shape[0], I = x.shape[1], O = ends.back();
    const int64_t P = ends.size(), K = adapters.shape[0];
    int64_t *rows = scratch<int64_t, ROWS>(N);
    size_t num_rows = 0, num_products = 0;
    for (int64_t row = 0; row < N; row++) {
      require(ids.data[row] >= -1 && ids.data[row] < K, "a row's adapter is not there");
      if (ids.data[row] >= 0) rows[num_rows++] = row;
    }
    std::sort(rows, rows + num_rows, [&](int64_t a, int64_t b) {
      return ids.data[a] != ids.data[b] ? ids.data[a] < ids.data[b] : a < b;
    });
    RowsOfAdapter *blocks = scratch<RowsOfAdapter, BLOCKS>(num_rows);
    // Each block reads its adapter's weights, and there should be one for each thread.
    const size_t rows_of_block = std::clamp(num_rows / most_parts(), Terms::LEAST_ROWS, Terms::MOST_ROWS);
    Terms work{};
    work.add = add, work.x = x.data, work.weights = adapters.data + R * first_unit, work.ranks = ranks.data + first_part;
    work.ends = ends.data(), work.blocks = blocks, work.distance = adapters.shape[1];
    work.distance_of_ranks = ranks.shape[1], work.num_inputs = I, work.num_outputs = O, work.num_parts = P;
    work.most_rank = R;
    for (size_t first = 0, stop = 0; first < num_rows; first = stop) {
      const size_t adapter = ids.data[rows[first]];
      while (stop < num_rows && ids.data[rows[stop]] == static_cast<int64_t>(adapter)) stop++;
      size_t products_of_row = 0;
      for (int64_t part = 0; part < P; part++) {
        const int32_t rank = work.ranks[adapter * work.distance_of_ranks + part];
        require(rank >= 0 && rank <= R, "a rank must be from 0 to the largest one");
        products_of_row += rank * (I + ends[part] - (part ? ends[part - 1] : 0));
      }
      if (!products_of_row) continue;
      const size_t count = stop - first, num_blocks = (count + rows_of_block - 1) / rows_of_block;
      num_products += std::max<size_t>(count, 8) * products_of_row; // fewer rows take as long, to read the weights
      for (size_t i = 0; i < num_blocks; i++) {
        const size_t begin = i * count / num_blocks;
        blocks[work.num_blocks++] = {rows + first + begin, (i + 1) * count / num_blocks - begin, adapter};
      }
    }
    work.outputs = output(context, 0, {N, O});
    if (work.outputs != y.data) memcpy(work.outputs, y.data, N * O * sizeof(float));
    if (work.num_blocks) compute(context, work, num_products);
  }
};

Int8Levels levels_of(const Int8Map &map, size_t num_rows) {
  return {scratch<uint8_t, LEVELS>(num_rows * map.row_bytes()), scratch<float, SCALES>(num_rows),
          scratch<int32_t, SHIFTS>(num_rows)};
}

Int4Levels levels_of(const Int4Map &map, size_t num_rows) {
  return {scratch<int8_t, LEVELS>(num_rows * map.depth), scratch<float, SCALES>(num_rows),
          scratch<int32_t, SHIFTS>(num_rows * map.num_blocks())};
}

const Instructions &required_instructions() {
  const Instructions *here = instructions_here();
  require(here, "this processor does not have the instructions of SEQ2SEQ_ISA");
  return *here;
}

bool are_positive(const void *info) { // the inputs that count
  float least_input = 0;
  check(call<85>(info, "least_input", &least_input));
  return least_input == 0;
}

// A map of levels, by weights of one kind.
template <class Weights> struct Quantized {
  using Map = Weights;
  std::unique_ptr<const Map> map;
  int64_t num_inputs = 0; // 0 if the weights do not tell

  void operator()(void *context) const {
    const auto x = given(context);
    multiply(context, x, output(context, 0, {x.shape[0], static_cast<int64_t>(map->num_outputs)}));
  }

  Tensor<float> given(void *context) const {
    const auto x = input<float>(context, 0);
    require(x.num_axes == 2 && Map::padded(x.shape[1]) == map->depth && (!num_inputs || x.shape[1] == num_inputs),
            "x has another width");
    return x;
  }

  void multiply(void *context, const Tensor<float> &x, float *outputs) const {
    run(context, Product<Map>{map.get(), levels(context, x), outputs, static_cast<size_t>(x.shape[0])});
  }

  template <class Multiplication> void run(void *context, const Multiplication &work) const {
    map->reuse.multiply(map->num_bytes());
    // Fewer than 32 rows take as long as 32, to read the weights.
    compute(context, work,
            std::max<size_t>(work.num_rows, 32) * map->depth * map->num_outputs / map->instructions->speed);
  }

  typename Map::Levels levels(void *context, const Tensor<float> &x) const {
    const size_t num_rows = x.shape[0], num_inputs = x.shape[1];
    const auto levels = levels_of(*map, num_rows);
    compute(context, typename Map::Quantization{map.get(), x.data, levels, num_rows, num_inputs}, 4 * num_rows * map->depth);
    return levels;
  }
};

// Inputs: x (N, I); and, constants, the weights (I, O), 128 above their levels, the scales of their columns (O,), the sums of
// their levels (O,), and the bias (O,). Output: (N, O). The attribute `least_input` is 0 where negative inputs count as 0.
//
// A server gives the weights as `pack_int8` writes them, and they are multiplied where they lie, so that all sessions, and all
// processes, share them. Others are packed by each session.
struct QuantizedLinear : Quantized<Int8Map> {
  static constexpr const char *NAME = "QuantizedLinear", *CHOICE = "QuantizedChoice";
  static constexpr int INPUTS[] = {FLOAT, UINT8, FLOAT, INT32, FLOAT}, OUTPUTS[] = {FLOAT};
  std::unique_ptr<Aligned<int8_t>> own;

  explicit QuantizedLinear(const void *info) {
    const auto weight = constant<uint8_t>(info, 1);
    const auto scales = constant<float>(info, 2), bias = constant<float>(info, 4);
    const auto sums = constant<int32_t>(info, 3);
    require(weight.num_axes == 2 || weight.num_axes == 5, "the weights must have 2 axes, or 5 if they are packed");
    require(scales.num_axes == 1, "the scales must have 1 axis");
    const Instructions &how = required_instructions();
    const size_t O = scales.shape[0];
    require(sums.has_shape(O) && bias.has_shape(O), "the columns differ in number");
    const bool is_packed = weight.num_axes == 5;
    const size_t depth = is_packed ? weight.shape[2] * weight.shape[4] : depth_of(weight.shape[0]);
    require(depth > 0 && depth % DEPTH == 0, "the weights must have inputs, padded to a multiple of 16");
    const Packing packing(how, depth, O);
    const int8_t *weights = reinterpret_cast<const int8_t *>(weight.data);
    if (is_packed) {
      require(std::equal(packing.shape, packing.shape + 5, weight.shape), "the weights are packed for other instructions");
    } else {
      require(weight.shape[1] == static_cast<int64_t>(O), "the columns differ in number");
      num_inputs = weight.shape[0];
      own = std::make_unique<Aligned<int8_t>>(packing.size());
      pack(how, weight.data, weight.shape[0], O, &(*own)[0]);
      weights = own->data();
    }
    map = std::make_unique<const Int8Map>(&how, weights, depth, O, are_positive(info), sums.data, scales.data, bias.data);
  }
};

// Inputs: token ids (…), the weights (D, V) of a QuantizedLinear, or as a server gives them, and their scales. Output: (…, D),
// where D must be a multiple of 16. Ids from V on are refused.
struct QuantizedEmbedding {
  static constexpr const char *NAME = "QuantizedEmbedding";
  static constexpr int INPUTS[] = {INT64, UINT8, FLOAT}, OUTPUTS[] = {FLOAT};
  Tensor<uint8_t> weight;
  Tensor<float> scales;
  const Instructions &how = required_instructions();

  explicit QuantizedEmbedding(const void *info) : weight(constant<uint8_t>(info, 1)), scales(constant<float>(info, 2)) {
    require(weight.num_axes == 2 || weight.num_axes == 5, "the weights must have 2 axes, or 5 if they are packed");
    require(scales.num_axes == 1, "the scales must have 1 axis");
    const Packing packing(how, width(), scales.shape[0]);
    require(width() > 0 && width() % DEPTH == 0, "the width must be a multiple of 16");
    require(is_packed() ? std::equal(packing.shape, packing.shape + 5, weight.shape) : weight.shape[1] == scales.shape[0],
            "the weights are packed for other instructions, or their columns differ in number");
  }

  bool is_packed() const { return weight.num_axes == 5; }
  size_t width() const { return is_packed() ? weight.shape[2] * weight.shape[4] : weight.shape[0]; }

  void operator()(void *context) const {
    const int64_t V = scales.shape[0];
    const Tokens tokens(context, V);
    const size_t D = width();
    const Int8Lookup work{is_packed() ? &how : nullptr, weight.data, scales.data, tokens.ids.data,
                          tokens.rows(context, D), tokens.count, D, static_cast<size_t>(V)};
    compute(context, work, tokens.count * D);
  }
};

// int4 weights (panels, blocks, groups, 16, 4), as int4.h says, and their scales (panels, blocks, 32).
struct Int4Weights {
  Tensor<uint8_t> levels;
  Tensor<Half> scales;

  explicit Int4Weights(const void *info) : levels(constant<uint8_t>(info, 1)), scales(constant<Half>(info, 2)) {
    const int64_t inner[] = {INT4_GROUPS, COLUMNS / 2, 4};
    require(levels.num_axes == 5 && std::equal(inner, inner + 3, levels.shape + 2),
            "the weights must have the shape (panels, blocks, 8, 16, 4)");
    require(scales.num_axes == 3 && std::equal(scales.shape, scales.shape + 2, levels.shape) && scales.shape[2] == COLUMNS,
            "the scales must have the shape (panels, blocks, 32)");
    require(num_panels() > 0 && num_blocks() > 0, "there must be an input and an output");
  }

  int64_t num_panels() const { return levels.shape[0]; }
  int64_t num_blocks() const { return levels.shape[1]; }
};

// Inputs: x (N, I); and, constants, the weights and their scales, as above, and the bias (O,). Output: (N, O). Attributes:
// `factor` multiplies the products, and `least_input` is 0 where negative inputs count as 0. The weights are multiplied where
// they lie.
struct Int4Linear : Quantized<Int4Map> {
  static constexpr const char *NAME = "Int4Linear", *CHOICE = "Int4Choice";
  static constexpr int INPUTS[] = {FLOAT, UINT8, FLOAT16, FLOAT}, OUTPUTS[] = {FLOAT};

  explicit Int4Linear(const void *info) {
    const Int4Weights weights(info);
    const auto bias = constant<float>(info, 3);
    float factor = 1;
    check(call<85>(info, "factor", &factor));
    require(bias.num_axes == 1 && panels_of(bias.shape[0]) == static_cast<size_t>(weights.num_panels()),
            "the outputs differ in number");
    map = std::make_unique<const Int4Map>(&required_instructions(), weights.levels.data, weights.num_blocks() * INT4_BLOCK,
                                          bias.shape[0], are_positive(info), factor, weights.scales.data, bias.data);
  }
};

// Inputs: token ids (…), and, constants, the weights of an Int4Linear with V outputs, and their scales. Output: (…, D), where
// D is 32 for each block. Ids beyond the panels are refused.
struct Int4Embedding {
  static constexpr const char *NAME = "Int4Embedding";
  static constexpr int INPUTS[] = {INT64, UINT8, FLOAT16}, OUTPUTS[] = {FLOAT};
  Int4Weights weights;

  explicit Int4Embedding(const void *info) : weights(info) {}

  void operator()(void *context) const {
    const Tokens tokens(context, weights.num_panels() * COLUMNS);
    const size_t B = weights.num_blocks(), D = B * INT4_BLOCK;
    const Int4Lookup work{weights.levels.data, weights.scales.data, tokens.ids.data, tokens.rows(context, D),
                          tokens.count, B};
    compute(context, work, tokens.count * D);
  }
};

// Rows and token ids (P, 2), whose log-probabilities are looked up.
struct TokenPlaces {
  const int64_t *data = nullptr;
  int64_t count = 0;

  TokenPlaces(void *context, size_t index, int64_t num_rows, int64_t vocab_size) {
    if (!has_input(context, index)) return;
    const auto places = input<int64_t>(context, index);
    require(places.num_axes == 2 && places.shape[1] == 2, "the places must have the shape (P, 2)");
    data = places.data, count = places.shape[0];
    for (int64_t i = 0; i < count; i++)
      require(data[2 * i] >= 0 && data[2 * i] < num_rows && data[2 * i + 1] >= 0 && data[2 * i + 1] < vocab_size,
              "a place is outside of the logits");
  }
};

template <size_t N> constexpr std::array<int, N + 3> with_choice(const int (&inputs)[N]) {
  std::array<int, N + 3> all{};
  for (size_t i = 0; i < N; i++) all[i] = inputs[i];
  all[N] = FLOAT, all[N + 1] = INT64, all[N + 2] = INT64;
  return all;
}

// Inputs: those of a map; constant, what is added to logits before a choice (O,), minus infinity for tokens that are never
// chosen; the number of candidates (1,); and places (P, 2) to look up, which older bundles do not have. Outputs: the logits
// (N, O) if the number is 0, otherwise (0, O); the ids of the candidates (N, candidates), the most probable first, -1 if the
// logits are not numbers; their log-probabilities, if there are several; and, with candidates, the log-probabilities at the
// places (P,), otherwise none.
template <class Linear> struct Choosing : Linear {
  static constexpr const char *NAME = Linear::CHOICE;
  static constexpr auto INPUTS = with_choice(Linear::INPUTS);
  static constexpr size_t PLACES = std::size(INPUTS) - 1, NUM_REQUIRED = PLACES;
  static constexpr int OUTPUTS[] = {FLOAT, INT64, FLOAT, FLOAT};
  std::vector<float> bias;
  using Linear::map;
  using Map = typename Linear::Map;

  explicit Choosing(const void *info)
      : Linear(info), bias(map->bias.data(), map->bias.data() + map->num_panels() * COLUMNS) {
    const auto added = constant<float>(info, std::size(Linear::INPUTS));
    require(added.has_shape(map->num_outputs), "the columns differ in number");
    for (size_t o = 0; o < map->num_outputs; o++) bias[o] += added.data[o];
  }

  void operator()(void *context) const {
    const auto x = this->given(context);
    const auto number = input<int64_t>(context, PLACES - 1);
    require(number.has_shape(1), "the number must have 1 axis");
    const int64_t N = x.shape[0], V = map->num_outputs, count = *number.data;
    require(count >= 0 && count <= V, "the number of candidates must be from 0 to the size of the vocabulary");
    float *logits = output(context, 0, {count ? 0 : N, V});
    int64_t *token_ids = output<int64_t>(context, 1, {N, count});
    float *log_probabilities = output(context, 2, {N, count > 1 ? count : 0});
    const TokenPlaces places(context, PLACES, N, V);
    float *found = output(context, 3, {count ? places.count : 0});
    require(N == 0 || (count ? token_ids && (count == 1 || log_probabilities) : logits != nullptr),
            "the outputs must be read");
    if (!count) return this->multiply(context, x, logits);
    const bool are_normalized = count > 1 || places.count;
    const size_t size = N * map->num_panels();
    const size_t products = COLUMNS * map->depth / map->instructions->speed; // of a row and a panel
    float *largest = scratch<float, SUMMARY>(2 * size), *powers = are_normalized ? largest + size : nullptr;
    const Summary<Map> summary{map.get(), bias.data(), this->levels(context, x), largest, powers, static_cast<size_t>(N)};
    this->run(context, summary);
    double *normalizers = are_normalized ? scratch<double, NORMALIZERS>(N) : nullptr;
    const Choice<Map> choice{summary, static_cast<size_t>(count), token_ids, count > 1 ? log_probabilities : nullptr,
                             normalizers};
    compute(context, choice, size * 8 + N * count * products);
    if (!places.count) return;
    require(found, "what is found must be read");
    const size_t num_places = places.count;
    size_t *order = scratch<size_t, ORDER>(num_places);
    for (size_t i = 0; i < num_places; i++) order[i] = i;
    std::sort(order, order + num_places, [&](size_t a, size_t b) { return places.data[2 * a + 1] < places.data[2 * b + 1]; });
    compute(context, Places<Map>{&summary, normalizers, places.data, order, found, num_places}, num_places * products);
  }
};

// Inputs: logits (N, V); the number of candidates (1,); and places (P, 2) to look up. Outputs: the ids of the candidates, as
// above, and their log-probabilities, the most probable first; and the log-probabilities at the places (P,).
struct Candidates {
  static constexpr const char *NAME = "Candidates";
  static constexpr int INPUTS[] = {FLOAT, INT64, INT64}, OUTPUTS[] = {INT64, FLOAT, FLOAT};

  explicit Candidates(const void *) {}

  void operator()(void *context) const {
    const auto logits = input<float>(context, 0);
    const auto number = input<int64_t>(context, 1);
    require(logits.num_axes == 2 && number.has_shape(1), "the logits must have 2 axes, the number 1");
    const int64_t N = logits.shape[0], V = logits.shape[1], count = *number.data;
    require(count >= 1 && count <= V, "the number of candidates must be from 1 to the size of the vocabulary");
    Ranking work{};
    work.logits = logits.data;
    work.token_ids = output<int64_t>(context, 0, {N, count});
    work.log_probabilities = output(context, 1, {N, count});
    work.normalizers = scratch<double, NORMALIZERS>(N);
    work.num_rows = N, work.vocab_size = V, work.num_candidates = count;
    const TokenPlaces places(context, 2, N, V);
    float *found = output(context, 2, {places.count});
    require(N == 0 || (work.token_ids && work.log_probabilities && (found || !places.count)), "the outputs must be read");
    compute(context, work, 8 * static_cast<size_t>(N * V));
    for (int64_t i = 0; i < places.count; i++) {
      const int64_t row = places.data[2 * i];
      found[i] = static_cast<float>(logits.data[row * V + places.data[2 * i + 1]] - work.normalizers[row]);
    }
  }
};

// Inputs: logits (N, V), and the bounds of each row (N, 1), in the order of the struct of this name in compute.h. Output: the
// logits with minus infinity for forbidden tokens (N, V).
struct TimeRulesOperator {
  static constexpr const char *NAME = "TimeRules";
  static constexpr int INPUTS[] = {FLOAT, INT64, INT64, INT64, INT64, INT64, INT64}, OUTPUTS[] = {FLOAT};

  explicit TimeRulesOperator(const void *) {}

  void operator()(void *context) const {
    const auto logits = input<float>(context, 0);
    require(logits.num_axes == 2, "the logits must have 2 axes");
    const int64_t N = logits.shape[0], V = logits.shape[1];
    TimeRules work{};
    for (size_t i = 0; i < TimeRules::NUM_BOUNDS; i++) {
      const auto bounds = input<int64_t>(context, 1 + i);
      require(bounds.has_shape(N, 1), "the bounds must have the shape (N, 1)");
      work.bounds[i] = bounds.data;
    }
    work.logits = logits.data, work.allowed = output(context, 0, {N, V});
    work.num_rows = N, work.vocab_size = V;
    compute(context, work, 8 * static_cast<size_t>(N * V));
  }
};

// The operators, which live as long as the library, because sessions use them.
struct Domain {
  const Operator operators[18] = {described<CacheAttention<float>>(),
                                  described<CacheAttention<Half>>(),
                                  described<MemoryAttention<float>>(),
                                  described<MemoryAttention<Half>>(),
                                  described<SourceAttention>(),
                                  described<AddNorm>(),
                                  described<Linear<false>>(),
                                  described<Linear<true>>(),
                                  described<Embedding>(),
                                  reusing<1>(described<LowRank>()),
                                  described<Candidates>(),
                                  described<TimeRulesOperator>(),
                                  described<QuantizedLinear>(),
                                  described<Choosing<QuantizedLinear>>(),
                                  described<QuantizedEmbedding>(),
                                  described<Int4Linear>(),
                                  described<Choosing<Int4Linear>>(),
                                  described<Int4Embedding>()};
  void *domain = nullptr;
  bool is_complete = false;

  explicit Domain(void *const *table) {
    api = table;
    Status *problem = call<26>("seq2seq_serve", &domain);
    for (const Operator &each : operators)
      if (!problem) problem = call<27>(domain, &each);
    is_complete = !problem;
  }
};

bool is_described = false;

} // namespace

// The SHA-256 of the sources.
extern "C" const char *sources_digest() { return SOURCES_DIGEST; }

// Whether ONNX Runtime has accepted the operators.
extern "C" bool is_complete() { return is_described; }

// The name of the instructions that multiply quantised weights; null if SEQ2SEQ_ISA names some that this processor does not
// have.
extern "C" const char *instructions() {
  const Instructions *here = instructions_here();
  return here ? here->name : nullptr;
}

// Whether this processor has the instructions of a name.
extern "C" bool has_instructions(const char *name) { return find_instructions(name); }

// Writes the shape (5,) in which weights (I, O) are packed here.
extern "C" void packed_shape(int64_t inputs, int64_t outputs, int64_t *shape) {
  const Packing packing(*instructions_here(), depth_of(inputs), outputs);
  std::copy(packing.shape, packing.shape + 5, shape);
}

// Packs weights (I, O), which lie 128 above their levels, into zeros, or into memory that begins where they do. Returns
// whether there is enough memory.
extern "C" bool pack_int8(const uint8_t *weights, int64_t inputs, int64_t outputs, int8_t *to) try {
  const Instructions &how = *instructions_here();
  std::vector<uint8_t> copy;
  if (static_cast<const void *>(weights) == to) {
    copy.assign(weights, weights + inputs * outputs);
    std::fill_n(to, Packing(how, depth_of(inputs), outputs).size(), 0);
    weights = copy.data();
  }
  pack(how, weights, inputs, outputs, to);
  return true;
} catch (const std::bad_alloc &) {
  return false;
}

// Writes the shape (3,) in which weights of floats are packed: (O / PANEL, I, PANEL), with O rounded up to whole groups.
extern "C" void packed_float_shape(int64_t outputs, int64_t inputs, int64_t *shape) {
  shape[0] = size_in_panels(1, outputs) / PANEL, shape[1] = inputs, shape[2] = PANEL;
}

// Packs weights (O, I), also into memory that begins where they do: in half precision if that has the same numbers. Returns how
// many bytes a number takes, or 0 if there is not enough memory.
extern "C" int pack_floats(const float *weights, int64_t outputs, int64_t inputs, void *to) try {
  if (are_halves(weights, outputs * inputs)) {
    write_panels(weights, inputs, outputs, static_cast<Half *>(to));
    return sizeof(Half);
  }
  write_panels(weights, inputs, outputs, static_cast<float *>(to));
  return sizeof(float);
} catch (const std::bad_alloc &) {
  return 0;
}

// ONNX Runtime calls this for each session that loads the library. A session that gets an error runs the definitions.
extern "C" Status *RegisterCustomOps(void *session_options, const ApiBase *base) {
  static void *const *const table = base->get(API_VERSION);
  if (!table) return nullptr; // an ONNX Runtime without the interface, to which nothing can be reported: see is_complete
  const auto failure = reinterpret_cast<Status *(*)(int, const char *)>(table[0]);
  if (!has_least()) return failure(INVALID_ARGUMENT, "they need a processor with AVX2");
  if (!instructions_here()) return failure(INVALID_ARGUMENT, "this processor does not have the instructions of SEQ2SEQ_ISA");
  static const Domain domain(table);
  is_described = domain.is_complete;
  if (!domain.is_complete) return failure(INVALID_ARGUMENT, "ONNX Runtime refuses their description");
  return reinterpret_cast<Status *(*)(void *, void *)>(table[28])(session_options, domain.domain);
}
