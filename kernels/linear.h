// Products of floats by weights that lie in panels. It knows nothing of ONNX Runtime.
//
// An output is the sum of its products in the order of the inputs, each rounded once with its addition. So a row has the same
// outputs alone and beside others, and on every processor.
//
// Letters: I inputs of a map, O outputs.

constexpr size_t GROUP = 2 * PANEL; // outputs that are computed together

struct FloatProduct;

// A map of floats: weights (O / PANEL, I, PANEL), with zeros up to whole groups, in single precision, or in half precision if
// that has the same numbers: they are read from memory in half the time.
struct FloatMap {
  void (*multiply)(const FloatProduct &, size_t first_row, size_t num_rows, size_t begin, size_t end); // groups from begin
  const void *weights;
  const float *bias; // has whole groups, too
  size_t num_inputs, num_outputs;
  float factor; // of the sums, before the bias is added
  float least;  // output: 0 for a ReLU, otherwise minus infinity

  size_t num_groups() const { return (num_outputs + GROUP - 1) / GROUP; }
};

static inline size_t size_in_panels(size_t inputs, size_t outputs) {
  return (outputs + GROUP - 1) / GROUP * GROUP * inputs;
}

// Packs weights (O, I) into panels, which may begin where the weights do.
template <class Element> static void write_panels(const float *weights, size_t inputs, size_t outputs, Element *to) {
  constexpr size_t TOGETHER = 64; // inputs, so that whole lines are read and written
  std::vector<float> rows(PANEL * inputs);
  for (size_t first = 0; first < size_in_panels(1, outputs); first += PANEL) {
    const size_t stop = std::clamp(outputs, first, first + PANEL);
    std::fill(std::copy(weights + first * inputs, weights + stop * inputs, rows.begin()), rows.end(), 0.0f);
    for (size_t begin = 0; begin < inputs; begin += TOGETHER)
      for (size_t i = begin; i < std::min(begin + TOGETHER, inputs); i++) {
        float column[PANEL];
        for (size_t o = 0; o < PANEL; o++) column[o] = rows[o * inputs + i];
        copy(column, PANEL, to + first * inputs + i * PANEL);
      }
  }
}

// Whether half precision has the same numbers as all of these.
static bool are_halves(const float *numbers, size_t count) {
  for (size_t begin = 0; begin < count; begin += 8) {
    float all[8] = {};
    memcpy(all, numbers + begin, std::min<size_t>(count - begin, 8) * sizeof(float));
    Half halves[8];
    float back[8];
    store(halves, load(all));
    store(back, load(halves));
    if (memcmp(all, back, sizeof all)) return false; // of NaN, too: some bits are lost
  }
  return true;
}

// Otherwise g++ keeps the sums in memory.
#define UNROLLED _Pragma("GCC unroll 16")

// Some rows, and the outputs of a panel or of a group.
template <class Element> struct FloatTile {
  const float *x;         // rows of I inputs
  const Element *weights; // of the first panel
  size_t num_inputs;
  const float *bias;
  float factor, least;
  float *to; // rows with this distance
  size_t distance;
  const char *ahead;  // what is prefetched with the first input, into the second-level cache
  size_t ahead_bytes; // by which that moves with each input
};

template <class Weight> struct FloatsInEights {
  using Element = Weight;
  static constexpr size_t MOST_ROWS = 6;

  template <int ROWS> static void run(const FloatTile<Element> &tile) {
    const size_t I = tile.num_inputs;
    const float *x = tile.x;
    const Element *weights = tile.weights;
    const char *ahead = tile.ahead;
    Vector sums[ROWS][2];
    UNROLLED
    for (int row = 0; row < ROWS; row++) sums[row][0] = sums[row][1] = Vector{};
    for (const float *end = x + I; x < end; x++, weights += PANEL, ahead += tile.ahead_bytes) {
      const Vector left = load(weights), right = load(weights + 8);
      __builtin_prefetch(ahead, 0, 2);
      UNROLLED
      for (int row = 0; row < ROWS; row++) {
        const Vector input = repeated(x[row * I]);
        sums[row][0] = fused(left, input, sums[row][0]);
        sums[row][1] = fused(right, input, sums[row][1]);
      }
    }
    UNROLLED
    for (int row = 0; row < ROWS; row++)
      for (int half = 0; half < 2; half++) {
        const Vector outputs = fused(sums[row][half], tile.factor, load(tile.bias + 8 * half));
        store(tile.to + row * tile.distance + 8 * half, outputs < tile.least ? repeated(tile.least) : outputs);
      }
  }
};

#if defined(__x86_64__)
#define SIXTEENS __attribute__((target("avx2,fma,f16c,avx512f")))

