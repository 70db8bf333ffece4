// Products of 8-bit levels by int8 weights, exact on every processor. It knows nothing of ONNX Runtime.
//
// A row of inputs x becomes levels from 0 to 255, which reach from its smallest number to its largest; 0 has a whole level,
// the row's zero point. Both are those of the row alone. Sums of products are integers, so they do not depend on the
// instructions that compute them, nor on the order; what is computed in floats is the same everywhere.
//
// Letters: I inputs of a map, O outputs.

constexpr size_t COLUMNS = BLOCK; // of a panel: they are computed together
constexpr size_t MOST_ROWS = 6; // of a tile: the sums of more do not stay in registers as compilers assign them
constexpr size_t DEPTH = 16;    // inputs are padded with zeros to a multiple of it

// The part of the next panel's weights that a tile prefetches while it multiplies. Only the first tile of a panel waits for
// memory, which would be idle while the others multiply. On an AMD EPYC (Zen 4, 2026-11-28) 8 rows in int8 are 1.35 times as
// fast as without this, 16 rows 1.25 times, 48 rows 1.08 times. After the last panel it prefetches what follows, which does no
// harm.
struct NextPanel {
  const char *place;
  size_t bytes = 0; // by which it moves with each step of the tile
  bool is_near;     // into the first-level cache: 1.05 times as fast with four tiles or more, slower with fewer

  // A step of a tile multiplies `step_bytes` of its panel. The first two tiles prefetch half of the next panel each; of four or
  // more, the first four prefetch a quarter each.
  NextPanel(const void *panel, size_t panel_bytes, size_t step_bytes, size_t tile, size_t num_tiles)
      : place(static_cast<const char *>(panel)), is_near(num_tiles >= 4) {
    const size_t parts = is_near ? 4 : 2;
    if (num_tiles == 1 || tile >= parts) return; // it asks for the same line in each step
    place += panel_bytes + tile * (panel_bytes / parts), bytes = step_bytes / parts;
  }
};

INLINE void prefetch(NextPanel &next) {
  if (next.is_near)
    __builtin_prefetch(next.place, 0, 3);
  else
    __builtin_prefetch(next.place, 0, 2);
  next.place += next.bytes;
}

// The only tile of a panel whose weights are in memory prefetches them farther ahead than the processor does by itself. On the
// same EPYC 4, 5 and 6 rows in int8 are 1.05, 1.1 and 1.2 times as fast as without this, fewer rows no faster; in int4 1 and 2
// rows 1.05 times, 3 to 6 rows 1.2 to 1.4 times. On a Zen 5 (`is_zen5`, 2026-12-01) so are 1, 2 and 3 rows in int8, 1.3, 1.1
// and 1.2 times, with two threads 1.05 to 1.4 times. Steps with weights in a cache would take 1.02 to 1.15 times as long.
template <size_t STEP_BYTES> struct OwnPanel {
  static constexpr size_t AHEAD = 8192; // bytes

  const char *place;

  explicit OwnPanel(const void *panel) : place(static_cast<const char *>(panel) + AHEAD) {}
};

template <size_t STEP_BYTES> INLINE void prefetch(OwnPanel<STEP_BYTES> &own) {
  for (size_t line = 0; line < STEP_BYTES; line += 64) __builtin_prefetch(own.place + line, 0, 2);
  own.place += STEP_BYTES;
}

// Tells whether the weights of a map have left the caches since it was last multiplied, if ever: weights of more bytes than
// the last-level cache of most cores were multiplied meanwhile. Threads that multiply at once may disturb what it tells.
class Reuse {
  static constexpr size_t CACHE_BYTES = 32 << 20;
  static inline std::atomic<size_t> multiplied{0}; // bytes of quantized weights of all maps
  std::atomic<size_t> last{0};                     // what was multiplied up to the last time; 0 if there was none
  std::atomic<bool> is_far{true};

public:
  void multiply(size_t num_bytes) {
    const size_t now = multiplied.fetch_add(num_bytes, std::memory_order_relaxed) + num_bytes;
    const size_t before = last.exchange(now, std::memory_order_relaxed);
    is_far.store(!before || now - before > CACHE_BYTES, std::memory_order_relaxed);
  }

