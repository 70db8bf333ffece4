// A CUDA runtime without a device: device memory is memory of the host, and kernels do nothing. Work, memory,
// streams, waits and captures are logged.
//
// The file needs no CUDA header: names, numbers and offsets are those of CUDA 13's ABI on x86-64 Linux.
// stand_ins.py adds the functions that are missing here; they log an error and fail.
//
// The rules of captures follow CUDA's documentation and were not compared with a device. The stub does not
// check forked streams that never join their capture's stream again.

#include "stub.h"

#include <cxxabi.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using Error = int;  // cudaError_t
constexpr Error SUCCESS = 0, OUT_OF_MEMORY = 2, ILLEGAL_STATE = 401;
constexpr Error UNSUPPORTED = 900, INVALIDATED = 901, MERGE = 902, UNMATCHED = 903, ISOLATION = 905,
                IMPLICIT = 906, CAPTURED_EVENT = 907, WRONG_THREAD = 908;

enum CaptureMode { GLOBAL, THREAD_LOCAL, RELAXED };
enum MemoryKind { PAGEABLE, PINNED, DEVICE };  // the numbers of cudaMemoryType
const char* const KIND_NAMES[] = {"pageable", "pinned", "device"};
constexpr size_t TOTAL_BYTES = 80ull << 30, ALIGNMENT = 512;

struct Dim3 { unsigned x, y, z; };
struct LaunchConfig { Dim3 grid, block; size_t shared_bytes; void* stream; };  // head of cudaLaunchConfig_t

struct Stream;
struct Capture { int id, mode, thread; Stream* origin; int nodes = 0; bool is_valid = true; };
struct Stream { int id; bool is_blocking; Capture* capture = nullptr; };
struct Event { int id; bool is_recorded = false; Capture* capture = nullptr; };  // which recorded it
struct Graph { int id, nodes; };
struct Allocation { size_t bytes; MemoryKind kind; };

struct State {
    std::recursive_mutex mutex;
    FILE* log = getenv("CUDA_STUB_LOG") ? fopen(getenv("CUDA_STUB_LOG"), "a") : nullptr;
    int num_threads = 0, num_streams = 0, num_events = 0, num_captures = 0;
    // CUDA_STUB_FAIL_CAPTURE=EVENT:N makes the first N captures with an event of that name fail there, which
    // shows what a program does when captures fail.
    std::string failing_event;
    int failures_left = 0;
    size_t device_bytes = 0;
    std::map<char*, Allocation> allocations;
    std::unordered_map<const void*, std::string> kernels;  // mangled name of each handle
    std::set<Stream*> streams;
    std::set<Capture*> captures;  // under way
    Stream legacy{0, true};

    State() {
        std::string asked = getenv("CUDA_STUB_FAIL_CAPTURE") ? getenv("CUDA_STUB_FAIL_CAPTURE") : "";
        size_t colon = asked.find(':');
        failing_event = asked.substr(0, colon);
        failures_left = colon == std::string::npos ? 1 : atoi(asked.c_str() + colon + 1);
    }
};

State& state = *new State;  // never destroyed: other libraries call the runtime until the process ends
thread_local Error last_error = SUCCESS;
using Lock = std::lock_guard<std::recursive_mutex>;

int thread_number() {
    thread_local int number = 0;
    if (!number) number = ++state.num_threads;
    return number;
}

void log_line(const std::string& line) {
    Lock lock(state.mutex);
    if (!state.log) return;
    if (line[0] != '#') fprintf(state.log, "t%d ", thread_number());
    fprintf(state.log, "%s\n", line.c_str());
    fflush(state.log);
}

std::string formatted(const char* format, va_list arguments) {
    char text[1024];
    vsnprintf(text, sizeof text, format, arguments);
    return text;
}

Error failed(Error error, const std::string& call) {
    log_line("ERROR " + std::to_string(error) + " in " + call);
    return last_error = error;
}

// Handles 0 and 1 are the legacy stream; the stub takes 2, a thread's own default stream, for it.
Stream& stream_of(void* handle) {
    return (uintptr_t)handle <= 2 ? state.legacy : *(Stream*)handle;
}

