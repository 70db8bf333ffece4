// Runs kernels/cuda_kernels.cu on the host: a thread of the system takes the place of each of CUDA's, and blocks run one
// after the other. Slow, and exact in what a warp and a block exchange.
#include <barrier>
#include <cmath>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#define HOST
#define __device__
#define SYNC block->arrive_and_wait()
#define SHARED

namespace {

using Index = int64_t;
struct Place {
  int x, y;
};
struct Warp {
  std::barrier<> barrier{32};
  unsigned lanes[32];
};

thread_local Place threadIdx, blockIdx, blockDim;
thread_local Warp *warp_of_thread;
std::barrier<> *block;
float *shared;

template <class T> T __shfl_xor_sync(unsigned, T value, int distance) {
  const int lane = threadIdx.x % 32;
  __builtin_memcpy(&warp_of_thread->lanes[lane], &value, 4);
  warp_of_thread->barrier.arrive_and_wait();
  __builtin_memcpy(&value, &warp_of_thread->lanes[lane ^ distance], 4);
  warp_of_thread->barrier.arrive_and_wait();
  return value;
}
float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }

#include "../../kernels/cuda_kernels.cu"

template <class Work> void run(const Work &work, void (*kernel)(const Work &), Place grid, int num_threads) {
  for (int y = 0; y < grid.y; y++)
    for (int x = 0; x < grid.x; x++) {
      std::barrier<> barrier(num_threads);
      std::vector<float> memory(1 << 14);
      std::vector<std::unique_ptr<Warp>> warps(num_threads / 32);
      for (auto &each : warps) each = std::make_unique<Warp>();
      block = &barrier, shared = memory.data();
      std::vector<std::thread> threads;
      for (int i = 0; i < num_threads; i++)
        threads.emplace_back([&, i] {
          threadIdx = {i, 0}, blockIdx = {x, y}, blockDim = {num_threads, 1};
          warp_of_thread = warps[i / 32].get();
          kernel(work);
        });
      for (auto &each : threads) each.join();
    }
}

} // namespace

extern "C" void run_attention(const Attention *work, int num_rows, int num_threads, bool is_bfloat16) {
  run(*work, is_bfloat16 ? attend<BFloat16> : attend<Float16>, {work->num_heads, num_rows}, num_threads);
}

extern "C" void run_embedding(const Embedding *work, int num_rows, bool is_bfloat16) {
  run(*work, is_bfloat16 ? embed<BFloat16> : embed<Float16>, {num_rows, 1}, 64);
}

extern "C" void run_gated(const Gated *work, int num_rows, bool is_bfloat16) {
  run(*work, is_bfloat16 ? gate<BFloat16> : gate<Float16>, {num_rows, (work->width + 1023) / 1024}, 128);
}

extern "C" void run_norm_linear(const NormLinear *work, bool is_bfloat16) {
  const Place grid{(work->num_outputs + COLUMNS - 1) / COLUMNS, (work->num_rows + ROWS - 1) / ROWS};
  run(*work, is_bfloat16 ? map_norm<BFloat16> : map_norm<Float16>, grid, ROWS * COLUMNS);
}

extern "C" void run_norm(const NormLinear *work, bool is_bfloat16) {
  run(*work, is_bfloat16 ? normalize_rows<BFloat16> : normalize_rows<Float16>, {(work->num_rows + 3) / 4, 1}, 128);
}

extern "C" void run_finish(const NormLinear *work, bool is_bfloat16) {
  const Place grid{(work->num_outputs + 255) / 256, work->num_rows};
  run(*work, is_bfloat16 ? finish_rows<BFloat16> : finish_rows<Float16>, grid, 256);
}

extern "C" void run_low_rank(const Terms *work, int num_rows, int num_parts, int num_threads, bool is_bfloat16) {
  run(*work, is_bfloat16 ? add_terms<BFloat16> : add_terms<Float16>, {num_rows, num_parts}, num_threads);
}

extern "C" void run_most_probable(const MostProbable *work, int num_rows, int num_threads, bool is_bfloat16) {
  run(*work, is_bfloat16 ? choose<BFloat16> : choose<Float16>, {num_rows, 1}, num_threads);
}

extern "C" void run_move(const Moves *work, int num_parts, int num_moves) {
  run(*work, carry_out, {num_parts, num_moves}, 32);
}