  bool are_in_memory() const { return is_far.load(std::memory_order_relaxed); }
};

// Some rows of levels, a panel of weights, and where their outputs go.
//
// A panel consists of strips of columns, whose weights lie as (depth / group, columns of a strip, group): one instruction
// adds the products of a group.
struct Int8Work {
  static constexpr size_t STEP_BYTES = 4 * COLUMNS; // of weights

  const uint8_t *levels; // rows that are `row_bytes` long, with the scale of each, and by how much it is below its levels
  const float *row_scales;
  const int32_t *shifts;
  size_t row_bytes, depth;
  const int8_t *weights;
  const int32_t *column_sums; // of the weights of the panel's columns, their scales, and what is added
  const float *scales, *bias;
  float *to; // rows with this distance; null if only the largest are wanted
  size_t distance;
  float *largest; // output of each row, with this distance; null if it is not wanted
  size_t largest_distance;
  bool are_in_memory; // the weights

  NextPanel next_panel(size_t tile, size_t num_tiles) const {
    return {weights, depth * COLUMNS, STEP_BYTES, tile, num_tiles};
  }
};

struct Int8Quantization;
struct Int4Work; // int4.h

// How one kind of processor multiplies.
struct Instructions {
  const char *name;
  bool (*run_here)();
  size_t strip, group;
  bool has_wide_levels; // of 16 bits, without the zero point; otherwise they are the ones from 0 to 255, or 128 less
  int least_level;      // of those of 8 bits
  size_t speed;         // products that take as long as one of other work
  void (*quantize)(const Int8Quantization &, size_t begin, size_t end);
  void (*multiply)(const Int8Work &, size_t num_rows);
  bool finds_largest; // while it multiplies
  void (*multiply_int4)(const Int4Work &, size_t num_rows);
};

#if defined(__x86_64__)
#define AVX512VNNI TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#endif

INLINE Integers load(const int32_t *place) {
  Integers eight;
  memcpy(&eight, place, sizeof eight);
  return eight;
}

// Multiplies all rows in tiles of few: `Tile::run<ROWS>(work, first row, next panel)` does one. The only tile of a panel that is
// in memory may get its own panel to prefetch, from so many rows on.
template <class Tile, int LEAST_PREFETCHING = MOST_ROWS + 1, class Work> void multiply_by(const Work &work, size_t num_rows) {
  const size_t num_tiles = (num_rows + MOST_ROWS - 1) / MOST_ROWS;
  for (size_t i = 0; i < num_tiles; i++) {
    const size_t first = i * num_rows / num_tiles;
    const size_t count = (i + 1) * num_rows / num_tiles - first;
    const NextPanel next = work.next_panel(i, num_tiles);
    with_rows<MOST_ROWS>(count, [&](auto rows) {
      if constexpr (rows >= LEAST_PREFETCHING)
        if (num_tiles == 1 && work.are_in_memory) return Tile::template run<rows>(work, first, OwnPanel<Work::STEP_BYTES>(work.weights));
      Tile::template run<rows>(work, first, next);
    });
  }
}

// Writes eight outputs of a row.
INLINE void finish(const Int8Work &work, Integers sums, size_t row, size_t column) {
  const Vector sum = __builtin_convertvector(sums - load(work.column_sums + column) * work.shifts[row], Vector);
  const Vector of_levels = sum * work.row_scales[row];
  store(work.to + row * work.distance + column, fused(of_levels, load(work.scales + column), load(work.bias + column)));
}

// ---- AVX-512 VNNI: unsigned by signed bytes, four products in a sum ----