std::string label(const Stream& stream) {
    std::string text = " s=" + std::to_string(stream.id);
    return stream.capture ? text + " capture=" + std::to_string(stream.capture->id) : text;
}

// Fails, and invalidates the captures that a call conflicts with, as CUDA does; succeeds without such
// captures.
template <class Predicate>
Error refuse_if_any(Error error, const std::string& call, Predicate conflicts) {
    bool is_refused = false;
    for (Capture* capture : state.captures)
        if (conflicts(*capture)) {
            capture->is_valid = false;
            is_refused = true;
        }
    return is_refused ? failed(error, call) : SUCCESS;
}

// Checks a call outside of all streams, like cudaMalloc. CUDA refuses it on a thread that captures, and on
// every thread during a capture in global mode. The stub refuses synchronous copies there, too, where CUDA's
// documentation does not say whether they are legal.
Error check_unsafe(const char* call) {
    return refuse_if_any(UNSUPPORTED, call, [](const Capture& capture) {
        return capture.mode == GLOBAL || (capture.mode == THREAD_LOCAL && capture.thread == thread_number());
    });
}

// The legacy stream waits for every blocking stream, which is illegal while one of them is capturing.
Error check_legacy(const std::string& call) {
    return refuse_if_any(IMPLICIT, call, [](const Capture& capture) { return capture.origin->is_blocking; });
}

Error enqueue(void* handle, const std::string& event, const std::string& details, int num_nodes = 1) {
    Lock lock(state.mutex);
    Stream& stream = stream_of(handle);
    if (&stream == &state.legacy)
        if (Error error = check_legacy(event)) return error;
    if (Capture* capture = stream.capture) {
        if (!capture->is_valid) return failed(INVALIDATED, event);
        if (event == state.failing_event && state.failures_left > 0) {
            state.failures_left--;
            capture->is_valid = false;
            return failed(UNSUPPORTED, event + " (asked for by CUDA_STUB_FAIL_CAPTURE)");
        }
        capture->nodes += num_nodes;
    }
    log_line(event + label(stream) + " " + details);
    return SUCCESS;
}

Error launch(const void* kernel, Dim3 grid, Dim3 block, void* stream) {
    Lock lock(state.mutex);
    auto found = state.kernels.find(kernel);
    std::string name = found == state.kernels.end() ? "unknown" : found->second;
    if (char* readable = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, nullptr)) {
        name = readable;
        free(readable);
    }
    char sizes[128];
    snprintf(sizes, sizeof sizes, "grid=%u,%u,%u block=%u,%u,%u ", grid.x, grid.y, grid.z, block.x, block.y,
             block.z);
    return enqueue(stream, "launch", sizes + name.substr(0, 500));
}

Error allocate(void** pointer, size_t bytes, MemoryKind kind) {
    *pointer = nullptr;
    if (!bytes) return SUCCESS;
    if (kind == DEVICE && state.device_bytes + bytes > TOTAL_BYTES)
        return failed(OUT_OF_MEMORY, "an allocation");
    if (posix_memalign(pointer, ALIGNMENT, bytes)) return failed(OUT_OF_MEMORY, "an allocation");
    memset(*pointer, 0, bytes);
    state.allocations[(char*)*pointer] = {bytes, kind};
    if (kind == DEVICE) state.device_bytes += bytes;
    return SUCCESS;
}

void release(void* pointer) {
    auto found = state.allocations.find((char*)pointer);
    if (found == state.allocations.end()) return;
    if (found->second.kind == DEVICE) state.device_bytes -= found->second.bytes;
    state.allocations.erase(found);
    free(pointer);
}

MemoryKind kind_of(const void* pointer) {
    Lock lock(state.mutex);
    auto after = state.allocations.upper_bound((char*)pointer);
    if (after == state.allocations.begin()) return PAGEABLE;
    auto& [start, allocation] = *--after;
    return (char*)pointer < start + allocation.bytes ? allocation.kind : PAGEABLE;
}

std::string copied(void* to, const void* from, size_t bytes) {
    std::string places = std::string(KIND_NAMES[kind_of(from)]) + "->" + KIND_NAMES[kind_of(to)];
    return "bytes=" + std::to_string(bytes) + " " + places;
}

