// cuDNN 9, to the extent that lets ONNX Runtime go on: the stub finds an engine for every graph and runs
// nothing. It does not show which engines the real cuDNN finds, nor the kernels that they launch.

#include "stub.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace {
struct Handle { void* stream; };
struct Descriptor { int type; };
constexpr int EXECUTION_FAILED = 5000;
// Numbers of cudnnBackendAttributeType_t and cudnnBackendAttributeName_t.
constexpr int TYPE_INT64 = 3, TYPE_KNOB = 9, TYPE_DESCRIPTOR = 15, TYPE_BEHAVIOUR = 23, ENGINE_KNOBS = 302;
}  // namespace

extern "C" {

size_t cudnnGetVersion() { return 91400; }
const char* cudnnGetErrorString(int) { return "an error of the CUDA stub, see its log"; }
void cudnnGetLastErrorString(char* text, size_t size) {
    if (size) *text = 0;
}

int cudnnCreate(Handle** handle) {
    cuda_stub_log("handle_create cudnn");
    *handle = new Handle{};
    return 0;
}
int cudnnDestroy(Handle* handle) {
    delete handle;
    return 0;
}
int cudnnSetStream(Handle* handle, void* stream) {
    handle->stream = stream;
    return 0;
}
int cudnnGetStream(Handle* handle, void** stream) {
    *stream = handle->stream;
    return 0;
}
int cudnnGetReductionIndicesSize(void*, void*, void*, void*, size_t* bytes) {
    *bytes = 0;
    return 0;
}
int cudnnGetReductionWorkspaceSize(void*, void*, void*, void*, size_t* bytes) {
    *bytes = 0;
    return 0;
}
int cudnnReduceTensor(Handle* handle) {
    return cuda_stub_enqueue(handle->stream, "library", "cudnnReduceTensor") ? EXECUTION_FAILED : 0;
}

int cudnnBackendCreateDescriptor(int type, Descriptor** descriptor) {
    *descriptor = (Descriptor*)calloc(1, 256);
    (*descriptor)->type = type;
    return 0;
}
int cudnnBackendDestroyDescriptor(Descriptor* descriptor) {
    free(descriptor);
    return 0;
}
// Answers every question for descriptors with one (engine, configuration, plan), for knobs with none, and for
// any number with zero.
int cudnnBackendGetAttribute(Descriptor*, int attribute, int type, int64_t num_asked, int64_t* num_given,
                             void* values) {
    int64_t given = 0;
    if (type == TYPE_DESCRIPTOR) {
        given = attribute != ENGINE_KNOBS;
    } else if (type == TYPE_INT64 || type == TYPE_KNOB || type == TYPE_BEHAVIOUR) {
        given = 1;
        if (values && num_asked > 0) {
            if (type == TYPE_INT64) *(int64_t*)values = 0;
            else *(int*)values = 0;
        }
    }
    if (num_given) *num_given = given;
    return 0;
}
int cudnnBackendExecute(Handle* handle, void*, void*) {
    return cuda_stub_enqueue(handle->stream, "library", "cudnnBackendExecute") ? EXECUTION_FAILED : 0;
}
}
