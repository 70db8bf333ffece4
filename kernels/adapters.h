// The low-rank terms that adapters add to the outputs of a map (Hu et al. 2021, arXiv:2106.09685), where each row may have
// another adapter. It knows nothing of ONNX Runtime.
//
// A term is B A x. Each product is rounded once with its addition. An element of A x has 16 sums, of every sixteenth input,
// which are added last; that of B (A x) is one sum in the order of the ranks. So a row has the same outputs alone and beside
// others, and on every processor.
//
// Letters: I inputs of a map, O outputs, P parts of its outputs, R the largest rank.

constexpr size_t SIXTEEN = 16;    // inputs whose products are in different sums
constexpr size_t RANKS = 4;       // rows of A that are multiplied together
constexpr size_t TERM_WIDTH = 64; // outputs that are computed together

static inline size_t whole(size_t count, size_t unit) { return (count + unit - 1) / unit * unit; }

// RANKS rows of A, and rows of x; the inputs are whole sixteens.
struct Reduction {
  const Half *a;
  size_t distance, num_inputs;
  const float *const *x;
  float *to; // rows with this distance
  size_t to_distance;
};

// TERM_WIDTH columns of B, and rows of A x.
struct Expansion {
  const Half *b;
  size_t distance, rank;
  const float *reduced; // rows with this distance
  size_t reduced_distance;
  float *const *outputs;
};

struct TermsInEights {
  static constexpr size_t MOST_ROWS = 3;

  template <int ROWS> static void reduce(const Reduction &given) {
    Vector sums_of_halves[ROWS][2 * RANKS] = {};
    for (size_t half = 0; half < SIXTEEN; half += 8) {
      Vector totals[ROWS][RANKS];
      UNROLLED
      for (int row = 0; row < ROWS; row++)
        for (size_t r = 0; r < RANKS; r++) totals[row][r] = Vector{};
      for (size_t i = half; i < given.num_inputs; i += SIXTEEN) {
        Vector inputs[ROWS];
        UNROLLED
        for (int row = 0; row < ROWS; row++) inputs[row] = load(given.x[row] + i);
        UNROLLED
        for (size_t r = 0; r < RANKS; r++) {
          const Vector a = load(given.a + r * given.distance + i);
          UNROLLED
          for (int row = 0; row < ROWS; row++) totals[row][r] = fused(a, inputs[row], totals[row][r]);
        }
      }
      for (int row = 0; row < ROWS; row++)
        for (size_t r = 0; r < RANKS; r++) sums_of_halves[row][r] += totals[row][r];
    }
    for (int row = 0; row < ROWS; row++) {
      const Vector reduced = sums(sums_of_halves[row]);
      memcpy(given.to + row * given.to_distance, &reduced, RANKS * sizeof(float));
    }
  }

  template <int ROWS> static void expand(const Expansion &given) {
    constexpr size_t VECTORS = ROWS == 1 ? 8 : 4;
    for (size_t column = 0; column < TERM_WIDTH; column += 8 * VECTORS) {
      Vector totals[ROWS][VECTORS];
      UNROLLED
      for (int row = 0; row < ROWS; row++)
        for (size_t v = 0; v < VECTORS; v++) totals[row][v] = Vector{};
      const Half *b = given.b + column;
      for (size_t r = 0; r < given.rank; r++, b += given.distance) {
        Vector factors[ROWS];
        UNROLLED
        for (int row = 0; row < ROWS; row++) factors[row] = repeated(given.reduced[row * given.reduced_distance + r]);
        UNROLLED
        for (size_t v = 0; v < VECTORS; v++) {
          const Vector eight = load(b + 8 * v);
          UNROLLED
          for (int row = 0; row < ROWS; row++) totals[row][v] = fused(eight, factors[row], totals[row][v]);
        }
      }
      UNROLLED
      for (int row = 0; row < ROWS; row++)
        for (size_t v = 0; v < VECTORS; v++) {
          float *output = given.outputs[row] + column + 8 * v;
          store(output, load(output) + totals[row][v]);
        }
    }
  }
};

#if defined(__x86_64__)
#define WIDE TARGET("avx2,fma,f16c,avx512f")

WIDE INLINE __m512 load_sixteen(const Half *place) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(place)));
}