SIXTEENS INLINE __m512 sixteen(const float *place) { return _mm512_loadu_ps(place); }

SIXTEENS INLINE __m512 sixteen(const Half *place) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(place)));
}

template <class Weight> struct FloatsInSixteens {
  using Element = Weight;
  static constexpr size_t MOST_ROWS = 12;
  // By so many inputs, weights are prefetched into the second-level cache: a core can wait for more lines of that than of the
  // first. On an AMD EPYC (Zen 4, 2026-11-28) one row is 1.2 times as fast as with 16 inputs and the first-level cache, 8 rows
  // are 1.4 times, 16 rows 1.2 times, 32 rows 1.1 times.
  static constexpr size_t AHEAD = 48 * sizeof(float) / sizeof(Element);

  template <int ROWS> SIXTEENS static void run(const FloatTile<Element> &tile) {
    const size_t I = tile.num_inputs;
    const float *x = tile.x;
    const Element *left = tile.weights, *right = left + PANEL * I;
    __m512 sums[ROWS][2];
    UNROLLED
    for (int row = 0; row < ROWS; row++) sums[row][0] = sums[row][1] = _mm512_setzero_ps();
    const size_t distance = std::min(I, AHEAD); // in inputs
    size_t ahead = distance * PANEL;             // in weights
    for (const float *end : {x + I - distance, x + I}) {
      for (; x < end; x++, left += PANEL, right += PANEL) {
        const __m512 weights[2] = {sixteen(left), sixteen(right)};
        __builtin_prefetch(left + ahead, 0, 2);
        __builtin_prefetch(right + ahead, 0, 2);
        UNROLLED
        for (int row = 0; row < ROWS; row++) {
          const __m512 input = _mm512_set1_ps(x[row * I]);
          sums[row][0] = _mm512_fmadd_ps(weights[0], input, sums[row][0]);
          sums[row][1] = _mm512_fmadd_ps(weights[1], input, sums[row][1]);
        }
      }
      ahead += I * PANEL; // the last inputs prefetch the next group, which lies behind the other panel
    }
    const __m512 factor = _mm512_set1_ps(tile.factor), least = _mm512_set1_ps(tile.least);
    const __m512 bias[2] = {_mm512_loadu_ps(tile.bias), _mm512_loadu_ps(tile.bias + PANEL)};
    UNROLLED
    for (int row = 0; row < ROWS; row++)
      for (int half = 0; half < 2; half++) {
        const __m512 outputs = _mm512_fmadd_ps(sums[row][half], factor, bias[half]);
        // A maximum of a number and NaN is the second of both.
        _mm512_storeu_ps(tile.to + row * tile.distance + half * PANEL, _mm512_maskz_max_ps(0xffff, least, outputs));
      }
  }
};
#endif

// Writes the outputs of a map of floats.
struct FloatProduct {
  // The most floats of a block of inputs, and of a block of weights: both stay in a second-level cache of 1 MiB.
  static constexpr size_t MOST_INPUTS = 1 << 16, MOST_WEIGHTS = 1 << 17;

  const FloatMap *map;
  const float *x; // (N, I)
  float *outputs; // (N, O)
  size_t num_rows;

  size_t num_items() const { return map->num_groups(); }
  size_t scratch() const { return 0; }

  void run(size_t begin, size_t end, float *) const {
    const size_t num_blocks = num_rows * map->num_inputs / MOST_INPUTS + 1;
    const size_t together = std::max<size_t>(MOST_WEIGHTS / (GROUP * map->num_inputs), 1);
    for (size_t block = 0; block < num_blocks; block++) {
      const size_t first = block * num_rows / num_blocks, count = (block + 1) * num_rows / num_blocks - first;
      for (size_t group = begin; group < end; group += together)
        map->multiply(*this, first, count, group, std::min(group + together, end));
    }
  }
};

// The rows of a block in tiles of about the same size.
struct FloatTiles {
  size_t first_row, num_rows, count;

  size_t begin(size_t tile) const { return first_row + tile * num_rows / count; }
};

