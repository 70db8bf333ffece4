// Products of 8-bit levels by int4 weights in blocks, with the same bits on every processor. It knows nothing of ONNX Runtime.
//
// A row of inputs x becomes levels from -127 to 127; 127 is the level of its largest magnitude. Sums of products over a
// block of inputs are integers; they become floats, and are added in the order of the blocks, each product with a scale
// rounded once with its addition.
//
// Weights lie 8 above their levels of -8 to 7, as all instructions read them: a panel of 32 columns has blocks, a block has
// groups of four inputs, and a byte has two columns, the first in its low bits. So nothing is packed when they are loaded.
//
// Letters: I inputs of a map, O outputs.

constexpr size_t INT4_BLOCK = 32;                       // inputs, which share a scale
constexpr size_t INT4_GROUP = 64;                       // bytes of four inputs: (COLUMNS / 2, 4)
constexpr size_t INT4_GROUPS = 8;                       // of a block
constexpr size_t INT4_BYTES = INT4_GROUPS * INT4_GROUP; // of a block
constexpr int INT4_ZERO = 8;

// Some rows of levels, a panel of weights, and where their outputs go.
struct Int4Work {
  static constexpr size_t STEP_BYTES = INT4_GROUP; // of weights

  const int8_t *levels;   // rows of (blocks, 32)
  const float *factors;   // of each row
  const int32_t *offsets; // rows of (blocks,): what is added to sums, because weights lie 8 above their levels
  size_t num_blocks;
  const uint8_t *weights; // (blocks, groups, COLUMNS / 2, 4)
  const Half *scales;     // (blocks, COLUMNS)
  const float *bias;
  float *to; // rows with this distance
  size_t distance;
  bool are_in_memory; // the weights

  const int8_t *levels_of(size_t row, size_t block) const { return levels + (row * num_blocks + block) * INT4_BLOCK; }
  int32_t offset(size_t row, size_t block) const { return offsets[row * num_blocks + block]; }

  NextPanel next_panel(size_t tile, size_t num_tiles) const {
    return {weights, num_blocks * INT4_BYTES, STEP_BYTES, tile, num_tiles};
  }
};

// Adds the sums of a block to eight totals.
INLINE void add_block(const Int4Work &work, Integers sums, size_t row, size_t block, size_t column, Vector &totals) {
  const Vector whole = __builtin_convertvector(sums + work.offset(row, block), Vector);
  totals = fused(whole, load(work.scales + block * COLUMNS + column), totals);
}

INLINE void finish(const Int4Work &work, Vector totals, size_t row, size_t column) {
  store(work.to + row * work.distance + column, fused(totals, work.factors[row], load(work.bias + column)));
}

#if defined(__x86_64__)
struct Int4Avx512Vnni {
  template <int ROWS, class Next> AVX512VNNI static void run(const Int4Work &work, size_t first, Next next) {
    const __m512i low = _mm512_set1_epi8(15);
    __m512 totals[ROWS][2];
    for (auto &of_row : totals) of_row[0] = of_row[1] = _mm512_setzero_ps();
    const uint8_t *weights = work.weights;
    for (size_t block = 0; block < work.num_blocks; block++) {
      __m512i sums[ROWS][2];
      for (int row = 0; row < ROWS; row++)
        sums[row][0] = sums[row][1] = _mm512_set1_epi32(work.offset(first + row, block));
      for (size_t group = 0; group < INT4_GROUPS; group++, weights += INT4_GROUP) {
        prefetch(next);
        const __m512i both = _mm512_loadu_si512(weights);
        const __m512i weight[2] = {_mm512_and_si512(both, low), _mm512_and_si512(_mm512_srli_epi16(both, 4), low)};
        for (int row = 0; row < ROWS; row++) {
          int32_t four;
          memcpy(&four, work.levels_of(first + row, block) + 4 * group, 4);
          for (int half = 0; half < 2; half++)
            sums[row][half] = _mm512_dpbusd_epi32(sums[row][half], weight[half], _mm512_set1_epi32(four));
        }
      }
      const __m256i *halves = reinterpret_cast<const __m256i *>(work.scales + block * COLUMNS);
      for (int half = 0; half < 2; half++) {
        const __m512 scale = _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(halves + half));
        for (int row = 0; row < ROWS; row++)
          totals[row][half] = _mm512_fmadd_ps(_mm512_maskz_cvtepi32_ps(0xffff, sums[row][half]), scale, totals[row][half]);
      }
    }
    for (int row = 0; row < ROWS; row++)
      for (int half = 0; half < 2; half++)
        _mm512_storeu_ps(work.to + (first + row) * work.distance + 16 * half,
                         _mm512_fmadd_ps(totals[row][half], _mm512_set1_ps(work.factors[first + row]),
                                         _mm512_loadu_ps(work.bias + 16 * half)));
  }
};

