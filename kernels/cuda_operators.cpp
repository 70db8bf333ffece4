// Operators for ONNX Runtime on CUDA, which launch the kernels of cuda_kernels.cu through the driver.
//
//   CudaCacheAttention   appends one position to each row's cache, and attends to the cache
//   CudaBiasedCacheAttention  the same with a bias of the scores by distance
//   CudaMemoryAttention  attends from one position per row to the row's own memory
//   CudaEmbedding        adds the embeddings of tokens and of the positions after given ones
//   CudaGatedRelu        multiplies one half of each row by the activation of the other; also CudaGatedGelu, ...
//   CudaNormLinear       computes the norm of a sum, and a map of it; also CudaRmsNormLinear, CudaNormLinearRelu, ...
//   CudaLowRank          adds the low-rank terms of adapters to the outputs of a map
//   MostProbable         converts scores to float32 logits, and finds the most probable token of each row
//
// Besides, `move_on_cuda` copies positions of rows, and `write_to_cuda` writes an array, both outside of graphs.
//
// They are compiled without CUDA: the driver's library is opened when the first session is created. A graph that uses them
// also has their definitions, which ONNX Runtime takes where it does not have this library (export/graphs/functions.py).

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <dlfcn.h>
#include <exception>
#include <initializer_list>
#include <iterator>
#include <string>
#include <vector>

namespace {

#include "interface.h"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr int MOST_THREADS = 1024, FEWEST_THREADS = 64;

std::string ptx; // of cuda_kernels.cu; set once, before the first session is created

// The functions of the driver that are used, by its names without "cu".
struct Driver {
  int (*CtxGetCurrent)(void **) = nullptr;
  int (*CtxSetCurrent)(void *) = nullptr;
  int (*DevicePrimaryCtxRetain)(void **, int) = nullptr;
  int (*ModuleLoadData)(void **, const void *) = nullptr;
  int (*ModuleGetFunction)(void **, void *, const char *) = nullptr;
  int (*LaunchKernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                      void **) = nullptr;
  int (*StreamSynchronize)(void *) = nullptr;
  int (*MemcpyHtoD)(uint64_t, const void *, size_t) = nullptr;
  void *module = nullptr;
  const char *problem = nullptr;

  Driver() {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    const auto find = [&](auto &function, const char *name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(library ? dlsym(library, name) : nullptr);
      if (!function) problem = "the CUDA driver lacks a function";
    };
    find(CtxGetCurrent, "cuCtxGetCurrent");
    find(CtxSetCurrent, "cuCtxSetCurrent");
    find(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    find(ModuleLoadData, "cuModuleLoadData");
    find(ModuleGetFunction, "cuModuleGetFunction");
    find(LaunchKernel, "cuLaunchKernel");
    find(StreamSynchronize, "cuStreamSynchronize");
    find(MemcpyHtoD, "cuMemcpyHtoD_v2");
    if (problem) return;
    if (!enter()) problem = "there is no CUDA context";
    else if (ModuleLoadData(&module, ptx.c_str())) problem = "the CUDA driver does not compile the kernels";
  }

  // Gives the calling thread a context: the primary one of the first device that the process sees, as the provider does.
  bool enter() const {
    void *context = nullptr;
    if (!CtxGetCurrent(&context) && context) return true;
    return !DevicePrimaryCtxRetain(&context, 0) && !CtxSetCurrent(context);
  }

  // The driver with the kernels, which live as long as the process.
  static const Driver &get() {
    static const Driver driver;
    require(!driver.problem, driver.problem ? driver.problem : "");
    return driver;
  }
};

// A kernel, and the launch of its blocks on the stream of a run.
struct Kernel {
  void *function = nullptr;

  explicit Kernel(const std::string &name) {
    const Driver &driver = Driver::get();
    require(!driver.ModuleGetFunction(&function, driver.module, name.c_str()), "a CUDA kernel is missing");
  }

  Kernel(const std::string &name, int type) : Kernel(name + (type == BFLOAT16 ? "_bfloat16" : "_float16")) {}

