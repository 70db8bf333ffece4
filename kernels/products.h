// Products of levels by int8 weights, with the instructions for them (AVX-512 VNNI). It knows nothing of ONNX Runtime.
//
// operators.cpp includes it after compute.h.
//
// Letters: I inputs of a map, O outputs.

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#endif

constexpr size_t COLUMNS = BLOCK; // of a panel: they are computed together, two vectors of sums for each row
constexpr size_t MOST_ROWS = 6; // of a tile: the sums of more do not stay in registers as compilers assign them

// A map from levels q of its input x = scale (q - zero_point) to floats, with a scale for each column of its weights.
struct Int8Map {
  size_t num_inputs, num_outputs, num_fours; // fours: groups of four inputs, whose products one instruction adds
  float scale, zero_point;
  std::vector<int8_t> weights;      // (O / COLUMNS, I / 4, COLUMNS, 4): a panel is read from its beginning to its end
  std::vector<int32_t> starts;      // (O,): what each sum starts with: minus the zero point times the column's sum
  std::vector<float> factors, bias; // (O,): the factor of each sum, and the bias; the padding of the bias is minus infinity

  // The weights are (I, O). What lies beyond I and O is zero.
  Int8Map(const int8_t *given, size_t inputs, size_t outputs, float level_scale, uint8_t level_zero_point,
          const float *weight_scales, const float *biases)
      : num_inputs(inputs), num_outputs(outputs), num_fours((inputs + 3) / 4), scale(level_scale),
        zero_point(level_zero_point) {
    const size_t room = num_panels() * COLUMNS;
    weights.resize(room * 4 * num_fours), starts.resize(room), factors.resize(room), bias.resize(room, -INFINITY);
    for (size_t i = 0; i < inputs; i++)
      for (size_t o = 0; o < outputs; o++) {
        const int8_t weight = given[i * outputs + o];
        weights[(((o / COLUMNS) * num_fours + i / 4) * COLUMNS + o % COLUMNS) * 4 + i % 4] = weight;
        starts[o] -= level_zero_point * weight;
      }
    for (size_t o = 0; o < outputs; o++) factors[o] = level_scale * weight_scales[o], bias[o] = biases[o];
  }

  size_t num_panels() const { return (num_outputs + COLUMNS - 1) / COLUMNS; }
};

// Writes rows of floats (N, I) as levels, each row followed by zeros up to a group of four.
static void quantize(const Int8Map &map, const float *x, size_t num_rows, uint8_t *levels) {
  const __m512 per_scale = _mm512_set1_ps(1 / map.scale), zero_point = _mm512_set1_ps(map.zero_point);
  for (size_t row = 0; row < num_rows; row++, x += map.num_inputs, levels += 4 * map.num_fours)
    for (size_t i = 0; i < 4 * map.num_fours; i += 16) {
      const size_t count = map.num_inputs - std::min(i, map.num_inputs), room = 4 * map.num_fours - i;
      const __mmask16 given = count < 16 ? (1u << count) - 1 : 0xffff, kept = room < 16 ? (1u << room) - 1 : 0xffff;
      const __m512 level = _mm512_maskz_fmadd_ps(given, _mm512_maskz_loadu_ps(given, x + i), per_scale, zero_point);
      const __m512 possible = _mm512_max_ps(_mm512_min_ps(level, _mm512_set1_ps(255)), _mm512_setzero_ps());
      _mm512_mask_cvtepi32_storeu_epi8(levels + i, kept, _mm512_cvtps_epi32(possible));
    }
}

// Multiplies some rows of levels by one panel, scales the sums, and adds `bias`.
template <int ROWS>
INLINE void multiply(const Int8Map &map, const float *bias, const uint8_t *levels, size_t panel,
                     __m512 (&products)[ROWS][2]) {
  const size_t I = 4 * map.num_fours, first = panel * COLUMNS;
  const int8_t *weights = map.weights.data() + first * I;
  __m512i sums[ROWS][2];
  for (int row = 0; row < ROWS; row++)
    for (int half = 0; half < 2; half++) sums[row][half] = _mm512_loadu_si512(map.starts.data() + first + 16 * half);
  for (size_t i = 0; i < I; i += 4) {
    const __m512i weight[2] = {_mm512_loadu_si512(weights + i * COLUMNS), _mm512_loadu_si512(weights + i * COLUMNS + 64)};
    for (int row = 0; row < ROWS; row++) {
      int32_t four;
      memcpy(&four, levels + row * I + i, 4);
      for (int half = 0; half < 2; half++)
        sums[row][half] = _mm512_dpbusd_epi32(sums[row][half], _mm512_set1_epi32(four), weight[half]);
    }
  }
  for (int half = 0; half < 2; half++) {
    const __m512 factor = _mm512_loadu_ps(map.factors.data() + first + 16 * half),
                 added = _mm512_loadu_ps(bias + first + 16 * half);
    for (int row = 0; row < ROWS; row++)
      products[row][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[row][half]), factor, added);
  }
}