// Multiplies a tile of rows by the panels from a place on, which prefetches `ahead_bytes` with each input.
template <class Tile, size_t COLUMNS>
static void multiply_tile(const FloatProduct &work, const FloatTiles &tiles, size_t i, size_t place, const char *ahead,
                          size_t ahead_bytes) {
  using Element = typename Tile::Element;
  const FloatMap &map = *work.map;
  const size_t I = map.num_inputs, O = map.num_outputs, row = tiles.begin(i), count = tiles.begin(i + 1) - row;
  float *to = work.outputs + row * O + place, rest[Tile::MOST_ROWS * COLUMNS];
  const bool is_whole = place + COLUMNS <= O;
  const FloatTile<Element> tile{work.x + row * I, static_cast<const Element *>(map.weights) + place * I, I,
                                map.bias + place, map.factor, map.least, is_whole ? to : rest, is_whole ? O : COLUMNS,
                                ahead, ahead_bytes};
  with_rows<Tile::MOST_ROWS>(count, [&](auto rows) { Tile::template run<rows>(tile); });
  for (size_t r = 0; r < count && !is_whole; r++) memcpy(to + r * O, rest + r * COLUMNS, (O - place) * sizeof(float));
}

// Multiplies some rows by some groups, panel by panel: a panel of up to 512 inputs is read from memory once, and from the
// caches for each further tile.
//
// Only the first tile of a panel would wait for memory, which would be idle while the others multiply, so the first four
// prefetch the next panel, a part each. The only tile of a panel prefetches so many inputs ahead: fewer than 72 if it has one
// row, more if it multiplies longer. On a Zen 4 that is told to do without AVX-512 (2026-12-01), with weights in memory, one
// row is 1.2 to 1.3 times as fast as with two panels at once, 2 to 6 rows are 1.1 to 1.4 times as fast as with 48 inputs and
// the first-level cache, 8 rows 1.3 to 1.5 times as fast as without the next panel, 32 rows 1.1 times.
template <class Element>
static void multiply_in_eights(const FloatProduct &work, size_t first_row, size_t num_rows, size_t begin, size_t end) {
  using Tile = FloatsInEights<Element>;
  constexpr size_t LINE = PANEL * sizeof(Element); // the weights of one input: a line of the cache, or half of one
  const size_t I = work.map->num_inputs, ahead = (num_rows == 1 ? 32 : 112) * sizeof(float) / sizeof(Element);
  const FloatTiles tiles{first_row, num_rows, (num_rows + Tile::MOST_ROWS - 1) / Tile::MOST_ROWS};
  const size_t parts = std::min<size_t>(tiles.count, 4);
  for (size_t place = begin * GROUP; place < std::min(end * GROUP, work.map->num_outputs); place += PANEL) {
    const char *own = static_cast<const char *>(work.map->weights) + place * I * sizeof(Element), *next = own + I * LINE;
    if (tiles.count == 1) {
      multiply_tile<Tile, PANEL>(work, tiles, 0, place, own + std::min(ahead, I) * LINE, LINE);
      continue;
    }
    for (size_t i = 0; i < tiles.count; i++)
      multiply_tile<Tile, PANEL>(work, tiles, i, place, next + i * (LINE / parts) * I, i < parts ? LINE / parts : 0);
  }
}

#if defined(__x86_64__)
// Multiplies some rows by some groups, in tiles of few rows, which stay in the first-level cache.
template <class Element>
static void multiply_in_sixteens(const FloatProduct &work, size_t first_row, size_t num_rows, size_t begin, size_t end) {
  using Tile = FloatsInSixteens<Element>;
  const FloatTiles tiles{first_row, num_rows, (num_rows + Tile::MOST_ROWS - 1) / Tile::MOST_ROWS};
  for (size_t i = 0; i < tiles.count; i++)
    for (size_t group = begin; group < end; group++)
      multiply_tile<Tile, GROUP>(work, tiles, i, group * GROUP, nullptr, 0);
}
#endif

// Looks up the rows of tokens in a table of embeddings.
struct Lookup {
  const void *table; // (V, D), or as the weights of a map with D inputs and V outputs
  bool is_packed, are_halves;
  const int64_t *token_ids; // (N,)
  float *to;                // (N, D)
  size_t num_tokens, width;

  size_t num_items() const { return num_tokens; }
  size_t scratch() const { return 0; }

  void run(size_t begin, size_t end, float *) const {
    for (size_t token = begin; token < end; token++) {
      const size_t id = static_cast<size_t>(token_ids[token]);
      float *row = to + token * width;
      if (!is_packed)
        memcpy(row, static_cast<const float *>(table) + id * width, width * sizeof(float));
      else if (are_halves)
        take(static_cast<const Half *>(table), id, row);
      else
        take(static_cast<const float *>(table), id, row);
    }
  }

  template <class Element> void take(const Element *panels, size_t id, float *row) const {
    constexpr size_t EIGHT = 8;
    const Element *column = panels + id / PANEL * PANEL * width + id % PANEL / EIGHT * EIGHT;
    for (size_t i = 0; i < width; i++) row[i] = load(column + i * PANEL)[id % EIGHT];
  }
};
