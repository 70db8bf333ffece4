// ONNX Runtime's C interface (onnxruntime_c_api.h), whose functions keep their places in its table, and what describes an
// operator to it. Included once in each library, in a namespace without a name. ONNX Runtime's packages for Python do not
// have its headers, so the interface is declared here as far as it is used.
#pragma once

using Status = void; // opaque; null means success
constexpr uint32_t API_VERSION = 24; // the first with all functions that are used
constexpr int VERSION = 1;           // of the operators, which the graphs import
constexpr int FLOAT = 1, UINT8 = 2, INT32 = 6, INT64 = 7, FLOAT16 = 10, BFLOAT16 = 16, INVALID_ARGUMENT = 2;

struct ApiBase {
  void *const *(*get)(uint32_t version);
  const char *(*version)();
};

struct Operator { // OrtCustomOp
  uint32_t version;
  void *(*create)(const Operator *, void *const *, const void *);
  const char *(*name)(const Operator *);
  const char *(*provider)(const Operator *);
  int (*input_type)(const Operator *, size_t);
  size_t (*num_inputs)(const Operator *);
  int (*output_type)(const Operator *, size_t);
  size_t (*num_outputs)(const Operator *);
  void (*compute)(void *, void *);
  void (*destroy)(void *);
  int (*input_kind)(const Operator *, size_t);
  int (*output_kind)(const Operator *, size_t);
  int (*input_memory)(const Operator *, size_t);
  int (*variadic[4])(const Operator *);
  Status *(*create_with_status)(const Operator *, void *const *, const void *, void **);
  Status *(*compute_with_status)(void *, void *);
  Status *(*infer_shapes)(const Operator *, void *);
  int (*first_version)(const Operator *);
  int (*last_version)(const Operator *);
  size_t (*reused)(int **, int **);
  void (*release_reused)(int *, int *);
  void *aliases[2];
};

#ifndef SOURCES_DIGEST
#define SOURCES_DIGEST "" // setup.py defines it
#endif

void *const *api = nullptr; // set once, before the first operator runs

template <int PLACE, class Result = Status *, class... Arguments> Result call(Arguments... arguments) {
  return reinterpret_cast<Result (*)(Arguments...)>(api[PLACE])(arguments...);
}

struct Failed { // an exception: it ends the run of an operator
  Status *status;
};

void check(Status *status) {
  if (status) throw Failed{status};
}

void require(bool is_right, const char *message) {
  if (!is_right) check(call<0>(INVALID_ARGUMENT, message));
}

// Runs a part of an operator; no exception may leave the library.
template <class Part> Status *guarded(const Part &part) {
  try {
    part();
    return nullptr;
  } catch (const Failed &failed) {
    return failed.status;
  } catch (const std::exception &error) { // of an allocation
    return call<0>(INVALID_ARGUMENT, error.what());
  }
}

template <class T> struct Tensor {
  const T *data = nullptr;
  const int64_t *shape = nullptr;
  size_t num_axes = 0;

  bool has_shape() const { return num_axes == 0; }
  bool has_shape(int64_t a) const { return num_axes == 1 && shape[0] == a; }
  bool has_shape(int64_t a, int64_t b) const { return num_axes == 2 && shape[0] == a && shape[1] == b; }
};

template <class T> Tensor<T> tensor_of(const void *value) {
  Tensor<T> tensor;
  int type = 0;
  void *data = nullptr;
  check(call<414>(value, &type, &tensor.shape, &tensor.num_axes));
  check(call<51>(const_cast<void *>(value), &data));
  tensor.data = static_cast<const T *>(data);
  return tensor;
}

template <class T> Tensor<T> input(void *context, size_t index) {
  const void *value = nullptr;
  check(call<90>(context, index, &value));
  return tensor_of<T>(value);
}

// Whether a node has an optional input.
bool has_input(void *context, size_t index) {
  size_t count = 0;
  const void *value = nullptr;
  check(call<88>(context, &count));
  if (index < count) check(call<90>(context, index, &value));
  return value;
}

// An input that must be a constant of the graph, when the operator is created.
template <class T> Tensor<T> constant(const void *info, size_t index) {
  const void *value = nullptr;
  int is_constant = 0;
  check(call<249>(info, index, &is_constant, &value));
  require(is_constant, "weights, scales and biases must be constants");
  return tensor_of<T>(value);
}

// Returns null for an optional output that nothing reads, and for an empty one.
template <class T = float> T *output(void *context, size_t index, const int64_t *shape, size_t num_axes) {
  void *value = nullptr, *data = nullptr;
  check(call<91>(context, index, shape, num_axes, &value));
  if (value) check(call<51>(value, &data));
  return static_cast<T *>(data);
}

template <class T = float> T *output(void *context, size_t index, std::initializer_list<int64_t> shape) {
  return output<T>(context, index, shape.begin(), shape.size());
}

// The attributes of an attention.
struct Heads {
  int64_t num_heads = 0;
  float scale = 0, cap = 0;

  explicit Heads(const void *info) {
    check(call<86>(info, "num_heads", &num_heads));
    check(call<85>(info, "scale", &scale));
    check(call<85>(info, "softcap", &cap));
    require(num_heads > 0, "there must be a head");
  }
};