// Copies, except that the host reads zeros from the device: no kernel computed what would stand there, and
// what earlier copies left would differ from run to run.
void carry_out(void* to, const void* from, size_t bytes) {
    if (kind_of(from) == DEVICE && kind_of(to) != DEVICE) memset(to, 0, bytes);
    else memmove(to, from, bytes);
}

// Checks a copy or fill on the legacy stream that returns when it is done.
Error synchronous(const char* call) {
    if (Error error = check_unsafe(call)) return error;
    return check_legacy(call);
}

template <class T>
void put(void* object, size_t offset, T value) {
    memcpy((char*)object + offset, &value, sizeof value);
}

}  // namespace

extern "C" {

void cuda_stub_log(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    log_line(formatted(format, arguments));
    va_end(arguments);
}

void cuda_stub_mark(const char* name) { log_line(std::string("## ") + name); }

int cuda_stub_enqueue(void* stream, const char* event, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::string details = formatted(format, arguments);
    va_end(arguments);
    return enqueue(stream, event, details);
}

// Kernels. A program that nvcc compiled registers its kernels when it is loaded. nvcc turns `<<<…>>>` into a
// push of the launch configuration and a call of a host function, which pops the configuration and launches
// the kernel.

void** __cudaRegisterFatBinary(void*) {
    static void* handle;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*,
                            void*, int*) {
    Lock lock(state.mutex);
    state.kernels[host] = name;
}

static thread_local std::vector<LaunchConfig> pushed;
unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared_bytes, void* stream) {
    pushed.push_back({grid, block, shared_bytes, stream});
    return 0;
}
Error __cudaPopCallConfiguration(Dim3* grid, Dim3* block, size_t* shared_bytes, void** stream) {
    LaunchConfig config = pushed.back();
    pushed.pop_back();
    *grid = config.grid, *block = config.block, *shared_bytes = config.shared_bytes, *stream = config.stream;
    return SUCCESS;
}
Error __cudaGetKernel(const void** kernel, const void* host) {
    *kernel = host;
    return SUCCESS;
}
Error __cudaLaunchKernel(const void* kernel, Dim3 grid, Dim3 block, void**, size_t, void* stream) {
    return launch(kernel, grid, block, stream);
}
Error cudaLaunchCooperativeKernel(const void* kernel, Dim3 grid, Dim3 block, void**, size_t, void* stream) {
    return launch(kernel, grid, block, stream);
}
Error cudaLaunchKernelExC(const LaunchConfig* config, const void* kernel, void**) {
    return launch(kernel, config->grid, config->block, config->stream);
}
Error cudaFuncGetAttributes(void* attributes, const void*) {
    memset(attributes, 0, 144);
    put(attributes, 24, 1024);    // maxThreadsPerBlock
    put(attributes, 28, 64);      // numRegs
    put(attributes, 32, 90);      // ptxVersion
    put(attributes, 36, 90);      // binaryVersion
    put(attributes, 44, 232448);  // maxDynamicSharedSizeBytes
    return SUCCESS;
}
Error cudaFuncSetAttribute(const void*, int, int) { return SUCCESS; }
Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                             unsigned) {
    *blocks = 2;
    return SUCCESS;
}

// The device: one H100.