#if defined(__x86_64__)
struct Avx512Vnni {
  template <int ROWS, class Next> AVX512VNNI static void run(const Int8Work &work, size_t first, Next next) {
    const int8_t *weights = work.weights;
    __m512i sums[ROWS][2];
    for (int half = 0; half < 2; half++) {
      const __m512i of_column = _mm512_loadu_si512(work.column_sums + 16 * half);
      for (int row = 0; row < ROWS; row++)
        sums[row][half] = _mm512_mullo_epi32(of_column, _mm512_set1_epi32(-work.shifts[first + row]));
    }
    for (size_t i = 0; i < work.depth; i += 4, weights += 4 * COLUMNS) {
      prefetch(next);
      const __m512i weight[2] = {_mm512_loadu_si512(weights), _mm512_loadu_si512(weights + 64)};
      for (int row = 0; row < ROWS; row++) {
        int32_t four;
        memcpy(&four, work.levels + (first + row) * work.row_bytes + i, 4);
        for (int half = 0; half < 2; half++)
          sums[row][half] = _mm512_dpbusd_epi32(sums[row][half], _mm512_set1_epi32(four), weight[half]);
      }
    }
    __m512 outputs[ROWS][2];
    for (int half = 0; half < 2; half++) {
      const __m512 scale = _mm512_loadu_ps(work.scales + 16 * half), added = _mm512_loadu_ps(work.bias + 16 * half);
      for (int row = 0; row < ROWS; row++) {
        const __m512 sum = _mm512_maskz_cvtepi32_ps(0xffff, sums[row][half]);
        const __m512 of_levels = _mm512_mul_ps(sum, _mm512_set1_ps(work.row_scales[first + row]));
        outputs[row][half] = _mm512_fmadd_ps(of_levels, scale, added);
      }
    }
    for (int row = 0; row < ROWS && work.to; row++)
      for (int half = 0; half < 2; half++)
        _mm512_storeu_ps(work.to + (first + row) * work.distance + 16 * half, outputs[row][half]);
    for (int row = 0; row < ROWS && work.largest; row++)
      work.largest[(first + row) * work.largest_distance] =
          _mm512_reduce_max_ps(_mm512_max_ps(outputs[row][0], outputs[row][1]));
  }
};

// ---- AVX-VNNI: the same in half as long vectors; g++ knows it since version 11 ----

#if defined(__clang__) || __GNUC__ >= 11
#define HAS_AVXVNNI

struct AvxVnni {
  template <int ROWS>
  TARGET("avx2,fma,f16c,avxvnni") static void run(const Int8Work &work, size_t first, NextPanel) {
    const int8_t *weights = work.weights;
    for (size_t strip = 0; strip < COLUMNS; strip += 16) {
      __m256i sums[ROWS][2];
      for (int row = 0; row < ROWS; row++) sums[row][0] = sums[row][1] = _mm256_setzero_si256();
      for (size_t i = 0; i < work.depth; i += 4, weights += 64) {
        const __m256i weight[2] = {_mm256_loadu_si256(reinterpret_cast<const __m256i *>(weights)),
                                   _mm256_loadu_si256(reinterpret_cast<const __m256i *>(weights + 32))};
        for (int row = 0; row < ROWS; row++) {
          int32_t four;
          memcpy(&four, work.levels + (first + row) * work.row_bytes + i, 4);
          for (int half = 0; half < 2; half++)
            sums[row][half] = _mm256_dpbusd_avx_epi32(sums[row][half], _mm256_set1_epi32(four), weight[half]);
        }
      }
      for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++) finish(work, (Integers)sums[row][half], first + row, strip + 8 * half);
    }
  }
};

#endif

// ---- AVX2: words of 16 bits, two products in a sum; products of bytes would saturate ----