// The attributes of the low-rank terms of a map, and the part of each of its outputs (O,), a constant: 0, then 1, and so on.
//
// The weights of K adapters are (K, R U), for ranks up to R; `num_units` is U. Those of this map begin at R times `first_unit`,
// A (P, R, I) and then B (R, O). The ranks of their parts are (K, parts of all maps), those of this map from `first_part` on.
struct PartsOfMap {
  static constexpr size_t PARTS = 5; // the input

  int64_t first_unit = 0, first_part = 0, num_units = 0;
  std::vector<size_t> ends; // of the parts

  explicit PartsOfMap(const void *info) {
    check(call<86>(info, "first_unit", &first_unit));
    check(call<86>(info, "first_part", &first_part));
    check(call<86>(info, "num_units", &num_units));
    require(first_unit >= 0 && first_part >= 0 && num_units > first_unit, "the weights of a map must be among the units");
    const auto parts = constant<int64_t>(info, PARTS);
    require(parts.num_axes == 1 && parts.shape[0] > 0 && parts.data[0] == 0, "the parts must have 1 axis, and begin with 0");
    for (int64_t o = 1; o < parts.shape[0]; o++) {
      const int64_t last = parts.data[o - 1];
      require(parts.data[o] == last || parts.data[o] == last + 1, "the outputs of a part must be neighbours");
      if (parts.data[o] != last) ends.push_back(o);
    }
    ends.push_back(parts.shape[0]);
  }

  // Returns R, if all shapes fit: those of x (N, I), the outputs of the map (N, O), the weights, the ranks, and the rows'
  // adapters (N,).
  template <class Number, class Weight>
  int64_t largest_rank(const Tensor<Number> &x, const Tensor<Number> &y, const Tensor<Weight> &adapters,
                       const Tensor<int32_t> &ranks, const Tensor<int64_t> &ids) const {
    require(x.num_axes == 2 && adapters.num_axes == 2 && ranks.num_axes == 2, "x, the weights and ranks must have 2 axes");
    const int64_t O = ends.back(), P = ends.size();
    require(y.has_shape(x.shape[0], O) && ids.has_shape(x.shape[0]), "x, the outputs and the rows' adapters differ in number");
    require(adapters.shape[1] % num_units == 0, "the weights of an adapter must be a multiple of the units");
    int64_t units = 0;
    require(!__builtin_mul_overflow(P, x.shape[1], &units) && !__builtin_add_overflow(units, O, &units) &&
                units <= num_units - first_unit,
            "the weights of a map must be among the units");
    require(ranks.shape[0] == adapters.shape[0] && P <= ranks.shape[1] - first_part, "the ranks differ in number");
    return adapters.shape[1] / num_units;
  }
};

// The number of first inputs that a node must have: all, if the operator does not say how many.
template <class T, class = void> struct Required {
  static constexpr size_t COUNT = std::size(T::INPUTS);
};

template <class T> struct Required<T, std::void_t<decltype(T::NUM_REQUIRED)>> {
  static constexpr size_t COUNT = T::NUM_REQUIRED;
};

// The description of an operator, which runs on the CPU or on CUDA.
template <class T, bool IS_CUDA = false> Operator described() {
  Operator made{};
  made.version = API_VERSION;
  made.name = [](const Operator *) { return T::NAME; };
  made.provider = [](const Operator *) -> const char * { return IS_CUDA ? "CUDAExecutionProvider" : nullptr; };
  made.input_type = [](const Operator *, size_t index) { return T::INPUTS[index]; };
  made.num_inputs = [](const Operator *) { return std::size(T::INPUTS); };
  made.output_type = [](const Operator *, size_t index) { return T::OUTPUTS[index]; };
  made.num_outputs = [](const Operator *) { return std::size(T::OUTPUTS); };
  made.input_kind = [](const Operator *, size_t index) { return index < Required<T>::COUNT ? 0 : 1; }; // required, or optional
  made.input_memory = [](const Operator *, size_t) { return 0; }; // the provider's
  made.output_kind = [](const Operator *, size_t) { return std::size(T::OUTPUTS) > 1 ? 1 : 0; }; // optional, or required
  for (auto &arity : made.variadic) arity = [](const Operator *) { return 0; };
  made.create_with_status = [](const Operator *, void *const *, const void *info, void **kernel) {
    return guarded([&] { *kernel = new T(info); });
  };
  made.compute_with_status = [](void *kernel, void *context) {
    return guarded([&] { (*static_cast<const T *>(kernel))(context); });
  };
  made.destroy = [](void *kernel) { delete static_cast<T *>(kernel); };
  made.first_version = made.last_version = [](const Operator *) { return VERSION; };
  return made;
}

// Lets the first output take the memory of an input that nothing reads afterwards.
template <int INPUT> Operator reusing(Operator made) {
  made.reused = [](int **inputs, int **outputs) -> size_t {
    static int input = INPUT, output = 0;
    *inputs = &input, *outputs = &output;
    return 1;
  };
  made.release_reused = [](int *, int *) {};
  return made;
}