  template <class Work>
  void launch(void *context, Work work, int64_t x, int64_t y, unsigned num_threads, size_t shared_bytes) const {
    if (x == 0 || y == 0) return;
    void *stream = nullptr, *arguments[] = {&work};
    check(call<193>(context, &stream));
    require(!Driver::get().LaunchKernel(function, x, y, 1, num_threads, 1, 1, shared_bytes, stream, arguments, nullptr),
            "a CUDA kernel cannot be launched");
  }
};

// The argument of the kernel; cuda_kernels.cu describes it.
struct AttentionWork {
  const void *queries, *added;
  void *keys, *values;
  const int32_t *last;
  void *outputs;
  const void *bias;
  int query_stride, num_heads, num_groups, num_positions, d_head, num_distances;
  float scale, cap;
};

template <int TYPE> struct Attention : Heads {
  Kernel kernel{"attention", TYPE};
  using Heads::Heads;

  // Runs the kernel; the inputs from `first` on are keys and values (B, G, C, K) and the rows' last positions (B,).
  void run(void *context, size_t first, bool appends, const Tensor<uint16_t> &bias = {}) const {
    const auto queries = input<uint16_t>(context, 0), keys = input<uint16_t>(context, first);
    const auto values = input<uint16_t>(context, first + 1);
    const auto last = input<int32_t>(context, first + 2);
    require(queries.num_axes == 2 && keys.num_axes == 4 && values.num_axes == 4, "queries must have 2 axes, keys 4");
    const int64_t B = queries.shape[0], G = keys.shape[1], C = keys.shape[2], K = keys.shape[3], H = num_heads;
    require(keys.shape[0] == B && last.has_shape(B), "the inputs differ in the number of rows");
    require(K >= 8 && K <= 256 && (K & (K - 1)) == 0, "d_head must be a power of 2 from 8 to 256");
    require(G > 0 && H % G == 0, "the heads must be a multiple of the heads of keys");
    require(queries.shape[1] == (appends ? H + 2 * G : H) * K, "queries have another width");
    AttentionWork work{};
    work.queries = queries.data, work.added = appends ? queries.data + H * K : nullptr, work.last = last.data;
    work.outputs = output<uint16_t>(context, 0, {B, H * K});
    work.keys = output<uint16_t>(context, 1, {B, G, C, K}), work.values = output<uint16_t>(context, 2, {B, G, C, K});
    require(B == 0 || (work.keys == keys.data && work.values == values.data), "keys and values must be bound in place");
    work.query_stride = queries.shape[1], work.num_heads = H, work.num_groups = G, work.num_positions = C, work.d_head = K;
    work.scale = scale * LOG2_E, work.cap = cap;
    if (bias.data) {
      require(bias.num_axes == 2 && bias.shape[0] == H && bias.shape[1] > 0, "the bias must have a row for each head");
      work.bias = bias.data, work.num_distances = bias.shape[1];
    }
    // A team of K / 8 threads reads 32 positions of a row that is full. On an H100 with C = 256 and 20 live positions, 64
    // threads take 2.6 us for 1 row and 7.4 for 256; 128 take 2.6 and 9.2. The number of threads decides how sums are
    // rounded, so it does not depend on the number of rows.
    int num_threads = MOST_THREADS;
    const int64_t enough = C * (K / 8) / 32;
    while (num_threads > FEWEST_THREADS && num_threads / 2 >= enough) num_threads /= 2;
    kernel.launch(context, work, H, B, num_threads, num_threads / 32 * (K + 2) * sizeof(float));
  }
};

// Inputs: queries, keys and values (B, (H + 2G)K); the cache's keys and values (B, G, C, K); the new position of each
// row (B,); and C, which only the definition reads. Outputs: (B, HK), and the cache, which must be bound in place.
template <int TYPE> struct CudaCacheAttention : Attention<TYPE> {
  static constexpr const char *NAME = "CudaCacheAttention";
  static constexpr int INPUTS[] = {TYPE, TYPE, TYPE, INT32, INT32}, OUTPUTS[] = {TYPE, TYPE, TYPE};
  using Attention<TYPE>::Attention;

  void operator()(void *context) const { this->run(context, 1, true); }
};

// Inputs as those of CudaCacheAttention, with a bias (H, D) before C: it is added to the scores by the distance of a position
// from the last one, the last column beyond its end.
template <int TYPE> struct CudaBiasedCacheAttention : Attention<TYPE> {
  static constexpr const char *NAME = "CudaBiasedCacheAttention";
  static constexpr int INPUTS[] = {TYPE, TYPE, TYPE, INT32, TYPE, INT32}, OUTPUTS[] = {TYPE, TYPE, TYPE};
  using Attention<TYPE>::Attention;

  void operator()(void *context) const { this->run(context, 1, true, input<uint16_t>(context, 4)); }
};

// Inputs: queries (B, HK); the key and value of each row's last position (B, 1, GK), which only the definition reads; the
// memory's keys and values (B, G, C, K); each row's last position (B,); and C, which only the definition reads. Outputs:
// (B, HK), and the memory, which must be bound in place, and is not changed.
template <int TYPE> struct CudaMemoryAttention : Attention<TYPE> {
  static constexpr const char *NAME = "CudaMemoryAttention";
  static constexpr int INPUTS[] = {TYPE, TYPE, TYPE, TYPE, TYPE, INT32, INT32}, OUTPUTS[] = {TYPE, TYPE, TYPE};
  using Attention<TYPE>::Attention;

  void operator()(void *context) const { this->run(context, 3, false); }
};

// cuBLAS, as the provider has loaded it.
struct Blas {
  static constexpr int RESOURCE_VERSION = 1, HANDLE = 10002, FLOAT_SUMS = 68, DEFAULT_ALGORITHM = -1;

