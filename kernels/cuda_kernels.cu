// CUDA kernels of the project's operators for one target position per row, in float16 and bfloat16.
//
// `make ptx` compiles this file to cuda_kernels.ptx, which the driver turns into code of the GPU at hand. It includes no
// header of CUDA, so that tests also compile it for the host, where threads take the place of CUDA's.
//
//   attention      attends to the first positions of each row of a buffer, and may append one position to them before
//   embedding      adds the embeddings of tokens and of the positions after given ones
//   gated          multiplies one half of each row by the activation of the other
//   norm_linear    adds a residual, and computes the norm of the sum and a map of it, for a few rows
//   norm, finish   the same before and after a map of many rows, which cuBLAS computes
//   low_rank       adds the low-rank terms of adapters to outputs of a map
//   most_probable  converts scores to float32 logits, and finds the largest of each row
//   move           copies positions of rows of several tensors into other rows
//
// A row's numbers do not depend on the rows beside it.

#ifndef HOST
#define SYNC __syncthreads()
#define SHARED extern __shared__ float shared[];
using Index = long long;
#endif

// Values of 16 bits.
struct alignas(16) Eight {
  unsigned pairs[4];
};
struct alignas(8) Four {
  unsigned pairs[2];
};
struct alignas(16) Floats {
  float numbers[4];
};

struct Float16 {
#ifndef HOST
  static __device__ void unpack(unsigned pair, float &low, float &high) {
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(low), "=f"(high) : "r"(pair));
  }
  static __device__ unsigned short pack(float value) {
    unsigned short bits;
    asm("{.reg .f16 a; cvt.rn.f16.f32 a, %1; mov.b16 %0, a;}" : "=h"(bits) : "f"(value));
    return bits;
  }
#else
  static void unpack(unsigned pair, float &low, float &high) {
    low = static_cast<float>(__builtin_bit_cast(_Float16, static_cast<unsigned short>(pair)));
    high = static_cast<float>(__builtin_bit_cast(_Float16, static_cast<unsigned short>(pair >> 16)));
  }
  static unsigned short pack(float value) { return __builtin_bit_cast(unsigned short, static_cast<_Float16>(value)); }
#endif
};