struct TermsInSixteens {
  static constexpr size_t MOST_ROWS = 6;

  template <int ROWS> WIDE static void reduce(const Reduction &given) {
    __m512 totals[ROWS + ROWS % 2][RANKS]; // of pairs of rows
    const float *x[ROWS];
    UNROLLED
    for (int row = 0; row < ROWS + ROWS % 2; row++)
      for (size_t r = 0; r < RANKS; r++) totals[row][r] = _mm512_setzero_ps();
    UNROLLED
    for (int row = 0; row < ROWS; row++) x[row] = given.x[row];
    for (size_t i = 0; i < given.num_inputs; i += SIXTEEN) {
      __m512 a[RANKS];
      UNROLLED
      for (size_t r = 0; r < RANKS; r++) a[r] = load_sixteen(given.a + r * given.distance + i);
      UNROLLED
      for (int row = 0; row < ROWS; row++) {
        const __m512 inputs = _mm512_loadu_ps(x[row] + i);
        UNROLLED
        for (size_t r = 0; r < RANKS; r++) totals[row][r] = _mm512_fmadd_ps(a[r], inputs, totals[row][r]);
      }
    }
    UNROLLED
    for (int row = 0; row < ROWS; row += 2) {
      Vector halves[2 * RANKS];
      UNROLLED
      for (size_t i = 0; i < 2 * RANKS; i++) {
        Vector both[2];
        memcpy(both, &totals[row + i / RANKS][i % RANKS], sizeof both);
        halves[i] = both[0] + both[1];
      }
      const Vector reduced = sums(halves);
      for (int i = 0; i < 2 && row + i < ROWS; i++)
        memcpy(given.to + (row + i) * given.to_distance, reinterpret_cast<const float *>(&reduced) + i * RANKS,
               RANKS * sizeof(float));
    }
  }

  template <int ROWS> WIDE static void expand(const Expansion &given) {
    constexpr size_t VECTORS = TERM_WIDTH / SIXTEEN;
    __m512 totals[ROWS][VECTORS];
    UNROLLED
    for (int row = 0; row < ROWS; row++)
      for (size_t v = 0; v < VECTORS; v++) totals[row][v] = _mm512_setzero_ps();
    const Half *b = given.b;
    for (size_t r = 0; r < given.rank; r++, b += given.distance) {
      __m512 columns[VECTORS];
      UNROLLED
      for (size_t v = 0; v < VECTORS; v++) columns[v] = load_sixteen(b + v * SIXTEEN);
      UNROLLED
      for (int row = 0; row < ROWS; row++) {
        const __m512 factor = _mm512_set1_ps(given.reduced[row * given.reduced_distance + r]);
        UNROLLED
        for (size_t v = 0; v < VECTORS; v++) totals[row][v] = _mm512_fmadd_ps(columns[v], factor, totals[row][v]);
      }
    }
    UNROLLED
    for (int row = 0; row < ROWS; row++)
      for (size_t v = 0; v < VECTORS; v++) {
        float *output = given.outputs[row] + v * SIXTEEN;
        _mm512_storeu_ps(output, _mm512_loadu_ps(output) + totals[row][v]);
      }
  }
};

#undef WIDE
#endif

// Some rows of one adapter.
struct RowsOfAdapter {
  const int64_t *rows;
  size_t count, adapter;
};

// Adds the terms to the outputs of a map.
struct Terms {
  static constexpr size_t LEAST_ROWS = 12, MOST_ROWS = 24; // of a block, which a thread computes, if there are so many

  void (*add)(const Terms &, const RowsOfAdapter &, float *scratch);
  const float *x;       // (N, I)
  float *outputs;       // (N, O)
  const Half *weights;  // of each adapter, with this distance: A (P, R, I), and B (R, O)
  const int32_t *ranks; // of each adapter, with another distance: those of its parts (P,)
  const size_t *ends;   // of the parts, in outputs: (P,)
  const RowsOfAdapter *blocks;
  size_t num_blocks, distance, distance_of_ranks, num_inputs, num_outputs, num_parts, most_rank;