Error cudaGetDeviceCount(int* count) {
    *count = 1;
    return SUCCESS;
}
Error cudaGetDevice(int* device) {
    *device = 0;
    return SUCCESS;
}
Error cudaSetDevice(int) { return SUCCESS; }
Error cudaDeviceGetAttribute(int* value, int attribute, int) {
    static const std::map<int, int> values = {
        {1, 1024}, {2, 1024}, {3, 1024}, {4, 64},             // threads of a block, in all and by dimension
        {5, 2147483647}, {6, 65535}, {7, 65535},              // blocks of a grid, by dimension
        {8, 49152}, {81, 233472}, {97, 232448},               // shared memory: block, multiprocessor, opt-in
        {9, 65536}, {12, 65536}, {82, 65536},                 // constant memory; registers of both
        {10, 32}, {13, 1980000}, {16, 132}, {39, 2048},       // warp; kHz; multiprocessors; threads of one
        {38, 50 << 20}, {106, 32}, {75, 9}, {76, 0}, {20, 0}, // L2; blocks of a multiprocessor; 9.0; mode
    };
    auto found = values.find(attribute);
    *value = found == values.end() ? 1 : found->second;  // the others are abilities: yes
    return SUCCESS;
}
Error cudaGetDeviceProperties(void* properties, int) {
    memset(properties, 0, 1008);
    strcpy((char*)properties, "Stub of an H100");
    put(properties, 288, TOTAL_BYTES);          // totalGlobalMem
    put(properties, 296, (size_t)49152);        // sharedMemPerBlock
    put(properties, 304, 65536);                // regsPerBlock
    put(properties, 308, 32);                   // warpSize
    put(properties, 320, 1024);                 // maxThreadsPerBlock
    put(properties, 324, Dim3{1024, 1024, 64});             // maxThreadsDim
    put(properties, 336, Dim3{2147483647, 65535, 65535});   // maxGridSize
    put(properties, 352, (size_t)65536);        // totalConstMem
    put(properties, 360, 9);                    // major, and minor 0
    put(properties, 384, 132);                  // multiProcessorCount
    put(properties, 596, 50 << 20);             // l2CacheSize
    put(properties, 604, 2048);                 // maxThreadsPerMultiProcessor
    put(properties, 624, (size_t)233472);       // sharedMemPerMultiprocessor
    put(properties, 632, 65536);                // regsPerMultiprocessor
    put(properties, 672, (size_t)232448);       // sharedMemPerBlockOptin
    put(properties, 688, 32);                   // maxBlocksPerMultiProcessor
    // canMapHostMemory, concurrentKernels, asyncEngineCount, unifiedAddressing, managedMemory,
    // cooperativeLaunch, memoryPoolsSupported
    for (int ability : {392, 560, 584, 588, 636, 668, 720}) put(properties, ability, 1);
    return SUCCESS;
}

Error cudaGetLastError() {
    Error error = last_error;
    last_error = SUCCESS;
    return error;
}
Error cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(Error) { return "cudaError"; }
const char* cudaGetErrorString(Error error) {
    static const std::map<Error, const char*> texts = {
        {SUCCESS, "no error"},
        {OUT_OF_MEMORY, "out of memory"},
        {UNSUPPORTED, "operation not permitted when stream is capturing"},
        {INVALIDATED, "operation failed due to a previous error during capture"},
        {ISOLATION, "dependency created on uncaptured work in another stream"},
        {IMPLICIT, "operation would make the legacy stream depend on a capturing blocking stream"},
        {CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream"},
    };
    auto found = texts.find(error);
    return found == texts.end() ? "an error of the CUDA stub, see its log" : found->second;
}

// Memory.

Error cudaMalloc(void** pointer, size_t bytes) {
    Lock lock(state.mutex);
    cuda_stub_log("malloc bytes=%zu", bytes);
    if (Error error = check_unsafe("cudaMalloc")) return error;
    return allocate(pointer, bytes, DEVICE);
}
Error cudaFree(void* pointer) {
    Lock lock(state.mutex);
    cuda_stub_log("free");
    if (Error error = pointer ? check_unsafe("cudaFree") : SUCCESS) return error;
    release(pointer);
    return SUCCESS;
}
Error cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
    Lock lock(state.mutex);
    cuda_stub_log("malloc_pinned bytes=%zu", bytes);
    if (Error error = check_unsafe("cudaHostAlloc")) return error;
    return allocate(pointer, bytes, PINNED);
}
Error cudaMallocHost(void** pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
Error cudaFreeHost(void* pointer) {
    Lock lock(state.mutex);
    cuda_stub_log("free_pinned");
    if (Error error = pointer ? check_unsafe("cudaFreeHost") : SUCCESS) return error;
    release(pointer);
    return SUCCESS;
}
Error cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    Lock lock(state.mutex);
    *total_bytes = TOTAL_BYTES;
    *free_bytes = TOTAL_BYTES - state.device_bytes;
    return SUCCESS;
}
Error cudaPointerGetAttributes(void* attributes, const void* pointer) {
    memset(attributes, 0, 88);
    put(attributes, 0, (int)kind_of(pointer));  // type
    put(attributes, 8, pointer);                // devicePointer
    put(attributes, 16, pointer);               // hostPointer
    return SUCCESS;
}

