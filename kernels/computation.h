// All computation of the operators, in the order in which the parts need each other. It knows nothing of ONNX Runtime.
//
// Included after the standard headers, in a namespace without a name.

#define INLINE static inline __attribute__((always_inline))
#define TARGET(features) __attribute__((target(features)))

#if defined(__x86_64__) && defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#elif defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized" // g++ 12 means its own header of AVX-512

#include "compute.h"
#include "linear.h"
#include "adapters.h"
#include "int8.h"
#include "int4.h"
#include "products.h"

#pragma GCC diagnostic pop

#if defined(__x86_64__) && defined(__clang__)
#pragma clang attribute pop
#elif defined(__x86_64__)
#pragma GCC pop_options
#endif

// What follows runs on every processor.
#include "instructions.h"

#undef INLINE
#undef SHUFFLE