  int (*GemmEx)(void *, int, int, int, int, int, const void *, const void *, int, int, const void *, int, int, const void *,
                void *, int, int, int, int) = nullptr;

  Blas() {
    for (const char *name : {"libcublas.so.12", "libcublas.so.13"})
      if (void *library = dlopen(name, RTLD_NOW | RTLD_NOLOAD))
        GemmEx = reinterpret_cast<decltype(GemmEx)>(dlsym(library, "cublasGemmEx"));
  }

  // Multiplies (B, I) by (I, O), on the stream of a run.
  static void multiply(void *context, int type, const void *x, const void *weights, void *outputs, int B, int I, int O) {
    static const Blas blas;
    require(blas.GemmEx, "cuBLAS is not loaded");
    void *handle = nullptr;
    check(call<265>(context, RESOURCE_VERSION, HANDLE, &handle));
    const float one = 1, zero = 0;
    const int kind = type == BFLOAT16 ? 14 : 2;
    require(!blas.GemmEx(handle, 0, 0, O, B, I, &one, weights, kind, O, x, kind, I, &zero, outputs, kind, O, FLOAT_SUMS,
                         DEFAULT_ALGORITHM),
            "cuBLAS cannot multiply");
  }
};

struct EmbeddingWork {
  const int64_t *ids;
  const int32_t *previous;
  const void *table, *positions;
  void *outputs;
  int32_t *lengths;
  int vocab_size, num_positions, width;
};

// Inputs: token ids (B,); the positions before theirs (B,); tables of tokens (V, D) and of positions (C, D). Outputs: the
// sums of their embeddings (B, D), and the tokens' positions, which may have the memory of the second input.
template <int TYPE> struct CudaEmbedding {
  static constexpr const char *NAME = "CudaEmbedding";
  static constexpr int INPUTS[] = {INT64, INT32, TYPE, TYPE}, OUTPUTS[] = {TYPE, INT32};
  Kernel kernel{"embedding", TYPE};

  explicit CudaEmbedding(const void *) {}

  void operator()(void *context) const {
    const auto ids = input<int64_t>(context, 0);
    const auto previous = input<int32_t>(context, 1);
    const auto table = input<uint16_t>(context, 2), positions = input<uint16_t>(context, 3);
    require(ids.num_axes == 1 && table.num_axes == 2 && positions.num_axes == 2, "ids must have 1 axis, tables 2");
    const int64_t B = ids.shape[0], V = table.shape[0], D = table.shape[1], C = positions.shape[0];
    require(previous.has_shape(B) && positions.has_shape(C, D) && D % 8 == 0, "the tables must have one width, a multiple of 8");
    EmbeddingWork work{ids.data, previous.data, table.data, positions.data, output<uint16_t>(context, 0, {B, D}),
                       output<int32_t>(context, 1, {B}), static_cast<int>(V), static_cast<int>(C), static_cast<int>(D)};
    require(B == 0 || (work.outputs && work.lengths), "the outputs must be read");
    kernel.launch(context, work, B, 1, 64, 0);
  }
};

struct GatedWork {
  const void *x;
  void *outputs;
  int width, activation;
};

// The activations, by their numbers in the kernels.
constexpr const char *GATED[] = {"", "CudaGatedRelu", "CudaGatedGelu", "CudaGatedFastGelu", "CudaGatedSilu"};

// Input: (B, 2 F). Output: the activation of its first half times the other (B, F).
template <int TYPE, int ACTIVATION> struct CudaGated {
  static constexpr const char *NAME = GATED[ACTIVATION];
  static constexpr int INPUTS[] = {TYPE}, OUTPUTS[] = {TYPE};
  Kernel kernel{"gated", TYPE};

  explicit CudaGated(const void *) {}

  void operator()(void *context) const {
    const auto x = input<uint16_t>(context, 0);
    require(x.num_axes == 2 && x.shape[1] % 16 == 0, "x must have 2 axes, and halves of a multiple of 8");
    const int64_t B = x.shape[0], F = x.shape[1] / 2;
    const GatedWork work{x.data, output<uint16_t>(context, 0, {B, F}), static_cast<int>(F), ACTIVATION};
    kernel.launch(context, work, B, (F + 1023) / 1024, 128, 0);
  }
};

// The argument of the kernels; cuda_kernels.cu describes it.
struct NormLinearWork {
  const void *x, *residual, *x_bias, *scale, *shift, *weights, *bias;
  void *totals, *normalized, *outputs;
  int num_rows, num_inputs, num_outputs, activation;
  float epsilon;
};

constexpr const char *NORM_LINEARS[] = {"CudaNormLinear", "CudaNormLinearRelu", "CudaNormLinearGelu"};
constexpr const char *RMS_NORM_LINEARS[] = {"CudaRmsNormLinear", "CudaRmsNormLinearRelu", "CudaRmsNormLinearGelu"};

// Inputs: x (B, I); the residual (B, I); the map's weights (I, O); the norm's scale (I,), and its shift, which an RMS norm
// lacks; a bias of x (I,), and one of the map (O,), both optional. Outputs: the map of the norm (B, O); the norm (B, I); and
// what it is of, the sum of x, its bias, and the residual.
template <int TYPE, int ACTIVATION, bool IS_RMS> struct CudaNormLinear {
  static constexpr const char *NAME = (IS_RMS ? RMS_NORM_LINEARS : NORM_LINEARS)[ACTIVATION];
  static constexpr int INPUTS[] = {TYPE, TYPE, TYPE, TYPE, TYPE, TYPE, TYPE}, OUTPUTS[] = {TYPE, TYPE, TYPE};
  static constexpr size_t NUM_REQUIRED = 4;
  // Blocks that compute 8 rows each read all weights; beyond 2 of them cuBLAS is faster. The inputs fit the memory of a block.
  static constexpr int ROWS = 8, COLUMNS = 32, MOST_ROWS = 16, MOST_INPUTS = 2048;
  Kernel norm_linear{"norm_linear", TYPE}, norm{"norm", TYPE}, finish{"finish", TYPE};
  float epsilon = 0;

  explicit CudaNormLinear(const void *info) { check(call<85>(info, "epsilon", &epsilon)); }

  void operator()(void *context) const {
    const auto x = input<uint16_t>(context, 0), residual = input<uint16_t>(context, 1), weights = input<uint16_t>(context, 2);
    const auto scale = input<uint16_t>(context, 3);
    require(x.num_axes == 2 && weights.num_axes == 2, "x and the weights must have 2 axes");
    const int64_t B = x.shape[0], I = x.shape[1], O = weights.shape[1];
    require(I % 8 == 0 && O % 8 == 0, "the widths must be multiples of 8");
    require(residual.has_shape(B, I) && weights.shape[0] == I && scale.has_shape(I), "the inputs differ in width");
    const auto optional = [&](size_t index, int64_t width) -> const void * {
      if (!has_input(context, index)) return nullptr;
      const auto given = input<uint16_t>(context, index);
      require(given.has_shape(width), "the inputs differ in width");
      return given.data;
    };
    NormLinearWork work{};
    work.x = x.data, work.residual = residual.data, work.weights = weights.data, work.scale = scale.data;
    work.shift = optional(4, I), work.x_bias = optional(5, I), work.bias = optional(6, O);
    require(!work.shift == IS_RMS, "a layer norm must have a shift, and an RMS norm none");
    work.outputs = output<uint16_t>(context, 0, {B, O}), work.normalized = output<uint16_t>(context, 1, {B, I});
    work.totals = output<uint16_t>(context, 2, {B, I});
    work.num_rows = B, work.num_inputs = I, work.num_outputs = O, work.activation = ACTIVATION, work.epsilon = epsilon;
    require(B == 0 || (work.normalized && work.totals), "the norm and the sum must be outputs");
    if (B == 0) return;
    if (B <= MOST_ROWS && I <= MOST_INPUTS) {
      constexpr int NUM_THREADS = ROWS * COLUMNS, NUM_WARPS = NUM_THREADS / 32;
      const size_t shared_bytes = NUM_WARPS * ROWS * COLUMNS * sizeof(float) + ROWS * I * sizeof(uint16_t);
      norm_linear.launch(context, work, (O + COLUMNS - 1) / COLUMNS, (B + ROWS - 1) / ROWS, NUM_THREADS, shared_bytes);
      return;
    }
    norm.launch(context, work, (B + 3) / 4, 1, 4 * 32, 0);
    Blas::multiply(context, TYPE, work.normalized, work.weights, work.outputs, B, I, O);
    if (work.bias || ACTIVATION) finish.launch(context, work, (O + 255) / 256, B, 256, 0);
  }
};

constexpr int MOST_PARTS = 256, MOST_RANK = 4096; // the arguments and the shared memory of a kernel are limited
constexpr int HOST = -2; // the memory of an input

struct TermsWork {
  const void *x, *y, *weights;
  const int32_t *ranks;
  const int64_t *ids;
  void *outputs;
  int64_t distance;
  int num_inputs, num_outputs, most_rank, num_adapters, distance_of_ranks;
  int ends[MOST_PARTS];
};

// Inputs and output as those of LowRank, but that x, y and the output have 16 bits. The parts are on the host. The others'
// numbers are not: an adapter that is not there is passed over, and ranks are at most the largest one.
template <int TYPE> struct CudaLowRank : PartsOfMap {
  static constexpr const char *NAME = "CudaLowRank";
  static constexpr int INPUTS[] = {TYPE, TYPE, FLOAT16, INT32, INT64, INT64}, OUTPUTS[] = {TYPE};
  Kernel kernel{"low_rank", TYPE};

  explicit CudaLowRank(const void *info) : PartsOfMap(info) {
    require(ends.size() <= MOST_PARTS, "there are too many parts");
  }

  void operator()(void *context) const {
    const auto x = input<uint16_t>(context, 0), y = input<uint16_t>(context, 1), adapters = input<uint16_t>(context, 2);
    const auto ranks = input<int32_t>(context, 3);
    const auto ids = input<int64_t>(context, 4);
    const int64_t R = largest_rank(x, y, adapters, ranks, ids), N = x.shape[0], O = ends.back();
    require(R <= MOST_RANK, "the largest rank must be at most 4096");
    TermsWork work{};
    work.x = x.data, work.y = y.data, work.weights = adapters.data + R * first_unit, work.ranks = ranks.data + first_part;
    work.ids = ids.data, work.outputs = output<uint16_t>(context, 0, {N, O}), work.distance = adapters.shape[1];
    work.num_inputs = x.shape[1], work.num_outputs = O, work.most_rank = R, work.num_adapters = adapters.shape[0];
    work.distance_of_ranks = ranks.shape[1];
    for (size_t part = 0; part < ends.size(); part++) work.ends[part] = ends[part];
    kernel.launch(context, work, N, ends.size(), 256, R * sizeof(float));
  }
};

// The description of CudaLowRank, whose parts are read when it is created.
template <int TYPE> Operator low_rank() {
  Operator made = reusing<1>(described<CudaLowRank<TYPE>, true>());
  made.input_memory = [](const Operator *, size_t index) { return index == PartsOfMap::PARTS ? HOST : 0; };
  return made;
}

struct ChoiceWork {
  const void *scores, *added;
  float *logits;
  int64_t *ids;
  int vocab_size;
};

// Inputs: scores (B, V); and what is added to them for the choice (V,). Outputs: the scores as logits (B, V); and the ids
// (B, 1) of the largest sums, the smallest id among equals.
template <int TYPE> struct MostProbable {
  static constexpr const char *NAME = "MostProbable";
  static constexpr int INPUTS[] = {TYPE, TYPE}, OUTPUTS[] = {FLOAT, INT64};
  Kernel kernel{"most_probable", TYPE};

  explicit MostProbable(const void *) {}

  void operator()(void *context) const {
    const auto scores = input<uint16_t>(context, 0), added = input<uint16_t>(context, 1);
    require(scores.num_axes == 2 && added.has_shape(scores.shape[1]), "the scores must have 2 axes, what is added 1");
    const int64_t B = scores.shape[0], V = scores.shape[1];
    ChoiceWork work{scores.data, added.data, output(context, 0, {B, V}), output<int64_t>(context, 1, {B, 1}),
                    static_cast<int>(V)};
    require(B == 0 || (work.logits && work.ids), "the outputs must be read");
    kernel.launch(context, work, B, 1, MOST_THREADS, MOST_THREADS / 16 * sizeof(float));
  }
};

constexpr int MOST_MOVES = 64;

struct MovesWork {
  void *first;
  int64_t tensor_stride, row_stride, outer_stride;
  int num_outer, position_size;
  int32_t moves[MOST_MOVES][4];
};

template <int TYPE> void describe_all(std::vector<Operator> &operators) {
  operators.insert(operators.end(), {described<CudaCacheAttention<TYPE>, true>(), described<CudaMemoryAttention<TYPE>, true>(),
                                     described<CudaBiasedCacheAttention<TYPE>, true>(),
                                     described<CudaEmbedding<TYPE>, true>(),
                                     described<CudaGated<TYPE, 1>, true>(), described<CudaGated<TYPE, 2>, true>(),
                                     described<CudaGated<TYPE, 3>, true>(), described<CudaGated<TYPE, 4>, true>(),
                                     described<CudaNormLinear<TYPE, 0, false>, true>(),
                                     described<CudaNormLinear<TYPE, 1, false>, true>(),
                                     described<CudaNormLinear<TYPE, 2, false>, true>(),
                                     described<CudaNormLinear<TYPE, 0, true>, true>(),
                                     described<CudaNormLinear<TYPE, 1, true>, true>(),
                                     described<CudaNormLinear<TYPE, 2, true>, true>(),
                                     low_rank<TYPE>(), described<MostProbable<TYPE>, true>()});
}

// The operators, which live as long as the library, because sessions use them.
struct Domain {
  std::vector<Operator> operators;
  void *domain = nullptr;
  bool is_complete = false;