// Copies and fills.

Error cudaMemcpy(void* to, const void* from, size_t bytes, int) {
    Lock lock(state.mutex);
    log_line("copy_sync s=0 " + copied(to, from, bytes));
    if (Error error = synchronous("cudaMemcpy")) return error;
    carry_out(to, from, bytes);
    return SUCCESS;
}
Error cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, void* stream) {
    if (Error error = enqueue(stream, "copy", copied(to, from, bytes))) return error;
    carry_out(to, from, bytes);
    return SUCCESS;
}
Error cudaMemcpyFromSymbol(void* to, const void*, size_t bytes, size_t, int) {
    Lock lock(state.mutex);
    log_line("copy_sync s=0 bytes=" + std::to_string(bytes) + " device->" + KIND_NAMES[kind_of(to)]);
    if (Error error = synchronous("cudaMemcpyFromSymbol")) return error;
    memset(to, 0, bytes);
    return SUCCESS;
}
Error cudaMemset(void* to, int value, size_t bytes) {
    Lock lock(state.mutex);
    cuda_stub_log("memset_sync s=0 bytes=%zu", bytes);
    if (Error error = synchronous("cudaMemset")) return error;
    memset(to, value, bytes);
    return SUCCESS;
}
Error cudaMemsetAsync(void* to, int value, size_t bytes, void* stream) {
    if (Error error = enqueue(stream, "memset", "bytes=" + std::to_string(bytes))) return error;
    memset(to, value, bytes);
    return SUCCESS;
}

// Streams, events and synchronisation. Work is done when it is enqueued, so that nothing ever waits.

Error cudaStreamCreateWithFlags(Stream** stream, unsigned flags) {
    Lock lock(state.mutex);
    bool is_blocking = !(flags & 1);
    *stream = new Stream{++state.num_streams, is_blocking};
    state.streams.insert(*stream);
    cuda_stub_log("stream_create s=%d %s", (*stream)->id, is_blocking ? "blocking" : "non-blocking");
    return SUCCESS;
}
Error cudaStreamCreate(Stream** stream) { return cudaStreamCreateWithFlags(stream, 0); }
Error cudaStreamDestroy(Stream* stream) {  // keeps the object: the log shows a wrong use after this
    cuda_stub_log("stream_destroy s=%d", stream->id);
    return SUCCESS;
}
Error cudaStreamSynchronize(void* handle) {
    Lock lock(state.mutex);
    Stream& stream = stream_of(handle);
    cuda_stub_log("sync_stream s=%d", stream.id);
    if (&stream == &state.legacy) return check_legacy("cudaStreamSynchronize of the legacy stream");
    return refuse_if_any(UNSUPPORTED, "cudaStreamSynchronize",
                         [&](const Capture& capture) { return &capture == stream.capture; });
}
Error cudaDeviceSynchronize() {
    Lock lock(state.mutex);
    cuda_stub_log("sync_device");
    return refuse_if_any(UNSUPPORTED, "cudaDeviceSynchronize", [](const Capture&) { return true; });
}
Error cudaEventCreateWithFlags(Event** event, unsigned) {
    Lock lock(state.mutex);
    *event = new Event{++state.num_events};
    return SUCCESS;
}
Error cudaEventCreate(Event** event) { return cudaEventCreateWithFlags(event, 0); }
Error cudaEventDestroy(Event*) { return SUCCESS; }
Error cudaEventRecordWithFlags(Event* event, void* stream, unsigned) {
    Lock lock(state.mutex);
    if (Error error = enqueue(stream, "record", "event=" + std::to_string(event->id), 0)) return error;
    event->is_recorded = true;
    event->capture = stream_of(stream).capture;
    return SUCCESS;
}
Error cudaEventRecord(Event* event, void* stream) { return cudaEventRecordWithFlags(event, stream, 0); }
Error cudaEventSynchronize(Event* event) {
    Lock lock(state.mutex);
    cuda_stub_log("sync_event event=%d", event->id);
    return refuse_if_any(CAPTURED_EVENT, "cudaEventSynchronize",
                         [&](const Capture& capture) { return &capture == event->capture; });
}
Error cudaStreamWaitEvent(void* handle, Event* event, unsigned) {
    Lock lock(state.mutex);
    Stream& stream = stream_of(handle);
    bool is_captured = state.captures.count(event->capture);
    bool is_fork = is_captured && !stream.capture && &stream != &state.legacy;
    if (is_fork) stream.capture = event->capture;
    auto is_ours = [&](const Capture& capture) { return &capture == stream.capture; };
    if (is_captured && stream.capture != event->capture)
        return refuse_if_any(MERGE, "cudaStreamWaitEvent", is_ours);
    if (!is_captured && stream.capture && event->is_recorded)
        return refuse_if_any(ISOLATION, "cudaStreamWaitEvent", is_ours);
    return enqueue(handle, "wait", "event=" + std::to_string(event->id), 0);
}