// Work over panels, each in tiles of rows: `tile.run<ROWS>(panel, first row)` does one.
template <class Tile> struct Tiles {
  Tile tile;
  size_t num_rows, num_panels;

  size_t num_items() const { return num_panels; }
  size_t scratch() const { return 0; }

  void run(size_t begin, size_t end, float *) const {
    const size_t num_tiles = (num_rows + MOST_ROWS - 1) / MOST_ROWS;
    for (size_t panel = begin; panel < end; panel++)
      for (size_t i = 0; i < num_tiles; i++) {
        const size_t first = i * num_rows / num_tiles, count = (i + 1) * num_rows / num_tiles - first;
        switch (count) {
        case 1: tile.template run<1>(panel, first); break;
        case 2: tile.template run<2>(panel, first); break;
        case 3: tile.template run<3>(panel, first); break;
        case 4: tile.template run<4>(panel, first); break;
        case 5: tile.template run<5>(panel, first); break;
        case 6: tile.template run<6>(panel, first); break;
        }
      }
  }
};

// Writes the outputs of a map.
struct Product {
  const Int8Map *map;
  const uint8_t *levels; // (N, I), I rounded up to four
  float *outputs;        // (N, O)

  template <int ROWS> void run(size_t panel, size_t first_row) const {
    __m512 products[ROWS][2];
    multiply<ROWS>(*map, map->bias.data(), levels + first_row * 4 * map->num_fours, panel, products);
    for (int half = 0; half < 2; half++) {
      const size_t O = map->num_outputs, place = panel * COLUMNS + 16 * half, count = O - std::min(place, O);
      const __mmask16 kept = count < 16 ? (1u << count) - 1 : 0xffff;
      for (int row = 0; row < ROWS; row++)
        _mm512_mask_storeu_ps(outputs + (first_row + row) * O + place, kept, products[row][half]);
    }
  }
};

// Instead of writing logits, keeps of each row and panel the largest one, and the sum of the powers relative to it.
struct Summary {
  const Int8Map *map;
  const float *bias;     // (O,), and minus infinity up to whole panels
  const uint8_t *levels; // (N, I), I rounded up to four
  float *largest;        // (N, panels)
  float *powers;         // (N, panels); null if they are not needed

  template <int ROWS> void run(size_t panel, size_t first_row) const {
    __m512 logits[ROWS][2];
    multiply<ROWS>(*map, bias, levels + first_row * 4 * map->num_fours, panel, logits);
    const size_t first = first_row * map->num_panels() + panel;
    for (int row = 0; row < ROWS; row++)
      largest[first + row * map->num_panels()] = _mm512_reduce_max_ps(_mm512_max_ps(logits[row][0], logits[row][1]));
    for (int row = 0; row < ROWS && powers; row++) {
      const size_t place = first + row * map->num_panels();
      Vector eights[BLOCK / 8];
      for (int half = 0; half < 2; half++) {
        eights[2 * half] = (Vector)_mm512_castps512_ps256(logits[row][half]);
        eights[2 * half + 1] = (Vector)_mm512_extractf32x8_ps(logits[row][half], 1);
      }
      powers[place] = sum_of_powers(eights, largest[place]);
    }
  }
};

// Finds the largest logits of each row by its summary, the lowest id among equals: the panels that may contain one are
// multiplied again.
struct Choice {
  Summary summary;
  size_t num_rows, num_candidates;
  int64_t *token_ids;       // (N, candidates)
  float *log_probabilities; // (N, candidates); null if they are not needed

  size_t num_items() const { return num_rows; }
  size_t scratch() const { return num_candidates; }

  // Writes the logits of a row in one panel.
  void logits_of(size_t row, size_t panel, float *logits) const {
    __m512 products[1][2];
    multiply<1>(*summary.map, summary.bias, summary.levels + row * 4 * summary.map->num_fours, panel, products);
    for (int half = 0; half < 2; half++) _mm512_storeu_ps(logits + 16 * half, products[0][half]);
  }

  void run(size_t begin, size_t end, float *scratch) const {
    const size_t num_panels = summary.map->num_panels();
    for (size_t row = begin; row < end; row++) {
      const float *largest = summary.largest + row * num_panels;
      float *best = log_probabilities ? log_probabilities + row * num_candidates : scratch;
      const auto search = [&](size_t panel, const auto &add) {
        float logits[COLUMNS];
        logits_of(row, panel, logits);
        for (size_t i = 0; i < COLUMNS; i++) add(logits[i], panel * COLUMNS + i);
      };
      find_largest(largest, num_panels, num_candidates, best, token_ids + row * num_candidates, search);
      if (log_probabilities) normalize(best, num_candidates, largest, summary.powers + row * num_panels, num_panels);
    }
  }
};

#undef INLINE

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