// Products of bytes do not saturate here: eight pairs have a sum of 8 * 2 * 15 * 127 = 30,480 at most.
struct Int4Avx2 {
  template <int ROWS> static void run(const Int4Work &work, size_t first, NextPanel) {
    constexpr size_t STRIPS = ROWS == 1 ? 2 : 1; // at once: a single row waits for memory, and reads whole lines
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    for (size_t strip = 0; strip < 2; strip += STRIPS) {
      Vector totals[ROWS][STRIPS][2] = {};
      for (size_t block = 0; block < work.num_blocks; block++) {
        __m256i sums[ROWS][STRIPS][2];
        for (auto &of_row : sums)
          for (auto &of_strip : of_row) of_strip[0] = of_strip[1] = _mm256_setzero_si256();
        for (size_t group = 0; group < INT4_GROUPS; group++) {
          const uint8_t *weights = work.weights + block * INT4_BYTES + group * INT4_GROUP + 32 * strip;
          __m256i weight[STRIPS][2];
          for (size_t s = 0; s < STRIPS; s++) {
            const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(weights + 32 * s));
            weight[s][0] = _mm256_and_si256(both, low);
            weight[s][1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
          }
          for (int row = 0; row < ROWS; row++) {
            int32_t four;
            memcpy(&four, work.levels_of(first + row, block) + 4 * group, 4);
            for (size_t s = 0; s < STRIPS; s++)
              for (int half = 0; half < 2; half++) {
                const __m256i pairs = _mm256_maddubs_epi16(weight[s][half], _mm256_set1_epi32(four));
                sums[row][s][half] = _mm256_add_epi16(sums[row][s][half], pairs);
              }
          }
        }
        for (int row = 0; row < ROWS; row++)
          for (size_t s = 0; s < STRIPS; s++)
            for (int half = 0; half < 2; half++)
              add_block(work, (Integers)_mm256_madd_epi16(sums[row][s][half], ones), first + row, block,
                        16 * half + 8 * (strip + s), totals[row][s][half]);
      }
      for (int row = 0; row < ROWS; row++)
        for (size_t s = 0; s < STRIPS; s++)
          for (int half = 0; half < 2; half++)
            finish(work, totals[row][s][half], first + row, 16 * half + 8 * (strip + s));
    }
  }
};
#endif

#if defined(__aarch64__)
// Adds the products of four inputs to the sums of eight columns, and of the eight columns in the high bits.
template <int ROWS, int LANE>
TARGET("arch=armv8.2-a+dotprod")
INLINE void add_int4_products(int32x4_t (&sums)[ROWS][4], const int8x16_t (&levels)[ROWS], const uint8_t *weights) {
  int8x16_t weight[4];
  for (int quarter = 0; quarter < 2; quarter++) {
    const uint8x16_t both = vld1q_u8(weights + 16 * quarter);
    weight[quarter] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
    weight[2 + quarter] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
  }
  for (int row = 0; row < ROWS; row++)
    for (int quarter = 0; quarter < 4; quarter++)
      sums[row][quarter] = vdotq_laneq_s32(sums[row][quarter], weight[quarter], levels[row], LANE);
}

