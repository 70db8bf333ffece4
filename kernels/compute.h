// Attention, norms and the choice of tokens, in vectors of eight floats. It knows nothing of ONNX Runtime.
//
// Letters: H heads, G heads of keys and values, K width of a head, D width of a model, V vocabulary.

typedef float Vector __attribute__((vector_size(32)));
typedef float Unaligned __attribute__((vector_size(32), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(32)));

constexpr size_t MAX_WIDTH = 128; // of a head, in vectors: K is at most 1024
constexpr Integers LANES = {0, 1, 2, 3, 4, 5, 6, 7};

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, decltype((a) < (b)){__VA_ARGS__})
#endif

INLINE Vector load(const float *place) { return *reinterpret_cast<const Unaligned *>(place); }

INLINE void store(float *place, Vector x) { *reinterpret_cast<Unaligned *>(place) = x; }

struct Half { // a number of 16 bits (IEEE 754 binary16)
  uint16_t bits;
};

INLINE Vector load(const Half *place) {
#if defined(__x86_64__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(place)));
#else
  const float16x8_t eight = vreinterpretq_f16_u16(vld1q_u16(&place->bits));
  const float32x4_t halves[] = {vcvt_f32_f16(vget_low_f16(eight)), vcvt_high_f32_f16(eight)};
  Vector x;
  memcpy(&x, halves, sizeof x);
  return x;
#endif
}

// Rounds to the nearest number, of two the even one; to infinity from 65,520 on.
INLINE void store(Half *place, Vector x) {
#if defined(__x86_64__)
  _mm_storeu_si128(reinterpret_cast<__m128i *>(place), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
  float32x4_t halves[2];
  memcpy(halves, &x, sizeof x);
  vst1q_u16(&place->bits, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(halves[0]), halves[1])));
#endif
}

template <class Element> static void copy(const float *from, size_t count, Element *to) {
  for (size_t i = 0; i < count; i += 8) store(to + i, load(from + i));
}

// Asks for numbers that are far away, in the second-level cache: a core can wait for more lines of that than of the first.
// On an AMD EPYC (Zen 4, 2026-11-25) keys and values with gaps between them are read at 17 GB/s so, and at 9 otherwise.
template <class Element> INLINE void prefetch(const Element *place, size_t count) {
  for (size_t i = 0; i < count; i += 64 / sizeof(Element)) __builtin_prefetch(place + i, 0, 2);
}