// Captures and graphs.

static Error begin_capture(void* handle, int mode) {
    Lock lock(state.mutex);
    Stream& stream = stream_of(handle);
    if (&stream == &state.legacy) return failed(UNSUPPORTED, "cudaStreamBeginCapture of the legacy stream");
    if (stream.capture) return failed(ILLEGAL_STATE, "cudaStreamBeginCapture");
    stream.capture = new Capture{++state.num_captures, mode, thread_number(), &stream};
    state.captures.insert(stream.capture);
    const char* const modes[] = {"global", "thread_local", "relaxed"};
    log_line("begin_capture" + label(stream) + " mode=" + modes[mode]);
    return SUCCESS;
}
Error cudaStreamBeginCapture(void* handle, int mode) {
    Error error = begin_capture(handle, mode);
    usleep(10'000);  // kernels take no time here: other threads get some to run into the capture
    return error;
}
Error cudaStreamEndCapture(void* handle, Graph** graph) {
    Lock lock(state.mutex);
    Stream& stream = stream_of(handle);
    Capture* capture = stream.capture;
    *graph = nullptr;
    if (!capture) return failed(ILLEGAL_STATE, "cudaStreamEndCapture");
    if (capture->origin != &stream) return failed(UNMATCHED, "cudaStreamEndCapture");
    if (capture->mode != RELAXED && capture->thread != thread_number())
        return failed(WRONG_THREAD, "cudaStreamEndCapture");
    log_line("end_capture" + label(stream) + " nodes=" + std::to_string(capture->nodes) +
             (capture->is_valid ? "" : " failed"));
    for (Stream* other : state.streams)
        if (other->capture == capture) other->capture = nullptr;
    state.captures.erase(capture);  // the object stays: events point to it
    if (!capture->is_valid) return failed(INVALIDATED, "cudaStreamEndCapture");
    *graph = new Graph{capture->id, capture->nodes};
    return SUCCESS;
}
Error cudaStreamIsCapturing(void* handle, int* status) {
    Lock lock(state.mutex);
    Capture* capture = stream_of(handle).capture;
    *status = !capture ? 0 : capture->is_valid ? 1 : 2;
    return SUCCESS;
}
Error cudaGraphInstantiate(Graph** executable, Graph* graph, unsigned long long) {
    *executable = new Graph(*graph);
    cuda_stub_log("graph_instantiate capture=%d nodes=%d", graph->id, graph->nodes);
    return SUCCESS;
}
Error cudaGraphLaunch(Graph* executable, void* handle) {
    Lock lock(state.mutex);
    Stream& stream = stream_of(handle);
    if (stream.capture)  // CUDA does not nest graphs this way
        return refuse_if_any(UNSUPPORTED, "cudaGraphLaunch",
                             [&](const Capture& capture) { return &capture == stream.capture; });
    // "of" names the capture that made the graph; "capture=" would say that the launch itself was captured
    return enqueue(handle, "graph_launch",
                   "of=" + std::to_string(executable->id) + " nodes=" + std::to_string(executable->nodes));
}
Error cudaGraphDestroy(Graph* graph) {
    delete graph;
    return SUCCESS;
}
Error cudaGraphExecDestroy(Graph* executable) {
    Lock lock(state.mutex);
    if (Error error = check_unsafe("cudaGraphExecDestroy")) return error;
    delete executable;
    return SUCCESS;
}

}  // extern "C"