struct Avx2 {
  template <int ROWS>
  TARGET("avx2,fma,f16c") static void run(const Int8Work &work, size_t first, NextPanel) {
    constexpr size_t STRIPS = ROWS == 1 ? 2 : 1; // at once: a single row is as fast as memory is with several streams
    constexpr size_t AHEAD = 2048;               // bytes after the weights that are being multiplied
    const size_t strip_bytes = 16 * work.depth;
    const int8_t *weights = work.weights;
    for (size_t column = 0; column < COLUMNS; column += 16 * STRIPS, weights += STRIPS * strip_bytes) {
      __m256i sums[ROWS][STRIPS][2];
      for (auto &of_row : sums)
        for (auto &of_strip : of_row) of_strip[0] = of_strip[1] = _mm256_setzero_si256();
      for (size_t i = 0; i < work.depth; i += 2) {
        __m256i weight[STRIPS][2];
        for (size_t strip = 0; strip < STRIPS; strip++) {
          const int8_t *here = weights + strip * strip_bytes + 16 * i;
          __builtin_prefetch(here + AHEAD);
          for (int half = 0; half < 2; half++)
            weight[strip][half] =
                _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(here + 16 * half)));
        }
        for (int row = 0; row < ROWS; row++) {
          int32_t two;
          memcpy(&two, work.levels + (first + row) * work.row_bytes + 2 * i, 4);
          const __m256i both = _mm256_set1_epi32(two);
          for (size_t strip = 0; strip < STRIPS; strip++)
            for (int half = 0; half < 2; half++) {
              __m256i sum = sums[row][strip][half];
              // Written as an addition in place, because g++ would keep copies of the sums in memory.
              asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(_mm256_madd_epi16(both, weight[strip][half])));
              sums[row][strip][half] = sum;
            }
        }
      }
      for (int row = 0; row < ROWS; row++)
        for (size_t strip = 0; strip < STRIPS; strip++)
          for (int half = 0; half < 2; half++)
            finish(work, (Integers)sums[row][strip][half], first + row, column + 16 * strip + 8 * half);
    }
  }
};

#endif

// ---- NEON's products of signed bytes, four in a sum ----

#if defined(__aarch64__)
template <int ROWS, int LANE>
TARGET("arch=armv8.2-a+dotprod")
INLINE void add_products(int32x4_t (&sums)[ROWS][4], const int8x16_t (&levels)[ROWS], const int8_t *weights) {
  int8x16_t weight[4];
  for (int quarter = 0; quarter < 4; quarter++) weight[quarter] = vld1q_s8(weights + 16 * quarter);
  for (int row = 0; row < ROWS; row++)
    for (int quarter = 0; quarter < 4; quarter++)
      sums[row][quarter] = vdotq_laneq_s32(sums[row][quarter], weight[quarter], levels[row], LANE);
}

struct DotProd {
  template <int ROWS>
  TARGET("arch=armv8.2-a+dotprod") static void run(const Int8Work &work, size_t first, NextPanel) {
    const int8_t *rows = reinterpret_cast<const int8_t *>(work.levels), *weights = work.weights;
    for (size_t strip = 0; strip < COLUMNS; strip += 16) {
      int32x4_t sums[ROWS][4] = {};
      for (size_t i = 0; i < work.depth; i += 16, weights += 256) {
        int8x16_t levels[ROWS];
        for (int row = 0; row < ROWS; row++) levels[row] = vld1q_s8(rows + (first + row) * work.row_bytes + i);
        add_products<ROWS, 0>(sums, levels, weights), add_products<ROWS, 1>(sums, levels, weights + 64);
        add_products<ROWS, 2>(sums, levels, weights + 128), add_products<ROWS, 3>(sums, levels, weights + 192);
      }
      for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++) {
          int32_t eight[8];
          vst1q_s32(eight, sums[row][2 * half]), vst1q_s32(eight + 4, sums[row][2 * half + 1]);
          finish(work, load(eight), first + row, strip + 8 * half);
        }
    }
  }
};
#endif

// ---- Any processor ----

struct Scalar {
  template <int ROWS>
  static void run(const Int8Work &work, size_t first, NextPanel) {
    const int8_t *weights = work.weights;
    int32_t sums[ROWS][COLUMNS] = {};
    for (size_t i = 0; i < work.depth; i++, weights += COLUMNS)
      for (int row = 0; row < ROWS; row++) {
        int16_t level;
        memcpy(&level, work.levels + (first + row) * work.row_bytes + 2 * i, 2);
        for (size_t column = 0; column < COLUMNS; column++) sums[row][column] += level * weights[column];
      }
    for (int row = 0; row < ROWS; row++)
      for (size_t column = 0; column < COLUMNS; column += 8) finish(work, load(sums[row] + column), first + row, column);
  }
};