struct BFloat16 {
  static __device__ void unpack(unsigned pair, float &low, float &high) {
    low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
  }
  static __device__ unsigned short pack(float value) { // rounded to the nearest, ties to even
    const unsigned bits = __float_as_uint(value);
    if (value != value) return static_cast<unsigned short>(bits >> 16 | 0x40);
    return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

template <class T, class Several> __device__ void unpack(const Several &from, float *to) {
  for (int i = 0; i < static_cast<int>(sizeof from / 4); i++) T::unpack(from.pairs[i], to[2 * i], to[2 * i + 1]);
}

template <class T> __device__ float number(unsigned short bits) {
  float low, high;
  T::unpack(bits, low, high);
  return low;
}

template <class T> __device__ Eight packed(const float *from) {
  Eight eight;
  for (int i = 0; i < 4; i++) eight.pairs[i] = T::pack(from[2 * i]) | static_cast<unsigned>(T::pack(from[2 * i + 1])) << 16;
  return eight;
}

// The softmax of the scores seen so far, of one part of the positions: exp2(score - largest) sums to `total`, and weights
// the values in `sums`, 8 of the K of a head.
struct Softmax {
  float largest, total, sums[8];

  __device__ void clear() {
    largest = -__builtin_huge_valf(), total = 0;
    for (int i = 0; i < 8; i++) sums[i] = 0;
  }

  __device__ static float factor(float from, float to) { // of sums relative to `from`; there may be none
    return from == -__builtin_huge_valf() ? 0.0f : exp2f(from - to);
  }

  __device__ void add(float score, const float *values) {
    const float next = fmaxf(largest, score), old = factor(largest, next), weight = factor(score, next);
    total = total * old + weight;
    for (int i = 0; i < 8; i++) sums[i] = sums[i] * old + weight * values[i];
    largest = next;
  }

  __device__ void merge(const Softmax &other) {
    const float next = fmaxf(largest, other.largest), a = factor(largest, next), b = factor(other.largest, next);
    total = total * a + other.total * b;
    for (int i = 0; i < 8; i++) sums[i] = sums[i] * a + other.sums[i] * b;
    largest = next;
  }

  __device__ Softmax across(int distance) const { // that of another thread of the warp
    Softmax other;
    other.largest = __shfl_xor_sync(0xffffffffu, largest, distance);
    other.total = __shfl_xor_sync(0xffffffffu, total, distance);
    for (int i = 0; i < 8; i++) other.sums[i] = __shfl_xor_sync(0xffffffffu, sums[i], distance);
    return other;
  }
};

// Attention of one position of each row. A block computes a head (x) of a row (y). K / 8 neighbouring threads, a team, read
// a position together; the teams share the positions. K / 8 is a power of 2 up to 32, and the block has whole warps.
//
// queries     head h of row r is at r * query_stride + h * K
// added       null, or the key of group g of row r at r * query_stride + g * K, which becomes the last position; its value is
//             G * K further
// keys        (rows, G, C, K), and so are the values
// last        each row's last position
// outputs     (rows, H * K)
// bias        null, or (H, D): added to the scores by the distance of a position from the last one, D - 1 at most
// scale       of the scores, times log2(e)
// cap         0, or c: scores become c tanh(score / c), before that factor
struct Attention {
  const unsigned short *queries, *added;
  unsigned short *keys, *values;
  const int *last;
  unsigned short *outputs;
  const unsigned short *bias;
  int query_stride, num_heads, num_groups, num_positions, d_head, num_distances;
  float scale, cap;
};

template <class T> __device__ void attend(const Attention &work) {
  SHARED
  const float LOG2_E = 1.4426950408889634f;
  const int K = work.d_head, lanes = K / 8, lane = threadIdx.x % lanes, team = threadIdx.x / lanes;
  const int num_teams = blockDim.x / lanes, head = blockIdx.x, row = blockIdx.y;
  const int heads_per_group = work.num_heads / work.num_groups, group = head / heads_per_group;
  const Index first = (static_cast<Index>(row) * work.num_groups + group) * work.num_positions * lanes + lane;
  Eight *keys = reinterpret_cast<Eight *>(work.keys) + first, *values = reinterpret_cast<Eight *>(work.values) + first;
  // The first round's position is read before `last` is there; it may be one that is not live.
  Eight key = {}, value = {};
  if (team < work.num_positions) {
    key = keys[static_cast<Index>(team) * lanes];
    value = values[static_cast<Index>(team) * lanes];
  }
  const int last = work.last[row], count = last + 1;
  const Index given = static_cast<Index>(row) * work.query_stride;
  Eight added_key = {}, added_value = {};
  if (work.added) {
    const Eight *added = reinterpret_cast<const Eight *>(work.added + given + group * K) + lane;
    added_key = added[0], added_value = added[work.num_groups * lanes];
    if (head % heads_per_group == 0 && team == 0) { // no block reads this position of the buffers
      keys[static_cast<Index>(last) * lanes] = added_key;
      values[static_cast<Index>(last) * lanes] = added_value;
    }
  }
  float query[8];
  unpack<T>(reinterpret_cast<const Eight *>(work.queries + given + head * K)[lane], query);
  Softmax softmax;
  softmax.clear();
  // Every thread takes part in each round, because threads of a warp exchange numbers in it. The next round's position is
  // read meanwhile.
  for (int start = 0; start < count; start += num_teams) {
    const int position = start + team, next = position + num_teams;
    Eight next_key = added_key, next_value = added_value;
    if (next < last || (next == last && !work.added)) {
      next_key = keys[static_cast<Index>(next) * lanes];
      next_value = values[static_cast<Index>(next) * lanes];
    }
    float bias = 0;
    if (work.bias && position <= last) {
      const int distance = last - position < work.num_distances ? last - position : work.num_distances - 1;
      bias = LOG2_E * number<T>(work.bias[head * work.num_distances + distance]);
    }
    if (work.added && position == last) key = added_key, value = added_value;
    float numbers[8], score = 0;
    unpack<T>(key, numbers);
    for (int i = 0; i < 8; i++) score += query[i] * numbers[i];
    for (int distance = lanes / 2; distance; distance /= 2) score += __shfl_xor_sync(0xffffffffu, score, distance);
    score *= work.scale;
    if (work.cap != 0) score = work.cap * LOG2_E * tanhf(score / (work.cap * LOG2_E));
    score += bias;
    unpack<T>(value, numbers);
    if (position < count) softmax.add(score, numbers);
    key = next_key, value = next_value;
  }
  for (int distance = lanes; distance < 32; distance *= 2) softmax.merge(softmax.across(distance));
  // Now each warp has one softmax, of which each of its first threads has 8 values.
  const int num_warps = blockDim.x / 32, warp = threadIdx.x / 32, size = K + 2;
  if (threadIdx.x % 32 < lanes) {
    float *own = shared + warp * size;
    if (lane == 0) own[0] = softmax.largest, own[1] = softmax.total;
    for (int i = 0; i < 8; i++) own[2 + 8 * lane + i] = softmax.sums[i];
  }
  SYNC;
  for (int k = threadIdx.x; k < K; k += blockDim.x) {
    float largest = shared[0];
    for (int w = 1; w < num_warps; w++) largest = fmaxf(largest, shared[w * size]);
    float total = 0, sum = 0;
    for (int w = 0; w < num_warps; w++) {
      const float factor = Softmax::factor(shared[w * size], largest);
      total += factor * shared[w * size + 1], sum += factor * shared[w * size + 2 + k];
    }
    work.outputs[(static_cast<Index>(row) * work.num_heads + head) * K + k] = T::pack(sum / total);
  }
}

constexpr int ROWS = 8, COLUMNS = 32, LOADS = 4; // of a block; a thread reads the weights of 8 outputs at once

// Adds the embeddings of tokens and of positions, which come after those before. A block computes a row.
//
// ids        (rows,); a token or a position without an embedding has that of zeros
// previous   (rows,), and so are `lengths`, the numbers that follow; they may be the same memory
// table      (V, D), and `positions` (C, D); D is a multiple of 8
// outputs    (rows, D)
struct Embedding {
  const Index *ids;
  const int *previous;
  const unsigned short *table, *positions;
  unsigned short *outputs;
  int *lengths;
  int vocab_size, num_positions, width;
};

template <class T> __device__ void embed(const Embedding &work) {
  const int row = blockIdx.x, length = work.previous[row] + 1, D = work.width;
  const Index id = work.ids[row];
  SYNC;
  if (threadIdx.x == 0) work.lengths[row] = length;
  const bool has_token = id >= 0 && id < work.vocab_size, has_position = length >= 0 && length < work.num_positions;
  for (int i = 8 * threadIdx.x; i < D; i += 8 * blockDim.x) {
    float token[8] = {}, position[8] = {};
    if (has_token) unpack<T>(*reinterpret_cast<const Eight *>(work.table + id * D + i), token);
    if (has_position) unpack<T>(*reinterpret_cast<const Eight *>(work.positions + static_cast<Index>(length) * D + i), position);
    for (int j = 0; j < 8; j++) token[j] += position[j];
    *reinterpret_cast<Eight *>(work.outputs + static_cast<Index>(row) * D + i) = packed<T>(token);
  }
}

constexpr int RELU = 1, GELU = 2, FAST_GELU = 3, SILU = 4;

__device__ inline float activated(float x, int activation) {
  if (activation == RELU) return x < 0 ? 0.0f : x;
  if (activation == GELU) return x * (0.5f + 0.5f * erff(x * 0.70710678f));
  if (activation == FAST_GELU) return x * (0.5f + 0.5f * tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
  if (activation == SILU) return x / (1 + exp2f(-1.44269504f * x));
  return x;
}

// x        (rows, 2 F); F is a multiple of 8
// outputs  (rows, F): the activation of the first half times the other
struct Gated {
  const unsigned short *x;
  unsigned short *outputs;
  int width, activation;
};

// A block computes a part (y) of a row (x).
template <class T> __device__ void gate(const Gated &work) {
  const int F = work.width, i = 8 * (blockIdx.y * blockDim.x + threadIdx.x);
  const Index row = blockIdx.x;
  if (i >= F) return;
  const Eight *given = reinterpret_cast<const Eight *>(work.x + row * 2 * F + i);
  float gates[8], numbers[8];
  unpack<T>(given[0], gates);
  unpack<T>(given[F / 8], numbers);
  for (int j = 0; j < 8; j++) numbers[j] *= activated(gates[j], work.activation);
  *reinterpret_cast<Eight *>(work.outputs + row * F + i) = packed<T>(numbers);
}

// A norm and a map of it. The widths are multiples of 8.
//
// x, residual  (rows, I); their sum, with x_bias (I,) unless that is null, is `totals`
// scale        (I,) of the norm, and so is `shift`; without one it is an RMS norm
// weights      (I, O), and `bias` (O,), which may be null
// normalized   (rows, I), the norm of the totals as they are rounded
// outputs      (rows, O)
struct NormLinear {
  const unsigned short *x, *residual, *x_bias, *scale, *shift, *weights, *bias;
  unsigned short *totals, *normalized, *outputs;
  int num_rows, num_inputs, num_outputs, activation;
  float epsilon;
};

__device__ inline float sum_of_warp(float sum) {
  for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  return sum;
}

// A warp writes the norm of a row to `to`, and both results to the row of the outputs if it keeps them.
template <class T> __device__ void normalize(const NormLinear &work, int row, unsigned short *to, bool keeps) {
  const int I = work.num_inputs, first = threadIdx.x % 32 * 8;
  const Index begin = static_cast<Index>(row) * I;
  const auto at = [](const unsigned short *from, Index i) { return *reinterpret_cast<const Eight *>(from + i); };
  const auto write = [](unsigned short *to, Index i, Eight eight) { *reinterpret_cast<Eight *>(to + i) = eight; };
  float sum = 0, squares = 0, numbers[8], others[8];
  for (int i = first; i < I; i += 256) {
    unpack<T>(at(work.x, begin + i), numbers);
    unpack<T>(at(work.residual, begin + i), others);
    for (int j = 0; j < 8; j++) numbers[j] += others[j];
    if (work.x_bias) {
      unpack<T>(at(work.x_bias, i), others);
      for (int j = 0; j < 8; j++) numbers[j] += others[j];
    }
    const Eight total = packed<T>(numbers);
    write(to, i, total);
    if (keeps) write(work.totals, begin + i, total);
    unpack<T>(total, numbers);
    for (int j = 0; j < 8; j++) sum += numbers[j];
  }
  const float mean = work.shift ? sum_of_warp(sum) / I : 0.0f;
  for (int i = first; i < I; i += 256) {
    unpack<T>(at(to, i), numbers);
    for (int j = 0; j < 8; j++) squares += (numbers[j] - mean) * (numbers[j] - mean);
  }
  const float factor = 1 / sqrtf(sum_of_warp(squares) / I + work.epsilon);
  for (int i = first; i < I; i += 256) {
    unpack<T>(at(to, i), numbers);
    unpack<T>(at(work.scale, i), others);
    for (int j = 0; j < 8; j++) numbers[j] = (numbers[j] - mean) * factor * others[j];
    if (work.shift) {
      unpack<T>(at(work.shift, i), others);
      for (int j = 0; j < 8; j++) numbers[j] += others[j];
    }
    const Eight norm = packed<T>(numbers);
    write(to, i, norm);
    if (keeps) write(work.normalized, begin + i, norm);
  }
}

template <class T> __device__ unsigned short finished(const NormLinear &work, float output, int column) {
  if (work.bias) output += number<T>(work.bias[column]);
  return T::pack(activated(output, work.activation));
}

// Adds half of the sums, 2 COUNT, to those of another thread, and the other thread's other half to the rest, which stays.
template <int COUNT, int DISTANCE> __device__ void exchange(float *sums) {
  const bool is_upper = threadIdx.x & DISTANCE;
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const float given = is_upper ? sums[i] : sums[COUNT + i], kept = is_upper ? sums[COUNT + i] : sums[i];
    sums[i] = kept + __shfl_xor_sync(0xffffffffu, given, DISTANCE);
  }
}

// A block of ROWS * COLUMNS threads computes some outputs (x) of some rows (y), and the norm of these rows. Its first
// weights are on their way meanwhile. 4 neighbouring threads read an input's weights together; the others read other
// inputs'. The order of a sum does not depend on the number of rows.
template <class T> __device__ void map_norm(const NormLinear &work) {
  SHARED
  const int I = work.num_inputs, O = work.num_outputs, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  constexpr int NUM_WARPS = ROWS * COLUMNS / 32, STEP = ROWS * COLUMNS / 4;
  const int first_row = blockIdx.y * ROWS, num_rows = work.num_rows - first_row < ROWS ? work.num_rows - first_row : ROWS;
  const int column = blockIdx.x * COLUMNS + lane % 4 * 8;
  const auto weights_of = [&](int i) -> Eight {
    if (i >= I || column >= O) return {};
    return *reinterpret_cast<const Eight *>(work.weights + static_cast<Index>(i) * O + column);
  };
  Eight weights[LOADS];
#pragma unroll
  for (int load = 0; load < LOADS; load++) weights[load] = weights_of(threadIdx.x / 4 + load * STEP);
  float *parts = shared; // (warps, ROWS, COLUMNS)
  unsigned short *inputs = reinterpret_cast<unsigned short *>(parts + NUM_WARPS * ROWS * COLUMNS); // (ROWS, I)
  for (int row = warp; row < num_rows; row += NUM_WARPS)
    normalize<T>(work, first_row + row, inputs + row * I, blockIdx.x == 0);
  SYNC;
  float sums[ROWS * 8] = {};
  for (int first = threadIdx.x / 4; first < I; first += LOADS * STEP) {
#pragma unroll
    for (int load = 0; load < LOADS; load++) {
      const int i = first + load * STEP;
      float numbers[8];
      unpack<T>(weights[load], numbers);
      weights[load] = weights_of(i + LOADS * STEP);
      if (i >= I) break;
#pragma unroll
      for (int row = 0; row < ROWS; row++) {
        if (row >= num_rows) break;
        const float input = number<T>(inputs[row * I + i]);
        for (int j = 0; j < 8; j++) sums[row * 8 + j] += input * numbers[j];
      }
    }
  }
  // Threads of a warp with the same outputs share these, until each has those of a single row.
  exchange<ROWS * 4, 4>(sums);
  exchange<ROWS * 2, 8>(sums);
  exchange<ROWS, 16>(sums);
  const int own_row = (lane & 4) + (lane & 8) / 4 + (lane & 16) / 16;
  for (int j = 0; j < 8; j++) parts[(warp * ROWS + own_row) * COLUMNS + lane % 4 * 8 + j] = sums[j];
  SYNC;
  const int row = threadIdx.x / COLUMNS, o = blockIdx.x * COLUMNS + threadIdx.x % COLUMNS;
  if (row >= num_rows || o >= O) return;
  float output = 0;
  for (int w = 0; w < NUM_WARPS; w++) output += parts[w * ROWS * COLUMNS + threadIdx.x];
  work.outputs[static_cast<Index>(first_row + row) * O + o] = finished<T>(work, output, o);
}

// A warp of a block computes the norm of a row.
template <class T> __device__ void normalize_rows(const NormLinear &work) {
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (row < work.num_rows) normalize<T>(work, row, work.normalized + static_cast<Index>(row) * work.num_inputs, true);
}

// A block adds the bias to outputs (x) of a row (y), and applies the activation.
template <class T> __device__ void finish_rows(const NormLinear &work) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned short *output = work.outputs + static_cast<Index>(blockIdx.y) * work.num_outputs + column;
  if (column < work.num_outputs) *output = finished<T>(work, number<T>(*output), column);
}

constexpr int MOST_PARTS = 256;

// The low-rank terms of rows, which may have different adapters. A block computes a part (y) of a row (x).
//
// x           (rows, I)
// y           (rows, O), to which the terms are added; `outputs` may be the same memory
// weights     in float16, of each adapter, with this distance: A (P, R, I), and B (R, O)
// ranks       of each adapter, with another distance: those of its parts (P,)
// ids         each row's adapter; any other number for none
// ends        of the parts, in outputs
struct Terms {
  const unsigned short *x, *y, *weights;
  const int *ranks;
  const Index *ids;
  unsigned short *outputs;
  Index distance;
  int num_inputs, num_outputs, most_rank, num_adapters, distance_of_ranks;
  int ends[MOST_PARTS];
};

// Loads up to 8 numbers, at once if they lie so, with zeros after the last one.
__device__ inline Eight load(const unsigned short *from, int count) {
  if (count >= 8 && reinterpret_cast<unsigned long long>(from) % sizeof(Eight) == 0)
    return *reinterpret_cast<const Eight *>(from);
  Eight eight = {};
  for (int i = 0; i < 8; i++)
    if (i < count) eight.pairs[i / 2] |= static_cast<unsigned>(from[i]) << 16 * (i % 2);
  return eight;
}

template <class T> __device__ void add_terms(const Terms &work) {
  SHARED
  const int I = work.num_inputs, O = work.num_outputs, R = work.most_rank, row = blockIdx.x, part = blockIdx.y;
  const int begin = part ? work.ends[part - 1] : 0, end = work.ends[part], num_threads = blockDim.x;
  const Index id = work.ids[row];
  const unsigned short *y = work.y + static_cast<Index>(row) * O;
  unsigned short *outputs = work.outputs + static_cast<Index>(row) * O;
  const bool has_adapter = id >= 0 && id < work.num_adapters;
  int rank = has_adapter ? work.ranks[id * work.distance_of_ranks + part] : 0;
  if (rank <= 0) { // the bits of y, which may be there
    for (int o = begin + threadIdx.x; o < end && outputs != y; o += num_threads) outputs[o] = y[o];
    return;
  }
  if (rank > R) rank = R;
  int num_parts = part + 1;
  while (work.ends[num_parts - 1] < O) num_parts++;
  const unsigned short *a = work.weights + id * work.distance + static_cast<Index>(part) * R * I;
  const unsigned short *b = work.weights + id * work.distance + static_cast<Index>(num_parts) * R * I;
  const unsigned short *x = work.x + static_cast<Index>(row) * I;
  // A warp computes an element of A x; a thread sums the products of 8 neighbouring inputs, and of those 256 further.
  for (int r = threadIdx.x / 32; r < rank; r += num_threads / 32) {
    float sum = 0;
    for (int i = threadIdx.x % 32 * 8; i < I; i += 256) {
      float weights[8], inputs[8];
      unpack<Float16>(load(a + static_cast<Index>(r) * I + i, I - i), weights);
      unpack<T>(load(x + i, I - i), inputs);
      for (int j = 0; j < 8; j++) sum += weights[j] * inputs[j];
    }
    sum = sum_of_warp(sum);
    if (threadIdx.x % 32 == 0) shared[r] = sum;
  }
  SYNC;
  for (int o = begin + threadIdx.x; o < end; o += num_threads) {
    float sum = 0, given, unused;
#pragma unroll 8
    for (int r = 0; r < rank; r++) {
      float weight;
      Float16::unpack(b[static_cast<Index>(r) * O + o], weight, unused);
      sum += shared[r] * weight;
    }
    T::unpack(y[o], given, unused);
    outputs[o] = T::pack(given + sum);
  }
}

// scores   (rows, V)
// added    (V,), added to the logits for the choice alone
// logits   (rows, V): the scores
// ids      (rows,): the largest of each row, the smallest id among equals; -1 if no score is a number
struct MostProbable {
  const unsigned short *scores, *added;
  float *logits;
  Index *ids;
  int vocab_size;
};

template <class T> __device__ void choose(const MostProbable &work) {
  SHARED
  const int V = work.vocab_size, row = blockIdx.x;
  const unsigned short *__restrict__ scores = work.scores + static_cast<Index>(row) * V;
  float *__restrict__ logits = work.logits + static_cast<Index>(row) * V;
  float best = -__builtin_huge_valf();
  int best_id = 0x7fffffff;
  const auto see = [&](float logit, float added, int id) {
    logit += added;
    if (logit > best || (logit == best && id < best_id)) best = logit, best_id = id;
  };
  if (V % 4 == 0) { // neighbouring threads read and write neighbouring words
#pragma unroll 4
    for (int first = 4 * threadIdx.x; first < V; first += 4 * blockDim.x) {
      Floats logits_here;
      float added[4];
      unpack<T>(reinterpret_cast<const Four *>(scores + first)[0], logits_here.numbers);
      unpack<T>(reinterpret_cast<const Four *>(work.added + first)[0], added);
      reinterpret_cast<Floats *>(logits + first)[0] = logits_here;
      for (int i = 0; i < 4; i++) see(logits_here.numbers[i], added[i], first + i);
    }
  } else {
    for (int id = threadIdx.x; id < V; id += blockDim.x) {
      float number, added, unused;
      T::unpack(scores[id], number, unused);
      T::unpack(work.added[id], added, unused);
      logits[id] = number;
      see(number, added, id);
    }
  }
  const auto compare = [&](float other, int other_id) {
    if (other > best || (other == best && other_id < best_id)) best = other, best_id = other_id;
  };
  for (int distance = 16; distance; distance /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, best, distance);
    compare(other, __shfl_xor_sync(0xffffffffu, best_id, distance));
  }
  if (threadIdx.x % 32 == 0)
    shared[threadIdx.x / 16] = best, reinterpret_cast<int *>(shared)[threadIdx.x / 16 + 1] = best_id;
  SYNC;
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < static_cast<int>(blockDim.x / 32); warp++)
      compare(shared[2 * warp], reinterpret_cast<int *>(shared)[2 * warp + 1]);
    work.ids[row] = best_id < V ? best_id : -1; // no score is a number
  }
}