  explicit Domain(void *const *table) {
    api = table;
    describe_all<FLOAT16>(operators);
    describe_all<BFLOAT16>(operators);
    Status *problem = call<26>("seq2seq_serve", &domain);
    for (const Operator &each : operators)
      if (!problem) problem = call<27>(domain, &each);
    is_complete = !problem;
  }
};

bool is_described = false;

} // namespace

// Takes the text of cuda_kernels.ptx, before any session loads the library.
extern "C" void set_ptx(const char *text) { ptx = text; }

// Tensors (G, N, outer, positions, inner) on the device, as in moves.cpp; the last two axes have no gaps.
struct DeviceTensors {
  void *first;
  int64_t num_tensors, num_outer, tensor_stride, row_stride, outer_stride, position_bytes;
};

// Carries out moves (M, 4), and waits for their end: for each the row to read, the row to write, the first position, and
// how many. No move reads or writes a row that another one writes. Returns whether that succeeded; false also if the sizes
// are no multiples of 16 bytes.
extern "C" bool move_on_cuda(const DeviceTensors *tensors, const int64_t *moves, int64_t num_moves) {
  if (!api) return false; // no session has loaded the library
  try {
    static const Kernel kernel("move");
    const Driver &driver = Driver::get();
    constexpr int64_t UNIT = 16;
    if ((tensors->tensor_stride | tensors->row_stride | tensors->outer_stride | tensors->position_bytes) % UNIT) return false;
    MovesWork work{};
    work.first = tensors->first, work.num_outer = tensors->num_outer, work.position_size = tensors->position_bytes / UNIT;
    work.tensor_stride = tensors->tensor_stride / UNIT, work.row_stride = tensors->row_stride / UNIT;
    work.outer_stride = tensors->outer_stride / UNIT;
    if (!driver.enter()) return false;
    for (int64_t begin = 0; begin < num_moves; begin += MOST_MOVES) {
      const int64_t count = num_moves - begin < MOST_MOVES ? num_moves - begin : MOST_MOVES;
      for (int64_t i = 0; i < 4 * count; i++) work.moves[i / 4][i % 4] = static_cast<int32_t>(moves[4 * begin + i]);
      void *arguments[] = {&work};
      if (driver.LaunchKernel(kernel.function, tensors->num_tensors * tensors->num_outer, count, 1, 128, 1, 1, 0, nullptr,
                              arguments, nullptr))
        return false;
    }
    return !driver.StreamSynchronize(nullptr);
  } catch (const Failed &) {
    return false;
  }
}

// Copies bytes of the host to an address of the device; returns whether that succeeded.
extern "C" bool write_to_cuda(uint64_t address, const void *bytes, size_t size) {
  if (!api) return false;
  try {
    const Driver &driver = Driver::get();
    // The copy may go on after the call, and the streams of sessions do not wait for it.
    return driver.enter() && !driver.MemcpyHtoD(address, bytes, size) && !driver.StreamSynchronize(nullptr);
  } catch (const Failed &) {
    return false;
  }
}

// The SHA-256 of the sources.
extern "C" const char *sources_digest() { return SOURCES_DIGEST; }

// Whether ONNX Runtime has accepted the operators.
extern "C" bool is_complete() { return is_described; }

// ONNX Runtime calls this for each session that loads the library. A session that gets an error runs the definitions.
extern "C" Status *RegisterCustomOps(void *session_options, const ApiBase *base) {
  static void *const *const table = base->get(API_VERSION);
  if (!table) return nullptr; // an ONNX Runtime without the interface, to which nothing can be reported: see is_complete
  static const Domain domain(table);
  is_described = domain.is_complete;
  if (!domain.is_complete)
    return reinterpret_cast<Status *(*)(int, const char *)>(table[0])(INVALID_ARGUMENT, "their description is refused");
  return reinterpret_cast<Status *(*)(void *, void *)>(table[28])(session_options, domain.domain);
}