// Inputs with their padding.
static inline size_t depth_of(size_t inputs) { return (inputs + DEPTH - 1) / DEPTH * DEPTH; }

static inline size_t panels_of(size_t outputs) { return (outputs + COLUMNS - 1) / COLUMNS; }

// How the weights of a map lie for some instructions: (O / COLUMNS, COLUMNS / strip, depth / group, strip, group).
struct Packing {
  int64_t shape[5];

  Packing(const Instructions &how, size_t depth, size_t outputs)
      : shape{static_cast<int64_t>(panels_of(outputs)), static_cast<int64_t>(COLUMNS / how.strip),
              static_cast<int64_t>(depth / how.group), static_cast<int64_t>(how.strip), static_cast<int64_t>(how.group)} {}

  size_t size() const { return shape[0] * shape[1] * shape[2] * shape[3] * shape[4]; }
};

// Packs weights (I, O), which lie 128 above their levels, into zeros.
static void pack(const Instructions &how, const uint8_t *weights, size_t inputs, size_t outputs, int8_t *to) {
  const size_t depth = depth_of(inputs), strip = how.strip, group = how.group;
  for (size_t first = 0; first < outputs; first += strip)
    for (size_t i = 0; i < inputs; i++) {
      int8_t *here = to + first * depth + i / group * strip * group + i % group;
      for (size_t o = first; o < std::min(first + strip, outputs); o++, here += group) *here = weights[i * outputs + o] - 128;
    }
}

constexpr float LEAST_RANGE = 7.8886090522101181e-31f; // of a row: one of zeros has a scale, too
constexpr float ROUNDING = 12582912.0f; // 1.5 * 2^23: a sum with it is rounded to a whole number, in its last bits

static inline int32_t bits_of(float number) {
  int32_t bits;
  memcpy(&bits, &number, sizeof bits);
  return bits;
}

// The number that a sum with ROUNDING has been rounded to; any number for NaN.
static inline int32_t whole_number(float sum) {
  return static_cast<int32_t>(static_cast<uint32_t>(bits_of(sum)) - static_cast<uint32_t>(bits_of(ROUNDING)));
}

// Rows of levels.
struct Int8Levels {
  uint8_t *levels; // (N, row_bytes)
  float *scales;   // (N,)
  int32_t *shifts; // (N,): by how much the levels are above those whose zero is 0
};

// A map from levels to floats, with a scale for each column of its weights.
struct Int8Map {
  using Levels = Int8Levels;
  using Quantization = Int8Quantization;
  static constexpr auto padded = depth_of; // inputs

  const Instructions *instructions;
  size_t depth, num_outputs;
  bool is_positive;             // whether negative inputs count as 0
  const int8_t *weights;        // as they are packed for the instructions
  Aligned<int32_t> column_sums; // (O,): of the weights
  Aligned<float> scales, bias;  // (O,): of the columns; the padding of the bias is minus infinity
  mutable Reuse reuse;

  Int8Map(const Instructions *how, const int8_t *packed, size_t depth, size_t outputs, bool positive, const int32_t *sums,
          const float *weight_scales, const float *biases)
      : instructions(how), depth(depth), num_outputs(outputs), is_positive(positive), weights(packed),
        column_sums(num_panels() * COLUMNS), scales(num_panels() * COLUMNS), bias(num_panels() * COLUMNS) {
    for (size_t o = 0; o < num_panels() * COLUMNS; o++)
      column_sums[o] = o < outputs ? sums[o] : 0, scales[o] = o < outputs ? weight_scales[o] : 0,
      bias[o] = o < outputs ? biases[o] : -INFINITY;
  }

  size_t num_panels() const { return panels_of(num_outputs); }
  size_t num_bytes() const { return depth * num_outputs; }
  bool finds_largest() const { return instructions->finds_largest; }
  size_t row_bytes() const { return depth * (instructions->has_wide_levels ? 2 : 1); }