struct Int4DotProd {
  template <int ROWS> TARGET("arch=armv8.2-a+dotprod") static void run(const Int4Work &work, size_t first, NextPanel) {
    for (size_t strip = 0; strip < 2; strip++) {
      Vector totals[ROWS][2] = {};
      for (size_t block = 0; block < work.num_blocks; block++) {
        int32x4_t sums[ROWS][4] = {};
        const uint8_t *weights = work.weights + block * INT4_BYTES + 32 * strip;
        for (size_t i = 0; i < INT4_BLOCK; i += 16, weights += 4 * INT4_GROUP) {
          int8x16_t levels[ROWS];
          for (int row = 0; row < ROWS; row++) levels[row] = vld1q_s8(work.levels_of(first + row, block) + i);
          add_int4_products<ROWS, 0>(sums, levels, weights), add_int4_products<ROWS, 1>(sums, levels, weights + INT4_GROUP);
          add_int4_products<ROWS, 2>(sums, levels, weights + 2 * INT4_GROUP);
          add_int4_products<ROWS, 3>(sums, levels, weights + 3 * INT4_GROUP);
        }
        for (int row = 0; row < ROWS; row++)
          for (int half = 0; half < 2; half++) {
            int32_t eight[8];
            vst1q_s32(eight, sums[row][2 * half]), vst1q_s32(eight + 4, sums[row][2 * half + 1]);
            add_block(work, load(eight), first + row, block, 16 * half + 8 * strip, totals[row][half]);
          }
      }
      for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++) finish(work, totals[row][half], first + row, 16 * half + 8 * strip);
    }
  }
};
#endif

struct Int4Scalar {
  template <int ROWS> static void run(const Int4Work &work, size_t first, NextPanel) {
    Vector totals[ROWS][COLUMNS / 8] = {};
    for (size_t block = 0; block < work.num_blocks; block++)
      for (int row = 0; row < ROWS; row++) {
        const uint8_t *weights = work.weights + block * INT4_BYTES;
        int32_t sums[COLUMNS] = {};
        for (size_t i = 0; i < INT4_BLOCK; i += 4, weights += INT4_GROUP)
          for (size_t place = 0; place < INT4_GROUP; place++) {
            const int level = work.levels_of(first + row, block)[i + place % 4];
            sums[place / 4] += (weights[place] & 15) * level, sums[16 + place / 4] += (weights[place] >> 4) * level;
          }
        for (size_t v = 0; v < COLUMNS / 8; v++)
          add_block(work, load(sums + 8 * v), first + row, block, 8 * v, totals[row][v]);
      }
    for (int row = 0; row < ROWS; row++)
      for (size_t v = 0; v < COLUMNS / 8; v++) finish(work, totals[row][v], first + row, 8 * v);
  }
};

struct Int4Quantization;

// Rows of levels.
struct Int4Levels {
  int8_t *levels;   // (N, blocks, 32)
  float *factors;   // (N,): of the sums
  int32_t *offsets; // (N, blocks): -8 times the sum of a block's levels
};

static inline size_t int4_blocks_of(size_t inputs) { return (inputs + INT4_BLOCK - 1) / INT4_BLOCK; }

// A map from levels to floats, with a scale for each block of inputs of each output.
struct Int4Map {
  using Levels = Int4Levels;
  using Quantization = Int4Quantization;

  const Instructions *instructions;
  size_t depth, num_outputs;
  bool is_positive;       // whether negative inputs count as 0
  float factor;           // of the products, before the bias is added
  const uint8_t *weights; // (panels, blocks, groups, COLUMNS / 2, 4)
  const Half *scales;     // (panels, blocks, COLUMNS)
  Aligned<float> bias;    // (O,): its padding is minus infinity
  mutable Reuse reuse;

  Int4Map(const Instructions *how, const uint8_t *given, size_t depth, size_t outputs, bool positive, float factor,
          const Half *weight_scales, const float *biases)
      : instructions(how), depth(depth), num_outputs(outputs), is_positive(positive), factor(factor), weights(given),
        scales(weight_scales), bias(num_panels() * COLUMNS) {
    for (size_t o = 0; o < num_panels() * COLUMNS; o++) bias[o] = o < outputs ? biases[o] : -INFINITY;
  }

  size_t num_panels() const { return panels_of(num_outputs); }
  size_t num_blocks() const { return depth / INT4_BLOCK; }
  size_t num_bytes() const { return num_panels() * num_blocks() * INT4_BYTES; }
  static size_t padded(size_t inputs) { return int4_blocks_of(inputs) * INT4_BLOCK; }
  bool finds_largest() const { return false; }

  // Multiplies some rows of levels by one panel.
  void multiply(const float *bias, const Int4Levels &given, size_t first_row, size_t num_rows, size_t panel, float *to,
                size_t distance, float * = nullptr) const {
    const size_t B = num_blocks();
    instructions->multiply_int4({given.levels + first_row * depth, given.factors + first_row, given.offsets + first_row * B,
                                 B, weights + panel * B * INT4_BYTES, scales + panel * B * COLUMNS, bias + panel * COLUMNS,
                                 to, distance, reuse.are_in_memory()},
                                num_rows);
  }
};