INLINE float sum(Vector x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

INLINE Vector larger(Vector a, Vector b) { return a > b ? a : b; }

INLINE Vector repeated(float x) { return Vector{x, x, x, x, x, x, x, x}; }

// a b + c, rounded once. Compilers are forbidden to fuse (-ffp-contract=off), because each chooses other products for it: a
// row would have other numbers in a library of another compiler.
INLINE Vector fused(Vector a, Vector b, Vector c) {
#if defined(__x86_64__)
  return _mm256_fmadd_ps(a, b, c);
#else
  float32x4_t x[2], y[2], sum[2];
  memcpy(x, &a, sizeof x), memcpy(y, &b, sizeof y), memcpy(sum, &c, sizeof sum);
  for (int half = 0; half < 2; half++) sum[half] = vfmaq_f32(sum[half], x[half], y[half]);
  memcpy(&c, sum, sizeof c);
  return c;
#endif
}

INLINE Vector fused(Vector a, float b, Vector c) { return fused(a, repeated(b), c); }

INLINE float largest(Vector x) {
  x = larger(x, SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
  x = larger(x, SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
  return larger(x, SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6))[0];
}

// The sums of eight vectors, in their order: pairs of neighbours are added three times.
INLINE Vector sums(const Vector *x) {
  Vector pairs[4], fours[2];
  for (int i = 0; i < 4; i++)
    pairs[i] = SHUFFLE(x[2 * i], x[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13) +
               SHUFFLE(x[2 * i], x[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  for (int i = 0; i < 2; i++)
    fours[i] = SHUFFLE(pairs[2 * i], pairs[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
               SHUFFLE(pairs[2 * i], pairs[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
  return SHUFFLE(fours[0], fours[1], 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(fours[0], fours[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

// Memory whose vectors do not lie across two lines of the cache.
template <class T> struct Aligned {
  std::unique_ptr<T, decltype(&free)> memory{nullptr, free};

  explicit Aligned(size_t size) {
    constexpr size_t LINE = 64;
    const size_t bytes = (size * sizeof(T) + LINE - 1) / LINE * LINE;
    memory.reset(static_cast<T *>(aligned_alloc(LINE, std::max(bytes, LINE))));
    if (!memory) throw std::bad_alloc();
    memset(memory.get(), 0, bytes);
  }

  T &operator[](size_t place) { return memory.get()[place]; }
  const T *data() const { return memory.get(); }
};

// e to the power of x <= 80, with a relative error below 3e-7. It is 2^n e^r with |r| <= ln(2) / 2, where a polynomial of
// degree 5 gives e^r: the one whose largest relative error is least, 9e-8. Below -87 the result is that of -87, about 1e-38.
INLINE Vector exponential(Vector x) {
  const Vector least = repeated(-87.0f), rounding = repeated(12582912.0f); // 1.5 * 2^23: n in the last bits of a sum
  x = x < least ? least : x;
  const Vector shifted = fused(x, 1.44269504f, rounding);
  const Vector r = fused(shifted - rounding, -0.693147182f, x);
  Vector power = repeated(8.290314115583897e-3f);
  for (const float coefficient :
       {4.189793020486832e-2f, 0.1666763573884964f, 0.4999915063381195f, 0.9999997019767761f, 1.0f})
    power = fused(power, r, repeated(coefficient));
  return (Vector)((Integers)power + ((Integers)shifted << 23)); // n is added to the exponent
}

// c tanh(x / c), from e^(-2 |x| / c).
INLINE Vector capped(Vector x, float cap) {
  const Vector positive = x < 0.0f ? -x : x;
  const Vector power = exponential(positive * (-2.0f / cap));
  const Vector result = (1.0f - power) / (1.0f + power) * cap;
  return x < 0.0f ? -result : result;
}

// Turns scores into the powers of their softmax, which are not divided by their sum yet; returns the sum. A score s first
// becomes s times the scale, then c tanh(s / c) if the cap c is positive. There is room for whole vectors; after the last
// score it is filled with zeros.
INLINE float weigh(float *scores, size_t length, float scale, float cap) {
  Vector eights = Vector{} - INFINITY, totals = {};
  for (size_t first = 0; first < length; first += 8) {
    Vector eight = load(scores + first) * scale;
    if (cap > 0) eight = capped(eight, cap);
    const Integers left = Integers{} + static_cast<int32_t>(std::min<size_t>(length - first, 8));
    eight = LANES < left ? eight : Vector{} - INFINITY;
    store(scores + first, eight);
    eights = larger(eights, eight);
  }
  const float most = largest(eights);
  for (size_t first = 0; first < length; first += 8) {
    const Vector eight = load(scores + first), power = exponential(eight - most);
    const Vector kept = eight == -INFINITY ? Vector{} : power;
    store(scores + first, kept);
    totals += kept;
  }
  return sum(totals);
}

// Attention of one query over the keys and values of one head (Vaswani et al. 2017, equation 1): writes the K numbers of
// softmax(q k^T scale) v. `scores` has room for `length` floats, rounded up to eight. WIDTH is K / 8, or 0 for any
// `width` up to MAX_WIDTH.
template <int WIDTH, class Element>
INLINE void attend(const float *query, const Element *keys, const Element *values, size_t length, float scale, float cap,
                   size_t width, float *scores, float *output) {
  constexpr size_t room = WIDTH ? WIDTH : MAX_WIDTH;
  const size_t W = WIDTH ? WIDTH : width, K = 8 * W;
  Vector q[room], mean[room];
  for (size_t i = 0; i < W; i++) q[i] = load(query + 8 * i), mean[i] = Vector{};
  for (size_t first = 0; first < length; first += 8) {
    Vector products[8];
    for (size_t j = 0; j < 8; j++) { // after the last position, that one again
      const Element *key = keys + std::min(first + j, length - 1) * K;
      products[j] = q[0] * load(key);
      for (size_t i = 1; i < W; i++) products[j] = fused(q[i], load(key + 8 * i), products[j]);
    }
    store(scores + first, sums(products));
  }
  const float total = weigh(scores, length, scale, cap);
  for (size_t position = 0; position < length; position++) {
    const float weight = scores[position];
    for (size_t i = 0; i < W; i++) mean[i] = fused(load(values + position * K + 8 * i), weight, mean[i]);
  }
  for (size_t i = 0; i < W; i++) store(output + 8 * i, mean[i] / total);
}

template <class Element>
INLINE void attend(const float *query, const Element *keys, const Element *values, size_t length, float scale, float cap,
                   size_t K, float *scores, float *output) {
  switch (K) {
  case 32: return attend<4>(query, keys, values, length, scale, cap, 4, scores, output);
  case 64: return attend<8>(query, keys, values, length, scale, cap, 8, scores, output);
  case 128: return attend<16>(query, keys, values, length, scale, cap, 16, scores, output);
  default: return attend<0>(query, keys, values, length, scale, cap, K / 8, scores, output);
  }
}

// Rows that each attend from one position to keys and values (G, positions, K) of their owner.
template <class Element> struct Rows {
  const float *queries; // a row begins with its queries (H, K)
  size_t query_stride;  // the distance of two rows' queries
  const Element *keys, *values;
  const int32_t *last_positions; // of the keys that each row attends to
  const int64_t *owners;         // the row whose keys and values each row reads
  float *outputs;                // rows of (H, K)
  size_t num_rows, num_heads, num_groups, num_positions, d_head;
  float scale, cap;

  size_t num_items() const { return num_rows * num_heads; }
  size_t scratch() const { return num_positions + 8; }
  size_t length(size_t row) const { return static_cast<size_t>(last_positions[row]) + 1; }

  // Where the keys of a row and head begin.
  size_t place(size_t row, size_t head) const {
    return (static_cast<size_t>(owners[row]) * num_groups + head * num_groups / num_heads) * num_positions * d_head;
  }

  // Computes some heads, counted over all rows.
  void run(size_t begin, size_t end, float *scores) const {
    constexpr size_t AHEAD = 2, MOST_PREFETCHED = 16384 / sizeof(Element); // more would fill that cache
    const size_t H = num_heads, K = d_head;
    for (size_t i = begin; i < end; i++) {
      const size_t later = (i + AHEAD) / H;
      if (i + AHEAD < end && (!later || owners[later] != owners[later - 1])) {
        // Keys and values come from memory, so the next ones are asked for now, unless the row before has read them.
        const size_t next = place(later, (i + AHEAD) % H), count = std::min(length(later) * K, MOST_PREFETCHED);
        prefetch(keys + next, count);
        prefetch(values + next, count);
      }
      const size_t row = i / H, head = i % H, here = place(row, head);
      const float *query = queries + row * query_stride + head * K;
      attend(query, keys + here, values + here, length(row), scale, cap, K, scores, outputs + i * K);
    }
  }
};

// Calls a function with a number of rows up to MOST as a constant, so that sums of the rows stay in registers.
template <int MOST, class Function> static void with_rows(size_t num_rows, const Function &run) {
  if (num_rows == MOST) return run(std::integral_constant<int, MOST>());
  if constexpr (MOST > 1) with_rows<MOST - 1>(num_rows, run);
}

constexpr size_t PANEL = 16; // columns of a matrix that lie together, row by row

// Some rows of a product A B, of the first vectors of a panel of B. Rows of A and of the product have these strides.
template <int ROWS, int VECTORS>
INLINE void multiply(const float *a, size_t a_stride, const float *panel, size_t depth, float *c, size_t c_stride) {
  Vector total[ROWS][VECTORS] = {};
  for (size_t d = 0; d < depth; d++)
    for (int v = 0; v < VECTORS; v++) {
      const Vector eight = load(panel + d * PANEL + 8 * v);
      for (int r = 0; r < ROWS; r++) total[r][v] = fused(eight, a[r * a_stride + d], total[r][v]);
    }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) store(c + r * c_stride + 8 * v, total[r][v]);
}

// The same for all columns, a multiple of eight; B consists of panels.
template <int ROWS>
INLINE void multiply(const float *a, size_t a_stride, const float *b, size_t columns, size_t depth, float *c,
                     size_t c_stride) {
  size_t column = 0;
  for (; column + PANEL <= columns; column += PANEL)
    multiply<ROWS, 2>(a, a_stride, b + column * depth, depth, c + column, c_stride);
  if (column < columns) multiply<ROWS, 1>(a, a_stride, b + column * depth, depth, c + column, c_stride);
}

// Sources whose tokens, one after the other, attend to all tokens of their source.
struct Sources {
  const float *packed; // (N, 3HK): queries, keys and values
  const int64_t *lengths;
  float *outputs; // (N, HK)
  size_t num_sources, num_heads, longest, d_head;
  float scale, cap;

  static constexpr size_t TOGETHER = 4; // tokens

  static size_t in_panels(size_t columns) { return (columns + PANEL - 1) / PANEL * PANEL; }
  size_t num_items() const { return num_sources * num_heads; }
  size_t room_for_keys() const { return in_panels(longest) * d_head; }
  size_t room_for_values() const { return in_panels(d_head) * longest; }
  size_t scratch() const { return room_for_keys() + room_for_values() + TOGETHER * in_panels(longest); }

  // Computes some heads, counted over all sources.
  void run(size_t begin, size_t end, float *scratch) const {
    const size_t H = num_heads, K = d_head;
    float *keys = scratch, *values = keys + room_for_keys(), *scores = values + room_for_values();
    size_t first = 0, source = 0;
    for (size_t i = begin; i < end; i++) {
      for (; source < i / H; source++) first += static_cast<size_t>(lengths[source]);
      const size_t S = static_cast<size_t>(lengths[source]);
      const float *head = packed + first * 3 * H * K + i % H * K;
      float *output = outputs + first * H * K + i % H * K;
      lay_out(head, S, keys, values);
      size_t token = 0;
      for (; token + TOGETHER <= S; token += TOGETHER)
        attend<TOGETHER>(head + token * 3 * H * K, keys, values, S, scores, output + token * H * K);
      for (; token < S; token++) attend<1>(head + token * 3 * H * K, keys, values, S, scores, output + token * H * K);
    }
  }

  // Writes the keys of a head as panels of (K, S), and its values as panels of (S, K).
  void lay_out(const float *head, size_t S, float *keys, float *values) const {
    const size_t HK = num_heads * d_head, K = d_head;
    std::fill(keys + S / PANEL * PANEL * K, keys + in_panels(S) * K, 0.0f);
    for (size_t token = 0; token < S; token++) {
      const float *key = head + (token * 3 + 1) * HK, *value = key + HK;
      float *column = keys + token / PANEL * PANEL * K + token % PANEL;
      for (size_t k = 0; k < K; k++) column[k * PANEL] = key[k];
      for (size_t k = 0; k < K; k += 8) store(values + k / PANEL * PANEL * S + token * PANEL + k % PANEL, load(value + k));
    }
  }

  template <int TOKENS>
  void attend(const float *queries, const float *keys, const float *values, size_t S, float *scores, float *output) const {
    const size_t HK = num_heads * d_head, columns = (S + 7) / 8 * 8;
    multiply<TOKENS>(queries, 3 * HK, keys, columns, d_head, scores, columns);
    float totals[TOKENS];
    for (int token = 0; token < TOKENS; token++) totals[token] = weigh(scores + token * columns, S, scale, cap);
    multiply<TOKENS>(scores, columns, values, d_head, S, output, HK);
    for (int token = 0; token < TOKENS; token++)
      for (size_t k = 0; k < d_head; k += 8) store(output + token * HK + k, load(output + token * HK + k) / totals[token]);
  }
};

// The residual connection, and the layer norm after it (Ba et al. 2016, arXiv:1607.06450).
struct Norm {
  const float *x, *residual;  // (N, D)
  const float *weight, *bias; // (D,)
  float *total, *normalized;  // (N, D): the sum, which may be null, and its norm
  size_t num_rows, d_model;
  float epsilon;

  size_t num_items() const { return num_rows; }
  size_t scratch() const { return 0; }

  void run(size_t begin, size_t end, float *) const {
    const size_t D = d_model;
    for (size_t place = begin * D; place < end * D; place += D) {
      float *sum_of_row = (total ? total : normalized) + place;
      Vector totals = {}, squares = {};
      for (size_t i = 0; i < D; i += 8) {
        const Vector eight = load(x + place + i) + load(residual + place + i);
        store(sum_of_row + i, eight);
        totals += eight;
      }
      const float mean = sum(totals) / D;
      for (size_t i = 0; i < D; i += 8) {
        const Vector centred = load(sum_of_row + i) - mean;
        squares = fused(centred, centred, squares);
      }
      const float factor = 1 / sqrtf(sum(squares) / D + epsilon);
      for (size_t i = 0; i < D; i += 8) {
        const Vector divided = (load(sum_of_row + i) - mean) * factor;
        store(normalized + place + i, fused(divided, load(weight + i), load(bias + i)));
      }
    }
  }
};

// Puts a logit behind those that are at least as large, and drops the last one.
static inline void insert(float *logits, int64_t *token_ids, size_t count, float logit, size_t token_id) {
  size_t place = count - 1;
  for (; place && logits[place - 1] < logit; place--)
    logits[place] = logits[place - 1], token_ids[place] = token_ids[place - 1];
  logits[place] = logit, token_ids[place] = static_cast<int64_t>(token_id);
}

constexpr size_t BLOCK = 32; // logits whose largest one is kept

// Finds the largest of numbers that lie in blocks, the lowest id among equals. `search(block, add)` calls `add(number, id)`
// for the numbers of a block in their order. The largest numbers of `count` blocks are `count` numbers, so no candidate is
// below the least of the `count` largest of these. A block whose largest number is below it is not searched.
template <class Search>
INLINE void find_largest(const float *largest_of_blocks, size_t num_blocks, size_t count, float *best, int64_t *ids,
                         const Search &search) {
  size_t found = 0;
  const auto add = [&](float number, size_t id) {
    if (found < count)
      insert(best, ids, ++found, number, id);
    else if (number > best[count - 1])
      insert(best, ids, count, number, id);
  };
  for (size_t block = 0; block < num_blocks; block++) add(largest_of_blocks[block], block);
  const float least = found < count ? -INFINITY : best[count - 1];
  found = 0;
  for (size_t block = 0; block < num_blocks; block++)
    if (!(largest_of_blocks[block] < least))
      search(block, [&](float number, size_t id) {
        if (number >= least) add(number, id);
      });
  for (; found < count; found++) best[found] = NAN, ids[found] = -1; // some are not numbers
}

// Turns some logits into log-probabilities, by the largest logit of each block, and the sum of the block's powers relative
// to it. Returns what it subtracts, in double precision.
INLINE double normalize(float *best, size_t count, const float *largest_of_blocks, const float *powers, size_t num_blocks) {
  const float most = best[0];
  double total = 0; // of sums: a float would lose small numbers of a large vocabulary
  size_t i = 0;
  while (i + 8 <= num_blocks) {
    Vector sums = {};
    for (const size_t stop = std::min(i + 1024, num_blocks & ~size_t{7}); i < stop; i += 8)
      sums = fused(load(powers + i), exponential(load(largest_of_blocks + i) - most), sums);
    total += sum(sums);
  }
  for (; i < num_blocks; i++)
    total = std::fma(powers[i], std::exp(static_cast<double>(largest_of_blocks[i] - most)), total);
  const double normalizer = most + std::log(total);
  for (i = 0; i < count; i++) best[i] = static_cast<float>(best[i] - normalizer);
  return normalizer;
}

// The sum of the powers of a block of logits, relative to its largest one, which may be minus infinity.
INLINE float sum_of_powers(const Vector (&logits)[BLOCK / 8], float largest) {
  const float most = std::max(largest, -1e38f);
  Vector total = {};
  for (const Vector &eight : logits) total += exponential(eight - most);
  return sum(total);
}

// The largest logits of each row, and their log-probabilities.
struct Ranking {
  const float *logits;      // (N, V)
  float *log_probabilities; // (N, candidates)
  int64_t *token_ids;       // (N, candidates)
  double *normalizers;      // (N,): what is subtracted from the logits of a row
  size_t num_rows, vocab_size, num_candidates;

  size_t num_items() const { return num_rows; }
  size_t num_blocks() const { return (vocab_size + BLOCK - 1) / BLOCK; }
  size_t scratch() const { return 2 * num_blocks(); }

  void run(size_t begin, size_t end, float *scratch) const {
    float *largest_of_blocks = scratch, *powers = scratch + num_blocks();
    for (size_t row = begin; row < end; row++) {
      const float *given = logits + row * vocab_size;
      float *best = log_probabilities + row * num_candidates;
      for (size_t block = 0; block < num_blocks(); block++) {
        Vector eights[BLOCK / 8];
        load_block(given, block, eights);
        const Vector most = larger(larger(eights[0], eights[1]), larger(eights[2], eights[3]));
        largest_of_blocks[block] = largest(most);
        powers[block] = sum_of_powers(eights, largest_of_blocks[block]);
      }
      const auto search = [&](size_t block, const auto &add) {
        for (size_t i = block * BLOCK; i < std::min(vocab_size, (block + 1) * BLOCK); i++) add(given[i], i);
      };
      find_largest(largest_of_blocks, num_blocks(), num_candidates, best, token_ids + row * num_candidates, search);
      normalizers[row] = normalize(best, num_candidates, largest_of_blocks, powers, num_blocks());
    }
  }

  // Loads a block of a row, with minus infinity after its end.
  void load_block(const float *row, size_t block, Vector (&eights)[BLOCK / 8]) const {
    const float *place = row + block * BLOCK;
    float copy[BLOCK];
    if ((block + 1) * BLOCK > vocab_size) {
      std::fill(std::copy(place, row + vocab_size, copy), copy + BLOCK, -INFINITY);
      place = copy;
    }
    for (size_t i = 0; i < BLOCK / 8; i++) eights[i] = load(place + 8 * i);
  }
};

// The rules of times for logits (Radford et al. 2022, arXiv:2212.04356): what lies outside of a row's bounds becomes minus
// infinity, and so do texts, the tokens that are not times, if the times together are more probable than any text.
struct TimeRules {
  // The first and the last time, the least and the most text, the least and the most time (N,): bounds that count themselves.
  static constexpr size_t NUM_BOUNDS = 6;

  const float *logits;                // (N, V)
  const int64_t *bounds[NUM_BOUNDS];
  float *allowed; // (N, V)
  size_t num_rows, vocab_size;

  struct Span {
    size_t begin, end; // which may be before the beginning: the span is empty

    size_t size() const { return end > begin ? end - begin : 0; }
  };

  size_t num_items() const { return num_rows; }
  size_t scratch() const { return 0; }

  void run(size_t begin, size_t end, float *) const {
    for (size_t row = begin; row < end; row++) {
      const auto place = [&](size_t bound, int64_t after) { // in the vocabulary, or its end
        return static_cast<size_t>(std::clamp<int64_t>(bounds[bound][row], -after, vocab_size - after) + after);
      };
      const size_t first = place(0, 0), behind = std::max(place(1, 1), first);
      const size_t least_text = place(2, 0), behind_texts = place(3, 1);
      const Span texts[] = {{least_text, std::min(first, behind_texts)}, {std::max(behind, least_text), behind_texts}};
      const Span times{std::max(first, place(4, 0)), std::min(behind, place(5, 1))};
      const float *given = logits + row * vocab_size;
      float *kept = allowed + row * vocab_size;
      const auto keep = [&](const Span &span) { std::copy_n(given + span.begin, span.size(), kept + span.begin); };
      std::fill_n(kept, vocab_size, -INFINITY);
      keep(times);
      // Relative to the best text, so that the powers of a row without times are 0.
      const float best_text = std::max(largest_of(given, texts[0]), largest_of(given, texts[1]));
      if (!(total_of_powers(given, times, best_text) > 1)) keep(texts[0]), keep(texts[1]);
    }
  }

  // Calls a function with eight numbers of a span at a time; after the last one with minus infinity.
  template <class Function> static void in_eights(const float *numbers, const Span &span, const Function &function) {
    size_t i = span.begin;
    for (; i + 8 <= span.end; i += 8) function(load(numbers + i));
    if (i >= span.end) return;
    float rest[8];
    std::fill(std::copy(numbers + i, numbers + span.end, rest), rest + 8, -INFINITY);
    function(load(rest));
  }

  static float largest_of(const float *numbers, const Span &span) {
    Vector eights = Vector{} - INFINITY;
    in_eights(numbers, span, [&](Vector eight) { eights = larger(eights, eight); });
    return largest(eights);
  }

  // The sum of e to the power of numbers minus another, as far as it matters beside 1.
  static float total_of_powers(const float *numbers, const Span &span, float other) {
    constexpr float MOST = 80; // of an exponential
    Vector totals = {};
    in_eights(numbers, span, [&](Vector eight) {
      const Vector relative = eight - other;
      totals += exponential(relative > MOST ? repeated(MOST) : relative);
    });
    return sum(totals);
  }
};
