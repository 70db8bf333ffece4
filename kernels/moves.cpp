// Copies positions of rows into other rows, for the server's buffers (server/runner/buffers.py).
//
// What a move copies is many short pieces far from each other: one for each head of each layer's keys and values. numpy
// waits for them one after the other. Here the pieces of the next move are asked for while this one's are copied.

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

struct Move {
  int64_t from_row, to_row, first_position, num_positions;
};

// Tensors (rows, outer, positions, …), whose axes have these distances in bytes.
struct Tensors {
  char *first;
  int64_t num_tensors, num_outer;
  int64_t tensor_stride, row_stride, outer_stride, position_bytes;

  template <class Part> void each_piece(const Move &move, const Part &part) const {
    for (int64_t tensor = 0; tensor < num_tensors; tensor++)
      for (int64_t outer = 0; outer < num_outer; outer++) {
        char *row_zero = first + tensor * tensor_stride + outer * outer_stride + move.first_position * position_bytes;
        part(row_zero + move.from_row * row_stride, row_zero + move.to_row * row_stride,
             static_cast<size_t>(move.num_positions * position_bytes));
      }
  }
};

} // namespace

// Carries out the moves in order.
extern "C" void copy_positions(const Tensors *tensors, const Move *moves, int64_t num_moves) {
  constexpr size_t LINE = 64, MOST_PREFETCHED = 1024;
  for (int64_t i = 0; i < num_moves; i++) {
    if (i + 1 < num_moves)
      tensors->each_piece(moves[i + 1], [](const char *from, const char *to, size_t size) {
        for (size_t byte = 0; byte < size && byte < MOST_PREFETCHED; byte += LINE) {
          __builtin_prefetch(from + byte, 0, 2);
          __builtin_prefetch(to + byte, 0, 2);
        }
      });
    tensors->each_piece(moves[i], [](const char *from, char *to, size_t size) { memmove(to, from, size); });
  }
}
