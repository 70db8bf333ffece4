// The computation of the operators as a program, which test_arm.py runs for another processor. It reads its inputs from
// standard input, and writes what it has computed to standard output, both as they are in memory.
//
//   products I O is_positive N     weights (I, O), their scales, biases, rows x (N, I) -> outputs (N, O)
//   int4_products I O is_positive N   the factor, weights and scales as in int4.h, biases, rows x (N, I) -> outputs (N, O)
//   linear I O N                   weights (O, I), packed as halves if they are, biases, rows x (N, I) -> outputs (N, O)
//   low_rank I O R N               an adapter's A (2, R, I), B (R, 2 O), ranks (2,), rows x (N, I), y (N, 2 O) -> (N, 2 O)
//   attention B H G C K            queries (B, H, K), keys, values (B, G, C, K), last positions, owners (B,) -> (B, H, K)
//   half_attention B H G C K       the same with keys and values in half precision
//   sources S H K                  packed tokens (S, 3 H K) of one source -> (S, H, K)
//   norm N D                       x, residual (N, D), weight, bias (D,) -> (N, D)
//   candidates N V K               logits (N, V) -> log-probabilities (N, K), ids (N, K)
//   time_rules N V                 bounds (6, N), logits (N, V) -> allowed logits (N, V)
//   instructions                   -> their name

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
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

template <class T = float> std::vector<T> read(size_t count) {
  std::vector<T> values(count);
  if (fread(values.data(), sizeof(T), count, stdin) != count) abort();
  return values;
}

template <class T> void write(const std::vector<T> &values) { fwrite(values.data(), sizeof(T), values.size(), stdout); }

template <class Work> void run(const Work &work) {
  std::vector<float> scratch(work.scratch() + 1);
  work.run(0, work.num_items(), scratch.data());
}

template <class Element> void attend_to(const size_t *sizes) {
  const size_t B = sizes[0], H = sizes[1], G = sizes[2], C = sizes[3], K = sizes[4], size = B * G * C * K;
  const auto queries = read(B * H * K), given_keys = read(size), given_values = read(size);
  const auto last = read<int32_t>(B);
  const auto owners = read<int64_t>(B);
  std::vector<Element> keys(size), values(size);
  copy(given_keys.data(), size, keys.data());
  copy(given_values.data(), size, values.data());
  std::vector<float> outputs(B * H * K);
  Rows<Element> rows{};
  rows.queries = queries.data(), rows.query_stride = H * K, rows.keys = keys.data(), rows.values = values.data();
  rows.last_positions = last.data(), rows.owners = owners.data(), rows.outputs = outputs.data();
  rows.num_rows = B, rows.num_heads = H;
  rows.num_groups = G, rows.num_positions = C, rows.d_head = K, rows.scale = 0.3f;
  run(rows);
  write(outputs);
}

} // namespace