  // Multiplies some rows of levels by one panel.
  void multiply(const float *bias, const Int8Levels &given, size_t first_row, size_t num_rows, size_t panel, float *to,
                size_t distance, float *largest = nullptr) const {
    const size_t first = panel * COLUMNS, bytes = row_bytes();
    instructions->multiply({given.levels + first_row * bytes, given.scales + first_row, given.shifts + first_row, bytes,
                            depth, weights + first * depth, column_sums.data() + first, scales.data() + first, bias + first,
                            to, distance, largest, num_panels(), reuse.are_in_memory()},
                           num_rows);
  }
};

#if defined(__x86_64__)
INLINE __m256i words_of(Integers first, Integers second) {
  return _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)first, (__m256i)second), 0xd8);
}
#endif

// Writes 16 levels, of 8 or 16 bits.
INLINE void store_levels(Integers first, Integers second, bool are_wide, uint8_t *to) {
#if defined(__x86_64__)
  const __m256i words = words_of(first, second);
  if (are_wide) return _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), words);
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i *>(to), bytes);
#else
  typedef int8_t Bytes __attribute__((vector_size(8)));
  typedef int16_t Words __attribute__((vector_size(16)));
  const Integers both[] = {first, second};
  for (int half = 0; half < 2; half++)
    if (are_wide) {
      const Words words = __builtin_convertvector(both[half], Words);
      memcpy(to + half * sizeof words, &words, sizeof words);
    } else {
      const Bytes bytes = __builtin_convertvector(both[half], Bytes);
      memcpy(to + half * sizeof bytes, &bytes, sizeof bytes);
    }
#endif
}

// Quantizes rows (N, I).
struct Int8Quantization {
  static constexpr float MOST = 255.0f;

  const Int8Map *map;
  const float *x;
  Int8Levels to;
  size_t num_rows, num_inputs;

  size_t num_items() const { return num_rows; }
  size_t scratch() const { return 0; }

  void run(size_t begin, size_t end, float *) const { map->instructions->quantize(*this, begin, end); }

  template <bool IS_POSITIVE> void run(size_t begin, size_t end) const {
    const Instructions &how = *map->instructions;
    const size_t I = num_inputs, whole = I / DEPTH * DEPTH, level_bytes = map->row_bytes() / map->depth;
    const auto counted = [](const float *place) {
      const Vector eight = ::load(place);
      return IS_POSITIVE ? (eight < Vector{} ? Vector{} : eight) : eight;
    };
    for (size_t row = begin; row < end; row++) {
      const float *inputs = x + row * I;
      float rest[DEPTH];
      if (whole < I) std::fill(std::copy(inputs + whole, inputs + I, rest), rest + DEPTH, 0.0f);
      Vector high = {}, low = {}, zeros = {}; // the last one gets NaN where a number is not finite
      for (size_t i = 0; i < map->depth; i += DEPTH)
        for (int half = 0; half < 2; half++) {
          const Vector eight = counted((i < whole ? inputs + i : rest) + 8 * half);
          high = larger(eight, high), low = eight < low ? eight : low;
          zeros = fused(eight, 0.0f, zeros);
        }
      const float least = -::largest(-low), range = std::max(::largest(high) - least, LEAST_RANGE) + sum(zeros);
      const float per_unit = MOST / range;
      const int32_t zero_point = -whole_number(std::fma(least, per_unit, ROUNDING));
      // Levels of 16 bits are those whose zero is 0; the others are shifted.
      const int32_t shift = how.has_wide_levels ? 0 : zero_point + how.least_level;
      const Integers offset = Integers{} + (shift - bits_of(ROUNDING)), most = Integers{} + (255 - zero_point + shift);
      uint8_t *levels = to.levels + row * map->row_bytes();
      for (size_t i = 0; i < map->depth; i += DEPTH) {
        Integers numbers[2];
        for (int half = 0; half < 2; half++) {
          const Vector eight = counted((i < whole ? inputs + i : rest) + 8 * half);
          const Vector rounded = fused(eight, per_unit, repeated(ROUNDING));
          const Integers level = reinterpret_cast<Integers>(rounded) + offset;
          numbers[half] = level < most ? level : most;
        }
        store_levels(numbers[0], numbers[1], how.has_wide_levels, levels + i * level_bytes);
      }
      to.scales[row] = range / MOST, to.shifts[row] = shift;
    }
  }
};