// Writes 16 levels.
INLINE void store_signed(Integers first, Integers second, int8_t *to) {
#if defined(__x86_64__)
  const __m256i words = words_of(first, second);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i *>(to), bytes);
#else
  store_levels(first, second, false, reinterpret_cast<uint8_t *>(to));
#endif
}

// Quantizes rows (N, I).
struct Int4Quantization {
  static constexpr float MOST = 127.0f;

  const Int4Map *map;
  const float *x;
  Int4Levels to;
  size_t num_rows, num_inputs;

  size_t num_items() const { return num_rows; }
  size_t scratch() const { return 0; }

  void run(size_t begin, size_t end, float *) const {
    const size_t I = num_inputs, whole = I / INT4_BLOCK * INT4_BLOCK;
    const Vector least = repeated(map->is_positive ? 0.0f : -INFINITY), rounding = repeated(ROUNDING);
    for (size_t row = begin; row < end; row++) {
      const float *inputs = x + row * I;
      float rest[INT4_BLOCK];
      if (whole < I) std::fill(std::copy(inputs + whole, inputs + I, rest), rest + INT4_BLOCK, 0.0f);
      const auto counted = [&](size_t i) {
        const Vector eight = load(i < whole ? inputs + i : rest + (i - whole));
        return eight < least ? least : eight; // also NaN
      };
      Vector magnitudes = {}, zeros = {}; // the last one gets NaN where a number is not finite
      for (size_t i = 0; i < map->depth; i += 8) {
        const Vector eight = counted(i);
        magnitudes = larger(larger(eight, -eight), magnitudes);
        zeros = fused(eight, 0.0f, zeros);
      }
      const float range = std::max(::largest(magnitudes), LEAST_RANGE) + sum(zeros);
      const float per_unit = MOST / range;
      int8_t *levels = to.levels + row * map->depth;
      for (size_t block = 0; block < map->num_blocks(); block++) {
        Integers total = {};
        for (size_t i = block * INT4_BLOCK; i < (block + 1) * INT4_BLOCK; i += 16) {
          Integers numbers[2];
          for (int half = 0; half < 2; half++) {
            const Vector rounded = fused(counted(i + 8 * half), per_unit, rounding);
            const Integers number = reinterpret_cast<Integers>(rounded) - bits_of(ROUNDING);
            numbers[half] = number < -127 ? -127 - Integers{} : number > 127 ? 127 - Integers{} : number; // where x is NaN
            total += numbers[half];
          }
          store_signed(numbers[0], numbers[1], levels + i);
        }
        int32_t sum = 0;
        for (int lane = 0; lane < 8; lane++) sum += total[lane];
        to.offsets[row * map->num_blocks() + block] = -INT4_ZERO * sum;
      }
      to.factors[row] = range / MOST * map->factor;
    }
  }
};

// Looks up the rows of tokens in a table of embeddings, which is the weights of a map with D inputs and V outputs.
struct Int4Lookup {
  const uint8_t *weights;
  const Half *scales;
  const int64_t *token_ids; // (N,)
  float *to;                // (N, 32 blocks)
  size_t num_tokens, num_blocks;

  size_t num_items() const { return num_tokens; }
  size_t scratch() const { return 0; }

  void run(size_t begin, size_t end, float *) const {
    for (size_t token = begin; token < end; token++) {
      const size_t id = static_cast<size_t>(token_ids[token]), first = id / COLUMNS * num_blocks, column = id % COLUMNS;
      const int shift = column < COLUMNS / 2 ? 0 : 4;
      for (size_t block = 0; block < num_blocks; block++) {
        const uint8_t *levels = weights + (first + block) * INT4_BYTES + column % (COLUMNS / 2) * 4;
        const float scale = load(scales + (first + block) * COLUMNS + column / 8 * 8)[column % 8];
        float *row = to + (token * num_blocks + block) * INT4_BLOCK;
        for (size_t i = 0; i < INT4_BLOCK; i++)
          row[i] = static_cast<float>((levels[i / 4 * INT4_GROUP + i % 4] >> shift & 15) - INT4_ZERO) * scale;
      }
    }
  }
};