int main(int count, char **given) {
  const std::string name = given[1];
  std::vector<size_t> sizes;
  for (int i = 2; i < count; i++) sizes.push_back(strtoul(given[i], nullptr, 10));
  if (name == "instructions") {
    const Instructions *here = instructions_here();
    return puts(here ? here->name : "none") < 0;
  }
  if (name == "products") {
    const size_t I = sizes[0], O = sizes[1], N = sizes[3];
    const auto weights = read<uint8_t>(I * O);
    const auto scales = read(O), biases = read(O), x = read(N * I);
    const Instructions &how = *instructions_here();
    std::vector<int8_t> packed(Packing(how, depth_of(I), O).size());
    pack(how, weights.data(), I, O, packed.data());
    std::vector<int32_t> sums(O);
    for (size_t i = 0; i < I * O; i++) sums[i % O] += weights[i] - 128;
    const Int8Map map(&how, packed.data(), depth_of(I), O, sizes[2] != 0, sums.data(), scales.data(), biases.data());
    std::vector<uint8_t> levels(N * map.row_bytes());
    std::vector<float> row_scales(N), outputs(N * O);
    std::vector<int32_t> shifts(N);
    const Int8Levels to{levels.data(), row_scales.data(), shifts.data()};
    run(Int8Quantization{&map, x.data(), to, N, I});
    run(Product<Int8Map>{&map, to, outputs.data(), N});
    write(outputs);
  } else if (name == "int4_products") {
    const size_t I = sizes[0], O = sizes[1], N = sizes[3], num_blocks = int4_blocks_of(I);
    const float factor = read(1)[0];
    const auto weights = read<uint8_t>(panels_of(O) * num_blocks * INT4_BYTES);
    const auto scales = read<Half>(panels_of(O) * num_blocks * COLUMNS);
    const auto biases = read(O), x = read(N * I);
    const Int4Map map(instructions_here(), weights.data(), num_blocks * INT4_BLOCK, O, sizes[2] != 0, factor, scales.data(),
                      biases.data());
    std::vector<int8_t> levels(N * map.depth);
    std::vector<float> factors(N), outputs(N * O);
    std::vector<int32_t> offsets(N * num_blocks);
    const Int4Levels to{levels.data(), factors.data(), offsets.data()};
    run(Int4Quantization{&map, x.data(), to, N, I});
    run(Product<Int4Map>{&map, to, outputs.data(), N});
    write(outputs);
  } else if (name == "linear") {
    const size_t I = sizes[0], O = sizes[1], N = sizes[2];
    const auto weights = read(O * I), given_biases = read(O), x = read(N * I);
    std::vector<float> panels(size_in_panels(I, O)), biases(size_in_panels(1, O)), outputs(N * O);
    const bool are_small = are_halves(weights.data(), weights.size());
    if (are_small)
      write_panels(weights.data(), I, O, reinterpret_cast<Half *>(panels.data()));
    else
      write_panels(weights.data(), I, O, panels.data());
    std::copy(given_biases.begin(), given_biases.end(), biases.begin());
    const FloatMap map{float_multiplication(are_small), panels.data(), biases.data(), I, O, 0.5f, 0.0f};
    run(FloatProduct{&map, x.data(), outputs.data(), N});
    write(outputs);
  } else if (name == "low_rank") {
    const size_t I = sizes[0], O = sizes[1], R = sizes[2], N = sizes[3], ends[] = {O, 2 * O};
    std::vector<Half> weights(2 * R * (I + O));
    copy(read(weights.size()).data(), weights.size(), weights.data());
    const auto ranks = read<int32_t>(2);
    const auto x = read(N * I);
    auto outputs = read(2 * N * O);
    std::vector<int64_t> rows(N);
    for (size_t row = 0; row < N; row++) rows[row] = static_cast<int64_t>(row);
    const RowsOfAdapter block{rows.data(), N, 0};
    Terms work{};
    work.add = addition_of_terms(), work.x = x.data(), work.outputs = outputs.data(), work.weights = weights.data();
    work.ranks = ranks.data(), work.ends = ends, work.blocks = &block, work.num_blocks = 1;
    work.num_inputs = I, work.num_outputs = 2 * O, work.num_parts = 2, work.most_rank = R;
    run(work);
    write(outputs);
  } else if (name == "attention") {
    attend_to<float>(sizes.data());
  } else if (name == "half_attention") {
    attend_to<Half>(sizes.data());
  } else if (name == "sources") {
    const int64_t length = static_cast<int64_t>(sizes[0]);
    const size_t S = sizes[0], H = sizes[1], K = sizes[2];
    const auto packed = read(S * 3 * H * K);
    std::vector<float> outputs(S * H * K);
    Sources work{};
    work.packed = packed.data(), work.lengths = &length, work.outputs = outputs.data(), work.num_sources = 1;
    work.num_heads = H, work.longest = S, work.d_head = K, work.scale = 0.3f;
    run(work);
    write(outputs);
  } else if (name == "norm") {
    const size_t N = sizes[0], D = sizes[1];
    const auto x = read(N * D), residual = read(N * D), weight = read(D), bias = read(D);
    std::vector<float> outputs(N * D);
    Norm work{};
    work.x = x.data(), work.residual = residual.data(), work.weight = weight.data(), work.bias = bias.data();
    work.normalized = outputs.data(), work.num_rows = N, work.d_model = D, work.epsilon = 1e-5f;
    run(work);
    write(outputs);
  } else if (name == "candidates") {
    const size_t N = sizes[0], V = sizes[1], K = sizes[2];
    const auto logits = read(N * V);
    std::vector<float> log_probabilities(N * K);
    std::vector<int64_t> ids(N * K);
    std::vector<double> normalizers(N);
    Ranking work{};
    work.normalizers = normalizers.data();
    work.logits = logits.data(), work.log_probabilities = log_probabilities.data(), work.token_ids = ids.data();
    work.num_rows = N, work.vocab_size = V, work.num_candidates = K;
    run(work);
    write(log_probabilities);
    write(ids);
  } else if (name == "time_rules") {
    const size_t N = sizes[0], V = sizes[1];
    const auto bounds = read<int64_t>(TimeRules::NUM_BOUNDS * N);
    const auto logits = read(N * V);
    std::vector<float> allowed(N * V);
    TimeRules work{};
    for (size_t i = 0; i < TimeRules::NUM_BOUNDS; i++) work.bounds[i] = bounds.data() + i * N;
    work.logits = logits.data(), work.allowed = allowed.data(), work.num_rows = N, work.vocab_size = V;
    run(work);
    write(allowed);
  } else {
    return 2;
  }
  return 0;
}