static void quantize(const Int8Quantization &work, size_t begin, size_t end) {
  if (work.map->is_positive) work.run<true>(begin, end);
  else work.run<false>(begin, end);
}

#if defined(__x86_64__)
// The same in vectors of sixteen, with the same results.
AVX512VNNI static void quantize_avx512(const Int8Quantization &work, size_t begin, size_t end) {
  const Int8Map &map = *work.map;
  const __m512 rounding = _mm512_set1_ps(ROUNDING), zero = _mm512_setzero_ps();
  const __m512 least_counted = map.is_positive ? zero : _mm512_set1_ps(-INFINITY);
  for (size_t row = begin; row < end; row++) {
    const float *inputs = work.x + row * work.num_inputs;
    const auto counted = [&](size_t i) AVX512VNNI { // a maximum of a number and NaN is the second of both
      const size_t left = work.num_inputs - i;
      const __m512 given = left < 16 ? _mm512_maskz_loadu_ps((1u << left) - 1, inputs + i) : _mm512_loadu_ps(inputs + i);
      return _mm512_max_ps(least_counted, given);
    };
    __m512 high = zero, low = zero, zeros = zero;
    for (size_t i = 0; i < map.depth; i += 16) {
      const __m512 x = counted(i);
      high = _mm512_max_ps(x, high), low = _mm512_min_ps(x, low), zeros = _mm512_fmadd_ps(x, zero, zeros);
    }
    const float least = _mm512_reduce_min_ps(low);
    float range = std::max(_mm512_reduce_max_ps(high) - least, LEAST_RANGE);
    if (_mm512_cmp_ps_mask(zeros, zeros, _CMP_UNORD_Q)) range = NAN;
    const float per_unit = work.MOST / range;
    const int32_t zero_point = -whole_number(std::fma(least, per_unit, ROUNDING));
    const __m512 scaling = _mm512_set1_ps(per_unit);
    const __m512i offset = _mm512_set1_epi32(zero_point - bits_of(ROUNDING));
    uint8_t *levels = work.to.levels + row * map.row_bytes();
    for (size_t i = 0; i < map.depth; i += 16) {
      const __m512i numbers = _mm512_castps_si512(_mm512_fmadd_ps(counted(i), scaling, rounding));
      _mm_storeu_si128(reinterpret_cast<__m128i *>(levels + i), _mm512_cvtusepi32_epi8(_mm512_add_epi32(numbers, offset)));
    }
    work.to.scales[row] = range / work.MOST, work.to.shifts[row] = zero_point;
  }
}
#endif

// Looks up the rows of tokens in a table of embeddings, which is the weights of a map with D inputs and V outputs.
struct Int8Lookup {
  const Instructions *packed_for; // null if the weights are (D, V), 128 above their levels
  const uint8_t *weights;
  const float *scales;      // (V,)
  const int64_t *token_ids; // (N,)
  float *to;                // (N, D)
  size_t num_tokens, width, vocab_size;

  size_t num_items() const { return num_tokens; }
  size_t scratch() const { return 0; }

  void run(size_t begin, size_t end, float *) const {
    for (size_t token = begin; token < end; token++) {
      const size_t id = static_cast<size_t>(token_ids[token]);
      const auto level = [&](size_t i) {
        if (!packed_for) return weights[i * vocab_size + id] - 128;
        const size_t strip = packed_for->strip, group = packed_for->group, first = id / strip * strip * width;
        return int{static_cast<int8_t>(weights[first + i / group * strip * group + id % strip * group + i % group])};
      };
      for (size_t i = 0; i < width; i++) to[token * width + i] = static_cast<float>(level(i)) * scales[id];
    }
  }
};