  size_t num_items() const { return num_blocks; }
  // In floats: A x, copies of weights, and copies of rows whose inputs are not whole sixteens.
  size_t room_for_reduced() const { return MOST_ROWS * whole(most_rank, RANKS); }
  size_t room_for_weights() const { return std::max(RANKS * whole(num_inputs, SIXTEEN), most_rank * TERM_WIDTH) / 2; }
  size_t room_for_inputs() const { return num_inputs % SIXTEEN ? MOST_ROWS * whole(num_inputs, SIXTEEN) : 0; }
  size_t scratch() const { return room_for_reduced() + room_for_weights() + room_for_inputs(); }

  void run(size_t begin, size_t end, float *scratch) const {
    for (size_t block = begin; block < end; block++) add(*this, blocks[block], scratch);
  }
};

// Copies rows with a distance, with zeros after the last number of each and after the last row.
template <class T>
static void pad(const T *from, size_t distance, size_t num_rows, size_t width, T *to, size_t to_rows, size_t to_width) {
  std::fill_n(to, to_rows * to_width, T{});
  for (size_t row = 0; row < num_rows; row++) std::copy_n(from + row * distance, width, to + row * to_width);
}

// Adds the terms of some rows.
template <class Tiles> static void add_terms(const Terms &work, const RowsOfAdapter &block, float *scratch) {
  const size_t I = work.num_inputs, O = work.num_outputs, P = work.num_parts, R = work.most_rank, N = block.count;
  const size_t wide = whole(I, SIXTEEN), stride = whole(R, RANKS), num_tiles = (N + Tiles::MOST_ROWS - 1) / Tiles::MOST_ROWS;
  const Half *first_a = work.weights + block.adapter * work.distance, *first_b = first_a + P * R * I;
  float *reduced = scratch, *inputs = reduced + work.room_for_reduced() + work.room_for_weights();
  Half *copy = reinterpret_cast<Half *>(reduced + work.room_for_reduced());
  const float *x[Terms::MOST_ROWS];
  for (size_t row = 0; row < N; row++) {
    x[row] = work.x + block.rows[row] * I;
    if (I != wide) pad(x[row], I, 1, I, inputs + row * wide, 1, wide), x[row] = inputs + row * wide;
  }
  // Calls a function with the first row of each tile, and its number of rows as a constant.
  const auto in_tiles = [&](const auto &run) {
    for (size_t i = 0; i < num_tiles; i++) {
      const size_t first = i * N / num_tiles;
      with_rows<Tiles::MOST_ROWS>((i + 1) * N / num_tiles - first, [&](auto rows) { run(first, rows); });
    }
  };
  for (size_t part = 0, begin = 0; part < P; begin = work.ends[part++]) {
    const size_t rank = work.ranks[block.adapter * work.distance_of_ranks + part], end = work.ends[part];
    for (size_t r = 0; r < rank; r += RANKS) {
      const Half *a = first_a + (part * R + r) * I;
      if (I != wide || rank - r < RANKS) pad(a, I, std::min(RANKS, rank - r), I, copy, RANKS, wide), a = copy;
      in_tiles([&](size_t first, auto rows) {
        Tiles::template reduce<rows>({a, a == copy ? wide : I, wide, x + first, reduced + first * stride + r, stride});
      });
    }
    for (size_t column = begin; column < end && rank; column += TERM_WIDTH) {
      const Half *b = first_b + column;
      const size_t width = std::min(TERM_WIDTH, end - column);
      const bool is_whole = width == TERM_WIDTH;
      if (!is_whole) pad(b, O, rank, width, copy, rank, TERM_WIDTH), b = copy;
      in_tiles([&](size_t first, auto rows) {
        constexpr size_t count = decltype(rows)::value;
        float *outputs[count], rest[count][TERM_WIDTH];
        for (size_t row = 0; row < count; row++) {
          float *output = outputs[row] = work.outputs + block.rows[first + row] * O + column;
          if (!is_whole) std::copy_n(output, width, rest[row]), outputs[row] = rest[row];
        }
        Tiles::template expand<rows>({b, is_whole ? O : TERM_WIDTH, rank, reduced + first * stride, stride, outputs});
        for (size_t row = 0; row < count && !is_whole; row++)
          std::copy_n(rest[row], width, work.outputs + block.rows[first + row] * O + column);
      });
    }
  }
}
