// cuBLAS: a call that computes is logged on the stream of its handle, and computes nothing.

#include "stub.h"

namespace {
struct Handle { void* stream; };
constexpr int EXECUTION_FAILED = 13;
}  // namespace

extern "C" {

int cublasCreate_v2(Handle** handle) {
    cuda_stub_log("handle_create cublas");
    *handle = new Handle{};
    return 0;
}
int cublasDestroy_v2(Handle* handle) {
    delete handle;
    return 0;
}
int cublasSetStream_v2(Handle* handle, void* stream) {
    handle->stream = stream;
    return 0;
}
int cublasGetMathMode(Handle*, int* mode) {
    *mode = 0;
    return 0;
}
const char* cublasGetStatusName(int) { return "CUBLAS_STATUS"; }
const char* cublasGetStatusString(int) { return "an error of the CUDA stub, see its log"; }

// A matrix product begins with the handle, two transpositions and m, n, k; the stub reads no other argument.
#define PRODUCT(name)                                                                                   \
    int name(Handle* handle, int, int, int m, int n, int k) {                                           \
        int error = cuda_stub_enqueue(handle->stream, "library", #name " m=%d n=%d k=%d", m, n, k);     \
        return error ? EXECUTION_FAILED : 0;                                                            \
    }
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmStridedBatched)
}