constexpr int MOST_MOVES = 64;

struct Move {
  int from_row, to_row, start, count; // positions
};

// Tensors (G, N, outer, positions, inner); the last two axes have no gaps. Strides and sizes are in units of 16 bytes. No
// move reads or writes a row that another one writes.
struct Moves {
  Eight *first;
  Index tensor_stride, row_stride, outer_stride;
  int num_outer, position_size;
  Move moves[MOST_MOVES];
};

// A block carries out a move (y) of a part without gaps (x) of a tensor's row.
__device__ void carry_out(const Moves &work) {
  const Move move = work.moves[blockIdx.y];
  const int tensor = blockIdx.x / work.num_outer, outer = blockIdx.x % work.num_outer;
  Eight *part = work.first + tensor * work.tensor_stride + outer * work.outer_stride;
  const Index start = static_cast<Index>(move.start) * work.position_size;
  const Eight *from = part + move.from_row * work.row_stride + start;
  Eight *to = part + move.to_row * work.row_stride + start;
  for (int i = threadIdx.x; i < move.count * work.position_size; i += blockDim.x) to[i] = from[i];
}

#ifndef HOST
extern "C" __global__ void __launch_bounds__(1024) move(Moves work) { carry_out(work); }
extern "C" __global__ void __launch_bounds__(1024) attention_float16(Attention work) { attend<Float16>(work); }
extern "C" __global__ void __launch_bounds__(1024) attention_bfloat16(Attention work) { attend<BFloat16>(work); }
extern "C" __global__ void __launch_bounds__(256) embedding_float16(Embedding work) { embed<Float16>(work); }
extern "C" __global__ void __launch_bounds__(256) embedding_bfloat16(Embedding work) { embed<BFloat16>(work); }
extern "C" __global__ void __launch_bounds__(256) gated_float16(Gated work) { gate<Float16>(work); }
extern "C" __global__ void __launch_bounds__(256) gated_bfloat16(Gated work) { gate<BFloat16>(work); }
extern "C" __global__ void __launch_bounds__(256) norm_linear_float16(NormLinear work) { map_norm<Float16>(work); }
extern "C" __global__ void __launch_bounds__(256) norm_linear_bfloat16(NormLinear work) { map_norm<BFloat16>(work); }
extern "C" __global__ void __launch_bounds__(256) norm_float16(NormLinear work) { normalize_rows<Float16>(work); }
extern "C" __global__ void __launch_bounds__(256) norm_bfloat16(NormLinear work) { normalize_rows<BFloat16>(work); }
extern "C" __global__ void __launch_bounds__(256) finish_float16(NormLinear work) { finish_rows<Float16>(work); }
extern "C" __global__ void __launch_bounds__(256) finish_bfloat16(NormLinear work) { finish_rows<BFloat16>(work); }
extern "C" __global__ void __launch_bounds__(1024) low_rank_float16(Terms work) { add_terms<Float16>(work); }
extern "C" __global__ void __launch_bounds__(1024) low_rank_bfloat16(Terms work) { add_terms<BFloat16>(work); }
extern "C" __global__ void __launch_bounds__(1024) most_probable_float16(MostProbable work) { choose<Float16>(work); }
extern "C" __global__ void __launch_bounds__(1024) most_probable_bfloat16(MostProbable work) { choose<BFloat16>(work); }
#endif
